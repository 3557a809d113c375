"""Runs of ranks without their supervisor, many in one process group, and what they left behind."""

import importlib.util
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import opened
from runs import WITHOUT_EVALUATION, run_ranks
from safetensors.torch import load_file
from tiny import make_data, make_llama, make_records

from ftkit.checkpoint.metadata import Metadata
from ftkit.checkpoint.store import Store
from ftkit.models.pretrained.model_files import has_extra_weights
from ftkit.recipe.devices import Devices
from ftkit.recipe.objectives import model_beside
from ftkit.recipe.own_metric import own_metrics
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.peft_adapter import with_adapter
from ftkit.recipe.plugin import using
from ftkit.recipe.recipe import Method
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job, StopAfter
from ftkit.runs.report.metrics import Row, loss_column, read_metrics, read_validation
from ftkit.runs.report.report import Report, read_report
from ftkit.training.journal import Journal
from ftkit.training.loop import StopRequest
from ftkit.training.rank import run_job
from ftkit.training.recorder import Recorder
from ftkit.utils.console.display import Display

# DeepSpeed is built from source, which needs g++; scripts/setup_env continues without it.
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
_NO_DEEPSPEED = "deepspeed is not installed: scripts/setup_env"
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason=_NO_DEEPSPEED)
DEEPSPEED = pytest.param("deepspeed", marks=needs_deepspeed)
"""The strategy among others in the parameters of a test."""


def require_deepspeed(*words: str) -> None:
    """Skip a test one of whose parameters holds the name of the strategy, where it is missing."""
    if "deepspeed" in words and not HAS_DEEPSPEED:
        # It has no wheel: scripts/setup_env builds it, where there is a compiler.
        pytest.skip(_NO_DEEPSPEED)


METHODS: list[Method] = ["full", "lora"]
NO_EVALUATION: tuple[tuple[str, Any], ...] = (
    *((key.replace("__", "."), value) for key, value in WITHOUT_EVALUATION.items()),
    ("eval.rouge_l", 0),
)
"""For tests of what is learned alone."""
CONTROL: tuple[tuple[str, Any], ...] = (
    ("train.epochs", 4),
    ("train.lr_schedule", "wsd"),
    ("train.lr_decay_fraction", 0.8),
    ("train.label_smoothing", 0.1),
    ("train.neftune_noise_alpha", 5.0),
    ("train.ema_decay", 0.7),
    ("eval.interval", 1),
    ("eval.patience", 3),
    ("eval.max_new_tokens", 3),
    ("eval.exact_match", 1),
    ("eval.rouge_l", 1),
    ("eval.sets.many", "BESIDE/many.json"),
    ("eval.sets.one", "BESIDE/one.json"),
    ("checkpoint.result", "best"),
    ("optimizer.lr", 0.06),
    ("optimizer.eps", 1e-6),  # as below, where embedding and head are one
)
"""What decides how it is learned beside the optimizer; the loss falls and rises again soon.

BASE is the base model of the case, BESIDE the directory of the data; two ranks have one record
between them in one of the sets.
"""
LORA = ["lora_key", "lora_projection", "lora_mlp", "lora_head"]


