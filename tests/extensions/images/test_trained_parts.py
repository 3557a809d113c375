"""Projector and tower are trained as in a plain loop of transformers, on any layout."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import NO_EVALUATION, Case, Outcome, assert_same_maths, chosen, make_run
from seeing_models import KINDS, PlainLoop, save_model, write_chats, write_pairs

from ftkit.cli.app import run
from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow

STEPS, CUT, RATE, EPS, DECAY = 4, 2, 2e-3, 1e-5, 0.1
PROJECTOR, TOWER = ("projector",), ("tower",)
BOTH = PROJECTOR + TOWER
NAMES: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {
    ("llava", PROJECTOR): ("multi_modal_projector",),
    ("llava", BOTH): ("multi_modal_projector", "vision_tower"),
    ("gemma3", BOTH): ("multi_modal_projector", "vision_tower"),
    ("qwen2_5_vl", PROJECTOR): ("visual.merger",),
    ("qwen2_5_vl", TOWER): ("visual.blocks", "visual.patch_embed"),
    ("idefics3", BOTH): ("connector", "vision_model"),
}
"""Names of what is trained beside the language model of a family, in transformers' model."""
_BESIDE = {
    **dict.fromkeys(("smolvlm",), ("connector", "vision_model")),
    **dict.fromkeys(("qwen2_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "glm4v"), ("visual",)),
    "gemma4": ("embed_vision", "vision_tower"),
}
OF_OTHERS: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {
    (kind, BOTH): _BESIDE.get(kind, ("multi_modal_projector", "vision_tower"))
    for kind in KINDS
    if (kind, BOTH) not in NAMES and kind != "qwen2_5_vl"
}
"""The same, of families of the matrix."""
ALL_NAMES = NAMES | OF_OTHERS
STAGE = "strategy.stage"
WITHOUT_LANGUAGE = ("train.freeze", "{language}")
TEXTS = (1, 0, 0, 2, 0, 0, 0, 1)
"""Images of records of which several steps have none."""


@dataclass(frozen=True)
class Layout:
    """How a run is laid out, and whether its second half is that of another run."""

    strategy: str = "single"
    micro_batch_size: int = 8
    is_resumed: bool = False
    method: Method = "full"
    by_record: bool = False
    """Whether steps of two records, some without images, are made."""
    more: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        words = ("resumed",) * self.is_resumed + (self.strategy, self.method)
        words += (str(self.micro_batch_size), *("pairs" for _ in range(self.by_record)))
        more = (f"{key.rpartition('.')[2]} {value}" for key, value in self.more)
        return "-".join((*words, *more))

    @property
    def alone(self) -> "Layout":
        """The one that it is compared with."""
        more = tuple(one for one in self.more if one[0] != STAGE)
        return Layout(method=self.method, by_record=self.by_record, more=more)


ALONE, PAIRS = Layout(), Layout(by_record=True)
LORA = Layout(method="lora")
FROZEN = Layout(more=(WITHOUT_LANGUAGE,))
RESUMED = [(*one, Layout("fsdp", 1, is_resumed=True)) for one in NAMES if one[1] != PROJECTOR]
OFTEN = [
    *(one for one in RESUMED if one[0] in ("llava", "qwen2_5_vl")),
    ("llava", PROJECTOR, Layout("ddp", 2)),
    ("llava", BOTH, Layout("fsdp", 1, is_resumed=True, by_record=True)),
    ("llava", BOTH, Layout("fsdp", 2, method="lora")),
    ("llava", BOTH, Layout(micro_batch_size=2)),
    ("llava", PROJECTOR, Layout("fsdp", 1, by_record=True, more=FROZEN.more)),
    ("llava", BOTH, Layout("deepspeed", 1, is_resumed=True, by_record=True)),
]
OTHERS = (
    RESUMED
    + [
        (kind, parts, Layout(strategy, size, method=method, by_record=by_record))
        for kind, parts in NAMES
        for strategy in ("ddp", "fsdp", "deepspeed")
        for size in (1, 2)
        for method in ("full", "lora")
        for by_record in (False, True)
    ]
    + [
        (
            "llava",
            BOTH,
            Layout("deepspeed", 1, is_resumed=True, by_record=True, more=((STAGE, stage),)),
        )
        for stage in (1, 2)
    ]
)
Found = Callable[[str, tuple[str, ...], Layout], Outcome]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seen")
    write_chats(folder / "chats.jsonl")
    (folder / "texts").mkdir()
    write_pairs(folder / "texts/chats.jsonl", TEXTS)
    for kind in KINDS:
        save_model(kind, folder / kind)
    return folder


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _case(folder: Path, kind: str, parts: tuple[str, ...], layout: Layout, **more: Any) -> Case:
    changes = {
        **dict(NO_EVALUATION),
        "checkpoint_dir": str(folder / kind),
        "data.json_path": None,
        "data.path": str(folder / ("texts" if layout.by_record else ".") / "chats.jsonl"),
        "data.mask_prompt": None,
        "data.val_split_fraction": 0,
        "data.chat_template": "tokenizer",
        "train.global_batch_size": 2 if layout.by_record else 8,
        "train.micro_batch_size": min(layout.micro_batch_size, 2 if layout.by_record else 8),
        "train.epochs": 2 if layout.by_record else STEPS,
        "train.lr_warmup_steps": 0,
        "train.lr_schedule": "constant",
        "train.max_norm": None,
        "train.max_seq_length": 1024,
        "optimizer.lr": RATE,
        # Adam would turn gradients that rounding leaves into steps: those of biases of keys.
        "optimizer.eps": EPS,
        "optimizer.weight_decay": DECAY,
        "train.decay_norms_and_biases": True,
        **{f"images.{part}": True for part in parts},
        **dict(layout.more),
    }
    return Case(layout.strategy, layout.method, changes=tuple(changes.items()), **more)


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, request: pytest.FixtureRequest
) -> Found:
    """Gives the run of a family in a layout, of those that the selected tests need."""
    train = make_run(tmp_path_factory)
    loops = chosen(request, test_losses_are_those_of_a_plain_loop)
    wanted = [(params["kind"], params["parts"], ALONE) for params in loops]
    wanted += [("llava", BOTH, PAIRS), ("llava", PROJECTOR, FROZEN)]
    for params in chosen(request, test_every_layout_learns_the_same):
        own = params["kind"], params["parts"]
        wanted += [(*own, params["layout"]), (*own, params["layout"].alone)]
    wanted += [("llava", BOTH, LORA)]
    wanted = list(dict.fromkeys(wanted))

    @functools.cache
    def runs() -> dict[Any, Outcome]:
        cases = {one: _case(folder, *one) for one in wanted if not one[2].is_resumed}
        halves = {
            one: _case(folder, *one[:2], one[2].alone, stop_after=CUT)
            for one in wanted
            if one[2].is_resumed
        }
        ones = [case for case in cases.values() if case.strategy == "single"]
        found = train(1, [*ones, *halves.values()])
        for one, half in halves.items():
            cases[one] = _case(folder, *one, start=found[half].out_dir)
        found |= train(2, [case for case in cases.values() if case not in found])
        return {one: found[case] for one, case in cases.items()}

    return lambda kind, parts, layout: runs()[kind, parts, layout]


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        pytest.param(
            *one,
            id=f"{one[0]}-{'+'.join(one[1])}",
            marks=[pytest.mark.matrix] * (one in OF_OTHERS),
        )
        for one in ALL_NAMES
    ],
)
def test_losses_are_those_of_a_plain_loop(
    trained: Found, folder: Path, kind: str, parts: tuple[str, ...]
) -> None:
    rows, found = _rows(folder / "chats.jsonl"), trained(kind, parts, ALONE)
    loop = PlainLoop(kind, folder / kind, folder, beside=ALL_NAMES[kind, parts])
    losses = loop.losses_of([rows] * STEPS, RATE, EPS, DECAY)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    # The result has what was trained, and the rest as it was: also what no loss depends on.
    frozen = PlainLoop(kind, folder / kind, folder).model.state_dict()
    final = PlainLoop(kind, found.out_dir / "final", folder).model.state_dict()
    for name, expected in loop.model.state_dict().items():
        torch.testing.assert_close(final[name], expected, rtol=0, atol=5e-5)
        is_as_before = torch.equal(final[name], frozen[name])
        assert is_as_before == torch.equal(expected, frozen[name]), name


