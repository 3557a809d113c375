"""Predicted memory of samples with images equals that of real runs, counted tensor by tensor."""

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import HAS_DEEPSPEED, NO_EVALUATION, Case, chosen, needs_deepspeed, write_job
from runs import run_ranks
from seeing_models import FIRST, PREFIXED, TABLED, Record, save_model, write_chats

from ftkit.cli.app import run
from ftkit.planning.predict import Planned, plan_files
from ftkit.runs.job import Job
from ftkit.runs.report.report import Report, read_report
from ftkit.strategies.step_memory import StepMemory

pytestmark = pytest.mark.slow

SCALE = 4
"""Images of 64 to 256 pixels: towers and activations are far larger than what is constant."""
SETTINGS: dict[str, Any] = {
    **dict(NO_EVALUATION),
    "data.json_path": None,
    "data.mask_prompt": None,
    "data.val_split_fraction": 0,
    "data.chat_template": "tokenizer",
    "train.global_batch_size": 8,
    "train.epochs": 3,
    "train.max_seq_length": 1800,
    "checkpoint.save": False,
}
SINGLE = {
    "full": Case("single", "full", changes=(("train.micro_batch_size", 4),)),
    "LoRA": Case("single", "lora", "bf16-true", (("train.micro_batch_size", 2),)),
    "padded": Case(
        *("single", "full"),
        changes=(("train.micro_batch_size", 4), ("train.padding_free", False)),
    ),
    "tokens": Case(
        *("single", "full", "bf16-true"),
        (("train.micro_batch_size", None), ("train.micro_batch_tokens", 450)),
    ),
    "wide tower": Case(
        *("single", "lora", "32-true"),
        (("train.micro_batch_size", 1), ("memory.activation_checkpointing", True)),
    ),
}
PROJECTOR = ("images.projector", True)
BOTH = (PROJECTOR, ("images.tower", True))
TRAINED = {
    "projector": Case("single", "lora", "bf16-true", (("train.micro_batch_size", 2), PROJECTOR)),
    "projector and tower": Case("single", "full", changes=(("train.micro_batch_size", 2), *BOTH)),
}
"""Cases of families whose projector is a module of its own, or lies in the tower."""
ALONE = SINGLE | TRAINED
TWO_RANKS = {
    "fsdp x2, all": Case("fsdp", "full", "bf16-mixed", (("train.micro_batch_size", 2), *BOTH)),
    "deepspeed x2, all": Case("deepspeed", "full", changes=(("train.micro_batch_size", 2), *BOTH)),
    "fsdp x2": Case("fsdp", "full", changes=(("train.micro_batch_size", 2),)),
    "fsdp x2, LoRA": Case("fsdp", "lora", "bf16-mixed", (("train.micro_batch_size", 2),)),
    "ddp x2": Case("ddp", "full", changes=(("train.micro_batch_size", 4),)),
    "deepspeed x2": Case("deepspeed", "full", "bf16-true", (("train.micro_batch_size", 4),)),
}
OFTEN = (*SINGLE, "fsdp x2")
"""Cases of the first families; the others are those of one, and other families have one."""
REPEATED = [
    *((kind, name) for kind in FIRST[1:] for name in OFTEN if name != "full"),
    *((kind, "full") for kind in TABLED if kind not in FIRST),
    # Outside: one with all that FSDP shards; text alone in tests/planning/test_step_memory.py.
    *((FIRST[0], name) for name in TWO_RANKS if name != "fsdp x2, all"),
    *(("gemma3", name) for name in TRAINED),
]
"""Those of the matrix: llava has the same cases, and the first families the usual one."""
WANTED = [
    *((kind, name) for kind in FIRST for name in OFTEN),
    *((FIRST[0], name) for name in TWO_RANKS if name not in OFTEN),
    *((kind, name) for kind in ("gemma3", "qwen2_5_vl") for name in TRAINED),
    *((kind, "full") for kind in TABLED if kind not in FIRST),
]


@dataclass(frozen=True)
class Found:
    """What a run left."""

    peaks: list[int]
    """Bytes of all tensors at the highest moment after the first step, on each rank."""
    report: Report

    @property
    def memory(self) -> StepMemory:
        memory = self.report.step_memory
        assert memory is not None and memory.predicted is not None and memory.heaviest is not None
        return memory

    def errors(self) -> tuple[float, float]:
        """Relative errors of the prediction, against what was counted and reported."""
        assert self.memory.predicted is not None
        predicted_bytes, measured = self.memory.predicted.peak_bytes, self.memory.ranks[0]
        # Runs before it in the same process may have left something.
        reported_bytes = measured.peak_bytes - measured.peak_breakdown_bytes.unattributed
        return predicted_bytes / self.peaks[0] - 1, predicted_bytes / reported_bytes - 1


