"""A reference that is not below an adapter is computed once: what is kept, and found again."""

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import says
from rank_jobs import NO_EVALUATION, Outcome, run_here
from tiny import make_labelled, make_llama, make_pairs

from ftkit.checkpoint.metadata import read_metadata
from ftkit.cli.app import run as run_command
from ftkit.errors import UserError
from ftkit.extensions.other_models import references
from ftkit.extensions.other_models.second_model import check_context, check_tokens
from ftkit.models.pretrained.base_model import open_base
from ftkit.objectives.objective import Batch
from ftkit.recipe.devices import Devices
from ftkit.recipe.hubs import HUBS
from ftkit.recipe.objectives import model_beside
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.peft_adapter import with_adapter
from ftkit.recipe.recipe import Method
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job, StopAfter
from ftkit.runs.report.metrics import read_validation
from ftkit.runs.report.report import read_report

PAIRS = 40
HELD_OUT = 8
TrainPairs = Callable[..., Outcome]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "base")


@pytest.fixture
def train(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> TrainPairs:
    """Trains on pairs in this process, with a cache for this test alone."""
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(make_pairs(PAIRS)))

    def train_(method: Method, name: str, start: Outcome | None = None, **keys: Any) -> Outcome:
        values = {
            "checkpoint_dir": str(base),
            "out_dir": str(tmp_path / name),
            "precision": "32-true",
            "accelerator": "cpu",
            "objective": "dpo",
            "data": "JSON",
            "data.json_path": str(file),
            "data.val_split_fraction": HELD_OUT / PAIRS,
            "train.global_batch_size": 8,
            "train.micro_batch_size": 4,
            "train.lr_warmup_steps": 0,
            "train.epochs": 1,
            "optimizer.lr": 3e-3,
            **dict(NO_EVALUATION),
            "eval.final_validation": True,
        }
        steps = keys.pop("stop_after", None)
        values |= {key.replace("__", "."): value for key, value in keys.items()}
        recipe = read_recipe([], [(k, json.dumps(v)) for k, v in values.items()], method=method)
        recipe = with_adapter(recipe)
        beside = model_beside(recipe)
        job = Job(
            recipe=recipe,
            devices=Devices(accelerator="cpu", count=1),
            base=str(base if start is None else start.checkpoint / "base"),
            reference=None if beside else recipe.reference,
            beside=beside and beside.name,
            command=(),
            started_at_s=time.time(),
            start=None if start is None else str(start.checkpoint),
            stop_after=None if steps is None else StopAfter(steps=steps),
        )
        return run_here(job, None if start is None else read_metadata(start.checkpoint))

    return train_


