"""Damaged foreign checkpoints are refused at once, with one message."""

import json
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command
from foreign_checkpoints import BASE, KEPT, SHALLOW, recipe
from messages import says
from torch.distributed.checkpoint.state_dict_saver import save

from ftkit.errors import UserError
from ftkit.extensions.foreign_checkpoints.command import import_run
from ftkit.extensions.foreign_checkpoints.commands import ImportOptions
from ftkit.extensions.foreign_checkpoints.distributed import _check_tiling
from ftkit.extensions.foreign_checkpoints.unpickling import (
    IN_DEEPSPEED,
    Inert,
    load_metadata,
    load_torch_file,
)

Change = Callable[[Any], Any]
OPTIMIZER = "optimizer.pt"
RANK = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
METADATA = ".metadata"
STATE = "trainer_state.json"


def words_of(source: Path, tmp_path: Path, base: Path = BASE) -> str:
    """Message that refuses the import of a checkpoint; nothing is left behind."""
    out = tmp_path / "run"
    with pytest.raises(UserError) as error:
        import_run(ImportOptions(source=source, out=out, config=(str(recipe(tmp_path, base)),)))
    assert not out.exists() and not list(tmp_path.glob(".run*"))
    return str(error.value)


def changed(case: str, file: str, change: Change, tmp_path: Path) -> Path:
    """A copy of a checkpoint in which one file has other content; what is imported of it."""
    copy = tmp_path / case
    shutil.copytree(KEPT / case, copy)
    (path,) = copy.rglob(file)
    content = _read(path)
    content = change(content) or content
    path.unlink()  # which is mapped into memory
    if path.suffix == ".json":
        path.write_text(json.dumps(content))
    elif path.name == METADATA:
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    return copy if case.startswith("deepspeed") else path.parent


def _read(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.name == METADATA:
        return pickle.loads(path.read_bytes())  # noqa: S301 (of ours, with torch's own classes)
    return _plain(load_torch_file(path, IN_DEEPSPEED))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(of_key) for key, of_key in value.items()}
    if type(value) in (list, tuple):  # not torch.Size
        return [_plain(item) for item in value]
    return None if isinstance(value, Inert) else value


def sharded(metadata: Any) -> tuple[list[Any], list[Any]]:
    """The chunks of a tensor in several, and their keys in `storage_data`, in the same order."""
    for name, entry in metadata.state_dict_metadata.items():
        if len(getattr(entry, "chunks", ())) > 1:
            keys = [key for key in metadata.storage_data if key.fqn == name]
            return entry.chunks, sorted(keys, key=lambda key: tuple(key.offset))
    raise AssertionError("no tensor is in chunks")


def name_first_chunk_twice(metadata: Any) -> None:
    chunks, _ = sharded(metadata)
    chunks[1] = chunks[0]


def store_second_chunk_where_the_first_lies(metadata: Any) -> None:
    _, (first, second, *_) = sharded(metadata)
    metadata.storage_data[second] = metadata.storage_data[first]


def move_second_chunk(metadata: Any) -> None:
    chunks, _ = sharded(metadata)
    chunks[1].offsets = torch.Size([chunks[1].offsets[0] + 1, *chunks[1].offsets[1:]])


def give_another_dtype(metadata: Any) -> None:
    name = sharded(metadata)[1][0].fqn
    metadata.state_dict_metadata[name].properties.dtype = torch.float16


def enlarge_all(metadata: Any) -> None:
    name = sharded(metadata)[1][0].fqn
    entry = metadata.state_dict_metadata[name]
    entry.size = torch.Size([10**6, 10**6])
    entry.chunks[:] = [type(entry.chunks[0])(torch.Size([0, 0]), entry.size)]