class Entries(list[Any]):
    """A list that may be among the changes of a case, which are keys of a dictionary."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self))


@dataclass(frozen=True, order=True)
class Case:
    """A strategy, a method, a precision, and what else differs from the recipe of all cases."""

    strategy: str
    method: Method
    precision: str = "32-true"
    changes: tuple[tuple[str, Any], ...] = ()
    tied: bool = False
    """Whether embedding and head of the base model are one."""
    stop_after: int | None = None
    """Steps of this session."""
    start: Path | None = None
    """The run that this one continues in a new directory, from its newest checkpoint."""
    plugin: Path | None = None

    def __str__(self) -> str:
        return f"{self.strategy}-{self.method}-{self.precision}"


@dataclass(frozen=True)
class Outcome:
    """Files and numbers of a finished run."""

    out_dir: Path

    @property
    def rows(self) -> list[Row]:
        return read_metrics(self.out_dir / "metrics.csv")

    @property
    def checkpoint(self) -> Path:
        """The newest."""
        store = Store(self.out_dir / "checkpoints")
        step = store.newest()
        assert step is not None
        return store.path(step)

    @property
    def losses(self) -> list[float]:
        return [float(row["loss"] or 0) for row in self.rows]

    @property
    def validation_losses(self) -> list[float]:
        rows = read_validation(self.out_dir / "validation.csv")
        return [float(row["val_loss"] or 0) for row in rows]

    def losses_on(self, source: str) -> list[float | None]:
        """Loss of each validation, or None if it had none of this source or set."""
        rows = read_validation(self.out_dir / "validation.csv")
        return [row[loss_column(source)] for row in rows]

    @property
    def report(self) -> Report:
        return read_report(RunDirectory(self.out_dir).rank(0).report)

    def complete(self) -> None:
        """Leave what a supervisor leaves: the recipe and the report of the run."""
        directory = RunDirectory(self.out_dir)
        shutil.copyfile(self.checkpoint / "recipe.yaml", directory.recipe)
        shutil.copyfile(directory.rank(0).report, directory.report)

    def weights(self) -> dict[str, torch.Tensor]:
        (file,) = (self.out_dir / "final").glob("*.safetensors")
        return load_file(file)


def run_here(job: Job, start: Metadata | None = None) -> Outcome:
    """Run the only rank of a job in the process of the test; `start` is its checkpoint's."""
    state = job.directory.rank(0)
    state.path.mkdir(parents=True)
    report = job.new_report(start)
    began = job.began_s
    with (
        Display(job.directory.path) as display,
        Recorder(report, state, job.plan, began_s=began, start=start) as recorder,
    ):
        run_job(job, start, StopRequest(), Journal(display, recorder))
    return Outcome(job.directory.path)


def layouts(cases: Iterable[tuple[str, ...]], often: Collection[tuple[str, ...]]) -> list[Any]:
    """Parameters of a test, one of which is a strategy: cases but for `often` are of the matrix."""
    return [
        pytest.param(
            *case,
            marks=[
                *([needs_deepspeed] * any(w == "deepspeed" or w.startswith("ZeRO") for w in case)),
                *([pytest.mark.matrix] * (case not in often)),
            ],
        )
        for case in cases
    ]


def repeated(*strategies: str) -> list[Any]:
    """Strategies, or other names, with which a test repeats in the matrix what others show."""
    return layouts([(strategy,) for strategy in strategies], often=())


def chosen(request: pytest.FixtureRequest, test: Callable[..., None]) -> list[dict[str, Any]]:
    """Parameters with which a test was selected, so that a fixture makes what they need alone.

    Of a test without parameters, which was selected or not: one empty dictionary, or none.
    """
    return [
        item.callspec.params if hasattr(item, "callspec") else {}
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test
    ]


Run = Callable[[int, list[Case]], dict[Case, Outcome]]


def make_run(tmp_path_factory: pytest.TempPathFactory, script: str = "rank_cases.py") -> Run:
    """Gives what runs cases on a number of ranks, all in one process group, by a script."""
    directory = tmp_path_factory.mktemp("base")
    bases = {
        tied: make_llama(directory / name, tie_word_embeddings=tied)
        for name, tied in (("tiny", False), ("tied", True))
    }
    data = make_data(tmp_path_factory.mktemp("data") / "records.json")
    for name, count in (("many", 25), ("one", 1)):
        records = make_records(count, seed=count)
        data.with_name(f"{name}.json").write_text(json.dumps(records))

    def run(world_size: int, cases: list[Case]) -> dict[Case, Outcome]:
        jobs = {}
        for case in cases:
            out_dir = tmp_path_factory.mktemp(f"x{world_size}-{case}")
            jobs[case] = write_job(case, world_size, out_dir, bases[case.tied], data)
        if jobs:  # the selected tests may need none
            run_ranks(world_size, list(jobs.values()), script)
        return {case: Outcome(job.parent.parent) for case, job in jobs.items()}

    return run