class Computed:
    """Counts the sequences that are computed, and interrupts when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sequences, self.most = 0, math.inf
        self._compute = references.sequence_log_probabilities  # type: ignore[attr-defined]
        monkeypatch.setattr(references, "sequence_log_probabilities", self)
        monkeypatch.setattr(references, "_SAMPLES_AT_ONCE", 4)

    def __call__(self, model: Any, batch: Batch) -> torch.Tensor:
        if self.sequences >= self.most:
            raise KeyboardInterrupt
        found: torch.Tensor = self._compute(model, batch)
        self.sequences += len(found)
        return found


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Computed:
    return Computed(monkeypatch)


def test_an_interrupted_computation_goes_on_where_it_was(
    train: TrainPairs, computed: Computed
) -> None:
    computed.most = 20
    with pytest.raises(KeyboardInterrupt):
        train("full", "interrupted")
    done = computed.sequences
    assert done == 24
    computed.most, computed.sequences = math.inf, 0
    found = train("full", "again")
    assert computed.sequences == 2 * PAIRS - done
    assert found.losses[0] == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.slow
def test_the_model_that_an_adapter_makes_is_the_reference_of_its_further_training(
    train: TrainPairs, computed: Computed
) -> None:
    first = train("lora", "first")
    assert not computed.sequences, "below the adapter there is nothing to compute before"
    assert first.losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert first.losses[-1] < math.log(2) - 0.001
    second = train("lora", "second", adapter=str(first.out_dir / "final"), lora_dropout=0)
    assert computed.sequences == 2 * PAIRS
    assert second.losses[0] == pytest.approx(math.log(2), rel=1e-6)
    times = [
        read_report(RunDirectory(run.out_dir).rank(0).path).phases_s for run in (first, second)
    ]
    assert times[0] is not None and times[0].reference is None
    assert times[1] is not None and (times[1].reference or 0) > 0 < (times[1].set_up or 0)


def test_a_reference_with_other_tokens_or_a_shorter_context_is_refused(tmp_path: Path) -> None:
    base = open_base(str(make_llama(tmp_path / "base")))
    check_tokens(base, open_base(str(make_llama(tmp_path / "same", hidden_size=32))), "reference")
    short = open_base(str(make_llama(tmp_path / "short", max_position_embeddings=64)))
    with pytest.raises(UserError) as refused:
        check_context(short, "reference", 65)
    assert says(
        str(refused.value), "reference is short ... 64 tokens ... --train.max_seq_length 64"
    )
    other = make_llama(tmp_path / "other")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["Ġmoon"], vocabulary["Ġtree"] = vocabulary["Ġtree"], vocabulary["Ġmoon"]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError) as refused:
        check_tokens(base, open_base(str(other)), "reference")
    assert says(str(refused.value), "reference is other ... vocabulary differs")


@pytest.mark.slow
def test_only_what_a_run_takes_is_computed_and_a_longer_run_adds_the_rest(
    train: TrainPairs, computed: Computed
) -> None:
    limits = {"eval__max_iters": 1, "eval__final_validation": False}
    train("full", "short", train__max_steps=1, train__global_batch_size=4, **limits)
    assert computed.sequences == 2 * (4 + 4), "a step, and as many samples to validate on"
    computed.sequences = 0
    train("full", "longer", train__max_steps=3, train__global_batch_size=4, **limits)
    assert computed.sequences == 2 * 8
    computed.sequences = 0
    train("full", "same", train__max_steps=3, train__global_batch_size=4, **limits)
    assert not computed.sequences


@pytest.mark.slow
def test_a_run_resumes_where_base_model_and_cache_are_gone(
    train: TrainPairs,
    computed: Computed,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = train("full", "whole")
    half = train("full", "half", stop_after=2)
    base.rename(tmp_path / "gone")
    (tmp_path / "cache/reference").rename(tmp_path / "gone/reference")
    computed.sequences = 0
    resumed = train("full", "resumed", start=half)
    assert not computed.sequences
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    more = tmp_path / "more.json"
    more.write_text(json.dumps(make_pairs(5, seed=1)))
    with pytest.raises(UserError) as refused:
        train("full", "more", start=half, eval__sets={"more": str(more)})
    assert says(str(refused.value), "reference ... 5 samples ... ftkit download")
    monkeypatch.setitem(vars(HUBS), "_of_extensions", {})  # the extension hub is missing
    with pytest.raises(UserError) as refused:
        train("full", "without", start=half, eval__sets={"more": str(more)})
    assert says(str(refused.value), "5 samples") and "ftkit download" not in str(refused.value)


@pytest.mark.slow
def test_noise_on_embeddings_is_of_the_sequence_and_not_of_the_reference(
    train: TrainPairs,
) -> None:
    noisy = {"train__neftune_noise_alpha": 20.0}
    one, four = (
        train("lora", f"by-{size}", train__micro_batch_size=size, **noisy) for size in (1, 4)
    )
    assert four.losses == pytest.approx(one.losses, rel=1e-5)
    assert abs(one.losses[0] - math.log(2)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_evaluating_a_result_gives_the_validation_loss_of_its_run(
    method: Method, train: TrainPairs, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = train(method, "run")
    outcome.complete()
    capsys.readouterr()
    arguments = ["evaluate", str(outcome.out_dir), "--accelerator", "cpu", "--format", "json"]
    assert run_command([*arguments, "--exact_match", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(outcome.validation_losses[-1], rel=1e-5)
    assert found["terms"]["accuracy"] >= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "saved modules", "further lora", "another"])
def test_evaluating_on_other_pairs_computes_their_reference(
    kind: str,
    train: TrainPairs,
    computed: Computed,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys: dict[str, Any] = {"data__val_split_fraction": None}
    if kind == "saved modules":
        keys |= {"lora_modules_to_save": ["lm_head"]}
    elif kind == "further lora":
        keys |= {"adapter": str(train("lora", "first").out_dir / "final")}
    elif kind == "another":
        keys |= {"reference": str(make_llama(tmp_path / "another", hidden_size=32))}
    for name, seed in (("own", 1), ("others", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.json").write_text(json.dumps(make_pairs(16)))
        (tmp_path / name / "val.json").write_text(json.dumps(make_pairs(6, seed=seed)))
    method: Method = "full" if kind in ("full", "another") else "lora"
    own, others = (
        train(method, f"on-{name}", data__json_path=str(tmp_path / name), **keys)
        for name in ("own", "others")
    )
    own.complete()
    shutil.rmtree(tmp_path / "cache/reference")
    computed.sequences = 0
    words = ["evaluate", str(own.out_dir), "--accelerator", "cpu", "--format", "json"]
    words += ["--exact_match", "0", "--data", "JSON"]
    words += ["--data.json_path", str(tmp_path / "others/val.json")]

    def evaluated(*more: str) -> dict[str, float]:
        capsys.readouterr()
        assert run_command([*words, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        return {"val_loss": found["loss"]} | {f"val_{k}": v for k, v in found["terms"].items()}

    # Both runs are trained on the same pairs.
    row = read_validation(others.out_dir / "validation.csv")[-1]
    first = evaluated()
    expected = {name: value for name, value in row.items() if name in first}
    assert len(expected) == 5
    assert first == evaluated() == pytest.approx(expected, rel=1e-4)
    assert computed.sequences == 2 * 6, "once: then they are in the cache"
    if kind == "full":
        moved = base.rename(tmp_path / "moved")
        with pytest.raises(UserError) as refused:
            run_command(words)
        assert says(str(refused.value), str(base), "--reference PATH", "reference ... 6 samples")
        assert evaluated("--reference", str(moved)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["base", pytest.param("another", marks=pytest.mark.matrix), "another, lora"]
)
def test_a_reference_that_computes_beside_the_trained_model_does_so_in_evaluate(
    kind: str,
    train: TrainPairs,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "labelled.json"
    file.write_text(json.dumps(make_labelled(PAIRS)))
    reference = base
    if kind != "base":
        reference = make_llama(tmp_path / "another", hidden_size=32)
    keys: dict[str, Any] = {"objective": "kto", "data__json_path": str(file)}
    keys["reference"] = str(reference)
    outcome = train("lora" if kind.endswith("lora") else "full", "run", **keys)
    outcome.complete()
    words = ["evaluate", str(outcome.out_dir), "--accelerator", "cpu", "--format", "json"]
    words += ["--exact_match", "0"]

    def evaluated(*more: str) -> dict[str, float]:
        capsys.readouterr()
        assert run_command([*words, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        return {"val_loss": found["loss"]} | {f"val_{k}": v for k, v in found["terms"].items()}

    row = read_validation(outcome.out_dir / "validation.csv")[-1]
    found = evaluated()
    expected = {name: value for name, value in row.items() if name in found}
    assert len(expected) == 5
    assert found == pytest.approx(expected, rel=1e-5)
    moved = reference.rename(tmp_path / "moved")
    with pytest.raises(UserError) as refused:
        run_command(words)
    assert says(str(refused.value), str(reference), "the reference of")
    assert evaluated("--reference", str(moved)) == pytest.approx(expected, rel=1e-5)
    other = make_llama(tmp_path / "other", initializer_range=0.3)
    with pytest.raises(UserError) as refused:
        run_command([*words, "--reference", str(other)])
    assert says(str(refused.value), str(other), "weights differ", "--reference PATH")


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "loss"), [("kto", 0.5), ("dpo", math.log(2))])
def test_the_base_model_as_the_reference_is_tied_as_the_trained_one(
    objective: str, loss: float, train: TrainPairs, base: Path, tmp_path: Path
) -> None:
    file = tmp_path / "labelled.json"
    file.write_text(json.dumps(make_labelled(PAIRS)))
    keys = {"data__json_path": str(file)} if objective == "kto" else {}
    outcome = train(
        "full",
        "run",
        objective=objective,
        reference=str(base),
        train__tie_embeddings=True,
        train__max_steps=1,
        eval__final_validation=False,
        **keys,
    )
    assert outcome.losses == [pytest.approx(loss, rel=1e-6)]


@pytest.mark.slow
def test_a_tied_model_is_another_reference_than_the_same_files_untied(
    train: TrainPairs, computed: Computed
) -> None:
    short = {"train__max_steps": 1, "eval__final_validation": False}
    train("full", "as it is", **short)
    untied = computed.sequences
    tied = train("full", "tied", train__tie_embeddings=True, **short)
    assert computed.sequences == 2 * untied
    assert tied.losses == [pytest.approx(math.log(2), rel=1e-6)]


def test_a_reference_is_refused_where_evaluate_needs_none(train: TrainPairs) -> None:
    outcome = train("lora", "run", train__max_steps=1)
    outcome.complete()
    with pytest.raises(UserError) as refused:
        run_command(["evaluate", str(outcome.out_dir), "--reference", "other"])
    assert says(str(refused.value), "--reference is other", "no other", "Leave --reference out")


@pytest.mark.slow
def test_the_reference_beside_a_run_is_fixed_wherever_it_lies(
    train: TrainPairs, base: Path, tmp_path: Path
) -> None:
    file = tmp_path / "labelled.json"
    file.write_text(json.dumps(make_labelled(PAIRS)))
    keys: dict[str, Any] = {"objective": "kto", "data__json_path": str(file)}
    reference = make_llama(tmp_path / "another", hidden_size=32)
    keys["reference"] = str(reference)
    whole = train("full", "whole", **keys)
    half = train("full", "half", stop_after=2, **keys)
    assert read_metadata(half.checkpoint).beside is not None
    resumed = train("full", "resumed", start=half, **keys)
    assert resumed.losses[-1] == pytest.approx(whole.losses[-1], rel=1e-6)
    shutil.rmtree(reference)
    make_llama(reference, hidden_size=32, initializer_range=0.3)
    with pytest.raises(UserError) as refused:
        train("full", "refused", start=half, **keys)
    assert says(str(refused.value), "reference", str(reference), "step 2", "weights differ")
