"""Models that see learn what a plain loop of transformers learns, on any layout."""

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import (
    METHODS,
    NO_EVALUATION,
    Case,
    Outcome,
    assert_same_maths,
    chosen,
    make_run,
    needs_deepspeed,
)
from seeing_models import FIRST, KINDS, PlainLoop, Record, largest_difference

from ftkit.cli.app import run
from ftkit.extensions.publish.model_card import CardKind, card_text, with_name
from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow

TWO = ("llava", "qwen2_5_vl")
"""Families without and with grids, whose layouts are also those of the others."""
STEPS, CUT, RATE, EPS = 4, 2, 2e-3, 1e-5
SLOWER = ("qwen3_5", "gemma4")
"""Families that learn at half the rate: else each step makes what rounding leaves ten times as
large."""


@dataclass(frozen=True)
class Layout:
    """How a run is laid out, and whether its second half is that of another run."""

    strategy: str = "single"
    micro_batch_size: int = 8
    padding_free: bool = True
    is_resumed: bool = False
    method: Method = "full"
    more: tuple[tuple[str, Any], ...] = ()
    """Other keys of hardware."""

    def __str__(self) -> str:
        rows = "rows" if self.padding_free else "padded"
        words = ("resumed",) * self.is_resumed + (self.strategy, self.method)
        more = (f"{key.rpartition('.')[2]} {value}" for key, value in self.more)
        return "-".join((*words, str(self.micro_batch_size), rows, *more))

    @property
    def ranks(self) -> int:
        return 1 if self.strategy == "single" else 2

    @property
    def alone(self) -> "Layout":
        """The one that it is compared with."""
        return Layout(method=self.method)


ALONE, ADAPTED = Layout(), Layout(method="lora")
RESUMED = Layout("fsdp", 2, is_resumed=True)
"""The layout of the first families."""
OF_TWO = (
    RESUMED,
    Layout(micro_batch_size=4, padding_free=False),
    Layout("fsdp", 1),
    ADAPTED,
    Layout("fsdp", 1, method="lora"),
)
"""Layouts of the two of these without and with grids."""
ALL = tuple(
    Layout(strategy, size, padding_free=padding_free, method=method)
    for strategy in ("ddp", "fsdp", "deepspeed")
    for size in (1, 2, 4)
    for padding_free in (True, False)
    for method in METHODS
)
"""Layouts of the matrix, of the first families; ZeRO-3 is what deepspeed does."""
OF_OTHERS = (RESUMED, Layout("fsdp", 1), Layout("fsdp", 1, method="lora"))
"""Layouts of the matrix, of the other families."""

Found = Callable[[str, Layout], Outcome]


@pytest.fixture(scope="module")
def plain(seen: Path, rows: list[dict[str, Any]]) -> Any:
    @functools.cache
    def trained(kind: str) -> tuple[list[float], PlainLoop]:
        loop = PlainLoop(kind, seen / kind, seen)
        return loop.losses(rows, STEPS, _rate(kind), EPS), loop

    return trained


def _rate(kind: str) -> float:
    return RATE / 2 if kind in SLOWER else RATE