def test_a_part_is_trained_without_the_language_model(trained: Found, folder: Path) -> None:
    rows, found = _rows(folder / "chats.jsonl"), trained("llava", PROJECTOR, FROZEN)
    names = NAMES["llava", PROJECTOR]
    loop = PlainLoop("llava", folder / "llava", folder, beside=names)
    for name, parameter in loop.model.named_parameters():
        parameter.requires_grad_(any(part in name for part in names))
    losses = loop.losses_of([rows] * STEPS, RATE, EPS, DECAY)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    final = PlainLoop("llava", found.out_dir / "final", folder).model.state_dict()
    for name, expected in loop.model.state_dict().items():
        torch.testing.assert_close(final[name], expected, rtol=0, atol=5e-5)


def test_a_step_without_images_leaves_what_sees_as_it_is(trained: Found, folder: Path) -> None:
    folder_of_texts = folder / "texts"
    rows = _rows(folder_of_texts / "chats.jsonl")
    loop = PlainLoop("llava", folder / "llava", folder_of_texts, beside=NAMES["llava", BOTH])
    pairs = loop.by_tokens(rows)
    found = trained("llava", BOTH, PAIRS)
    steps = [pairs[int(row["tokens"] or 0)] for row in found.rows]
    with_images = [any("images" in row for row in step) for step in steps]
    assert {True, False} <= {*with_images[CUT:]} and False in with_images[:CUT]
    losses = loop.losses_of(steps, RATE, EPS, DECAY)
    assert found.losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "parts", "layout"),
    [
        *(pytest.param(*one, id=f"{one[0]}-{'+'.join(one[1])}-{one[2]}") for one in OFTEN),
        *(
            pytest.param(*one, id=f"{one[0]}-{'+'.join(one[1])}-{one[2]}", marks=pytest.mark.matrix)
            for one in OTHERS
            if one not in OFTEN
        ),
    ],
)
def test_every_layout_learns_the_same(
    trained: Found, kind: str, parts: tuple[str, ...], layout: Layout
) -> None:
    expected = trained(kind, parts, layout.alone)
    assert_same_maths(trained(kind, parts, layout), expected, validations=0)


def test_an_adapter_with_what_sees_loads_in_peft(
    trained: Found, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, final = _rows(folder / "chats.jsonl"), trained("llava", BOTH, LORA).out_dir / "final"
    words = ["evaluate", str(final), "--format", "json", "--accelerator", "cpu", "--data", "JSON"]
    words += ["--data.path", str(folder / "chats.jsonl"), "--exact_match", "0"]
    assert run([*words, "--data.val_split_fraction", "0"]) == 0
    loss = float(json.loads(capsys.readouterr().out)["loss"])
    theirs = PlainLoop("llava", folder / "llava", folder, final)
    assert loss == pytest.approx(theirs.loss(rows), rel=1e-5)
    alone = PlainLoop("llava", folder / "llava", folder).loss(rows)
    assert loss < alone - 0.1
    merged = folder / "merged"
    assert run(["merge", str(final), "--out", str(merged)]) == 0
    assert PlainLoop("llava", merged, folder).loss(rows) == pytest.approx(loss, rel=1e-5)
