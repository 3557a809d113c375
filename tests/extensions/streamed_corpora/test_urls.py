"""Corpora at urls: the same samples, read by ranges; an object that has changed is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Command
from corpora import documents, lines_of
from messages import key_words
from object_servers import BUCKET, Bucket, Proxy, az_server, gs_server, has_azurite, s3_server
from runs import options, rows

from ftkit.data.samples.stream import Stream
from ftkit.errors import UserError
from ftkit.extensions.streamed_corpora.source import CorpusSource
from ftkit.extensions.streamed_corpora.stream import open_stream
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["s3", "gs", "az"])
def storage(request: pytest.FixtureRequest) -> Iterator[Proxy]:
    module, serve = {
        "s3": ("moto", s3_server),
        "gs": ("gcp_storage_emulator", gs_server),
        "az": ("adlfs", az_server),
    }[request.param]
    pytest.importorskip(module, reason="the extra dev is not installed")
    if request.param == "az" and not has_azurite():
        pytest.skip("Azurite is not installed")
    with serve() as proxy:
        yield proxy


@pytest.fixture
def bucket(storage: Proxy, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The corpus in a bucket, beside a neighbour whose name begins alike."""
    for name, value in storage.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("ftkit.extensions.streamed_corpora.files._BLOCKS", 8)
    found = Bucket(storage)
    for file in corpus.rglob("*"):
        if file.is_file():
            found.write(f"texts/corpus/{file.relative_to(corpus).as_posix()}", file.read_bytes())
    found.write("texts/corpus/.hidden.jsonl", lines_of(["hidden"]))
    found.write("texts/corpus-2/x.jsonl", lines_of(["neighbour"]))
    storage.requests.clear()
    return found


def opened(path: object, tokenizer: Tokenizer, held: Path) -> Stream:
    options: dict[str, Any] = {"piece_kib": 1, "window_pieces": 3, "windows_ahead": 0}
    given = options | {"path": str(path), "val_path": str(held), "cache_gib": 0}
    stream = open_stream(
        CorpusSource.of(Component(class_path="Corpus", init_args=given)), tokenizer, 24
    )
    stream.begin(7, 0, None)
    return stream


def taken(stream: Stream, first: int, last: int) -> list[list[int]]:
    samples = stream.gathered(np.arange(first, last))
    return [samples[place].ids.tolist() for place in range(last - first)]


def test_samples_and_fingerprint_are_those_of_the_same_files_on_disk(
    bucket: Bucket, storage: Proxy, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    held = tmp_path / "held.jsonl"
    held.write_bytes(lines_of(documents(4, 9)))
    here = opened(corpus, tokenizer, held)
    there = opened(f"{storage.scheme}://{BUCKET}/texts/corpus", tokenizer, held)
    assert taken(there, 0, 150) == taken(here, 0, 150)
    assert there.fingerprint == here.fingerprint
    # Lines are read by ranges: no request asks for more than a piece and what its last line needs.
    header = "x-ms-range" if storage.scheme == "az" else "range"
    ranges = [
        {name.lower(): value for name, value in request.headers.items()}.get(header)
        for request in storage.requests
        if request.method == "GET" and request.path.endswith(("a.jsonl", "b.jsonl"))
        # Google's has requests for what it knows of an object, too.
        if storage.scheme != "gs" or request.path.startswith("/download/")
    ]
    assert ranges and all(ranges)
    one = opened(f"{storage.scheme}://{BUCKET}/texts/corpus/a.jsonl", tokenizer, held)
    assert taken(one, 0, 5) == taken(opened(corpus / "a.jsonl", tokenizer, held), 0, 5)


def test_an_object_that_is_written_anew_is_refused(
    bucket: Bucket, storage: Proxy, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    held = tmp_path / "held.jsonl"
    held.write_bytes(lines_of(documents(4, 9)))
    url = f"{storage.scheme}://{BUCKET}/texts/corpus"
    stream = opened(url, tokenizer, held)
    assert stream.fingerprint
    content = (corpus / "a.jsonl").read_bytes()
    changed = content.replace(b"red", b"bed")
    assert changed != content
    bucket.write("texts/corpus/a.jsonl", changed)
    with pytest.raises(UserError, match=key_words(f"{url}/a.jsonl ... changed")):
        taken(stream, 0, 200)
    bucket.write("texts/corpus/a.jsonl", content)


def test_a_url_without_documents_is_refused(
    bucket: Bucket, storage: Proxy, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    held = tmp_path / "held.jsonl"
    held.write_bytes(lines_of(documents(4, 9)))
    for place, words in [
        (f"{BUCKET}/nothing", "data.path ... nothing ... .jsonl"),
        (f"{BUCKET}/texts/*.jsonl", "without any of"),
    ]:
        with pytest.raises(UserError, match=key_words(words)):
            opened(f"{storage.scheme}://{place}", tokenizer, held)


# Outside the matrix: samples at urls above, and runs on several ranks in test_runs.py.
@pytest.mark.matrix
def test_a_run_on_several_ranks_learns_what_one_on_files_here_does(
    bucket: Bucket,
    storage: Proxy,
    corpus: Path,
    tiny_base: Path,
    ftkit: Command,
    tmp_path: Path,
) -> None:
    if storage.scheme != "s3":
        pytest.skip("what differs between providers is below what a run knows")
    held = tmp_path / "held.jsonl"
    held.write_bytes(lines_of(documents(4, 9)))
    keys: dict[str, Any] = {
        "checkpoint_dir": tiny_base,
        "data": "Corpus",
        "data__val_path": held,
        "data__piece_kib": 1,
        "data__window_pieces": 3,
        "train__max_seq_length": 32,
        "train__global_batch_size": 6,
        "train__max_steps": 5,
        "eval__interval": 0,
        "eval__final_validation": "false",
        "eval__max_new_tokens": 0,
        "accelerator": "cpu",
        "precision": "32-true",
    }
    url = f"s3://{BUCKET}/texts/corpus"
    here = ftkit("finetune_full", *options(**keys, data__path=corpus, out_dir=tmp_path / "here"))
    assert here.returncode == 0, here.stderr
    out = tmp_path / "there"
    words = options(**keys, data__path=url, out_dir=out, devices=2, stop_after=3)
    there = ftkit("finetune_full", *words)
    assert there.returncode == 0, there.stderr
    moved = options(**keys, data__path=corpus, out_dir=out, resume="auto")
    again = ftkit("finetune_full", *moved)
    assert again.returncode == 0, again.stderr
    assert len(rows(out)) == 5
    for mine, other in zip(rows(out), rows(tmp_path / "here"), strict=True):
        assert (mine["samples"], mine["tokens"]) == (other["samples"], other["tokens"])
        assert float(mine["loss"]) == pytest.approx(float(other["loss"]), rel=1e-5)
