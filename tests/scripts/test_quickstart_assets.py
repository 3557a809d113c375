"""The embedded model and data of the quick start are what their scripts make."""

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from command import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftkit.models.chat_templates.prompt_styles import resolve_prompt_style
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.utils import embedded

SCRIPTS = ROOT / "scripts"
QUICKSTART = embedded.path("quickstart")
MODEL, DATA = QUICKSTART / "model", QUICKSTART / "data"
PAIRS = embedded.path("preference") / "data"
MAX_ASSETS_BYTES = 4_000_000
MAX_DATA_BYTES = 600_000
MODEL_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script without a suffix as a module, with its neighbours importable as when it is run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader(name, str(SCRIPTS / name))
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def read_records(part: str, directory: Path = DATA) -> list[dict[str, str]]:
    return json.loads((directory / f"{part}.json").read_text(encoding="utf-8"))


def test_the_embedded_data_is_what_the_script_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_script("make_quickstart_data", monkeypatch).main(["--out", str(tmp_path)])
    for name, directory in (("quickstart", DATA), ("preference", PAIRS)):
        assert contents(tmp_path / name / "data") == contents(directory)


def test_the_plain_text_has_no_instruction_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus.txt"
    script = load_script("make_quickstart_data", monkeypatch)
    script.main(["--out", str(tmp_path / "data"), "--corpus", str(corpus), "--documents", "20000"])
    text = corpus.read_text(encoding="utf-8")
    assert text.count("\n\n") == 20000
    for mark in ("###", "Instruction", "Response", "Tell me"):
        assert mark not in text


@pytest.mark.parametrize(("directory", "answer"), [(DATA, "output"), (PAIRS, "chosen")])
def test_held_out_inputs_and_adjectives_are_never_trained_on(directory: Path, answer: str) -> None:
    train, val = read_records("train", directory), read_records("val", directory)
    inputs = {record["input"] for record in train} - {""}
    assert not inputs & {record["input"] for record in val}
    answers = {record[answer] for record in train if not record["input"]}
    assert not answers & {record[answer] for record in val}


@pytest.mark.parametrize("part", ["train", "val"])
def test_the_answers_of_a_pair_differ_in_what_they_say(part: str) -> None:
    for pair in read_records(part, PAIRS):
        assert list(pair) == ["instruction", "input", "chosen", "rejected"]
        chosen, rejected = (pair[answer].split() for answer in ("chosen", "rejected"))
        assert chosen != rejected and len(chosen) == len(rejected)


@pytest.mark.parametrize("part", ["train", "val"])
def test_every_record_is_well_formed(part: str) -> None:
    records = read_records(part)
    pairs = {(record["instruction"], record["input"]) for record in records}
    assert len(pairs) == len(records)
    for record in records:
        assert list(record) == ["instruction", "input", "output"]
        assert all(isinstance(text, str) and text == text.strip() for text in record.values())
        assert record["instruction"][-1] in ".?"
        assert record["output"]


def test_the_embedded_files_are_small() -> None:
    data = [*DATA.iterdir(), *PAIRS.iterdir()]
    assert sum(file.stat().st_size for file in data) < MAX_DATA_BYTES
    files = [*(file for file in QUICKSTART.rglob("*") if file.is_file()), *PAIRS.iterdir()]
    assert sum(file.stat().st_size for file in files) <= MAX_ASSETS_BYTES


def test_the_embedded_model_loads_in_transformers() -> None:
    assert {file.name for file in MODEL.iterdir()} == MODEL_FILES
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    model, notes = AutoModelForCausalLM.from_pretrained(MODEL, output_loading_info=True)  # type: ignore[misc]
    assert not any(notes.values())  # type: ignore[has-type]
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}  # type: ignore[has-type]


def test_transformers_and_litgpt_read_the_same_token_ids() -> None:
    ours, theirs = Tokenizer(MODEL), AutoTokenizer.from_pretrained(MODEL)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for record in read_records("val")[:50]:
        prompt = resolve_prompt_style("alpaca").apply(record["instruction"], **record)
        ids = ours.encode(prompt).tolist()
        assert ids == theirs(prompt)["input_ids"]
        assert theirs.decode(ids, skip_special_tokens=True) == prompt


@pytest.mark.slow
def test_pretraining_twice_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    try:
        for name in ("one", "two"):
            script = load_script("make_quickstart_model", monkeypatch)
            script.main(["--steps", "2", "--out", str(tmp_path / name)])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    one = contents(tmp_path / "one")
    assert set(one) == MODEL_FILES
    assert one == contents(tmp_path / "two")
