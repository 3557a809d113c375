"""Damaged and absurd files of base models: one message that names the file, before memory is taken.

Wider: scripts/fuzz changes every value of such files; here stands a case of each kind.
"""

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file
from tiny import make_llama

from ftkit.errors import UserError
from ftkit.models.pretrained.base_model import open_base, read_blueprint
from ftkit.models.pretrained.model_files import weight_files
from ftkit.models.pretrained.places import find_here
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.models.pretrained.weight_files import stored_tensors


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    """The same files, as links: a test replaces what it damages."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in sound.iterdir():
        (directory / file.name).symlink_to(file)
    return directory


def replaced(file: Path, content: bytes | str) -> Path:
    file.unlink(missing_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def edited(file: Path, **values: Any) -> Path:
    return replaced(file, json.dumps(json.loads(file.read_text()) | values))


NESTED: dict[str, Any] = {}
for _ in range(100):
    NESTED = {"a": NESTED}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"hidden_size": 10**18}, "hidden_size is"),
        ({"intermediate_size": [96, 10**9]}, "intermediate_size is"),
        ({"intermediate_size": {"a": "1"}}, r"config\.json is damaged"),
        ({"head_dim": 1e308}, "head_dim is 1e[+]308"),
        ({"num_local_experts": 10**7}, "num_local_experts is"),
        ({"max_position_embeddings": {"a": 1}}, "max_position_embeddings"),
        ({"max_position_embeddings": 1}, "1 positions"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is"),
        ({"rms_norm_eps": []}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"rope_parameters": [1]}, r"config\.json is damaged"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": "8"}}, "factor is '8'"),
        ({"model_type": {"v": "llama"}}, "model_type"),
        ({"tie_word_embeddings": "False"}, "tie_word_embeddings is 'False'"),
        ({"extra": NESTED}, "nested too deeply"),
    ],
)
def test_what_no_model_has_in_its_settings_is_refused_by_its_key(
    values: dict[str, Any], named: str, model: Path
) -> None:
    edited(model / "config.json", **values)
    with pytest.raises(UserError, match=named):
        read_blueprint(str(model))


def test_tables_that_grow_with_the_square_of_the_positions_are_bounded(model: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 200_000, "vocab_size": 400}
    replaced(model / "config.json", json.dumps({"model_type": "gpt_bigcode"} | sizes))
    with pytest.raises(UserError, match=r"config\.json is damaged: .*GiB"):
        read_blueprint(str(model))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"[" * 100_000, "too deeply"), (b'{"a"', "is damaged"), (b"\xff{}", "is damaged")],
)
def test_settings_that_are_no_json_are_named(
    name: str, content: bytes, problem: str, model: Path
) -> None:
    from ftkit.models.pretrained.model_files import read_json

    file = replaced(model / name, content)
    with pytest.raises(UserError, match=problem) as refused:
        read_json(file)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.bin", 5, ""]
)
@pytest.mark.parametrize("index", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_names_files_of_its_own_directory_alone(
    index: str, shard: Any, model: Path
) -> None:
    (model / "model.safetensors").unlink()
    content = {"weight_map": {"a.weight": shard}}
    replaced(model / f"{index}.index.json", json.dumps(content))
    with pytest.raises(UserError, match=r"index\.json says that a\.weight lies in"):
        weight_files(model)


def test_a_cache_of_links_to_other_directories_is_read(model: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    (model / "model.safetensors").rename(model / shard)
    content = {"weight_map": dict.fromkeys(load_file(model / shard), shard)}
    replaced(model / "model.safetensors.index.json", json.dumps(content))
    assert (model / shard).is_symlink()
    assert open_base(str(model)).layout == "hf"


@pytest.mark.extensions
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", find_here),
        ("model.safetensors", find_here),
        ("tokenizer.json", lambda name: Tokenizer(Path(name))),
        ("m.gguf", lambda name: find_here(f"{name}/m.gguf")),
    ],
)
def test_what_is_no_regular_file_is_refused_unread(
    kind: str, name: str, read: Callable[[str], object], model: Path
) -> None:
    (model / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(model / name)
    else:
        (model / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match="not a regular file"):
        read(str(model))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2**40], "data_offsets": [0, 2**42]},
        {"shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F99"},
        {"data_offsets": [0]},
    ],
)
def test_a_safetensors_header_that_its_file_cannot_hold_is_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | change
    header = json.dumps({"a": entry}).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(UserError, match=rf"{file} is damaged"):
        stored_tensors([file])


def rewritten(file: Path, change: Callable[[str, bytes], tuple[bytes, int]]) -> None:
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records.items():
            changed, packing = change(name, content)
            archive.writestr(name, changed, packing)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda name, content: (content, zipfile.ZIP_DEFLATED), "is packed"),
        (lambda name, content: (content[:-3], zipfile.ZIP_STORED), "is damaged"),
        (
            lambda name, content: (
                content[:40] if "/data/" in name else content,
                zipfile.ZIP_STORED,
            ),
            "is damaged",
        ),
    ],
    ids=["packed", "cut", "short records"],
)
def test_a_bin_file_holds_its_numbers_as_they_are(
    change: Callable[[str, bytes], tuple[bytes, int]], problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(1000.0), "b": torch.ones(3)}, file)
    assert stored_tensors([file]).keys() == {"a", "b"}
    rewritten(file, change)
    with pytest.raises(UserError, match=problem):
        stored_tensors([file])


@pytest.mark.parametrize("is_old", [False, True])
def test_a_pickle_that_asks_for_anything_but_tensors_is_refused(
    is_old: bool, tmp_path: Path
) -> None:
    class Large:
        def __reduce__(self) -> tuple[type[bytearray], tuple[int]]:
            return bytearray, (2**36,)

    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": Large()}, file, _use_new_zipfile_serialization=not is_old)
    with pytest.raises(UserError, match=r"holds more than weights \(.*bytearray"):
        stored_tensors([file])


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BETWEEN = {"type": "Replace", "pattern": {"Regex": ""}, "content": "ab"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [DOUBLING] * 30}),
        ("normalizer", {"type": "Sequence", "normalizers": [BETWEEN] * 20}),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 20}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 30}),
        ("decoder", {"type": "Sequence", "decoders": [DOUBLING] * 30}),
    ],
)
def test_a_tokenizer_that_makes_texts_grow_without_bound_is_refused(
    part: str, steps: dict[str, Any], model: Path
) -> None:
    edited(model / "tokenizer.json", **{part: steps})
    with pytest.raises(UserError, match=rf"the steps of its {part} can make a text"):
        Tokenizer(model)


@pytest.mark.parametrize("where", ["vocabulary", "added tokens"])
def test_a_vocabulary_with_millions_of_unused_ids_is_refused(where: str, model: Path) -> None:
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    if where == "vocabulary":
        content["model"]["vocab"]["a"] = 10**9
    else:
        content["added_tokens"][0]["id"] = 10**9
    replaced(file, json.dumps(content))
    with pytest.raises(UserError, match="has the id 1,000,000,000"):
        Tokenizer(model)


def test_steps_of_published_tokenizers_are_not_refused(model: Path) -> None:
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    quotes = {"type": "Replace", "pattern": {"String": "``"}, "content": '"'}
    steps = [quotes, quotes, {"type": "NFKD"}, {"type": "Lowercase"}, spaces, spaces]
    edited(model / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": steps})
    assert Tokenizer(model).encode("Ab  c", bos=False).tolist() == (
        Tokenizer(model).encode("ab c", bos=False).tolist()
    )


def test_a_special_token_is_a_text(model: Path) -> None:
    edited(model / "tokenizer_config.json", eos_token=5)
    with pytest.raises(UserError, match="eos_token is 5, but it has to be a text"):
        Tokenizer(model)


@pytest.mark.extensions
def test_millions_of_empty_texts_in_a_gguf_header_are_refused(tmp_path: Path) -> None:
    from ftkit.extensions.gguf.header import read_header

    key = b"tokenizer.ggml.tokens"
    count = 10 * 2**20
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key
    file = tmp_path / "m.gguf"
    with file.open("wb") as out:
        out.write(header + struct.pack("<IIQ", 9, 8, count))
        out.truncate(out.tell() + 8 * count)
    with pytest.raises(UserError, match=f"{count:,} texts of tokenizer.ggml.tokens"):
        read_header(file)


@pytest.mark.extensions
def test_a_gguf_file_with_absurd_sizes_is_refused(sound: Path, tmp_path: Path) -> None:
    file = write_gguf(sound, tmp_path / "m.gguf", llama__context_length=2**31)
    with pytest.raises(UserError, match="max_position_embeddings is 2147483648"):
        read_blueprint(str(file))
