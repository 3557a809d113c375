"""Checkpoints on disk are complete or absent, and every damage is detected."""

import dataclasses
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import xxhash
from checkpoints import FILES, save, some_metadata, write_partial

from ftkit.checkpoint import file_checks
from ftkit.checkpoint import metadata as metadata_module
from ftkit.checkpoint import store as store_module
from ftkit.checkpoint.file_checks import describe_file, hash_file
from ftkit.checkpoint.metadata import (
    FORMAT_VERSION,
    METADATA,
    BaseIdentity,
    CheckpointError,
    FileEntry,
    read_metadata,
    write_metadata,
)
from ftkit.checkpoint.store import KeepEvery, Store, check_files, is_milestone, verify
from ftkit.utils.url_files import BlockChecksums


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run/checkpoints")


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


# --- What a checkpoint says about itself --------------------------------------------------------


class TestMetadata:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        files = {"a/b.safetensors": FileEntry(size_bytes=3, sha256="0" * 64)}
        write_metadata(some_metadata(5, files=files, changes=["train.epochs: 1 -> 2"]), tmp_path)
        return tmp_path / METADATA

    def rewrite(self, file: Path, **changes: object) -> None:
        """Change values, and the checksum with them."""
        values = json.loads(file.read_text()) | changes
        values.pop("checksum")
        values["checksum"] = metadata_module._checksum_of(values)
        file.write_text(json.dumps(values))

    def test_comes_back_as_it_was(self, tmp_path: Path) -> None:
        files = {"a/b.safetensors": FileEntry(size_bytes=3, sha256="0" * 64)}
        metadata = some_metadata(
            1500,
            files=files,
            validation_loss=0.1 + 0.2,
            carried={"loss": {"first": 2.5}, "examples": [{"instruction": "é \u2028 \x1b"}]},
            loggers={"wandb": "abc"},
        )
        write_metadata(metadata, tmp_path)
        assert read_metadata(tmp_path) == metadata
        assert [path.name for path in tmp_path.iterdir()] == [METADATA]

    def test_every_flipped_byte_is_detected_unless_it_is_white_space(self, file: Path) -> None:
        sound = file.read_bytes()
        expected = read_metadata(file.parent)
        for position in range(len(sound)):
            flip(file, position)
            if sound[position : position + 1].isspace():
                with suppress(CheckpointError):
                    assert read_metadata(file.parent) == expected
            else:
                with pytest.raises(CheckpointError, match=re.escape(str(file))):
                    read_metadata(file.parent)
            file.write_bytes(sound)

    def test_every_truncation_is_detected(self, file: Path) -> None:
        sound = file.read_bytes().rstrip()
        for length in range(0, len(sound), 7):
            file.write_bytes(sound[:length])
            with pytest.raises(CheckpointError, match="damaged"):
                read_metadata(file.parent)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"step": 5', '"step": 6'),
            ('"step": 5', '"step": 5.0'),
            ('"loss": 1.25', '"loss": null'),
            ('"loss": 1.25', '"loss": 1.25, "more": 1'),
            ('"checksum"', '"Checksum"'),
        ],
    )
    def test_a_changed_value_is_detected(self, file: Path, old: str, new: str) -> None:
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(CheckpointError, match="does not match its checksum"):
            read_metadata(file.parent)

    def test_white_space_may_differ(self, file: Path) -> None:
        expected = read_metadata(file.parent)
        file.write_text(json.dumps(json.loads(file.read_text())))
        assert read_metadata(file.parent) == expected

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "not valid JSON"),
            (b"\xff\x00", "not valid JSON"),
            (b"{", "not valid JSON"),
            (b"[" * 100_000, "not valid JSON"),
            (b"9" * 100_000, "not valid JSON"),
            (b'{"format_version": NaN}', "NaN is not a number of JSON"),
            (b'{"format_version": 1, "format_version": 1}', "'format_version' appears twice"),
            (b'{"files": {"a": 1, "a": 2}}', "'a' appears twice"),
            (b"[1]", "no format_version"),
            (b"null", "no format_version"),
            (b'{"format_version": true}', "no format_version"),
            (b'{"format_version": 1}', "does not match its checksum"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_a_value_that_is_missing_is_named(
        self, tmp_path: Path, content: bytes, message: str
    ) -> None:
        (tmp_path / METADATA).write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as error:
            read_metadata(tmp_path)
        assert str(tmp_path / METADATA) in str(error.value)

    def test_a_missing_one_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"metadata\.json is missing"):
            read_metadata(tmp_path)

    def test_it_must_be_a_regular_file(self, file: Path, tmp_path: Path) -> None:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to("elsewhere")
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_metadata(tmp_path)
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_metadata(tmp_path)

    def test_a_newer_format_says_so(self, file: Path) -> None:
        self.rewrite(file, format_version=FORMAT_VERSION + 1)
        with pytest.raises(CheckpointError, match="has format_version 2, but this ftkit reads"):
            read_metadata(file.parent)

    def test_unknown_keys_are_passed_over(self, file: Path) -> None:
        expected = read_metadata(file.parent)
        self.rewrite(file, added_later=[1, 2])
        assert read_metadata(file.parent) == expected

    def test_a_teacher_is_found_under_the_key_of_earlier_versions(self, file: Path) -> None:
        self.rewrite(file, teacher={"name": "large", "fingerprint": "hf:1"})
        assert read_metadata(file.parent).beside == BaseIdentity(name="large", fingerprint="hf:1")

    @pytest.mark.parametrize(
        "changes",
        [
            {"step": "5"},
            {"step": True},
            {"layout": None},
            {"layout": {"strategy": "fsdp"}},
            {"epochs": 10**400},
            {"files": {"a": {"size_bytes": -1, "sha256": "0" * 64}}},
            {"files": {"a": {"size_bytes": 1, "sha256": "0" * 63}}},
        ],
    )
    def test_values_of_another_kind_are_refused(self, file: Path, changes: dict[str, Any]) -> None:
        self.rewrite(file, **changes)
        with pytest.raises(CheckpointError, match="is not the metadata of a checkpoint"):
            read_metadata(file.parent)

    @pytest.mark.parametrize(
        "name", ["../x", "a/../../x", "/x", "a//b", "./a", "a/", "", ".", "a\0b", METADATA]
    )
    def test_files_lie_inside_the_directory(self, file: Path, name: str) -> None:
        entry = FileEntry(size_bytes=1, sha256="0" * 64)
        self.rewrite(file, files={name: dataclasses.asdict(entry)})
        with pytest.raises(CheckpointError, match="is not the metadata of a checkpoint"):
            read_metadata(file.parent)
        with pytest.raises(ValueError, match="file"):
            write_metadata(some_metadata(5, files={name: entry}), file.parent)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_nan_loss_is_written_as_null(self, tmp_path: Path, value: float) -> None:
        metadata = some_metadata(5, loss=value, validation_loss=value, carried={"loss": [value]})
        write_metadata(metadata, tmp_path)
        read = read_metadata(tmp_path)
        assert (read.loss, read.validation_loss, read.carried) == (None, None, {"loss": [None]})

    def test_no_other_number_may_be_infinite(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="not JSON compliant"):
            write_metadata(some_metadata(5, learning_rate=math.inf), tmp_path)
        assert list(tmp_path.iterdir()) == []


