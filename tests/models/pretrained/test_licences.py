"""The licence of a base model goes with everything that holds its weights, byte for byte."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command import Command
from tiny import make_data, make_llama

from ftkit.models.pretrained.base_model import (
    open_base,
    open_without_weights,
    save_without_weights,
    weights,
)
from ftkit.models.pretrained.model_files import is_licence
from ftkit.models.pretrained.save import save_hf, save_in_own_layout

FILES = {
    "LICENSE": b"terms\r\n\xff\x00",
    "LICENCE.txt": b"",
    "NOTICE.md": "© somebody\n".encode(),
    "USE_POLICY.md": b"for good",
}
OTHERS = {"LICENSING.txt": b"not this one", "licensed.py": b"nor this"}
TRAINED = [
    *("--data", "JSON", "--train.max_steps", "2", "--train.global_batch_size", "4"),
    *("--accelerator", "cpu", "--precision", "32-true", "--train.max_seq_length", "128"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = make_llama(tmp_path / "model")
    for name, content in {**FILES, **OTHERS}.items():
        (directory / name).write_bytes(content)
    return directory


def licences_in(directory: Path) -> dict[str, bytes]:
    names = FILES | OTHERS
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name in names}


@pytest.mark.parametrize("name", [*FILES, "License-Model", "NOTICES", "notice", "LICENSE_AMD.pdf"])
def test_a_licence_is_known_by_the_beginning_of_its_name(name: str) -> None:
    assert is_licence(name)


@pytest.mark.parametrize("name", [*OTHERS, "noticed", "docs/LICENSE", "my LICENSE", "license/x"])
def test_no_other_file_is_one(name: str) -> None:
    assert not is_licence(name)


@pytest.mark.extensions
@pytest.mark.parametrize(
    "save", [save_hf, partial(save_in_own_layout, layout="litgpt")], ids=["hf", "litgpt"]
)
def test_a_model_is_saved_with_the_licence_of_its_base(
    save: Callable[..., None], model: Path, tmp_path: Path
) -> None:
    base = open_base(str(model))
    save(base, weights(base), tmp_path / "out")
    assert licences_in(tmp_path / "out") == FILES


def test_a_checkpoint_keeps_the_licence_for_the_result_of_the_run_that_goes_on(
    model: Path, tmp_path: Path
) -> None:
    base = open_base(str(model))
    for place in ("base", "again"):
        (tmp_path / place).mkdir()
    save_without_weights(base, tmp_path / "base")
    outlined = open_without_weights(tmp_path / "base")
    (tmp_path / "base" / "LICENSE").unlink()  # the checkpoint may be deleted meanwhile
    save_hf(outlined, weights(base), tmp_path / "out")
    assert licences_in(tmp_path / "out") == FILES
    save_without_weights(outlined, tmp_path / "again")
    assert licences_in(tmp_path / "again") == FILES


@pytest.mark.slow
def test_full_results_merges_and_exports_have_it_and_adapters_do_not(
    model: Path, tmp_path: Path, ftkit: Command
) -> None:
    data = ("--data.path", make_data(tmp_path / "data.json"))

    def run(*words: object) -> None:
        done = ftkit(*words)
        assert done.returncode == 0, done.stderr

    full = ("finetune_full", model, *TRAINED, *data, "--out_dir", "full")
    run(*full, "--stop_after", "1")
    for name in FILES:
        (model / name).unlink()
    run(*full, "--resume", "auto")
    assert licences_in(tmp_path / "full/final") == FILES
    run("export", "full", "--format", "litgpt", "--out", "exported")
    assert licences_in(tmp_path / "exported") == FILES
    for name, content in FILES.items():
        (model / name).write_bytes(content)
    run("finetune", model, *TRAINED, *data, "--out_dir", "lora")
    assert licences_in(tmp_path / "lora/final") == {}
    run("merge", "lora", "--out", "merged")
    assert licences_in(tmp_path / "merged") == FILES
