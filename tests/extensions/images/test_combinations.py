"""Images beside what else a run may have: rounded and packed weights, averages, objectives, auto.

Each combination is exact, or refused by name before anything is loaded.
"""

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_models import STYLES, Style, in_fp8
from messages import message_of, says
from rank_jobs import (
    HAS_DEEPSPEED,
    NO_EVALUATION,
    Case,
    Outcome,
    assert_same_maths,
    chosen,
    layouts,
    make_run,
)
from safetensors.torch import load_file, save_file
from seeing_models import PlainLoop, save_model, write_chats, write_pairs

from ftkit.cli.app import run
from ftkit.models.quantization import rounded
from ftkit.planning.gpus import HOST, Gpu
from ftkit.planning.predict import Planned, plan_files

Row = dict[str, Any]

KIND = "bnb.nf4"
LATE = (0, 1, 1, 1, 0, 1, 0, 0)
"""Images of records of which the first two steps have none, and the last one."""
RATE, EPS, DECAY, AVERAGED = 2e-3, 1e-5, 0.1, 0.7
STEPS, LEARNED = 4, 30
"""Steps of most runs, and of the one after which most answers are right."""
PARTS = ("vision", "visual", "multi_modal_projector")
"""Words in the names of what sees."""
EVERYTHING = "everything"
STYLES[EVERYTHING] = Style(
    {"quant_method": "fp8", "weight_block_size": [16, 16]},
    block=(16, 16),
    linear=(
        *("_proj.weight", "linear_1.weight", "linear_2.weight", "fc1.weight", "fc2.weight"),
        *("qkv.weight", "attn.proj.weight", "merger.mlp.0.weight", "merger.mlp.2.weight"),
    ),
)
"""All linear layers, also of tower and projector."""


# --- Models and runs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and chats; the models also in FP8 beside what that stands for, one rounded."""
    folder = tmp_path_factory.mktemp("seen")
    write_chats(folder / "chats.jsonl")
    (folder / "late").mkdir()
    write_pairs(folder / "late/chats.jsonl", LATE)
    for kind in ("llava", "qwen2_5_vl"):
        save_model(kind, folder / kind)
        in_fp8(folder / kind, folder / f"{kind}-fp8", EVERYTHING)
    _round(folder / "llava", folder / "llava-rounded")
    return folder