# --- Coming ---------------------------------------------------------------------------------------


def test_a_committed_checkpoint_is_whole_and_the_latest(store: Store) -> None:
    metadata = write_partial(store, 1500)
    assert store.steps() == []
    path = store.commit(metadata)
    assert path == store.path(1500) == store.directory / "step-00001500"
    assert store.metadata(1500) == metadata
    assert store.verify(1500) == store.check_files(1500) == []
    assert sorted(p.name for p in store.directory.iterdir()) == ["latest", "step-00001500"]
    assert (store.directory / "latest").read_text() == "step-00001500\n"


def test_all_is_synced_before_the_rename_and_the_rename_after(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def fsync_(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def rename_(source: Path, target: Path) -> None:
        calls.append(f"rename to {target.name}")
        rename(source, target)

    metadata = write_partial(store, 5)
    monkeypatch.setattr(os, "fsync", fsync_)
    monkeypatch.setattr(os, "rename", rename_)
    store.commit(metadata)
    committed = calls.index("rename to step-00000005")
    assert calls[0].startswith(f".{METADATA}.")
    assert set(calls[1:committed]) == {"adapter", ".step-00000005.partial"}
    assert calls[committed - 1] == ".step-00000005.partial"
    assert calls[committed + 1 : committed + 3] == ["checkpoints", "run"]


@pytest.mark.parametrize(
    ("step", "name"),
    [(0, "step-00000000"), (99999999, "step-99999999"), (123456789, "step-123456789")],
)
def test_names_have_eight_digits_or_more(store: Store, step: int, name: str) -> None:
    assert save(store, step).name == name
    assert store.steps() == [step]
    assert store.newest() == step


@pytest.mark.parametrize(
    "name",
    ["step-5", "step-000000005", "step-00000005x", ".step-00000005", "step-0000000\u0665", "final"],
)
def test_other_names_are_none_of_a_checkpoint(store: Store, name: str) -> None:
    shutil.copytree(save(store, 5), store.directory / name)
    (store.directory / "step-00000007").write_text("a file")
    assert store.steps() == [5]
    assert store.leftovers() == []


def test_an_empty_store_needs_no_directory(store: Store) -> None:
    assert (store.steps(), store.newest(), store.leftovers()) == ([], None, [])
    assert store.remove_leftovers() == store.prune(keep_last=1, keep_every=None, keep_best=0) == []  # type: ignore[comparison-overlap]
    store.discard_partial(5)
    assert not store.directory.exists()


@pytest.mark.parametrize("content", [None, b"step-00000099\n", b"\xff\x00garbage", b""])
def test_the_newest_counts_whatever_latest_says(store: Store, content: bytes | None) -> None:
    save(store, 5)
    latest = store.directory / "latest"
    latest.unlink()
    if content is not None:
        latest.write_bytes(content)
    assert store.newest() == 5
    save(store, 10)
    assert latest.read_text() == "step-00000010\n"


def test_a_checkpoint_counts_though_latest_cannot_be_written(store: Store) -> None:
    (store.directory / "latest").mkdir(parents=True)
    save(store, 5)
    assert store.newest() == 5
    assert store.verify(5) == []
    assert store.leftovers() == []


def test_a_partial_checkpoint_can_be_discarded(store: Store) -> None:
    write_partial(store, 5)
    store.discard_partial(5)
    assert list(store.directory.iterdir()) == []


def test_a_checkpoint_of_the_same_step_is_replaced(store: Store) -> None:
    save(store, 5)
    save(store, 5, validation_loss=1.0)
    assert store.metadata(5).validation_loss == 1.0
    assert sorted(p.name for p in store.directory.iterdir()) == ["latest", "step-00000005"]


def test_a_checkpoint_that_cannot_be_replaced_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 5)
    metadata = write_partial(store, 5, validation_loss=1.0)
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if source.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        store.commit(metadata)
    assert store.metadata(5).validation_loss is None
    assert store.leftovers() == [store.partial(5)]


# --- A crash at every stage -----------------------------------------------------------------------


class Crash(BaseException):
    """The process is gone: nothing after it happens either."""


@contextmanager
def crash_at(stage: int) -> Iterator[None]:
    """From the given change to the disk on, none happens any more; those that did."""
    done: list[str] = []  # what was changed, by the name of the call
    with pytest.MonkeyPatch.context() as patch:

        def until_then(name: str, real: Any) -> Any:
            def change(*args: Any, **kwargs: Any) -> Any:
                if len(done) >= stage:
                    raise Crash
                done.append(name)
                return real(*args, **kwargs)

            return change

        for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, until_then(name, getattr(os, name)))
        yield


