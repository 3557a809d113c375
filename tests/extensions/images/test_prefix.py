"""PaliGemma, in which all tokens of a prompt see each other, learns what a plain loop learns."""

import json
from pathlib import Path
from typing import Any

import pytest
from messages import message_of, says
from rank_jobs import NO_EVALUATION, Case, Outcome, assert_same_maths, make_run
from seeing_models import (
    PREFIXED,
    PlainLoop,
    Record,
    largest_difference,
    save_model,
    write_chats,
)

from ftkit.cli.app import run
from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow

STEPS, CUT, RATE, EPS = 4, 2, 2e-3, 1e-5
COUNTS = (1, 2, 1, 1, 3, 1)
KEYS: dict[str, Any] = {
    **dict(NO_EVALUATION),
    "data.json_path": None,
    "data.mask_prompt": None,
    "data.val_split_fraction": 0,
    "data.chat_template": "paligemma",
    "train.global_batch_size": len(COUNTS),
    "train.micro_batch_size": len(COUNTS),
    "train.epochs": STEPS,
    "train.lr_warmup_steps": 0,
    "train.lr_schedule": "constant",
    "train.max_norm": None,
    "train.max_seq_length": 512,
    "optimizer.lr": RATE,
    "optimizer.eps": EPS,
    "optimizer.weight_decay": 0.0,
}
ONE_EACH = {"train.micro_batch_size": 1}
LAYOUTS: dict[str, tuple[str, Method, dict[str, Any]]] = {
    "single": ("single", "full", {}),
    "single, LoRA": ("single", "lora", {}),
    "padded": ("single", "full", {"train.micro_batch_size": 2, "train.padding_free": False}),
    "fsdp x2, LoRA": ("fsdp", "lora", ONE_EACH),
    "fsdp x2, resumed": ("fsdp", "full", ONE_EACH),
}
OTHERS = [name for name in LAYOUTS if not name.startswith("single")]
"""Layouts that learn what one device learns."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seen")
    write_chats(folder / "chats.jsonl", COUNTS)
    save_model(PREFIXED, folder / PREFIXED)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Outcome]:
    train = make_run(tmp_path_factory)
    base = {"checkpoint_dir": str(folder / PREFIXED), "data.path": str(folder / "chats.jsonl")}

    def case(name: str, **more: Any) -> Case:
        strategy, method, changes = LAYOUTS[name]
        return Case(strategy, method, changes=tuple((KEYS | base | changes).items()), **more)

    cases = {name: case(name) for name in LAYOUTS if not name.endswith("resumed")}
    half = case("single", stop_after=CUT)
    found = train(1, [*(one for one in cases.values() if one.strategy == "single"), half])
    cases["fsdp x2, resumed"] = case("fsdp x2, resumed", start=found[half].out_dir)
    found |= train(2, [one for one in cases.values() if one.strategy == "fsdp"])
    return {name: found[one] for name, one in cases.items()}


def test_losses_and_results_are_those_of_a_plain_loop(
    trained: dict[str, Outcome],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Record,
) -> None:
    rows = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    loop = PlainLoop(PREFIXED, folder / PREFIXED, folder)
    losses = loop.losses(rows, STEPS, RATE, EPS)
    record_property("difference", largest_difference(trained["single"].losses, losses))
    assert trained["single"].losses == pytest.approx(losses, rel=1e-5)
    final = trained["single"].out_dir / "final"
    words = ["evaluate", str(final), "--format", "json", "--accelerator", "cpu", "--data", "JSON"]
    words += ["--data.path", str(folder / "chats.jsonl"), "--exact_match", "0"]
    assert run([*words, "--data.val_split_fraction", "0"]) == 0
    loss = float(json.loads(capsys.readouterr().out)["loss"])
    assert loss == pytest.approx(PlainLoop(PREFIXED, final, folder).loss(rows), rel=1e-5)


@pytest.mark.parametrize("layout", OTHERS)
def test_every_layout_learns_the_same(
    trained: dict[str, Outcome], layout: str, record_property: Record
) -> None:
    alone = trained["single, LoRA" if layout.endswith("LoRA") else "single"]
    record_property("difference", largest_difference(trained[layout].losses, alone.losses))
    assert_same_maths(trained[layout], alone, validations=0)


def test_an_answer_is_that_of_transformers(
    trained: dict[str, Outcome], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final, image = trained["single"].out_dir / "final", folder / "images/0.png"
    question = "what colour is it"
    words = ["generate", str(final), "--image", str(image), "--prompt", question]
    words += ["--max_new_tokens", "6", "--format", "json"]
    assert run(words) == 0
    said = json.loads(capsys.readouterr().out)["answer"]
    loop = PlainLoop(PREFIXED, final, folder)
    messages = [{"role": "user", "content": f"<image>{question}"}]
    row = {
        "messages": [*messages, {"role": "assistant", "content": ""}],
        "images": ["images/0.png"],
    }
    inputs, labels = loop.sample(row)
    own = int((labels[0] == -100).sum())
    inputs = {key: v[:, :own] if v.ndim == 2 else v for key, v in inputs.items()}
    ids = loop.model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, own:]
    assert said.strip() == loop.decode(ids.tolist()).strip()


def test_a_record_without_an_image_is_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_chats(folder / "mixed.jsonl", (1, 0))
    words = ["data", "--checkpoint_dir", str(folder / PREFIXED), "--data", "JSON"]
    words += ["--data.path", str(folder / "mixed.jsonl"), "--data.chat_template", "paligemma"]
    assert run([*words, "--data.val_split_fraction", "0"]) == 0
    assert says(capsys.readouterr().out, "1 of 2 records", "no image", "Remove them")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.path": "texts.jsonl"}, ["paligemma", "see each other", "media"]),
        ({"data.train_on": "all"}, ["data.train_on", "--data.train_on assistant"]),
    ],
)
def test_what_has_no_prefix_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    write_chats(folder / "texts.jsonl", (0, 0))
    keys = KEYS | {"checkpoint_dir": PREFIXED, "data.path": "chats.jsonl"} | changes
    keys |= {name: str(folder / keys[name]) for name in ("checkpoint_dir", "data.path")}
    keys |= {"data": "JSON", "accelerator": "cpu", "devices": 1, "out_dir": str(tmp_path / "out")}
    asked = [
        word
        for key, value in keys.items()
        if value is not None
        for word in (f"--{key}", json.dumps(value))
    ]
    assert says(message_of(run, ["finetune_full", *asked]), *words)