def _round(base: Path, rounded_base: Path) -> None:
    """Copy a model with the linear layers of its language model alone rounded to 4 bits."""
    shutil.copytree(base, rounded_base)
    weights = load_file(base / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight") and not any(part in name for part in PARTS):
            weights[name] = rounded(weight, KIND)
    save_file(weights, rounded_base / "model.safetensors", {"format": "pt"})


def _rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@dataclass(frozen=True)
class Layout:
    """A run: of what, and on which ranks."""

    base: str
    method: Any = "lora"
    strategy: str = "single"
    steps: int = STEPS
    keys: tuple[tuple[str, Any], ...] = ()
    is_late: bool = False
    """Whether its steps have two records, of which the first have no image."""
    continues: int | None = None
    """Steps of the run that it continues."""

    def case(self, folder: Path, **more: Any) -> Case:
        changes = {
            **dict(NO_EVALUATION),
            "checkpoint_dir": str(folder / self.base),
            "data.json_path": None,
            "data.path": str(folder / ("late" * self.is_late) / "chats.jsonl"),
            "data.mask_prompt": None,
            "data.val_split_fraction": 0,
            "data.chat_template": "tokenizer",
            "train.global_batch_size": 2 if self.is_late else 8,
            "train.micro_batch_size": 1 if self.strategy != "single" else 2 if self.is_late else 8,
            "train.epochs": 2 if self.is_late else self.steps,
            "train.lr_warmup_steps": 0,
            "train.lr_schedule": "constant",
            "train.max_norm": None,
            "train.max_seq_length": 1024,
            "optimizer.lr": RATE,
            # Adam would turn gradients that rounding leaves into steps: those of biases of keys.
            "optimizer.eps": EPS,
            "optimizer.weight_decay": DECAY,
            "train.decay_norms_and_biases": True,
            **dict(self.keys),
        }
        return Case(self.strategy, self.method, changes=tuple(changes.items()), **more)


PROJECTOR = ("images.projector", True)
QLORA = (("quantize", KIND), PROJECTOR, ("optimizer.lr", 1e-2))
STORED = ("quantize", "stored")
AVERAGE = (PROJECTOR, ("train.ema_decay", AVERAGED))
ALONE = {
    "nf4": Layout("llava", keys=QLORA, steps=LEARNED),
    "of rounded": Layout("llava-rounded", keys=QLORA[1:]),
    "FP8": Layout("llava-fp8/packed", "full", keys=(PROJECTOR,)),
    "of plain": Layout("llava-fp8/plain", "full", keys=(PROJECTOR,)),
    "stored": Layout("qwen2_5_vl-fp8/packed", keys=(STORED, ("images.tower", True))),
    "of plain, qwen": Layout("qwen2_5_vl-fp8/plain", keys=(("images.tower", True),)),
    "average": Layout("llava", "full", keys=AVERAGE, is_late=True),
}
LEFT_OUT = {
    "fsdp": Layout("llava", "full", "fsdp", keys=AVERAGE, is_late=True, continues=1),
    **{
        f"ZeRO-{stage}": Layout(
            *("llava", "full", "deepspeed"),
            keys=(*AVERAGE, ("strategy.stage", stage)),
            is_late=True,
            continues=begun,
        )
        for stage, begun in ((1, None), (2, 1), (3, 2))
    },
}
"""Runs with parts that steps leave out; the first of those after their beginning."""
PACKED = {
    "nf4": Layout("llava", strategy="fsdp", keys=QLORA),
    "stored": Layout("qwen2_5_vl-fp8/packed", strategy="fsdp", keys=ALONE["stored"].keys),
}
OFTEN = ("ZeRO-3", "nf4")
"""Outside the matrix: what has to find and to keep averages beside no state, and one of QLoRA."""
Runs = Callable[[str | Layout], Outcome]


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, request: pytest.FixtureRequest
) -> Runs:
    """Gives the run of a name in ALONE, or of a layout of two ranks that the tests need."""
    train = make_run(tmp_path_factory)
    params = chosen(request, test_packed_weights_learn_the_same_on_two_ranks)
    wanted = [PACKED[one["name"]] for one in params]
    params = chosen(request, test_averages_that_steps_leave_out_are_the_same_on_any_layout)
    wanted += [LEFT_OUT[one["name"]] for one in params]

    @functools.cache
    def alone() -> dict[str, Outcome]:
        cases = {name: layout.case(folder) for name, layout in ALONE.items()}
        for steps in {one.continues for one in wanted} - {None}:
            cases[f"{steps}"] = ALONE["average"].case(folder, stop_after=steps)
        found = train(1, list(cases.values()))
        return {name: found[case] for name, case in cases.items()}

    @functools.cache
    def two_ranks() -> dict[Layout, Outcome]:
        cases = {}
        for one in wanted:
            start = None if one.continues is None else alone()[f"{one.continues}"].out_dir
            if one.strategy != "deepspeed" or HAS_DEEPSPEED:
                cases[one] = one.case(folder, start=start)
        found = train(2, list(cases.values()))
        return {one: found[case] for one, case in cases.items()}

    return lambda one: alone()[one] if isinstance(one, str) else two_ranks()[one]


# --- Rounded and packed weights -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # Outside the matrix: the same weights on two ranks below.
        pytest.param("nf4", "of rounded", marks=pytest.mark.matrix),
        ("FP8", "of plain"),
        ("stored", "of plain, qwen"),
    ],
)
def test_losses_are_those_of_the_numbers_that_packed_weights_stand_for(
    runs: Runs, found: str, expected: str
) -> None:
    assert runs(found).losses[:STEPS] == runs(expected).losses, "to the bit"


