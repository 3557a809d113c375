"""Corpora of a hub: the same samples, read by ranges at one commit, also where it goes on there."""

import logging
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import command_environment, command_line
from corpora import documents, lines_of
from huggingface_hub import constants
from messages import key_words
from runs import options
from saved_runs import recipe
from stand_in_hub import COMMIT, NAME, TOKEN, DataHub, serving_data

from ftkit.data.samples.stream import Stream
from ftkit.data.sources import pinned
from ftkit.errors import UserError
from ftkit.extensions.streamed_corpora.source import CorpusSource
from ftkit.extensions.streamed_corpora.stream import open_stream
from ftkit.launch.supervisor import prepare_run
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.hubs import Hub, HubName, as_owner_of
from ftkit.recipe.recipe import Component

OTHER_COMMIT = "d" * 40


@pytest.fixture
def served(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataHub]:
    """The corpus below texts/ of a repository, beside what no corpus has."""
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("ftkit.extensions.streamed_corpora.files._BLOCKS", 8)
    files = {
        f"texts/{file.relative_to(corpus).as_posix()}": file.read_bytes()
        for file in corpus.rglob("*")
        if file.is_file()
    }
    hub = DataHub(files | {"README.md": b"# Texts", ".gitattributes": b""})
    (tmp_path / "held.jsonl").write_bytes(lines_of(documents(4, 9)))
    with serving_data(hub, monkeypatch, tmp_path):
        yield hub


def data_of(path: object, **options: object) -> Component:
    sizes: dict[str, Any] = {"piece_kib": 1, "window_pieces": 3, "windows_ahead": 0}
    given = {"path": str(path), "val_path": "held.jsonl", "cache_gib": 0}
    return Component(class_path="Corpus", init_args=sizes | given | options)


def opened(data: Component, tokenizer: Tokenizer) -> Stream:
    stream = open_stream(CorpusSource.of(data), tokenizer, 24)
    stream.begin(7, 0, None)
    return stream


def taken(stream: Stream, first: int, last: int) -> list[list[int]]:
    samples = stream.gathered(np.arange(first, last))
    return [samples[place].ids.tolist() for place in range(last - first)]


def test_samples_and_fingerprint_are_those_of_the_same_files_on_disk(
    served: DataHub, corpus: Path, tokenizer: Tokenizer
) -> None:
    here = opened(data_of(corpus), tokenizer)
    there = opened(data_of(NAME, data_files="texts/**"), tokenizer)
    assert taken(there, 0, 150) == taken(here, 0, 150)
    assert there.fingerprint == here.fingerprint
    # Nothing but parts of files was fetched, all of one commit.
    assert len(served.ranges) == len(served.transfers)
    assert {commit for commit, _ in served.ranges} == {COMMIT}
    whole = opened(data_of(NAME), tokenizer)
    assert taken(whole, 0, 20) == taken(there, 0, 20)
    one = opened(data_of(NAME, data_files="texts/a.jsonl"), tokenizer)
    assert taken(one, 0, 5) == taken(opened(data_of(corpus / "a.jsonl"), tokenizer), 0, 5)


def test_what_the_hub_holds_later_changes_neither_a_run_nor_one_that_goes_on(
    served: DataHub, tokenizer: Tokenizer
) -> None:
    before = dict(served.files)
    data = data_of(NAME, revision="main")
    begun = pinned(data, None)
    assert begun["init_args"]["revision"] == COMMIT
    running = opened(begun, tokenizer)
    first = taken(running, 0, 10)
    changed = {name: content.replace(b"red", b"bed") for name, content in before.items()}
    served.push(OTHER_COMMIT, changed)
    rest = taken(running, 10, 150)
    resumed = opened(pinned(data, begun), tokenizer)
    assert taken(resumed, 0, 10) + taken(resumed, 10, 150) == first + rest
    assert resumed.fingerprint == running.fingerprint
    # Another run reads what is newest, also of a commit of its own among several sources.
    newest = pinned(data_of(NAME), None)
    assert newest["init_args"]["revision"] == OTHER_COMMIT
    sources = [{"path": NAME}, {"path": NAME, "revision": COMMIT}, {"path": "held.jsonl"}]
    several = Component(class_path="Corpus", init_args={"sources": sources})
    found = pinned(several, None)["init_args"]["sources"]
    assert [entry.get("revision") for entry in found] == [OTHER_COMMIT, COMMIT, None]