def _case(seen: Path, kind: str, layout: Layout, **more: Any) -> Case:
    changes = {
        **dict(NO_EVALUATION),
        "checkpoint_dir": str(seen / kind),
        "data.json_path": None,
        "data.path": str(seen / "chats.jsonl"),
        "data.mask_prompt": None,
        "data.val_split_fraction": 0,
        "data.chat_template": "tokenizer",
        "train.global_batch_size": 8,
        "train.micro_batch_size": layout.micro_batch_size,
        # Some families are always padded.
        "train.padding_free": None if layout.padding_free else False,
        "train.epochs": STEPS,
        "train.lr_warmup_steps": 0,
        "train.lr_schedule": "constant",
        "train.max_norm": None,
        "train.max_seq_length": 512,
        "optimizer.lr": _rate(kind),
        # Adam would turn gradients that rounding leaves into steps: those of biases of keys.
        "optimizer.eps": EPS,
        "optimizer.weight_decay": 0.0,
        **dict(layout.more),
    }
    return Case(layout.strategy, layout.method, changes=tuple(changes.items()), **more)


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, seen: Path, request: pytest.FixtureRequest
) -> Found:
    """Gives the run of a family in a layout, of those that the selected tests need."""
    train = make_run(tmp_path_factory)
    selected = chosen(request, test_every_layout_learns_the_same)
    adapted = chosen(request, test_an_adapter_loads_in_peft_and_merged_and_sees_the_same)
    wanted = [(kind, ALONE) for kind in KINDS] + [("llava", ADAPTED)]
    wanted += [(params["kind"], ADAPTED) for params in adapted]
    for params in selected:
        wanted += [(params["kind"], one) for one in (params["layout"], params["layout"].alone)]
    wanted = list(dict.fromkeys(wanted))
    # All at once, but for the matrix: there the first test of each family waits for its runs.
    groups = [KINDS] if len(wanted) < _MOST_AT_ONCE else [(kind,) for kind in KINDS]
    group_of = {kind: group for group in groups for kind in group}

    @functools.cache
    def of_group(kinds: tuple[str, ...]) -> dict[tuple[str, Layout], Outcome]:
        own = [one for one in wanted if one[0] in kinds]
        cases = {one: _case(seen, *one) for one in own if not one[1].is_resumed}
        halves = {
            kind: _case(seen, kind, ALONE, stop_after=CUT)
            for kind, layout in own
            if layout.is_resumed
        }
        ones = [case for (_, layout), case in cases.items() if layout.ranks == 1]
        found = train(1, [*ones, *halves.values()])
        for kind, layout in own:
            if layout.is_resumed:
                start = found[halves[kind]].out_dir
                cases[kind, layout] = _case(seen, kind, layout, start=start)
        found |= train(2, [case for case in cases.values() if case not in found])
        return {one: found[case] for one, case in cases.items()}

    return lambda kind, layout: of_group(group_of[kind])[kind, layout]


_MOST_AT_ONCE = 80


def _parameters(layouts: Iterable[tuple[str, Layout]], often: bool = True) -> list[Any]:
    return [
        pytest.param(
            *one,
            id=f"{one[0]}-{one[1]}",
            marks=[
                *([needs_deepspeed] * (one[1].strategy == "deepspeed")),
                *([pytest.mark.matrix] * (not often)),
            ],
        )
        for one in layouts
    ]


OFTEN = [(kind, RESUMED) for kind in (*TWO, "gemma3")]
OFTEN += [("llava", layout) for layout in OF_TWO if layout is not RESUMED]
OFTEN += [("llava", Layout("ddp", 2)), ("llava", Layout("deepspeed", 1))]
OFTEN += [
    ("gemma3", Layout(more=(("memory.activation_checkpointing", True),))),
    ("qwen3_vl", Layout(more=(("memory.activation_checkpointing", True),))),
    ("llava", Layout(more=(("train.optimizer_in_backward", True),))),
    ("qwen2_5_vl", Layout(more=(("compile", True),))),
]
EACH = pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *_parameters(OFTEN),
        *_parameters(
            [
                (kind, one)
                for kind in KINDS
                for one in ((*OF_TWO, *ALL) if kind in FIRST else OF_OTHERS)
                if (kind, one) not in OFTEN
            ],
            often=False,
        ),
    ],
)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_a_plain_loop(
    trained: Found, plain: Any, kind: str, record_property: Record
) -> None:
    (losses, _), found = plain(kind), trained(kind, ALONE).losses
    record_property("difference", largest_difference(found, losses))
    assert found == pytest.approx(losses, rel=1e-5)