def stages_of(tmp_path: Path, prepare: Any, act: Any) -> Iterator[Store]:
    """A store after a crash at each stage of an act."""
    for stage in count():
        store = Store(tmp_path / f"run-{stage}/checkpoints")
        state = prepare(store)
        with crash_at(stage):
            try:
                act(store, state)
                assert stage > 3
                return
            except Crash:
                pass
        yield store


def check_after_crash(store: Store, allowed: list[list[int]]) -> None:
    """All that has a checkpoint's name is whole, before and after leftovers are removed."""
    for _ in range(2):
        assert store.steps() in allowed
        assert [store.verify(step) for step in store.steps()] == [[] for _ in store.steps()]
        store.remove_leftovers()
    assert {path.name for path in store.directory.iterdir()} - {"latest"} == {
        store.path(step).name for step in store.steps()
    }
    save(store, 99)
    assert store.newest() == 99
    assert (store.directory / "latest").read_text() == "step-00000099\n"


def test_a_crash_anywhere_in_a_commit_costs_no_other_checkpoint(tmp_path: Path) -> None:
    def prepare(store: Store) -> object:
        save(store, 5)
        return write_partial(store, 10)

    seen = set()
    for store in stages_of(tmp_path, prepare, Store.commit):
        seen.add(tuple(store.steps()))
        check_after_crash(store, [[5], [5, 10]])
    assert seen == {(5,), (5, 10)}