def test_a_private_data_set_needs_the_token_which_is_nowhere_shown(
    served: DataHub, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    served.gated = True
    with pytest.raises(UserError, match=key_words(f"{NAME} ... gated ... HF_TOKEN")):
        opened(data_of(NAME), tokenizer)
    with as_owner_of(TOKEN):
        stream = opened(data_of(NAME), tokenizer)
        fetched = taken(stream, 0, 10)
        assert len(fetched) == 10
    served.files = {"README.md": b""}  # a removed file
    with pytest.raises(UserError, match=key_words(f"{NAME}/texts/ ... not there")) as refused:
        taken(stream, 10, 150)
    assert TOKEN not in caplog.text + str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "some-org/nothing"}, "no data set some-org/nothing ... HF_TOKEN"),
        ({"revision": "v9"}, "data.revision is v9 ... main"),
        ({"data_files": "texts/a.json"}, "texts/a.json ... no such file ... texts/a.jsonl"),
        ({"data_files": "README.md"}, f"data.path ... {NAME} ... .jsonl"),
        ({"data_files": 3}, "data.data_files is 3 ... a text"),
    ],
)
def test_what_is_not_there_is_named(
    served: DataHub, options: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=key_words(words)):
        pinned(data_of(**{"path": NAME} | options), None)


def test_a_hub_of_another_package_may_lack_files() -> None:
    acme = Hub(name="acme", models="acme.models", data_sets="acme.data:Sums")
    with pytest.raises(UserError, match=key_words("owner/sums ... acme ... --data JSON")):
        acme.data_files(HubName(name="owner/sums"))


def test_a_server_without_ranges_is_refused_before_a_file_is_read(
    served: DataHub, tokenizer: Tokenizer
) -> None:
    served.gives_ranges = False
    with pytest.raises(UserError, match=key_words("ranges ... hf download ... HF_ENDPOINT")):
        taken(opened(data_of(NAME), tokenizer), 0, 1)


def test_a_hub_that_is_busy_for_a_while_is_asked_again(
    served: DataHub, corpus: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between attempts
    stream = opened(data_of(NAME), tokenizer)
    served.busy = 4
    assert taken(stream, 0, 20) == taken(opened(data_of(corpus), tokenizer), 0, 20)
    assert served.busy == 0
    served.busy = 10**6
    with pytest.raises(UserError, match=key_words(f"{NAME}/ ... HTTP 503 ... --resume auto")):
        taken(stream, 20, 150)


def test_a_hub_that_cannot_be_reached_is_one_error(
    served: DataHub, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between attempts
    words = key_words(f"{NAME} ... http://127.0.0.1:9 cannot be reached ... HF_ENDPOINT")
    stream = opened(data_of(NAME), tokenizer)
    nowhere = "http://127.0.0.1:9"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, nowhere)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    with pytest.raises(UserError, match=words):
        pinned(data_of(NAME), None)
    with pytest.raises(UserError, match=words):
        taken(stream, 0, 1)


@pytest.mark.slow
def test_a_run_goes_on_at_the_commit_with_which_it_began(
    served: DataHub, tiny_base: Path, tmp_path: Path
) -> None:
    """As commands start it, with the hub that the environment names."""
    served.gated = True
    of_hub = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HOME": str(tmp_path / "home")}
    out = tmp_path / "out"
    keys: dict[str, Any] = {
        "checkpoint_dir": tiny_base,
        "access_token": TOKEN,
        "data": "Corpus",
        "data__path": NAME,
        "data__val_path": "held.jsonl",
        "data__piece_kib": 1,
        "train__max_seq_length": 32,
        "train__global_batch_size": 4,
        "train__max_steps": 4,
        "eval__final_validation": "false",
        "eval__interval": 0,
        "eval__max_new_tokens": 0,
        "accelerator": "cpu",
        "precision": "32-true",
    }

    done = subprocess.run(
        command_line("finetune_full", *options(**keys, out_dir=out, stop_after=1)),
        env=command_environment() | of_hub,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "of version ccccccc" in done.stdout
    assert TOKEN not in done.stdout + done.stderr + (out / "recipe.yaml").read_text()
    assert {commit for commit, _ in served.ranges} == {COMMIT}
    served.push(OTHER_COMMIT, {"texts/other.jsonl": lines_of(documents(30, 3))})
    # The ranks of the resumed run read what its job says.
    again = recipe(out, "full", **keys, resume="auto")
    with prepare_run(again, ["ftkit"], overwrite=False, started_at_s=0.0, began_s=0.0) as job:
        assert job.start_step == 1
        assert job.recipe.data["init_args"]["revision"] == COMMIT
    assert f"revision: {COMMIT}" in (out / "recipe.yaml").read_text()
