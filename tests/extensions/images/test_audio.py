"""A model that hears learns what a plain loop of transformers learns, on any layout."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hearing_models import PlainLoop, save_model, write_chats
from rank_jobs import NO_EVALUATION, Case, Outcome, assert_same_maths, chosen, layouts, make_run

from ftkit.cli.app import run
from ftkit.extensions.publish.model_card import CardKind, card_text, with_name
from ftkit.runs.directory import RunDirectory

pytestmark = pytest.mark.slow

STEPS, CUT, RATE, EPS = 4, 2, 2e-3, 1e-5
Evaluate = Callable[[Path, Path], float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heard")
    write_chats(folder / "chats.jsonl")
    write_chats(folder / "flac.jsonl", suffix="flac")
    save_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    return _rows(folder / "chats.jsonl")


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _case(strategy: str, micro_batch_size: int | None, **more: Any) -> Case:
    changes = {
        **dict(NO_EVALUATION),
        "data.json_path": None,
        "data.mask_prompt": None,
        "data.val_split_fraction": 0,
        "data.chat_template": "tokenizer",
        "train.global_batch_size": 8,
        "train.micro_batch_size": micro_batch_size,
        "train.epochs": STEPS,
        "train.lr_warmup_steps": 0,
        "train.lr_schedule": "constant",
        "train.max_norm": None,
        "train.max_seq_length": 512,
        "optimizer.lr": RATE,
        "optimizer.eps": EPS,  # as in test_families.py
        "optimizer.weight_decay": 0.0,
        **more.pop("changes", {}),
    }
    method = more.pop("method", "full")
    return Case(strategy, method, changes=tuple(changes.items()), **more)


def _of_model(case: Case, folder: Path, model: str = "model") -> Case:
    places = {"checkpoint_dir": folder / model, "data.path": folder / "chats.jsonl"}
    changes = (*case.changes, *((key, str(place)) for key, place in places.items()))
    return dataclasses.replace(case, changes=changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Outcome]:
    """Runs by what they show."""
    train = make_run(tmp_path_factory)
    alone = {
        "alone": _case("single", 8),
        "padded": _case("single", 4, changes={"train.padding_free": False}),
        "LoRA": _case("single", 8, method="lora"),
        "half": _case("single", 8, stop_after=CUT),
    }
    alone = {name: _of_model(case, folder) for name, case in alone.items()}
    found = train(1, list(alone.values()))
    start = found[alone["half"]].out_dir
    of_two = {
        "fsdp": _case("fsdp", 2, start=start),
        "LoRA, fsdp": _case("fsdp", 1, method="lora"),
    }
    of_two = {name: _of_model(case, folder) for name, case in of_two.items()}
    found |= train(2, list(of_two.values()))
    return {name: found[case] for name, case in (alone | of_two).items()}


def test_losses_are_those_of_a_plain_loop(
    trained: dict[str, Outcome], folder: Path, rows: list[dict[str, Any]]
) -> None:
    losses = PlainLoop(folder / "model", folder).losses(rows, STEPS, RATE, EPS)
    assert trained["alone"].losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("one", "other"), [("padded", "alone"), ("fsdp", "alone"), ("LoRA, fsdp", "LoRA")]
)
def test_every_layout_learns_the_same(trained: dict[str, Outcome], one: str, other: str) -> None:
    assert_same_maths(trained[one], trained[other], validations=0)


def test_parts_that_hear_are_kept(trained: dict[str, Outcome], folder: Path) -> None:
    base = PlainLoop(folder / "model", folder).model
    final = PlainLoop(trained["alone"].out_dir / "final", folder).model.state_dict()
    frozen = [name for name, p in base.named_parameters() if not p.requires_grad]
    assert any("audio_tower" in name for name in frozen)
    assert all(torch.equal(base.state_dict()[name], final[name]) for name in frozen)


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Gives the loss of a result on a file of records."""

    def loss(result: Path, file: Path) -> float:
        words = ["evaluate", str(result), "--format", "json", "--accelerator", "cpu"]
        words += ["--data", "JSON", "--data.path", str(file), "--exact_match", "0"]
        assert run([*words, "--data.val_split_fraction", "0"]) == 0
        return float(json.loads(capsys.readouterr().out)["loss"])

    return loss