def test_a_crash_while_files_are_written_costs_no_other_checkpoint(store: Store) -> None:
    save(store, 5)
    write_partial(store, 10)
    assert store.leftovers() == [store.partial(10)]
    check_after_crash(store, [[5]])


def test_a_crash_anywhere_in_replacing_leaves_one_of_both(tmp_path: Path) -> None:
    def prepare(store: Store) -> object:
        save(store, 5, validation_loss=1.0)
        return write_partial(store, 5, validation_loss=2.0)

    losses = set()
    for store in stages_of(tmp_path, prepare, Store.commit):
        store.remove_leftovers()
        losses.add(store.metadata(5).validation_loss)
        check_after_crash(store, [[5]])
    assert losses == {1.0, 2.0}


def test_a_crash_anywhere_in_a_deletion_leaves_all_of_it_or_nothing(tmp_path: Path) -> None:
    def prepare(store: Store) -> object:
        save(store, 5)
        save(store, 10)
        return 10

    seen = set()
    for store in stages_of(tmp_path, prepare, Store.delete):
        seen.add(tuple(store.steps()))
        check_after_crash(store, [[5], [5, 10]])
    assert seen == {(5,), (5, 10)}


def test_a_crash_while_leftovers_are_removed_is_made_good_by_the_next_start(tmp_path: Path) -> None:
    def prepare(store: Store) -> None:
        save(store, 5)
        write_partial(store, 10)
        save(store, 20).rename(store.directory / ".step-00000020.deleted")
        (store.directory / ".latest.4711").write_text("step")

    for store in stages_of(tmp_path, prepare, lambda store, _: store.remove_leftovers()):
        check_after_crash(store, [[5]])


def test_leftovers_are_named_and_nothing_else_is_removed(store: Store) -> None:
    save(store, 5)
    write_partial(store, 10)
    (store.directory / ".latest.4711").write_text("step")
    (store.directory / ".step-00000007.deleted").write_text("a file")
    for name in (".metadata.json.4711", ".metadata.json.mine"):
        (store.path(5) / name).write_text("half of i")
    assert store.verify(5) == [f"{store.path(5)}/.metadata.json.mine is not one of its files."]
    others = [".step-7.partial", ".step-00000007.mine", ".hidden", "notes.txt"]
    for name in others:
        (store.directory / name).mkdir()
    removed = [".latest.4711", ".step-00000007.deleted", ".step-00000010.partial"]
    removed.append(".metadata.json.4711")
    assert [path.name for path in store.remove_leftovers()] == removed
    assert store.remove_leftovers() == []
    left = {path.name for path in store.directory.iterdir()}
    assert left == {*others, "latest", "step-00000005"}


# --- Damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("position", [0, -1])
def test_the_checksum_detects_a_flipped_byte(store: Store, name: str, position: int) -> None:
    path = save(store, 5)
    flip(path / name, position)
    assert store.check_files(5) == []
    assert store.verify(5) == [f"{path / name} is damaged: its checksum differs."]


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_size_is_detected_without_reading_the_file(store: Store, name: str) -> None:
    path = save(store, 5)
    size = len(FILES[name])
    os.truncate(path / name, size - 1)
    problem = f"{path / name} has {size - 1:,} bytes instead of {size:,}."
    assert store.check_files(5) == store.verify(5) == [problem]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_detected(store: Store, name: str) -> None:
    path = save(store, 5)
    (path / name).unlink()
    assert store.check_files(5) == store.verify(5) == [f"{path / name} is missing."]


def test_damaged_metadata_is_detected(store: Store) -> None:
    path = save(store, 5)
    flip(path / METADATA, 20)
    (problem,) = store.check_files(5)
    assert str(path / METADATA) in problem
    assert store.verify(5) == [problem]