def claim_a_terabyte(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length = 10**12


def put_an_object_for_an_offset(metadata: Any) -> None:
    for key in metadata.storage_data:
        object.__setattr__(key, "offset", next(iter(metadata.storage_data.values())))


def setting(*keys: Any, value: Any) -> Change:
    """A change of one value."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


STEPS = ("state", 0)
MOMENT = (*STEPS, "exp_avg")
GROUP = ("param_groups", 0)
CHANGES: dict[str, tuple[str, str, Change, str]] = {
    "a chunk twice": ("distributed", METADATA, name_first_chunk_twice, r"overlap"),
    "a chunk for two": (
        "distributed",
        METADATA,
        store_second_chunk_where_the_first_lies,
        r"two chunks share the bytes",
    ),
    "a chunk beyond the end": ("distributed", METADATA, move_second_chunk, r"has no chunk at"),
    "another dtype": ("distributed", METADATA, give_another_dtype, r"says \(torch\.float16"),
    "a shape of 10**12": ("distributed", METADATA, enlarge_all, r"bytes for a chunk of"),
    "a length of 1 TB": ("distributed", METADATA, claim_a_terabyte, r"has [\d,]+ bytes, but"),
    "an object as offset": (
        "distributed",
        METADATA,
        put_an_object_for_an_offset,
        r"a size or position is",
    ),
    "10**9 ranks": ("deepspeed-zero1", MODEL, setting("dp_world_size", value=10**9), r"of 10{9} "),
    "no ranks": ("deepspeed-zero1", MODEL, setting("dp_world_size", value=[]), r"dp_world_size"),
    "no mapping": ("deepspeed-zero1", MODEL, lambda _: [1], r"holds a list"),
    "no steps": ("deepspeed-zero1", MODEL, setting("global_steps", value=None), r"None steps"),
    "a negative shape": (
        "deepspeed-zero1",
        MODEL,
        setting("param_shapes", value=[{"a": [-1]}]),
        r"param_shapes",
    ),
    "unequal parts": (
        "deepspeed-zero1",
        RANK,
        setting(
            *("optimizer_state_dict", "single_partition_of_fp32_groups"), value=[torch.zeros(7)]
        ),
        r"equal parts of the master",
    ),
    "masters that are no tensors": (
        "deepspeed-zero3",
        RANK,
        setting("optimizer_state_dict", "fp32_flat_groups", value=[3]),
        r"rank_1\S+ is damaged: AttributeError",
    ),
    "a group without numbers": (
        "trainer",
        OPTIMIZER,
        setting(*GROUP, "params", value=3),
        "not the st",
    ),
    "state that is a list": ("trainer", OPTIMIZER, setting(*STEPS, value=[3]), r"AttributeError"),
    "a step in lists": (
        "trainer",
        OPTIMIZER,
        setting(*STEPS, "step", value=[3]),
        r"step of .*list",
    ),
    "whole numbers as moments": (
        "trainer",
        OPTIMIZER,
        setting(*MOMENT, value=torch.zeros(24, 16, dtype=torch.int64)),
        r"numbers of torch\.int64|has groups of",
    ),
    "one number for all": (
        "trainer",
        OPTIMIZER,
        setting(*MOMENT, value=torch.zeros(1).expand(10**6, 10**6)),
        r"a tensor of shape \[1000000, 1000000\] has 4 bytes",
    ),
    "sparse": ("trainer", OPTIMIZER, setting(*MOMENT, value=torch.eye(4).to_sparse()), r"sparse"),
    "nested": ("trainer", OPTIMIZER, setting(*GROUP, "lr", value=nested(300)), r"lr: \[\["),
    "a rate of words": ("trainer", OPTIMIZER, setting(*GROUP, "lr", value="x"), r"lr: 'x'"),
    "an infinite rate": ("trainer", OPTIMIZER, setting(*GROUP, "lr", value=float("inf")), r"lr: i"),
    "a negative step": ("trainer", STATE, setting("global_step", value=-3), r"step: -3"),
    "10**30 steps": ("trainer", STATE, setting("global_step", value=10**30), r"step: 10{30}"),
    "a list of epochs": ("trainer", STATE, setting("epoch", value=[3]), r"epoch: \[3\]"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_impossible_content_is_one_message_and_nothing_is_written(
    tmp_path: Path, case: str
) -> None:
    name, file, change, words = CHANGES[case]
    source = changed(name, file, change, tmp_path)
    said = words_of(source, tmp_path, SHALLOW if name == "distributed" else BASE)
    assert re.search(words, said), said
    assert str(tmp_path / name) in said


def test_a_step_of_its_own_for_a_parameter_is_refused_in_distributed_files_too(
    tmp_path: Path,
) -> None:
    source = tmp_path / "saved"
    steps = {"layer": torch.tensor(3.0), "other": torch.tensor(2.0)}
    moments = {name: {"step": step, "exp_avg": torch.zeros(2)} for name, step in steps.items()}
    save({"optimizer": {"state": moments}}, checkpoint_id=source, no_dist=True)
    said = words_of(source, tmp_path)
    assert says(said, f"{source} has another step for each parameter ... new run"), said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda address: address.update(start=0), "in one range"),
        (lambda address: address.update(start=address["start"] + 1), "in one range"),
        (lambda address: address.update(numel=address["numel"] - 1), "in one range|all of"),
        (lambda address: address.update(numel=-5), "in one range"),
        (lambda address: address.update(numel="x"), "damaged"),
    ],
)
def test_ranges_of_parameters_in_a_rank_of_zero_lie_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, words: str
) -> None:
    def loaded(file: Path, stand_ins: tuple[str, ...]) -> Any:
        content = load_torch_file(file, stand_ins)
        if file.name == RANK:
            places = content["optimizer_state_dict"]["param_slice_mappings"][0]
            change(list(places.values())[1].state)
        return content

    monkeypatch.setattr("ftkit.extensions.foreign_checkpoints.deepspeed.load_torch_file", loaded)
    said = words_of(KEPT / "deepspeed-zero1", tmp_path)
    assert re.search(words, said) and "deepspeed-zero1" in said, said


BOX = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.mark.parametrize(
    ("shape", "boxes", "words"),
    [
        ((), [((), ())], ""),
        ((), [((), ()), ((), ())], "hold 2 of 1"),
        ((0, 3), [], ""),
        ((4, 4), [((0, 0), (4, 4))], ""),
        ((4, 4), [((2, 0), (2, 4)), ((0, 0), (2, 4))], ""),
        ((4, 4), [((0, 0), (4, 4)), ((4, 0), (0, 4))], ""),
        ((4, 4), [((0, 0), (3, 1)), ((0, 1), (1, 3)), ((1, 1), (3, 3)), ((3, 0), (1, 1))], ""),
        ((4, 4), [((0, 0), (2, 4)), ((0, 0), (2, 4))], "overlap"),
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))], "overlap"),
        ((4, 4), [((0, 0), (4, 2)), ((1, 0), (1, 4)), ((2, 2), (2, 2))], "overlap"),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (1, 4))], "hold 12 of 16"),
        ((4, 4), [((0, 0), (2, 4)), ((2, 2), (2, 4))], r"has \[2, 4\] numbers at \[2, 2\]"),
        ((4, 4), [((0,), (16,))], "has"),
        ((4, 4), [], "hold 0 of 16"),
    ],
)
def test_chunks_fill_their_tensor_exactly(
    shape: tuple[int, ...], boxes: list[BOX], words: str
) -> None:
    if not words:
        _check_tiling("layer", shape, boxes)
        return
    with pytest.raises(ValueError, match=words):
        _check_tiling("layer", shape, boxes)


def _compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data/0", bytes(10**7))


def _flipped_in_a_record(path: Path) -> None:
    """One bit of the numbers, which torch would take as they are."""
    torch.save({"a": torch.arange(50.0)}, path)
    content = path.read_bytes()
    at = content.index(torch.arange(50.0).numpy().tobytes()) + 40
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def _of_old_torch(path: Path) -> None:
    torch.save({"state": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)


def _longer_in_its_pickle(path: Path) -> None:
    """A storage of 3 numbers, of which the pickle says that it has 9."""
    torch.save({"a": torch.zeros(3), "b": torch.ones(9)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    (name,) = (name for name in members if name.endswith("/data/1"))
    members[name] = members[name][:12]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (_compressed, r"is packed: torch\.save stores archive/data"),
        (_flipped_in_a_record, r"Bad CRC-32 for file .*data/0"),
        (_of_old_torch, r"File is not a zip file\. Expected: .*since torch 1\.6"),
        (_longer_in_its_pickle, r"a storage has 36 bytes only in its pickle|damaged"),
    ],
)
def test_a_file_of_torch_holds_as_many_bytes_as_it_says(
    tmp_path: Path, write: Callable[[Path], None], words: str
) -> None:
    write(tmp_path / "a.pt")
    with pytest.raises(UserError, match=words):
        load_torch_file(tmp_path / "a.pt")


def test_a_stand_in_cannot_be_iterated() -> None:
    with pytest.raises(TypeError):
        tuple(Inert())


def test_metadata_that_is_nested_or_no_object_is_refused_by_the_name_of_the_file(
    tmp_path: Path,
) -> None:
    for content in (b"\x80\x04" + b"]" * 10 + b".", pickle.dumps([1]), b"", b"\x80\x04\x8e" * 9):
        (tmp_path / METADATA).write_bytes(content)
        with pytest.raises(UserError, match=r"\.metadata is damaged"):
            load_metadata(tmp_path / METADATA)


@pytest.mark.slow
def test_a_small_file_that_explodes_ends_the_import_alone(ftkit: Command, tmp_path: Path) -> None:
    """Its text has 3 GB: each object holds the one before twice."""

    def explode(metadata: Any) -> None:
        words: Any = ("word" * 25_000,)
        for _ in range(15):
            words = (words, words)
        for info in metadata.storage_data.values():
            info.relative_path = words

    source = changed("distributed", METADATA, explode, tmp_path)
    left = tmp_path / ".run.partial"
    left.mkdir()
    ended = ftkit(
        *("import", source, "--out", tmp_path / "run"),
        *("--config", recipe(tmp_path, SHALLOW)),
        cold=True,
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert f"{source / METADATA} is damaged" in ended.stderr
    assert not left.exists() and not (tmp_path / "run").exists()