def test_the_result_loads_in_transformers_and_hears_the_same(
    trained: dict[str, Outcome], folder: Path, rows: list[dict[str, Any]], evaluate: Evaluate
) -> None:
    final = trained["alone"].out_dir / "final"
    loss = evaluate(final, folder / "chats.jsonl")
    assert loss == pytest.approx(PlainLoop(final, folder).loss(rows), rel=1e-5)
    assert loss < trained["alone"].losses[-1]


def test_other_audio_makes_another_loss_and_flac_the_same(
    folder: Path, rows: list[dict[str, Any]], evaluate: Evaluate
) -> None:
    (one,) = rows[-1]["audios"]
    swapped = [
        row | ({"audios": [one] * len(row["audios"])} if "audios" in row else {}) for row in rows
    ]
    file = folder / "swapped.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in swapped))
    files = (folder / "chats.jsonl", file, folder / "flac.jsonl")
    losses = [evaluate(folder / "model", one) for one in files]
    loop = PlainLoop(folder / "model", folder)
    assert losses[:2] == pytest.approx([loop.loss(rows), loop.loss(swapped)], rel=1e-5)
    assert abs(losses[0] - losses[1]) > 5e-4
    assert losses[2] == losses[0]


MEASURED = {
    "full": _case("single", 4),
    "padded": _case("single", 4, changes={"train.padding_free": False}),
    "LoRA": _case("single", 2, method="lora", precision="bf16-true"),
    "tokens": _case(
        *("single", None), changes={"train.micro_batch_tokens": 300}, precision="bf16-true"
    ),
    "fsdp": _case("fsdp", 2),
}


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, request: pytest.FixtureRequest
) -> dict[str, Outcome]:
    """Runs of a wider model, of which all tensors are counted."""
    save_model(folder / "wide", scale=4)
    train = make_run(tmp_path_factory, "counted_cases.py")
    selected = chosen(request, test_the_peak_with_audio_is_predicted_within_2_percent)
    names = [params["name"] for params in selected]
    cases = {name: _of_model(MEASURED[name], folder, "wide") for name in names}
    found = train(1, [case for name, case in cases.items() if name != "fsdp"])
    if "fsdp" in cases:
        found |= train(2, [cases["fsdp"]])
    return {name: found[case] for name, case in cases.items()}


@pytest.mark.parametrize("name", layouts([(name,) for name in MEASURED], [("full",)]))
def test_the_peak_with_audio_is_predicted_within_2_percent(
    measured: dict[str, Outcome], name: str
) -> None:
    memory = measured[name].report.step_memory
    assert memory is not None and memory.predicted is not None and memory.heaviest is not None
    peak = RunDirectory(measured[name].out_dir).rank(0).path / "peak.json"
    counted = sum(json.loads(peak.read_text()).values())
    assert memory.predicted.peak_bytes == pytest.approx(counted, rel=0.02)
    assert memory.heaviest.peak_bytes > 0.98 * counted


def test_answers_are_those_of_transformers(
    trained: dict[str, Outcome],
    folder: Path,
    rows: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    final = trained["alone"].out_dir / "final"
    words = ["generate", str(final), "--prompts", str(folder / "chats.jsonl")]
    assert run([*words, "--max_new_tokens", "6", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    loop = PlainLoop(final, folder)
    assert [one["answer"] for one in found] == [loop.answer(row, 6) for row in rows]


@pytest.mark.parametrize(("name", "kind"), [("alone", "hf"), ("LoRA", "adapter")])
def test_the_code_of_its_card_asks_about_audio(
    trained: dict[str, Outcome],
    folder: Path,
    name: str,
    kind: CardKind,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    final = str(trained[name].out_dir / "final")
    card = card_text(trained[name].report, folder / "model", kind)
    assert "\npipeline_tag: audio-text-to-text\n" in card
    code = with_name(card, final, None).partition("```python\n")[2].partition("```")[0]
    assert "max_new_tokens=100" in code
    code = code.replace("max_new_tokens=100", "max_new_tokens=6")
    exec(code.replace("sound.wav", str(folder / "wav" / "1.wav")), {})
    said = capsys.readouterr().out.strip()
    asked = {"messages": [{"role": "user", "content": "<audio>What is this?"}]}
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps(asked | {"audios": [str(folder / "wav" / "1.wav")]}) + "\n")
    words = ["generate", final, "--prompts", str(file), "--max_new_tokens", "6"]
    assert run([*words, "--format", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["answer"].strip() == said