@pytest.mark.slow
@pytest.mark.parametrize("name", layouts([(name,) for name in PACKED], [(one,) for one in OFTEN]))
def test_packed_weights_learn_the_same_on_two_ranks(runs: Runs, name: str) -> None:
    assert runs(PACKED[name]).losses == pytest.approx(runs(name).losses[:STEPS], rel=1e-5)


@pytest.mark.slow
def test_a_model_whose_tower_is_in_fp8_is_written_as_plain_numbers(
    runs: Runs, folder: Path
) -> None:
    final, expected = (
        PlainLoop("llava", runs(name).out_dir / "final", folder).model.state_dict()
        for name in ("FP8", "of plain")
    )
    assert final.keys() == expected.keys()
    assert all(torch.equal(final[name], tensor) for name, tensor in expected.items())


def _swapped(rows: list[Row]) -> list[Row]:
    """The rows, each with the picture of the last one."""
    (picture,) = rows[-1]["images"]
    return [r | {"images": [picture] * len(r["images"])} if "images" in r else r for r in rows]


@pytest.mark.slow
def test_an_adapter_of_rounded_weights_is_evaluated_and_published(
    runs: Runs, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome, rows = runs("nf4"), _rows(folder / "chats.jsonl")
    outcome.complete()
    words = ["evaluate", str(outcome.out_dir), "--format", "json", "--accelerator", "cpu"]
    words += ["--data", "JSON", "--data.path", str(folder / "chats.jsonl")]
    words += ["--data.val_split_fraction", "0", "--exact_match", "8", "--rouge_l", "8"]
    assert run([*words, "--max_new_tokens", "12"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quantize"] == KIND

    loop = PlainLoop("llava", folder / "llava-rounded", folder, outcome.out_dir / "final")
    expected = [row["messages"][1]["content"] for row in rows]
    answers = [loop.answer(row, 12) for row in rows]
    right = [answer.strip() == text for answer, text in zip(answers, expected, strict=True)]
    assert 0.5 < sum(right) / len(right) < 1, "it has learned, and not all"
    assert answers != [loop.answer(row, 12) for row in _swapped(rows)], "it looks at pictures"
    assert found["exact_match"] == {"records": 8, "share": sum(right) / len(right)}
    ((score),) = found["scores"]
    assert score["score"] == pytest.approx(sum(map(_rouge_l, answers, expected)) / len(rows))
    assert found["loss"] == pytest.approx(loop.loss(rows), rel=1e-5)

    capsys.readouterr()
    words = ["push", str(outcome.out_dir), "me/model", "--base", "org/base", "--dry_run"]
    assert run([*words, "--format", "json"]) == 0
    sent = json.loads(capsys.readouterr().out)["files_bytes"]
    assert {"preprocessor_config.json", "processor_config.json"} <= sent.keys()


# Outside the matrix adapters of plain weights are merged: test_families.py, test_trained_parts.py.
@pytest.mark.matrix
def test_an_adapter_of_rounded_weights_is_merged_into_these(
    runs: Runs, folder: Path, tmp_path: Path
) -> None:
    outcome, rows = runs("nf4"), _rows(folder / "chats.jsonl")
    outcome.complete()
    assert run(["merge", str(outcome.out_dir), "--out", str(tmp_path / "merged")]) == 0
    loop = PlainLoop("llava", folder / "llava-rounded", folder, outcome.out_dir / "final")
    found = PlainLoop("llava", tmp_path / "merged", folder)
    assert found.loss(rows) == pytest.approx(loop.loss(rows), rel=1e-5)


def _rouge_l(answer: str, expected: str) -> float:
    """F1 of the longest words that both have in one order."""
    one, other = answer.split(), expected.split()
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one):
        for k, also in enumerate(other):
            before = max(lengths[i][k + 1], lengths[i + 1][k])
            lengths[i + 1][k + 1] = lengths[i][k] + 1 if word == also else before
    return 2 * lengths[-1][-1] / (len(one) + len(other))


# --- The average of the weights -------------------------------------------------------------------


@pytest.mark.slow
def test_the_average_of_the_projector_is_that_of_a_plain_loop(runs: Runs, folder: Path) -> None:
    late = folder / "late"
    loop = PlainLoop("llava", folder / "llava", late, beside=("multi_modal_projector",))
    pairs, found = loop.by_tokens(_rows(late / "chats.jsonl")), runs("average")
    steps = [pairs[int(row["tokens"] or 0)] for row in found.rows]
    seen = [any("images" in row for row in step) for step in steps]
    assert seen[:3] == [False, False, True] and not seen[-1], "as LATE says"
    averages: dict[str, torch.Tensor] = {}
    projector: list[torch.Tensor] = []

    def average() -> None:
        for name, parameter in loop.model.named_parameters():
            if parameter.requires_grad:
                weight = parameter.detach().clone()
                averages[name] = weight.lerp(averages.get(name, weight), AVERAGED)
        projector.append(loop.model.get_parameter(PROJECTOR_WEIGHT).detach().clone())

    losses = loop.losses_of(steps, RATE, EPS, DECAY, after_step=average)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert torch.equal(projector[-2], projector[-1]), "a plain loop leaves it as it is, too"
    base, final = (
        PlainLoop("llava", place, late).model.state_dict()
        for place in (folder / "llava", found.out_dir / "final")
    )
    for name, tensor in final.items():
        torch.testing.assert_close(tensor, averages.get(name, base[name]), rtol=0, atol=5e-5)
    assert not torch.allclose(final[PROJECTOR_WEIGHT], projector[-1], rtol=0, atol=5e-5), (
        "the average"
    )
    frozen = base.keys() - averages.keys()
    assert frozen and all(torch.equal(final[name], base[name]) for name in frozen)


PROJECTOR_WEIGHT = "model.multi_modal_projector.linear_1.weight"


@pytest.mark.slow
@pytest.mark.parametrize("name", layouts([(name,) for name in LEFT_OUT], [(one,) for one in OFTEN]))
def test_averages_that_steps_leave_out_are_the_same_on_any_layout(runs: Runs, name: str) -> None:
    assert_same_maths(runs(LEFT_OUT[name]), runs("average"), validations=0)


# --- Objectives that are given no images ----------------------------------------------------------

IMAGE = "images/0.png"
PART = [{"type": "image", "image": IMAGE}, {"type": "text", "text": "what"}]
ASKED = [{"role": "user", "content": "<image>what"}]
RED, BLUE = ([{"role": "assistant", "content": colour}] for colour in ("red", "blue"))
PAIR = {"prompt": ASKED, "chosen": RED, "rejected": BLUE, "images": [IMAGE]}
OF_PAIRS: dict[str, Row] = {
    "prompt": PAIR,
    "parts": {"prompt": [{"role": "user", "content": PART}], "chosen": RED, "rejected": BLUE},
    "ms-swift": {"messages": ASKED + RED, "rejected_response": "blue", "images": [IMAGE]},
    "texts": {"prompt": "<image>what", "chosen": "red", "rejected": "blue", "images": [IMAGE]},
}
LABELLED = {"messages": ASKED + RED, "label": True, "images": [IMAGE]}
GIVEN = {"messages": ASKED + RED, "images": [IMAGE]}
RECORD = ("line 1", "images", "Remove the record")
DATA = ("The records have images", "--objective sft")
NO_QAT = ("qat.weights is int4", "llava", "--qat.weights null")


@pytest.mark.parametrize(
    ("method", "keys", "record", "words"),
    [
        *(("", {"objective": "dpo"}, record, RECORD) for record in OF_PAIRS.values()),
        ("", {"objective": "orpo"}, PAIR, RECORD),
        ("", {"objective": "simpo"}, PAIR, RECORD),
        ("", {"objective": "reward"}, PAIR, ("llava", "reward model")),
        ("", {"objective": "reward", "checkpoint_dir": "TEXT"}, PAIR, RECORD),
        ("", {"objective": "kto"}, LABELLED, DATA),
        ("_full", {"objective": "kto", "reference": "BASE"}, LABELLED, DATA),
        ("", {"objective": "distill", "teacher": "BASE"}, GIVEN, DATA),
        ("_full", {"qat.weights": "int4"}, GIVEN, NO_QAT),
        ("_full", {"qat.weights": "int4", "images.projector": True}, GIVEN, NO_QAT),
    ],
)
def test_what_is_given_no_images_is_refused_before_anything_is_loaded(
    method: str,
    keys: Row,
    record: Row,
    words: tuple[str, ...],
    folder: Path,
    tiny_base: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(folder / "images", tmp_path / "images")
    (tmp_path / "chats.jsonl").write_text((json.dumps(record) + "\n") * 4)
    places = {"BASE": str(folder / "llava"), "TEXT": str(tiny_base)}
    asked: Row = {
        "checkpoint_dir": "BASE",
        "data": "JSON",
        "data.path": str(tmp_path / "chats.jsonl"),
    }
    asked |= {"data.val_split_fraction": 0, "accelerator": "cpu", **keys}
    if isinstance(record.get("prompt"), list) or "prompt" not in record:
        asked["data.chat_template"] = "chatml" if "TEXT" in asked.values() else "tokenizer"
    values = {key: places.get(str(value), value) for key, value in asked.items()}
    line = [word for key, value in values.items() for word in (f"--{key}", json.dumps(value))]
    assert says(message_of(run, ["plan", f"finetune{method}", *line]), *words)


# --- The chosen micro-batch -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", ["micro_batch_size", pytest.param("micro_batch_tokens", marks=pytest.mark.matrix)]
)
def test_auto_leaves_room_for_images(key: str, tmp_path: Path) -> None:
    rows = write_chats(tmp_path / "chats.jsonl", (1,) * 2, scale=4)
    save_model("llava", tmp_path / "llava", 4)

    def plan(bound: Any, memory_bytes: int = 2**40, file: str = "chats.jsonl") -> Planned:
        keys = {
            "checkpoint_dir": str(tmp_path / "llava"),
            "precision": "32-true",
            "data": "JSON",
            "data.path": str(tmp_path / file),
            "data.val_split_fraction": 0,
            "data.chat_template": "tokenizer",
            "accelerator": "cpu",
            "train.global_batch_size": 64,
            f"train.{key}": bound,
        }
        given = [(name, json.dumps(value)) for name, value in keys.items()]
        gpu = Gpu(name=HOST, memory_bytes=memory_bytes)
        return plan_files((), given, command="finetune_full", gpu=gpu)

    # The same with texts of as many tokens.
    most = plan(1).length.tokens
    texts = [row["messages"] for row in rows]
    for question, _ in texts:
        question["content"] = "what" + " it" * (most - 17)
    lines = (json.dumps({"messages": messages}) + "\n" for messages in texts)
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    full = 64 if key == "micro_batch_size" else 64 * (most - 1)
    of_texts = plan(full, file="texts.jsonl")
    assert of_texts.length.tokens == most and of_texts.length.media is None
    room = of_texts.high_bytes + 2**20
    alone, seeing = plan("auto", room, "texts.jsonl"), plan("auto", room)
    assert (alone.fits, seeing.fits) == (True, True)
    bounds = [getattr(one.plan, key) for one in (seeing, alone)]
    assert bounds[0] < bounds[1] == full
