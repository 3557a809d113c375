"""Runs of ftkit: memory as of other programs, and the durations of steps that it measures."""

import csv
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarking.figures import Measured, Step, steps_of
from benchmarking.watch import Event, own_bytes, watch
from ftkit.runs.report.meters import ThroughputMeter
from ftkit.runs.report.report import Report, read_report
from ftkit.utils.files import CACHE_VARIABLE

LEARNING_RATE = 2e-4
IMPORTS = """
import os, runpy, sys
from contextlib import suppress
sys.argv[1:] = [str(os.getppid()), "", "-1"]  # no terminal: it ends when it has imported
os.environ["RANK"] = "1"  # only rank 0 shows that libraries are loading
with suppress(ValueError):
    runpy.run_module("ftkit.training.rank", run_name="__main__", alter_sys=True)
assert "torch" in sys.modules
"""
"""Program that imports what a rank does at its start, in the same way. LoRA imports PEFT later,
which counts as memory of training."""
SEED = 1337
FTKIT = (sys.executable, "-m", "ftkit")

Keys = Mapping[str, Any]

COMMON: dict[str, Any] = {
    "devices": 1,
    "seed": SEED,
    "data": "JSON",
    "data.mask_prompt": True,
    "data.prompt_style": "litgpt.prompts.Default",
    "train.epochs": 1,
    "train.lr_warmup_steps": 0,
    "train.min_lr": 0,
    "optimizer": "AdamW",
    "optimizer.lr": LEARNING_RATE,
    "optimizer.weight_decay": 0,
    "eval.interval": 0,
    "eval.initial_validation": False,
    "eval.final_validation": False,
    "eval.max_new_tokens": 0,
    "checkpoint.save": False,
}
"""Keys of every run: only steps are measured."""


def words_of(method: str, keys: Keys) -> list[str]:
    """The command line of a run. A key without a value (None) is left out."""
    command = [*FTKIT, f"finetune_{method}"]
    for key, value in keys.items():
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            command += [f"--{key}", text]
    return command


class Rows:
    """Reader of metrics.csv while it is being written."""

    def __init__(self, file: Path, column: str = "loss") -> None:
        self._file, self._column, self._seen, self._tokens = file, column, 0, 0

    def new(self) -> list[Event]:
        """Return the rows that were added since the last call."""
        if not self._file.exists():
            return []
        text = self._file.read_text()
        rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))[self._seen :]
        self._seen += len(rows)
        events = []
        for row in rows:
            self._tokens += int(row["tokens"])
            loss = float(row[self._column] or "nan")
            duration_s = int(row["tokens"]) / float(row["tokens_per_s"])
            events.append(
                {
                    "step": int(row["step"]),
                    "loss": loss,
                    "total_tokens": self._tokens,
                    "duration_s": duration_s,
                }
            )
        return events


def run_ftkit(
    method: str, keys: Keys, out_dir: Path, limit_s: float, *, column: str = "loss"
) -> Measured:
    """Train once with these keys beside COMMON, and measure.

    Args:
        method: full or lora.
        keys: dotted keys of a recipe; those of COMMON may be among them.
        out_dir: of the run; must not exist.
        limit_s: seconds after which it is ended.
        column: of metrics.csv, whose values become the losses of the steps.
    """
    # Query and value with rank 8, the default of LitGPT, so that figures stay comparable.
    adapted = {"lora_dropout": 0, "lora_query": True} if method == "lora" else {}
    words = words_of(method, COMMON | adapted | {"out_dir": out_dir} | dict(keys))
    rows = Rows(out_dir / "metrics.csv", column)
    # What earlier runs have computed of data and reference would not be computed again.
    cache = {CACHE_VARIABLE: str(out_dir.parent / "cache")}
    seen = watch(words, limit_s=limit_s, directory=out_dir.parent, look=rows.new, environment=cache)
    if seen.exit_code != 0:
        return Measured(failure=_failure(seen.exit_code, seen.output, limit_s))
    report = read_report(out_dir)
    peak = report.peak_memory
    steps = steps_of(seen.events)
    return Measured(
        steps=steps,
        first_step_s=steps[0].ended_s if steps else None,
        reference_s=(report.phases_s and report.phases_s.reference) or 0.0,
        padding_fraction=report.tokens.padding_fraction if report.tokens else None,
        host_bytes=seen.host_bytes,
        allocated_bytes=peak.allocated_bytes if peak else None,
        reserved_bytes=peak.reserved_bytes if peak else None,
        slowed=slowed_steps(report, steps),
    )


def slowed_steps(report: Report, steps: Sequence[Step]) -> list[int]:
    """Numbers of the steps, from 1, whose memory ftkit followed, or in which it compiled.

    The report names the followed step that needed most. It does not name the others, but how many
    steps its own window leaves out, and how long they took.

    Args:
        report: of the run.
        steps: all of it.
    """
    named = {one.step for one in report.step_memory.ranks} if report.step_memory else set()
    if report.throughput is None:
        return sorted(named)
    window = report.throughput
    # As `ThroughputMeter` leaves them out, whatever happens in them.
    first = set(range(1, min(ThroughputMeter().skip_steps, len(steps) // 4) + 1))
    known = first | named
    unnamed = len(steps) - window.window_steps - len(known)
    if unnamed > 0:
        times_s = {number: step.duration_s or 0.0 for number, step in enumerate(steps, 1)}
        others = [number for number in times_s if number not in known]
        lacking_s = sum(times_s.values()) - window.window_s - sum(times_s[n] for n in known)
        # Of a model that is compiled no step is followed. Compiling takes seconds.
        if window.compiled_graphs:
            others.sort(key=lambda number: -times_s[number])
        else:  # at most one beside the one that is named
            others.sort(key=lambda number: abs(times_s[number] - lacking_s))
        named.update(others[:unnamed])
    # The first steps may have compiled, too.
    return sorted(named | first if window.compiled_graphs else named)


def imports_bytes() -> int:
    """Bytes that a rank holds after its imports."""
    return own_bytes(Path(sys.executable), IMPORTS, Path.cwd())


def _failure(exit_code: int | None, output: str, limit_s: float) -> str:
    """Reason of a failed run, in one line."""
    if exit_code is None:
        return f"not done after {limit_s:.0f} s"
    said = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in said if line.startswith(("ftkit:", "error:", "Error:"))]
    return (errors or said or [f"exit code {exit_code}"])[-1 if not errors else 0]


def is_gpu_here() -> bool:
    """Return whether runs use a GPU; found in a separate process, which leaves nothing on it."""
    program = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", program]).returncode == 0
