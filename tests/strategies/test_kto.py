"""Promises P1 and P2 for answers with labels, whose reference point is one of the whole step."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command
from messages import says
from rank_jobs import NO_EVALUATION, Case, Outcome, make_run, needs_deepspeed
from tiny import make_labelled
from transformers import AutoModelForCausalLM

from ftkit.cli.app import run
from ftkit.data.dataset import load_data
from ftkit.data.samples.sample_set import Sample, mismatched
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component

pytestmark = pytest.mark.slow
Changes = tuple[tuple[str, Any], ...]
Found = dict[str, Outcome]
ROWS: dict[str, Changes] = {
    "one by one": (("train.micro_batch_size", 1),),
    "two": (("train.micro_batch_size", 2),),
    "at once": (("train.micro_batch_size", 11),),
    "padded": (("train.padding_free", False),),
}
STRATEGIES = ("ddp", "fsdp", pytest.param("deepspeed", marks=needs_deepspeed), "resumed")
TERMS = ("accuracy", "chosen_reward", "rejected_reward", "reference_point")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("labelled") / "labelled.json"
    file.write_text(json.dumps(make_labelled(60)))
    return file


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, labelled: Path) -> Found:
    """All runs, by what they are."""
    run_cases = make_run(tmp_path_factory)
    changes: Changes = (
        *NO_EVALUATION,
        ("objective", "kto"),
        ("objective.beta", 0.5),
        ("objective.undesirable_weight", 1.5),
        ("data.json_path", str(labelled)),
        ("data.mask_prompt", None),
        ("eval.interval", 3),
        ("eval.final_validation", True),
    )

    def case(strategy: str, more: Changes = (), **keys: Any) -> Case:
        return Case(strategy, "lora", changes=(*changes, *more), **keys)

    single = {
        "alone": case("single"),
        **{name: case("single", more) for name, more in ROWS.items()},
        "half": case("single", stop_after=4),
    }
    alone = run_cases(1, list(single.values()))
    known = {name: alone[one] for name, one in single.items()}
    double = {strategy: case(strategy) for strategy in ("ddp", "fsdp", "deepspeed")}
    double["resumed"] = case("fsdp", start=known["half"].out_dir)
    in_two = run_cases(2, list(double.values()))
    return known | {name: in_two[one] for name, one in double.items()}


@pytest.mark.parametrize("how", [*ROWS, *STRATEGIES])
def test_no_layout_changes_what_is_learned(how: str, found: Found) -> None:
    outcome, expected = found[how], found["alone"]
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
    assert outcome.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    assert len(outcome.validation_losses) == 3
    for name in (*TERMS, "grad_norm"):
        values = [float(row[name] or 0) for row in expected.rows]
        assert [float(row[name] or 0) for row in outcome.rows] == pytest.approx(values, rel=1e-4)
    weights = outcome.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=1e-5)


def test_the_reference_point_is_not_always_zero(found: Found) -> None:
    points = [float(row["reference_point"] or 0) for row in found["alone"].rows]
    assert points[0] == 0, "the model is the reference before the first update"
    assert max(points) > 0.05


@torch.no_grad()
def test_validation_is_the_formula_on_models_of_transformers(
    found: Found, labelled: Path, tmp_path: Path
) -> None:
    outcome = found["alone"]
    outcome.complete()
    assert run(["merge", str(outcome.out_dir), "--out", str(tmp_path / "merged")]) == 0
    base = Path(
        json.loads((outcome.out_dir / "final/adapter_config.json").read_text())[
            "base_model_name_or_path"
        ]
    )
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "merged", base)]

    def ratio(sample: Sample) -> float:
        ids = torch.tensor(sample.ids[None], dtype=torch.long)
        first = int(sample.trained[0, 0])
        logs = [model(ids).logits[0, :-1].log_softmax(1) for model in models]
        chosen = [log.gather(1, ids[0, 1:, None])[first - 1 :].sum().item() for log in logs]
        return chosen[0] - chosen[1]

    part: Component = {
        "class_path": "JSON",
        "init_args": {"path": str(labelled), "val_split_fraction": 0.2},
    }
    samples = load_data(part, Tokenizer(base), 200, preference="labels").val
    known = [samples[i] for i in range(len(samples))]
    shifted = [mismatched(known[i], known[i - 1], 200) for i in range(len(known))]
    point = max(float(np.mean([ratio(one) for one in shifted])), 0)

    def loss(sample: Sample) -> float:
        distance = (ratio(sample) - point) * (1 if sample.desirable else -1)
        weight = 1 if sample.desirable else 1.5
        return weight * (1 - 1 / (1 + math.exp(-0.5 * distance)))

    expected = np.mean([loss(one) for one in known])
    assert outcome.validation_losses[-1] == pytest.approx(expected, rel=1e-5)
    terms = outcome.report.terms
    assert terms["reference_point"].validation_last == pytest.approx(point, abs=1e-4)


@pytest.mark.parametrize(
    ("count", "keys", "words"),
    [
        pytest.param(
            26,
            {"train.global_batch_size": 5, "data.val_split_fraction": 0.2},
            ["5, has one example", "--train.max_steps 4"],
            id="last step",
        ),
        pytest.param(
            21,
            {"train.global_batch_size": 4, "data.val_split_fraction": 0.05},
            ["one validation record", "data.val_split_fraction"],
            id="validation",
        ),
    ],
)
def test_an_example_without_another_is_refused(
    count: int, keys: dict[str, Any], words: list[str], ftkit: Command, tiny_base: Path
) -> None:
    settings = {"data.path": "few.json", "train.epochs": 1, "eval.max_new_tokens": 0, **keys}
    given = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    file = tiny_base.with_name(f"few-{count}.json")
    file.write_text(json.dumps(make_labelled(count)))
    given[1] = str(file)
    command = ["finetune", str(tiny_base), "--objective", "kto", "--data", "JSON", *given]
    ended = ftkit(*command, "--accelerator", "cpu", "--precision", "32-true")
    assert ended.returncode == 2
    assert says(ended.stderr, *words)
