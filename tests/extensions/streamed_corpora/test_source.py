"""Corpora as data of a recipe: what is refused, and what is known before a run."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from command import Command
from corpora import documents, lines_of, write_corpus
from messages import key_words

from ftkit.data.sources import check_data, check_run_length, data_source
from ftkit.errors import UserError
from ftkit.extensions.streamed_corpora.source import CorpusSource
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe import Component, Recipe


def component(**options: Any) -> Component:
    return Component(class_path="Corpus", init_args=options)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "data.path is missing ... --data.path"),
        ({"pth": "x"}, "data.pth ... --data.path"),
        ({"path": 3}, "data.path is 3"),
        ({"path": "corpsu"}, "data.path is corpsu ... corpus"),
        ({"path": "other"}, "data.path is the directory other ... .jsonl"),
        ({"path": "other/a.csv"}, "other/a.csv ... .jsonl"),
        ({"path": "nothing/*.jsonl"}, "nothing/*.jsonl"),
        (
            {"path": "corpus", "revision": "v1"},
            "data.revision is v1 ... corpus ... --data.revision",
        ),
        (
            {"sources": [{"path": "corpus", "data_files": "a.jsonl"}]},
            "data.sources[0].data_files is a.jsonl ... corpus",
        ),
        ({"path": "s3://bucket/*.jsonl"}, "s3://bucket/*.jsonl ... without any of"),
        ({"path": "http://host/texts"}, "http://host/texts ... http"),
        ({"path": "corpus", "piece_kib": 0}, "data.piece_kib is 0 ... 128"),
        ({"path": "corpus", "window_pieces": 1.5}, "data.window_pieces is 1.5 ... 16"),
        ({"path": "corpus", "windows_ahead": -1}, "data.windows_ahead is -1"),
        ({"path": "corpus", "cache_gib": -1}, "data.cache_gib is -1"),
        ({"path": "corpus", "join_documents": "yes"}, "data.join_documents is 'yes'"),
        ({"path": "corpus", "text_files": "words"}, "data.text_files is 'words' ... lines"),
        ({"path": "corpus", "val_path": "none.jsonl"}, "none.jsonl"),
        ({"sources": []}, "data.sources is []"),
        ({"sources": [{"weight": 1}]}, "data.sources[0] ... path"),
        ({"sources": [{"path": "corpus", "weight": 0}]}, "data.sources[0].weight is 0"),
        ({"sources": [{"path": "corpus", "samples": 5}]}, "data.sources[0] has no key samples"),
        ({"sources": [{"path": "corpus"}], "path": "corpus"}, "data.path is corpus ... sources"),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_read(
    options: dict[str, Any],
    words: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.csv").write_text("text\nred\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=key_words(words)):
        check_data(component(**options))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"train__max_steps": "null"}, "train.max_steps ... train.max_tokens ... Try"),
        ({"train__global_batch_tokens": 100}, "train.global_batch_tokens is 100"),
        ({"train__step_ends_with_epoch": "true"}, "train.step_ends_with_epoch is true"),
        ({"train__lr_warmup_fraction": 0.1}, "train.lr_warmup_fraction is 0.1"),
        ({"train__save_interval_epochs": 0.5}, "train.save_interval_epochs is 0.5"),
        ({"eval__interval_epochs": 0.5}, "eval.interval_epochs is 0.5"),
        (
            {"train__max_tokens": 100, "data__join_documents": "false"},
            "train.max_tokens is 100 ... data.join_documents",
        ),
        ({"data": "JSON", "train__max_tokens": 5}, "train.max_tokens is 5 ... JSON"),
    ],
)
def test_a_run_that_its_data_do_not_end_says_when_it_does(
    keys: dict[str, object], words: str, corpus: Path
) -> None:
    with pytest.raises(UserError, match=key_words(words)):
        check_run_length(recipe_of(corpus, **keys))


def recipe_of(corpus: Path, **keys: object) -> Recipe:
    given = {"data": "Corpus", "data__path": corpus, "train__max_steps": 5} | keys
    pairs = [(key.replace("__", "."), str(value)) for key, value in given.items()]
    return read_recipe([], [("checkpoint_dir", "base"), *pairs], method="full")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "red"}\n{"text": 3}\n', "a.jsonl, byte 16 ... text"),
        ("a.jsonl", b'{"text": "red"}\n{"txt": "x"}\n', "a.jsonl, byte 16 ... txt"),
        ("a.jsonl", b'{"text": "red"}\nred\n', "a.jsonl, byte 16 ... JSON"),
        ("a.jsonl", b'{"text": "red"}\n{"text": "\xff"}\n', "a.jsonl, byte 16 ... UTF-8"),
        ("a.jsonl", b'{"text": "red"}\n{"text": "\\ud800"}\n', "a.jsonl, byte 16 ... surrogate"),
    ],
)
def test_a_record_without_a_text_is_refused_or_left_out(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    held = tmp_path / "held.txt"
    held.write_text("red cat")
    options = {"path": str(tmp_path / name), "val_path": str(held)}
    with pytest.raises(UserError, match=key_words(words, "--data.skip_bad_documents true")):
        CorpusSource.of(component(**options)).corpora[0].read()
    part = CorpusSource.of(component(**options, skip_bad_documents=True)).corpora[0].read()
    assert part.train == [{"text": "red"}]
    assert "1 bad record" in part.description


def test_what_cannot_be_read_in_pieces_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.extensions.streamed_corpora.files._MOST_WHOLE_BYTES", 1000)
    (tmp_path / "a.txt").write_text("red " * 300)
    table = pyarrow.table({"content": ["red " * 300] * 3})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet", use_dictionary=False)
    for name, options, words in [
        ("a.txt", {}, "a.txt ... --data.text_files lines"),
        ("b.parquet", {}, "b.parquet has no column text ... --data.text_key content"),
        ("b.parquet", {"text_key": "content"}, "b.parquet ... row group ... row_group_size"),
    ]:
        source = CorpusSource.of(component(path=str(tmp_path / name), **options))
        with pytest.raises(UserError, match=key_words(words)):
            len(source.corpora[0].pieces)
    lines = CorpusSource.of(component(path=str(tmp_path / "a.txt"), text_files="lines"))
    with pytest.raises(UserError, match=key_words("data.val_pieces is 1", "--data.val_path")):
        len(lines.corpora[0].pieces)


def test_what_is_known_before_a_run_is_of_the_first_documents(tmp_path: Path) -> None:
    texts = documents(4000)
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines_of(texts))
    source = data_source(component(path=str(file), piece_kib=16, window_pieces=2))
    (one,) = source.parts()
    part = one.read()
    first = [record["text"] for record in part.train]
    assert first == texts[: len(first)] and len(first) < 2000
    assert part.val and not {record["text"] for record in part.val} & set(first)
    assert f"{len(first):,} documents" in part.description


@pytest.mark.slow
def test_a_plan_says_that_lengths_are_of_the_first_records(
    ftkit: Command, tiny_base: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines_of(documents(3000)))
    words = [
        *("finetune_full", "--checkpoint_dir", tiny_base, "--data", "Corpus"),
        *("--data.path", tmp_path / "a.jsonl", "--train.max_seq_length", "64"),
        *("--accelerator", "cpu", "--out_dir", tmp_path / "out"),
    ]
    refused = ftkit("plan", *words)
    assert refused.returncode == 2 and "train.max_steps" in refused.stderr
    planned = ftkit("plan", *words, "--train.max_tokens", "10000", "--format", "json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["longest_sample_tokens"] == 64 and plan["samples_per_epoch"] is None
    assert plan["steps"] == 10  # of 16 samples with 63 labels each
    shown = ftkit("plan", *words, "--train.max_tokens", "10000")
    assert "only the first records were looked at" in " ".join(shown.stdout.split())