Runs = Callable[[int], dict[tuple[str, str], Found]]


def keys_of(folder: Path, kind: str, name: str) -> dict[str, Any]:
    case = (ALONE | TWO_RANKS)[name]
    base = folder / (f"{kind}-wide" if name == "wide tower" else kind)
    data = {"data.path": str(folder / "chats.jsonl"), "checkpoint_dir": str(base)}
    if kind == PREFIXED:  # each of its samples has an image
        data |= {"data.path": str(folder / "seen.jsonl"), "data.chat_template": PREFIXED}
    return SETTINGS | data | dict(case.changes)


def measured(
    folder: Path, world_size: int, wanted: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Found]:
    cases, jobs = ALONE if world_size == 1 else TWO_RANKS, {}
    for kind, name in wanted:
        if name not in cases or (name.startswith("deepspeed") and not HAS_DEEPSPEED):
            continue
        out_dir = folder / f"{kind}-{name}"
        out_dir.mkdir()
        case, changes = cases[name], tuple(keys_of(folder, kind, name).items())
        changed = Case(case.strategy, case.method, case.precision, changes)
        jobs[kind, name] = write_job(changed, world_size, out_dir, folder / kind, folder / "none")
    run_ranks(world_size, list(jobs.values()), "counted_cases.py")
    found = {}
    for one, job in jobs.items():
        directory = Job.read(job).directory
        peaks = [directory.rank(rank).path / "peak.json" for rank in range(world_size)]
        counted = [sum(json.loads(peak.read_text()).values()) for peak in peaks]
        found[one] = Found(counted, read_report(directory.rank(0).report))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seen")
    write_chats(folder / "seen.jsonl", (1, 2, 1, 1, 1, 3, 1, 1), SCALE)
    write_chats(folder / "chats.jsonl", scale=SCALE)
    for kind in TABLED:
        save_model(kind, folder / kind, SCALE)
    for kind in FIRST:
        save_model(kind, folder / f"{kind}-wide", SCALE, tower=8)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path, request: pytest.FixtureRequest) -> Runs:
    """Gives the runs that the selected tests need, on a number of ranks."""
    predicted = chosen(request, test_the_peak_with_images_is_predicted_within_2_percent)
    planned = chosen(request, test_a_plan_finds_the_images_that_the_run_finds)
    wanted = [(params["kind"], params["name"]) for params in predicted]
    wanted += [(params["kind"], "full") for params in planned]
    wanted = list(dict.fromkeys(wanted))
    return functools.cache(lambda world_size: measured(folder, world_size, wanted))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            *one,
            marks=[
                *([needs_deepspeed] * one[1].startswith("deepspeed")),
                *([pytest.mark.matrix] * (one in REPEATED)),
            ],
        )
        for one in WANTED
    ],
)
def test_the_peak_with_images_is_predicted_within_2_percent(
    runs: Runs, kind: str, name: str, record_property: Record
) -> None:
    found = runs(1 if name in ALONE else 2)[kind, name]
    record_property("error", max(found.errors(), key=abs))  # in docs/images.md
    assert max(map(abs, found.errors())) < 0.02
    # All sequences would have the most images, and loss on every token.
    assert found.memory.heaviest is not None
    assert found.memory.heaviest.peak_bytes > 0.98 * max(found.peaks)


def test_a_plan_says_that_the_tower_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {**keys_of(folder, FIRST[0], "full"), "data": "JSON", "accelerator": "cpu"}
    words = [word for key, value in keys.items() for word in (f"--{key}", json.dumps(value))]
    assert run(["plan", "finetune", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "of other parts of the model, frozen, whole on each rank" in shown
    assert "225 tokens (and 3 images): the longest sample" in shown


@pytest.mark.parametrize("kind", FIRST)
def test_a_plan_finds_the_images_that_the_run_finds(runs: Runs, folder: Path, kind: str) -> None:
    keys = keys_of(folder, kind, "full") | {
        "accelerator": "cpu",
        "devices": 1,
        "data": "JSON",
        "precision": "32-true",
    }
    words = [(key, json.dumps(value)) for key, value in keys.items()]

    def plan(**more: Any) -> Planned:
        changes = [(key.replace("__", "."), json.dumps(value)) for key, value in more.items()]
        return plan_files((), [*words, *changes], command="finetune_full")

    found = runs(1)[kind, "full"]
    resolved, planned = found.report.resolved, plan()
    assert resolved is not None and found.memory.heaviest is not None
    # Without what the run has left in the cache: by the headers of the files.
    for one in (planned, plan(train__max_seq_length=1700)):
        assert one.length.media == resolved.heaviest_media
        assert one.length.tokens == resolved.longest_sample_tokens
    assert planned.memory.peak_bytes == found.memory.heaviest.peak_bytes
    assert planned.length.words.endswith("(and 3 images): the longest sample")
