"""Runs on devices that compile programs for each shape: few shapes, and the same losses.

A CPU takes the part of such a device: it has the fact of the kind that decides.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixed_shapes import compile_shapes
from messages import says
from plugins import plugin_of
from rank_jobs import NO_EVALUATION, Outcome, repeated, run_here
from tiny import make_labelled, make_llama, make_pairs, make_records
from transformers_models import make_transformers_model

from ftkit.data.samples import loader
from ftkit.data.samples.shapes import MOST_LENGTHS
from ftkit.errors import UserError
from ftkit.models.pretrained.base_model import open_base
from ftkit.planning.memory import heaviest_micro_batch
from ftkit.recipe.devices import Devices
from ftkit.recipe.objectives import model_beside
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan
from ftkit.recipe.plugin import using
from ftkit.recipe.recipe import Method, Recipe, Train
from ftkit.runs.job import Job
from ftkit.runs.report.table import measured_rows

RECORDS = 30
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {
        "llama": make_llama(directory / "llama"),
        "teacher": make_llama(directory / "teacher", initializer_range=0.1),
        "experts": make_transformers_model(
            directory / "experts", "olmoe", output_router_logits=True
        ),
    }


@pytest.fixture
def run(tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Trains in this process on data of the objective; keys have `__` in the place of dots."""

    def run_(name: str, *, base: str = "llama", method: Method = "full", **keys: Any) -> Outcome:
        # Each computes the log-probabilities of its reference for itself.
        monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / f"cache-{name}"))
        objective = keys.get("objective", "sft")
        records: Any = make_records(RECORDS)
        if objective in ("dpo", "orpo", "simpo", "reward"):
            records = make_pairs(RECORDS)
        elif objective == "kto":
            records = make_labelled(RECORDS)
        elif keys.pop("weighted", False):
            records = [one | {"weight": 1 + i % 3} for i, one in enumerate(records)]
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(records))
        values = {
            "checkpoint_dir": str(models[base]),
            "out_dir": str(tmp_path / name),
            "precision": "32-true",
            "accelerator": "cpu",
            "data": "JSON",
            "data.json_path": str(file),
            "data.val_split_fraction": 0.2,
            "train.global_batch_size": 7,
            "train.micro_batch_size": 3,
            "train.lr_warmup_steps": 0,
            "train.epochs": 1,
            "train.padding_free": None,
            "optimizer.lr": 3e-3,
            **dict(NO_EVALUATION),
            "eval.interval": 2,
        }
        values |= {key.replace("__", "."): value for key, value in keys.items()}
        overrides = [(key, json.dumps(value)) for key, value in values.items()]
        recipe = read_recipe([], overrides, method=method)
        beside = model_beside(recipe)
        job = Job(
            recipe=recipe,
            devices=Devices(accelerator="cpu", count=1),
            base=recipe.checkpoint_dir,
            beside=beside and beside.name,
            command=(),
            started_at_s=time.time(),
        )
        return run_here(job)

    return run_


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """Shapes of the micro-batches that were made."""
    found: set[tuple[Any, ...]] = set()

    def collate(*arguments: Any, real: Any = loader.collate, **options: Any) -> dict[str, Any]:
        batch: dict[str, Any] = real(*arguments, **options)
        found.add((tuple(batch["input_ids"].shape), len(batch["labels"])))
        return batch

    monkeypatch.setattr(loader, "collate", collate)
    return found


FAST = ("answers", "dpo")
OFTEN = (
    *("weighted", "kto, with a reference beside", "reward", "distillation", "experts"),
    "steps of some tokens",
)
"""Among the slow tests; the others are of the matrix, and have other terms of the same kinds."""
CASES: dict[str, dict[str, Any]] = {
    "answers": {},
    "weighted": {"weighted": True},
    "noise": {"train__neftune_noise_alpha": 5.0},
    "smoothed": {"train__label_smoothing": 0.1},
    "dft": {"objective": "dft"},
    "z-loss": {"objective": "sft", "objective__z_loss": 0.1},
    "dpo": {"objective": "dpo"},
    "dpo, below an adapter": {"objective": "dpo", "method": "lora"},
    "orpo": {"objective": "orpo"},
    "simpo": {"objective": "simpo"},
    "kto": {"objective": "kto", "method": "lora"},
    "kto, with a reference beside": {"objective": "kto", "reference": ""},
    "reward": {"objective": "reward", "objective__center_weight": 0.1},
    "distillation": {"objective": "distill", "teacher": "", "objective__sft_weight": 0.5},
    "experts": {"base": "experts", "router_aux_loss_coef": 0.1},
    "steps of some tokens": {"train__global_batch_tokens": 300},
}