def test_every_problem_is_listed(store: Store) -> None:
    path = save(store, 5)
    names = sorted(FILES)
    flip(path / names[0], 0)
    (path / names[1]).unlink()
    os.truncate(path / names[2], 1)
    assert [problem.partition(" ")[0] for problem in store.verify(5)] == [
        str(path / name) for name in names[:3]
    ]


@pytest.mark.parametrize("name", ["extra.bin", "adapter/extra.bin", "more/extra.bin"])
def test_an_unlisted_file_is_detected(store: Store, name: str) -> None:
    path = save(store, 5)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("x")
    assert store.check_files(5) == []
    assert store.verify(5) == [f"{path / name} is not one of its files."]


@pytest.mark.parametrize("name", ["recipe.yaml", "adapter"])
def test_a_link_is_refused(store: Store, name: str, tmp_path: Path) -> None:
    path = save(store, 5)
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    for problems in (store.check_files(5), store.verify(5)):
        assert problems
        assert "is not a regular file of the checkpoint." in problems[0]


def test_a_name_that_is_not_text_can_be_shown(store: Store) -> None:
    path = save(store, 5)
    (path / os.fsdecode(b"\xff.bin")).touch()
    assert store.verify(5)[0].encode().endswith(b".bin is not one of its files.")


def test_a_directory_or_pipe_is_refused(store: Store) -> None:
    path = save(store, 5)
    (path / "recipe.yaml").unlink()
    os.mkfifo(path / "recipe.yaml")
    assert store.verify(5) == [f"{path / 'recipe.yaml'} is not a regular file of the checkpoint."]


def test_a_file_that_cannot_be_read_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(store, 5)

    def failing(*_: object) -> FileEntry:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store_module, "hash_file", failing)
    assert store.verify(5)[0].endswith(" cannot be read (Permission denied).")
    assert len(store.verify(5)) == len(FILES)
    assert path.exists()


def test_a_checkpoint_under_the_name_of_another_step_is_detected(store: Store) -> None:
    save(store, 5).rename(store.path(6))
    problem = f"{store.path(6)} holds the checkpoint of step 5."
    assert store.check_files(6) == store.verify(6) == [problem]
    with pytest.raises(CheckpointError, match="step 5"):
        store.metadata(6)


def test_a_checkpoint_is_the_same_wherever_it_lies(store: Store, tmp_path: Path) -> None:
    copy = shutil.copytree(save(store, 5), tmp_path / "elsewhere/best")
    assert check_files(copy) == verify(copy) == []
    assert read_metadata(copy) == store.metadata(5)


def test_verifying_reports_progress(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PROGRESS_INTERVAL_S", 0)
    save(store, 5)
    calls: list[tuple[int, int]] = []
    assert store.verify(5, lambda *call: calls.append(call)) == []
    total = sum(map(len, FILES.values()))
    assert calls == sorted(calls)
    assert all(0 <= done <= total == all_ for done, all_ in calls)


def test_verifying_ends_at_once_when_it_is_interrupted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 5, {"large": bytes(20_000_000)} | FILES)
    monkeypatch.setattr(store_module, "PROGRESS_INTERVAL_S", 0.01)
    monkeypatch.setattr(file_checks, "_READ_BYTES", 1)  # about 10 s for all of it

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        store.verify(5, interrupt)
    assert time.monotonic() - start < 5


def test_the_checksum_is_that_of_sha256sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    for size in (1, 2, 100):
        monkeypatch.setattr(file_checks, "_READ_BYTES", size)
        assert hash_file(file) == FileEntry(size_bytes=3, sha256=expected)
        assert describe_file(file, size) == hash_file(file)


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 25, 30])
def test_a_file_that_is_written_gets_a_checksum_of_each_block(tmp_path: Path, size: int) -> None:
    file, content = tmp_path / "file", bytes(range(100, 100 + size))
    file.write_bytes(content)
    entry = describe_file(file, 10)
    assert entry == hash_file(file)
    parts = [content[start : start + 10] for start in range(0, size, 10)]
    assert entry.blocks == BlockChecksums(
        block_bytes=10, xxh3_64="".join(map(xxhash.xxh3_64_hexdigest, parts))
    )
    assert entry.blocks.problem(size) is None
    for number, part in enumerate(parts):
        assert entry.blocks.matches(number, part)
        assert not entry.blocks.matches(number, part[:-1] + bytes([part[-1] ^ 1]))


