"""Data sets from a stand-in for the Hugging Face hub on the loopback interface."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from command import command_environment, command_line
from huggingface_hub import constants
from messages import key_words
from stand_in_hub import COMMIT, NAME, TOKEN, DataHub, serving_data

from ftkit.data.records.read import RecordSet, read_hub
from ftkit.errors import UserError
from ftkit.recipe.hubs import HubName

OTHER_COMMIT = "d" * 40


def lines(count: int, prefix: str = "") -> bytes:
    rows = ({"instruction": f"{prefix}{i}?", "output": f"{i}."} for i in range(count))
    return "\n".join(map(json.dumps, rows)).encode()


def card(**configs: dict[str, str]) -> bytes:
    """A README that says which files are which splits of which subset."""
    listed = [
        {"config_name": name, "data_files": [{"split": s, "path": p} for s, p in files.items()]}
        for name, files in configs.items()
    ]
    return f"---\n{json.dumps({'configs': listed})}\n---\n".encode()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[DataHub]:
    """A hub that the libraries take for the real one, although they are imported already."""
    hub = DataHub({"train.jsonl": lines(6), "test.jsonl": lines(2, "t")})
    with serving_data(hub, monkeypatch, tmp_path):
        yield hub


def read(**options: str) -> RecordSet:
    return read_hub(HubName(name=NAME, **options), None)


def test_splits_are_read_with_their_version(served: DataHub) -> None:
    found = read()
    assert [record["instruction"] for record in found.train] == [f"{i}?" for i in range(6)]
    assert [record["instruction"] for record in found.val] == ["t0?", "t1?"]
    assert (found.val_split, found.where, found.version) == ("test", NAME, "ccccccc")


def test_a_second_reading_transfers_no_records(served: DataHub) -> None:
    first = read()
    served.transfers.clear()
    assert read() == first or served.transfers == []
    assert not [file for file in served.transfers if file.endswith(".jsonl")]


@pytest.mark.parametrize(
    ("files", "options", "train", "val"),
    [
        (("train", "validation", "test"), {}, "train", "validation"),
        (("train", "test"), {"split": "test"}, "test", None),
        (("train_sft", "test_sft", "test"), {}, "train_sft", "test_sft"),
        (("train", "test"), {"split": "train[:50%]"}, "train[:50%]", "test"),
        (("everything",), {}, "everything", None),
    ],
)
def test_the_counterpart_of_the_split_that_is_trained_on_is_validated_on(
    served: DataHub, files: tuple[str, ...], options: dict[str, str], train: str, val: str | None
) -> None:
    served.files = {f"{name}.jsonl": lines(4, name) for name in files}
    served.files["README.md"] = card(default={name: f"{name}.jsonl" for name in files})
    found = read(**options)
    name, _, part = train.partition("[")
    assert [record["instruction"] for record in found.train] == [
        f"{name}{i}?" for i in range(2 if part else 4)
    ]
    assert found.val_split == val
    assert (found.val is None) == (val is None)


def test_without_a_split_to_train_on_the_splits_are_listed(served: DataHub) -> None:
    served.files = {"README.md": card(default={"a": "a.jsonl", "b": "b.jsonl"})}
    served.files |= {"a.jsonl": lines(2), "b.jsonl": lines(2)}
    with pytest.raises(UserError, match=key_words("split train ... a, b ... --data.split a")):
        read()
    with pytest.raises(UserError, match=key_words("data.split is bb ... a, b ... --data.split b")):
        read(split="bb")


def test_one_of_several_subsets_must_be_named(served: DataHub) -> None:
    served.files = {"README.md": card(easy={"train": "a.jsonl"}, hard={"train": "b.jsonl"})}
    served.files |= {"a.jsonl": lines(3), "b.jsonl": lines(5)}
    assert len(read(subset="hard").train) == 5
    with pytest.raises(UserError, match=key_words("easy, hard ... --data.subset easy")):
        read()
    with pytest.raises(UserError, match=key_words("data.subset is har ... --data.subset hard")):
        read(subset="har")


def test_a_revision_is_read(served: DataHub) -> None:
    assert len(read(revision=COMMIT).train) == len(read(revision="v1").train) == 6
    with pytest.raises(UserError, match=key_words("data.revision is v2 ... version")):
        read(revision="v2")


def test_a_file_is_read_in_the_place_of_the_splits(served: DataHub) -> None:
    served.files |= {"a.jsonl": lines(3, "a"), "b.jsonl": lines(4, "b")}
    found = read(data_files="a.jsonl")
    assert [record["instruction"] for record in found.train] == ["a0?", "a1?", "a2?"]
    assert found.val is None
    assert len(read(data_files="[ab].jsonl").train) == 7
    with pytest.raises(UserError, match=key_words("data.data_files is c.jsonl")):
        read(data_files="c.jsonl")


def test_a_gated_data_set_needs_the_token_of_an_account(
    served: DataHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.gated = True
    with pytest.raises(UserError, match=r"is gated.*\n.*HF_TOKEN or --access_token"):
        read()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert len(read().train) == 6


def test_a_data_set_that_does_not_exist_may_have_been_meant_as_a_path(served: DataHub) -> None:
    with pytest.raises(UserError, match=key_words("a/b at ... no local file or directory a/b")):
        read_hub(HubName(name="a/b"), None)


def test_an_unreachable_hub_is_an_error(served: DataHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Cannot send a request, as the client has been closed.")

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    with pytest.raises(UserError, match=key_words("cannot be reached")):
        read()


def test_no_program_of_a_hub_is_run(served: DataHub, tmp_path: Path) -> None:
    served.files = {"some-data.py": f"open({str(tmp_path / 'ran')!r}, 'w')".encode()}
    with pytest.raises(UserError, match=key_words("program ... ftkit does not run")):
        read()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.tar": b"x"}, "of the kind ... not read"),
        ({"a.png": b"x"}, "of the kind ... not read"),
        ({"a.h5": b"x"}, "of the kind ... not read"),
        ({"a.pkl": b"x", "b.pt": b"x"}, "no data files"),
    ],
    ids=["an archive", "images", "HDF5", "pickles"],
)
def test_files_of_other_kinds_are_not_read_from_a_hub(
    served: DataHub, files: dict[str, bytes], message: str
) -> None:
    served.files = files
    with pytest.raises(UserError, match=key_words(message)):
        read()
    assert served.transfers == []


def test_a_broken_file_of_a_hub_is_an_error(served: DataHub) -> None:
    served.files = {"a.jsonl": b'{"instruction": '}
    with pytest.raises(UserError, match="could not be loaded"):
        read()


@pytest.mark.slow
def test_a_run_reads_a_gated_data_set_with_its_access_token(
    served: DataHub, tmp_path: Path
) -> None:
    """As the command starts it, with the hub that the environment names."""
    served.gated = True
    of_hub = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HOME": str(tmp_path / "home")}
    of_hub["FTKIT_CACHE_DIR"] = str(tmp_path / "cache")
    words = [
        *("finetune", "embedded:quickstart", "--accelerator", "cpu", "--out_dir", "out"),
        *("--data", "JSON", "--data.path", NAME, "--access_token", TOKEN),
        *("--train.max_steps", "1", "--train.global_batch_size", "2", "--eval.max_iters", "1"),
    ]
    run = subprocess.run(
        command_line(*words),
        env=command_environment() | of_hub,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    expected = f"data of {NAME}: 6 instructions (instruction, output) of version ccccccc, 2 more "
    assert expected in run.stdout
    assert TOKEN not in run.stdout + run.stderr + (Path("out") / "recipe.yaml").read_text()


class TestOffline:
    """Data that were read once are read from the cache."""

    @pytest.fixture
    def offline(self, served: DataHub, monkeypatch: pytest.MonkeyPatch) -> DataHub:
        read()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        served.files.clear()
        return served

    def test_the_cached_version_is_read(self, offline: DataHub) -> None:
        assert (len(read().train), read().version) == (6, "ccccccc")
        assert len(read(revision=COMMIT).train) == 6

    @pytest.mark.parametrize("revision", [OTHER_COMMIT, "v1"])
    def test_another_version_is_refused(self, offline: DataHub, revision: str) -> None:
        with pytest.raises(UserError, match=f"data.revision is {revision}.*\n.*{COMMIT}"):
            read(revision=revision)

    def test_a_single_file_is_refused(self, offline: DataHub) -> None:
        with pytest.raises(UserError, match=key_words("data.data_files ... cannot be reached")):
            read(data_files="train.jsonl")

    def test_a_data_set_missing_from_the_cache_is_an_error(self, offline: DataHub) -> None:
        with pytest.raises(UserError, match=r"a/b is not a local file .*\n.*HF_HUB_OFFLINE"):
            read_hub(HubName(name="a/b"), None)


@pytest.mark.extensions
def test_nulls_that_the_table_needs_are_not_values_of_records(served: DataHub) -> None:
    """A table gives every object all keys that any of them has."""
    call = {"function": {"name": "sum", "arguments": {"a": 1}}}
    other = {"function": {"name": "say", "arguments": {"b": "x"}}}
    question = [{"role": "user", "content": "?"}]
    rows = [
        {"messages": [*question, {"role": "assistant", "content": None, "tool_calls": [one]}]}
        for one in (call, other)
    ]
    served.files = {"train.jsonl": "\n".join(map(json.dumps, rows)).encode()}
    first, second = (record["messages"][1] for record in read().train)
    assert first["tool_calls"][0]["function"] == call["function"]
    assert second["tool_calls"][0]["function"] == other["function"]