@EACH
def test_every_layout_learns_the_same(
    trained: Found, kind: str, layout: Layout, record_property: Record
) -> None:
    found, alone = trained(kind, layout), trained(kind, layout.alone)
    record_property("difference", largest_difference(found.losses, alone.losses))
    assert_same_maths(found, alone, validations=0)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_see_are_kept(trained: Found, plain: Any, seen: Path, kind: str) -> None:
    _, loop = plain(kind)
    base = PlainLoop(kind, seen / kind, seen).model.state_dict()
    final = PlainLoop(kind, trained(kind, ALONE).out_dir / "final", seen).model.state_dict()
    frozen = {n for n, p in loop.model.named_parameters() if not p.requires_grad}
    assert frozen
    assert all(torch.equal(base[name], final[name]) for name in frozen)


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


def often(kinds: Iterable[str], all_of_them: Iterable[str]) -> pytest.MarkDecorator:
    """Families of a test; those that are not among the first ones are in the matrix."""
    matrix = pytest.mark.matrix
    return pytest.mark.parametrize(
        "kind",
        [one if one in kinds else pytest.param(one, marks=matrix) for one in all_of_them],
    )


@often(FIRST, KINDS)
def test_the_result_loads_in_transformers_and_sees_the_same(
    trained: Found, seen: Path, rows: list[dict[str, Any]], kind: str, evaluate: Evaluate
) -> None:
    final = trained(kind, ALONE).out_dir / "final"
    loss = evaluate(final, seen / "chats.jsonl")
    assert loss == pytest.approx(PlainLoop(kind, final, seen).loss(rows), rel=1e-5)
    assert loss < trained(kind, ALONE).losses[-1]


@often(TWO, FIRST)
def test_an_adapter_loads_in_peft_and_merged_and_sees_the_same(
    trained: Found,
    seen: Path,
    rows: list[dict[str, Any]],
    kind: str,
    evaluate: Evaluate,
    tmp_path: Path,
) -> None:
    final = trained(kind, ADAPTED).out_dir / "final"
    base = PlainLoop(kind, seen / kind, seen)
    theirs = PlainLoop(kind, seen / kind, seen, final)
    loss = evaluate(final, seen / "chats.jsonl")
    assert loss == pytest.approx(theirs.loss(rows), rel=1e-5)
    assert loss < base.loss(rows) - 0.1
    merged = tmp_path / "merged"
    assert run(["merge", str(final), "--out", str(merged)]) == 0
    assert loss == pytest.approx(PlainLoop(kind, merged, seen).loss(rows), rel=1e-5)


@pytest.mark.parametrize(("layout", "kind_of_result"), [(ALONE, "hf"), (ADAPTED, "adapter")])
def test_the_code_of_its_card_asks_about_an_image(
    trained: Found,
    seen: Path,
    layout: Layout,
    kind_of_result: CardKind,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome, image = trained("llava", layout), next((seen / "images").glob("*.png"))
    final = str(outcome.out_dir / "final")
    card = card_text(outcome.report, seen / "llava", kind_of_result)
    assert "\npipeline_tag: image-text-to-text\n" in card
    code = with_name(card, final, None).partition("```python\n")[2].partition("```")[0]
    assert "max_new_tokens=100" in code
    code = code.replace("max_new_tokens=100", "max_new_tokens=6")
    exec(code.replace("picture.png", str(image)), {})
    said = capsys.readouterr().out.strip()
    words = ["generate", final, "--image", str(image), "--prompt", "What is this?"]
    assert run([*words, "--max_new_tokens", "6", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["answer"].strip() == said


@pytest.mark.parametrize("kind", FIRST)
def test_other_pictures_make_another_loss(
    seen: Path, rows: list[dict[str, Any]], kind: str, evaluate: Evaluate
) -> None:
    (one,) = rows[-1]["images"]
    swapped = [
        row | ({"images": [one] * len(row["images"])} if "images" in row else {}) for row in rows
    ]
    file = seen / "swapped.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in swapped))
    losses = [evaluate(seen / kind, one) for one in (seen / "chats.jsonl", file)]
    loop = PlainLoop(kind, seen / kind, seen)
    assert losses == pytest.approx([loop.loss(rows), loop.loss(swapped)], rel=1e-5)
    assert abs(losses[0] - losses[1]) > 5e-4