@pytest.mark.parametrize("change", [{"xxh3_64": "00"}, {"xxh3_64": "x" * 16}, {"block_bytes": 0}])
def test_checksums_of_blocks_that_cannot_be_are_damage(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    blocks = BlockChecksums(**{"block_bytes": 4, "xxh3_64": "0" * 16} | change)
    entry = FileEntry(size_bytes=3, sha256="0" * 64, blocks=blocks)
    write_metadata(some_metadata(5, files={"a": entry}), tmp_path)
    with pytest.raises(CheckpointError, match=r"'a': .*checksums"):
        read_metadata(tmp_path)


# --- Going ----------------------------------------------------------------------------------------


def test_deleting_the_newest_makes_the_one_before_the_latest(store: Store) -> None:
    save(store, 5)
    save(store, 10)
    store.delete(10)
    assert store.steps() == [5]
    assert (store.directory / "latest").read_text() == "step-00000005\n"
    store.delete(5)
    assert list(store.directory.iterdir()) == []


def test_deleting_a_link_keeps_its_target(store: Store, tmp_path: Path) -> None:
    elsewhere = save(store, 5).rename(tmp_path / "elsewhere")
    store.path(5).symlink_to(elsewhere)
    assert store.verify(5) == []
    store.delete(5)
    assert store.steps() == []
    assert verify(elsewhere) == []


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ((3, None, 0), {30, 40, 50}),
        ((1, None, 0), {50}),
        ((9, None, 0), {10, 20, 30, 40, 50}),
        ((0, None, 0), set()),
        ((1, 20, 0), {20, 40, 50}),
        ((0, 7, 0), set()),
        ((1, None, 1), {40, 50}),  # of equal losses the newer
        ((1, None, 2), {20, 40, 50}),
        ((1, None, 9), {10, 20, 40, 50}),
        ((1, 30, 1), {30, 40, 50}),
    ],
)
def test_retention_rules(store: Store, rule: tuple[Any, ...], kept: set[int] | set[Any]) -> None:
    losses = {10: 0.9, 20: 0.5, 30: None, 40: 0.5, 50: 0.7}
    for step, loss in losses.items():
        save(store, step, validation_loss=loss)
    assert store.kept(*rule) == kept
    keep_last, keep_every, keep_best = rule
    deleted = store.prune(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    assert deleted == sorted(losses.keys() - kept)
    assert set(store.steps()) == kept


def test_a_damaged_checkpoint_counts_for_nothing_and_is_not_pruned(store: Store) -> None:
    for step in (10, 20, 30, 40):
        save(store, step, validation_loss=step / 10)
    flip(store.path(10) / METADATA, 20)
    (store.path(40) / "recipe.yaml").unlink()
    store.path(50).mkdir()
    assert store.kept(1, 40, 0) == {10, 30, 40, 50}
    assert store.prune(keep_last=1, keep_every=None, keep_best=1) == []
    assert store.prune(keep_last=1, keep_every=None, keep_best=0) == [20]


def test_later_checkpoints_are_set_aside_and_stay_whole(store: Store, tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(store, step)
    target = tmp_path / "run/set_aside/1"
    assert store.move_later(5, target) == [10, 15]
    assert store.steps() == [5]
    assert (store.directory / "latest").read_text() == "step-00000005\n"
    backup = Store(target / "checkpoints")
    assert [backup.verify(step) for step in backup.steps()] == [[], []]
    assert store.move_later(5, tmp_path / "run/set_aside/2") == []
    assert not (tmp_path / "run/set_aside/2").exists()


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (None, []),
        (40, [40, 80, 120, 160, 200, 240]),
        ({100: 20, 200: 100}, [20, 40, 60, 80, 100, 200]),
        ({200: 100, 100: 50}, [50, 100, 200]),
    ],
    ids=str,
)
def test_steps_that_stay_are_thinned_out_by_ranges_of_steps(
    rule: KeepEvery, kept: list[int]
) -> None:
    """The last interval also applies after its step."""
    assert [step for step in range(10, 250, 10) if is_milestone(step, rule)] == kept
    if isinstance(rule, dict):
        assert is_milestone(1000, rule) and not is_milestone(1050, {100: 20, 200: 100})