@pytest.mark.extensions
@pytest.mark.parametrize(
    "case",
    [
        *FAST,
        *(pytest.param(case, marks=pytest.mark.slow) for case in OFTEN),
        *repeated(*(case for case in CASES if case not in (*FAST, *OFTEN))),
    ],
)
def test_losses_are_those_without_and_shapes_are_few(
    run: Run,
    seen: set[tuple[Any, ...]],
    models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    keys = dict(CASES[case])
    for key in keys.keys() & {"teacher", "reference"}:
        keys[key] = str(models["teacher"])
    usual = run("usual", **keys)
    seen.clear()
    compile_shapes(monkeypatch)
    fixed = run("fixed", **keys)
    assert fixed.losses == pytest.approx(usual.losses, rel=1e-6)
    assert fixed.validation_losses == pytest.approx(usual.validation_losses, rel=1e-6)
    for one, other in zip(fixed.rows, usual.rows, strict=True):
        # Rounding may break a tie with the reference before the first step.
        own = {"tokens_per_s": one["tokens_per_s"], "accuracy": one.get("accuracy")}
        assert one == pytest.approx(
            other | {k: own[k] for k in own if k in one}, rel=1e-5, abs=1e-6
        )
    assert len({rows for (rows, _), _ in seen}) == 1
    assert len(seen) == len({length for (_, length), _ in seen}) <= MOST_LENGTHS
    report, before = fixed.report, usual.report
    assert report.resolved is not None and before.resolved is not None
    assert before.resolved.padded_lengths is None
    lengths = report.resolved.padded_lengths
    assert lengths is not None and {length for (_, length), _ in seen} <= {*lengths}
    assert report.resolved.attention == "padded"
    assert report.tokens.label == before.tokens.label
    assert report.tokens.real == before.tokens.real
    assert f"{len(lengths)} lengths" in dict(measured_rows(report))["padding"]


def test_memory_is_predicted_for_what_is_padded(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the greatest length, as many as every micro-batch has, and weights of labels."""
    compile_shapes(monkeypatch)
    train = Train(global_batch_size=4, micro_batch_size=3)
    recipe = Recipe(checkpoint_dir=str(models["llama"]), train=train)
    plan = make_plan(recipe, Devices(accelerator="cpu", count=1))
    found = heaviest_micro_batch(open_base(recipe.checkpoint_dir), plan, 101)
    assert (
        (found.sequences, found.positions, found.tokens) == (plan.rows, 100, None) == (2, 100, None)
    )
    assert found.weighted


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"micro_batch_tokens": 900}, "train.micro_batch_tokens is 900 ... cpu ... null"),
        ({"micro_batch_tokens": "auto"}, "train.micro_batch_tokens is auto ... cpu ... null"),
        (
            {"padding_free": True},
            "train.padding_free is true ... cpu ... --train.padding_free null",
        ),
    ],
)
def test_rows_without_padding_are_refused(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], message: str
) -> None:
    recipe = Recipe(checkpoint_dir="base", train=Train(**keys))
    devices = Devices(accelerator="cpu", count=1)
    compile_shapes(monkeypatch)
    with pytest.raises(UserError) as refused:
        make_plan(recipe, devices)
    assert says(str(refused.value), message)


def test_a_result_that_was_trained_in_rows_is_measured_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_shapes(monkeypatch)
    train = Train(micro_batch_tokens=900, padding_free=True, micro_batch_size=None)
    recipe = Recipe(checkpoint_dir="base", train=train)
    plan = make_plan(recipe, Devices(accelerator="cpu", count=1), trains=False)
    assert (plan.micro_batch_tokens, plan.rows) == (None, 1)


OWN = """
import ftkit
from ftkit.models.loss import LogProbabilities

class Own(ftkit.Objective):
    terms = (ftkit.Term(name="loss", divisor="tokens"),)
    def amounts(self, samples):
        return {"tokens": samples.label_counts}
    def output(self, batch):
        return LogProbabilities()
    def sums(self, output, batch):
        return (-output.double().sum(),)
"""


@pytest.mark.slow
def test_an_objective_of_a_plugin_gets_the_labels_of_samples_alone(
    run: Run, seen: set[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with using(plugin_of(tmp_path, OWN)):
        usual = run("usual", objective="Own", train__epochs=2)
        seen.clear()
        compile_shapes(monkeypatch)
        fixed = run("fixed", objective="Own", train__epochs=2)
    assert fixed.losses == pytest.approx(usual.losses, rel=1e-6)
    assert len({shape for shape, _ in seen}) <= MOST_LENGTHS < len(seen)
