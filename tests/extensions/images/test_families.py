"""Models that see learn what a plain loop of transformers learns, on any layout."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import NO_EVALUATION, Case, Outcome, assert_same_maths, make_run, needs_deepspeed
from seeing_models import FIRST, KINDS, PlainLoop, save_model, write_chats

from ftkit.cli.app import run
from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow

STEPS, CUT, RATE, EPS = 6, 3, 5e-3, 1e-5
ALONE = "rows of 8"
RESUMED = "stopped, then two ranks"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    ALONE: (1, {"train.micro_batch_size": 8}),
    "padded": (1, {"train.micro_batch_size": 4, "train.padding_free": False}),
    "fsdp x2": (2, {"strategy": "fsdp", "train.micro_batch_size": 1}),
    RESUMED: (2, {"strategy": "fsdp", "train.micro_batch_size": 2}),
    "ddp x2": (2, {"strategy": "ddp", "train.micro_batch_size": 2}),
    "deepspeed x2": (2, {"strategy": "deepspeed", "train.micro_batch_size": 4}),
}
OF_EACH = (ALONE, RESUMED)
"""Layouts of every family; the others are those of some."""

Found = dict[tuple[str, str], Outcome]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seen")
    write_chats(folder / "chats.jsonl")
    for kind in KINDS:
        save_model(kind, folder / kind)
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(folder: Path, rows: list[dict[str, Any]]) -> Any:
    @functools.cache
    def trained(kind: str) -> tuple[list[float], PlainLoop]:
        loop = PlainLoop(kind, folder / kind, folder)
        return loop.losses(rows, STEPS, RATE, EPS), loop

    return trained


def _case(folder: Path, kind: str, layout: str, method: Method = "full", **more: Any) -> Case:
    changes = {
        **dict(NO_EVALUATION),
        "checkpoint_dir": str(folder / kind),
        "data.json_path": None,
        "data.path": str(folder / "chats.jsonl"),
        "data.mask_prompt": None,
        "data.val_split_fraction": 0,
        "data.chat_template": "tokenizer",
        "train.global_batch_size": 8,
        "train.epochs": STEPS,
        "train.lr_warmup_steps": 0,
        "train.lr_schedule": "constant",
        "train.max_norm": None,
        "train.max_seq_length": 512,
        "optimizer.lr": RATE,
        # Adam would turn gradients that rounding leaves into steps: those of biases of keys.
        "optimizer.eps": EPS,
        "optimizer.weight_decay": 0.0,
        **LAYOUTS[layout][1],
    }
    strategy = changes.pop("strategy", "single")
    return Case(str(strategy), method, changes=tuple(changes.items()), **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Found:
    train = make_run(tmp_path_factory)
    cases = {(kind, layout): _case(folder, kind, layout) for kind, layout in WANTED}
    halves = {kind: _case(folder, kind, ALONE, stop_after=CUT) for kind in KINDS}
    ones = {name: case for name, case in cases.items() if LAYOUTS[name[1]][0] == 1}
    found = train(1, [*ones.values(), *halves.values()])
    for kind, half in halves.items():
        cases[kind, RESUMED] = _case(folder, kind, RESUMED, start=found[half].out_dir)
    for kind, layout in ADAPTED:
        cases[f"{kind}, LoRA", layout] = _case(folder, kind, layout, "lora")
    found |= train(1, [cases[f"{kind}, LoRA", ALONE] for kind in FIRST])
    found |= train(2, [case for case in cases.values() if case not in found])
    return {name: found[case] for name, case in cases.items()}


WANTED = [(kind, layout) for kind in KINDS for layout in OF_EACH] + [
    *((kind, layout) for kind in FIRST for layout in ("padded", "fsdp x2")),
    *(("llava", layout) for layout in ("ddp x2", "deepspeed x2")),
]
ADAPTED = [(kind, layout) for kind in FIRST for layout in (ALONE, "fsdp x2")]
EACH = pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(*one, marks=[needs_deepspeed] * one[1].startswith("deepspeed"))
        for one in WANTED
    ],
)


@EACH
def test_losses_are_those_of_a_plain_loop(
    trained: Found, plain: Any, kind: str, layout: str
) -> None:
    losses, _ = plain(kind)
    assert trained[kind, layout].losses == pytest.approx(losses, rel=1e-5)


@EACH
def test_every_layout_learns_the_same(trained: Found, kind: str, layout: str) -> None:
    assert_same_maths(trained[kind, layout], trained[kind, ALONE], validations=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_answers_as_the_plain_loop(
    trained: Found, plain: Any, folder: Path, rows: list[dict[str, Any]], kind: str
) -> None:
    _, loop = plain(kind)
    final = PlainLoop(kind, trained[kind, ALONE].out_dir / "final", folder)
    for row in rows[:3]:
        inputs, _ = loop.sample(row)
        with torch.no_grad():
            expected, found = (one.model(**inputs).logits for one in (loop, final))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_see_are_kept(trained: Found, plain: Any, folder: Path, kind: str) -> None:
    _, loop = plain(kind)
    base = PlainLoop(kind, folder / kind, folder).model.state_dict()
    final = PlainLoop(kind, trained[kind, ALONE].out_dir / "final", folder).model.state_dict()
    frozen = {n for n, p in loop.model.named_parameters() if not p.requires_grad}
    assert frozen
    assert all(torch.equal(base[name], final[name]) for name in frozen)


@pytest.mark.parametrize("kind", FIRST)
def test_an_adapter_learns_the_same_on_two_ranks(trained: Found, kind: str) -> None:
    found, expected = (trained[f"{kind}, LoRA", layout] for layout in ("fsdp x2", ALONE))
    assert_same_maths(found, expected, validations=0)


Evaluate = Callable[[Path, Path], float]


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Gives the loss of a result on a file of records."""

    def loss(result: Path, file: Path, *more: str) -> float:
        words = ["evaluate", str(result), "--format", "json", "--accelerator", "cpu"]
        words += ["--data", "JSON", "--data.path", str(file), "--exact_match", "0", *more]
        assert run([*words, "--data.val_split_fraction", "0"]) == 0
        return float(json.loads(capsys.readouterr().out)["loss"])

    return loss


@pytest.mark.parametrize("kind", FIRST)
def test_an_adapter_loads_in_peft_and_sees_the_same(
    trained: Found, folder: Path, rows: list[dict[str, Any]], kind: str, evaluate: Evaluate
) -> None:
    final = trained[f"{kind}, LoRA", ALONE].out_dir / "final"
    base = PlainLoop(kind, folder / kind, folder)
    theirs = PlainLoop(kind, folder / kind, folder, final)
    loss = evaluate(final, folder / "chats.jsonl")
    assert loss == pytest.approx(theirs.loss(rows), rel=1e-5)
    assert loss < base.loss(rows) - 0.1


@pytest.mark.parametrize("kind", FIRST)
def test_other_pictures_make_another_loss(
    folder: Path, rows: list[dict[str, Any]], kind: str, evaluate: Evaluate
) -> None:
    (one,) = rows[-1]["images"]
    swapped = [
        row | ({"images": [one] * len(row["images"])} if "images" in row else {}) for row in rows
    ]
    file = folder / "swapped.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in swapped))
    losses = [evaluate(folder / kind, one) for one in (folder / "chats.jsonl", file)]
    loop = PlainLoop(kind, folder / kind, folder)
    assert losses == pytest.approx([loop.loss(rows), loop.loss(swapped)], rel=1e-5)
    assert abs(losses[0] - losses[1]) > 5e-4