def write_job(case: Case, world_size: int, out_dir: Path, base: Path, data: Path) -> Path:
    """The recipe of all cases: what a wrong loss, clipping or schedule would show in."""
    values = {
        "checkpoint_dir": str(base),
        "out_dir": str(out_dir),
        "precision": case.precision,
        "accelerator": "cpu",
        "devices": world_size,
        "strategy": case.strategy,
        "data": "JSON",
        "data.json_path": str(data),
        "data.mask_prompt": True,
        "data.val_split_fraction": 0.2,
        "data.num_workers": 0,
        "train.global_batch_size": 11,
        "train.micro_batch_size": 4,
        "train.epochs": 2,
        "train.lr_warmup_steps": 2,
        "train.max_norm": 0.4,
        "train.max_seq_length": 200,
        "eval.interval": 5,
        "eval.initial_validation": True,
        "eval.max_new_tokens": 3,
        "eval.exact_match": 3,
        "eval.rouge_l": 4,
        "optimizer.lr": 3e-3,
    }
    if case.method == "lora":
        values |= dict.fromkeys(LORA, True) | {"lora_dropout": 0.2}
    if case.tied:
        # In its first step one gradient of a value projection is 7e-10, what rounding leaves of
        # terms near 4e-3. Below its usual eps of 1e-8 Adam turns such noise into steps of 1e-5.
        values["optimizer.eps"] = 1e-6
    place = str(data.parent)
    for key, value in case.changes:
        if value == "BASE":
            values[key] = str(base)
        else:
            values[key] = value.replace("BESIDE", place) if isinstance(value, str) else value
    base, start = Path(values["checkpoint_dir"]), None
    if case.start is not None:
        start = Outcome(case.start).checkpoint
        is_whole = not {"train.only", "train.freeze"} & values.keys()
        if case.method == "full" and is_whole and not has_extra_weights(start / "base"):
            base = start / "base"
        for name in ("metrics.csv", "validation.csv"):
            shutil.copyfile(case.start / name, out_dir / name)
    plugin = None if case.plugin is None else opened(case.plugin)
    with using(plugin):
        keys = [(key, json.dumps(value)) for key, value in values.items()]
        recipe = with_adapter(read_recipe([], keys, method=case.method))
        beside = model_beside(recipe)
    metric = out_dir / "metric.py"
    metric.write_text("def length(answer, expected, record):\n    return len(answer)\n")
    metrics = own_metrics([f"{metric}:length"]) if values["eval.rouge_l"] else ()
    job = Job(
        recipe=recipe,
        devices=Devices(accelerator="cpu", count=2),
        base=str(base),
        reference=recipe.reference if beside is None else None,
        beside=None if beside is None else beside.name,
        command=(),
        started_at_s=time.time(),
        start=None if start is None else str(start),
        stop_after=None if case.stop_after is None else StopAfter(steps=case.stop_after),
        metrics=metrics,
        plugin=plugin,
    )
    job.directory.state.mkdir()
    job.write(job.directory.job)
    return job.directory.job


def assert_same_maths(
    found: Outcome,
    expected: Outcome,
    weights_within: float = 1e-5,
    *,
    answers: bool = True,
    validations: int = 3,
) -> None:
    """Two runs have learned the same; unless `answers` is false, they have something to say.

    A case with `NO_EVALUATION` has 0 `validations`: steps and weights alone are compared.
    """
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert [row["lr"] for row in found.rows] == [row["lr"] for row in expected.rows]
    for column in ("step", "samples", "tokens"):
        assert [row[column] for row in found.rows] == [row[column] for row in expected.rows]
    norms = [float(row["grad_norm"] or 0) for row in expected.rows]
    assert [row["grad_norm"] for row in found.rows] == pytest.approx(norms, rel=1e-4)
    if validations:
        assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
        assert len(found.validation_losses) == validations
        assert_same_answers(found, expected, something=answers)
    weights = found.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=weights_within)
    assert not weights


def assert_same_answers(found: Outcome, expected: Outcome, *, something: bool) -> None:
    """Two runs give the same answers, with the same scores before and after training."""
    assert found.report.exact_match == expected.report.exact_match
    assert found.report.scores == expected.report.scores
    assert [score.name for score in found.report.scores] == ["rouge_l", "length"]
    assert all(None not in (score.before, score.after) for score in found.report.scores)
    assert found.report.examples == expected.report.examples
    (example,) = found.report.examples or []
    assert not something or example.before or example.after
