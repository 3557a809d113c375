"""Samples of a corpus, in the order of their definition, from any place and on any ranks."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import (
    Encode,
    documents,
    lines_of,
    mixed,
    permuted,
    pieces_of,
    samples_of,
    scattered,
    write_corpus,
)
from messages import key_words
from tiny import make_tokenizer

from ftkit.data.samples.layout import RankLayout
from ftkit.data.samples.loader import train_batches
from ftkit.data.samples.sampler import Position
from ftkit.data.samples.stream import Stream, StreamedOrder, StreamPosition
from ftkit.errors import UserError
from ftkit.extensions.streamed_corpora import stream as streams
from ftkit.extensions.streamed_corpora.files import Pieces
from ftkit.extensions.streamed_corpora.source import CorpusSource
from ftkit.extensions.streamed_corpora.stream import open_stream, shares
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.objectives.supervised import Supervised
from ftkit.recipe.recipe import Component

LENGTH, SEED = 24, 7
SMALL: dict[str, Any] = {"piece_kib": 1, "window_pieces": 3, "windows_ahead": 0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def encode(tokenizer: Tokenizer) -> Encode:
    return lambda text: tokenizer.encode_all([text], eos=True)[0]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def held(tmp_path: Path) -> Path:
    file = tmp_path / "held.jsonl"
    file.write_bytes(lines_of(documents(4, 9)))
    return file


def source_of(path: Path, **options: Any) -> CorpusSource:
    return CorpusSource.of(
        Component(class_path="Corpus", init_args={"path": str(path), **SMALL, **options})
    )


def opened(
    source: CorpusSource,
    tokenizer: Tokenizer,
    samples: int = 0,
    position: StreamPosition | None = None,
) -> Stream:
    stream = open_stream(source, tokenizer, LENGTH)
    stream.begin(SEED, samples, position)
    return stream


def taken(stream: Stream, first: int, last: int) -> list[list[int]]:
    """Samples [first, last), as steps of 5 take them."""
    found = []
    for start in range(first, last, 5):
        numbers = np.arange(start, min(start + 5, last))
        gathered = stream.gathered(numbers)
        for place, number in enumerate(numbers.tolist()):
            (sample,) = stream.sequences(number)
            assert sample.ids.tolist() == gathered[place].ids.tolist()
            assert sample.trained.tolist() == [[0, len(sample.ids)]]
            found.append(sample.ids.tolist())
    return found


def defined(corpus: Path, encode: Encode) -> Iterator[list[int]]:
    return samples_of(pieces_of(corpus, 1024), encode, LENGTH, 3, SEED)


@pytest.mark.parametrize(
    "options", [{}, {"windows_ahead": 1}, {"windows_ahead": 3}, {"cache_gib": 0}]
)
def test_samples_are_those_of_the_definition_with_any_workers_cold_or_cached(
    options: dict[str, Any], corpus: Path, held: Path, tokenizer: Tokenizer, encode: Encode
) -> None:
    expected = list(islice(defined(corpus, encode), 700))
    for _ in range(2):  # cold, then cached
        stream = opened(source_of(corpus, val_path=held, **options), tokenizer)
        assert taken(stream, 0, 700) == expected
        assert stream.epochs(700) > 2, "too few samples to cross epochs"


def test_pieces_that_are_held_out_are_validated_on_and_never_trained_on(
    corpus: Path, tokenizer: Tokenizer, encode: Encode
) -> None:
    source, pieces = source_of(corpus, val_pieces=2), pieces_of(corpus, 1024)
    (one,) = source.corpora
    assert len(one.held_out) == 2
    trained = [piece for number, piece in enumerate(pieces) if number not in one.held_out]
    expected = list(islice(samples_of(trained, encode, LENGTH, 3, SEED), 500))
    assert taken(opened(source, tokenizer), 0, 500) == expected
    part = one.read()
    assert [record["text"] for record in part.val] == [
        text for number in one.held_out for text in pieces[number]
    ]


def test_a_document_that_is_cut_by_itself_is_in_samples_of_its_own(
    corpus: Path, held: Path, tokenizer: Tokenizer, encode: Encode
) -> None:
    stream = opened(source_of(corpus, val_path=held, join_documents=False), tokenizer)
    wanted = Counter[tuple[int, ...]]()
    for text in (text for piece in pieces_of(corpus, 1024) for text in piece):
        ids = encode(text)
        wanted.update(
            tuple(ids[first : first + LENGTH]) for first in range(0, len(ids) - 1, LENGTH - 1)
        )
    found = taken(stream, 0, wanted.total())
    assert Counter(map(tuple, found)) == wanted
    assert stream.epochs(wanted.total()) == 1


def test_an_epoch_has_every_document_once_whatever_the_pieces(
    corpus: Path, held: Path, tokenizer: Tokenizer
) -> None:
    every = Counter(text for piece in pieces_of(corpus, 1024) for text in piece)
    for kib, window in ((1, 3), (2, 100), (4, 1)):
        source = source_of(corpus, val_path=held, piece_kib=kib, window_pieces=window)
        pieces = source.corpora[0].pieces
        found = Counter(text for number in range(len(pieces)) for text in pieces.texts(number))
        assert found == every


@pytest.mark.parametrize("size", [1, 2, 3, 7, 25, 1000])
def test_a_document_belongs_to_the_piece_that_it_begins_in(size: int, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        b"\n" + lines_of(["one", "two\u00e9", ""]) + b"\r\n" + lines_of(["x" * 50])[:-1]
    )
    corpus = source_of(file).corpora[0]
    pieces = Pieces(*corpus.found, corpus.reading(size))
    expected = [[text for text in piece if text] for piece in pieces_of(tmp_path, size)]
    assert [pieces.texts(number) for number in range(len(pieces))] == expected


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("micro_batch", "tokens"), [(1, None), (4, None), (8, 100)], ids=["one", "padded", "rows"]
)
def test_steps_take_the_same_samples_on_any_ranks(
    world_size: int,
    micro_batch: int,
    tokens: int | None,
    corpus: Path,
    held: Path,
    tokenizer: Tokenizer,
    encode: Encode,
) -> None:
    expected, steps, batch = defined(corpus, encode), 12, 7
    loaders = []
    for rank in range(world_size):
        stream = opened(source_of(corpus, val_path=held, windows_ahead=rank % 2), tokenizer)
        order = ordered(stream, steps * batch, batch, micro_batch, tokens, rank, world_size)
        loaders.append(iter(train_batches(stream, order, 0, steps)))
    for _ in range(steps):
        wanted = list(islice(expected, batch))
        found = Counter[tuple[int, ...]]()
        is_last = False
        while not is_last:
            for loader in loaders:
                micro = next(loader)
                is_last = micro["is_last_of_step"]
                assert micro["divisors"]["label_tokens"] == sum(len(one) - 1 for one in wanted)
                found.update(inputs_of(micro))
        assert found == Counter(tuple(one[:-1]) for one in wanted)


def ordered(
    stream: Stream,
    total: int,
    batch: int,
    micro_batch: int = 4,
    tokens: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    start: Position = Position(),  # noqa: B008 - frozen
) -> StreamedOrder:
    objective = Supervised()
    return StreamedOrder(
        stream,
        view=objective.view,
        amounts=objective.amounts,
        global_batch_size=batch,
        total_samples=total,
        layout=RankLayout(
            micro_batch_size=micro_batch,
            micro_batch_tokens=tokens,
            padding_free=tokens is not None,
            rank=rank,
            world_size=world_size,
        ),
        start=start,
    )


def inputs_of(micro: dict[str, Any]) -> list[tuple[int, ...]]:
    """Input tokens of each sample of a micro-batch, fillers left out."""
    flat, lengths = micro["input_ids"].flatten().tolist(), micro["lengths"]
    width = micro["input_ids"].shape[1]
    starts = (
        np.cumsum([0, *lengths]) if micro["sequence_lengths"] else np.arange(len(lengths)) * width
    )
    return [
        tuple(flat[start : start + length])
        for start, length, real in zip(starts, lengths, micro["is_real_sequence"], strict=False)
        if real
    ]


def test_a_run_goes_on_anywhere_after_it_has_tokenised_one_window(
    corpus: Path,
    held: Path,
    tokenizer: Tokenizer,
    encode: Encode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = source_of(corpus, val_path=held, cache_gib=0)
    expected = list(islice(defined(corpus, encode), 600))
    stream = opened(source, tokenizer)
    read: list[int] = []
    texts = Pieces.texts

    def noted(self: Pieces, number: int) -> list[str]:
        read.append(number)
        return texts(self, number)

    monkeypatch.setattr(Pieces, "texts", noted)
    for samples in (0, 1, 5, 60, 200, 333, 500):
        taken(stream, 0 if not samples else samples - 1, samples)
        position = stream.position(samples)
        read.clear()
        later = opened(source_of(corpus, val_path=held, cache_gib=0), tokenizer, samples, position)
        assert taken(later, samples, samples + 1) == expected[samples : samples + 1]
        assert len(read) <= 3
        assert taken(later, samples + 1, samples + 90) == expected[samples + 1 : samples + 90]
        assert later.position(samples + 90) == opened_at(source, tokenizer, samples + 90)


def opened_at(source: CorpusSource, tokenizer: Tokenizer, samples: int) -> StreamPosition:
    stream = opened(source, tokenizer)
    taken(stream, 0, samples)
    return stream.position(samples)


def test_several_corpora_have_their_shares_in_every_thousand_samples(
    tmp_path: Path, held: Path, tokenizer: Tokenizer, encode: Encode
) -> None:
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        (tmp_path / f"{name}.jsonl").write_bytes(lines_of(documents(60, seed)))
    weights = {"a": 3.0, "b": 1.0, "c": 0.01}
    entries = [
        {"path": str(tmp_path / f"{name}.jsonl"), "weight": weight, "val_path": str(held)}
        for name, weight in weights.items()
    ]
    source = CorpusSource.of(
        Component(class_path="Corpus", init_args={"sources": entries, **SMALL})
    )
    counts = shares(list(weights.values()))
    assert sum(counts) == 1000 and counts == [748, 249, 3]
    streams = []
    for number, name in enumerate(weights):
        folder = tmp_path / f"only-{name}"
        folder.mkdir()
        (folder / "x.jsonl").write_bytes((tmp_path / f"{name}.jsonl").read_bytes())
        streams.append(samples_of(pieces_of(folder, 1024), encode, LENGTH, 3, SEED, number))
    expected = list(islice(mixed(streams, counts, SEED), 2100))
    stream = opened(source, tokenizer)
    assert taken(stream, 0, 2100) == expected
    assert stream.sources(np.arange(1000)).tolist() == counts
    later = opened(source, tokenizer, 2050, stream.position(2050))
    assert taken(later, 2050, 2100) == expected[2050:]


def test_a_piece_that_has_changed_is_refused(
    corpus: Path, held: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a large corpus, of which hardly anything is sampled.
    monkeypatch.setattr("ftkit.extensions.streamed_corpora.files._BLOCK_BYTES", 1)
    monkeypatch.setattr("ftkit.extensions.streamed_corpora.files._BLOCKS", 1)
    file = corpus / "a.jsonl"
    content = file.read_bytes()
    taken(opened(source_of(corpus, val_path=held, cache_gib=0), tokenizer), 0, 600)
    file.write_bytes(content.replace(b"red", b"bed"))
    with pytest.raises(UserError, match=key_words("a.jsonl ... changed")):
        taken(opened(source_of(corpus, val_path=held, cache_gib=0), tokenizer), 0, 600)
    file.write_bytes(content + b"\n")
    stream = opened(source_of(corpus, val_path=held, cache_gib=0), tokenizer)
    file.write_bytes(content)
    with pytest.raises(UserError, match=key_words("a.jsonl ... size")):
        taken(stream, 0, 600)


def test_a_checkpoint_of_other_documents_is_refused(
    corpus: Path, held: Path, tokenizer: Tokenizer, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = opened(source_of(corpus, val_path=held), tokenizer)
    taken(stream, 0, 40)
    position = stream.position(40)
    (corpus / "a.jsonl").write_bytes((corpus / "a.jsonl").read_bytes().replace(b"red", b"bed"))
    (corpus / "b.jsonl").write_bytes((corpus / "b.jsonl").read_bytes().replace(b"red", b"bed"))
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(own_cache / "of-another-machine"))
    later = opened(source_of(corpus, val_path=held), tokenizer, 40, position)
    with pytest.raises(UserError, match=key_words("changed since the checkpoint")):
        taken(later, 40, 41)


def test_a_damaged_piece_of_the_cache_is_made_again(
    corpus: Path, held: Path, tokenizer: Tokenizer, own_cache: Path
) -> None:
    expected = taken(opened(source_of(corpus, val_path=held), tokenizer), 0, 100)
    files = sorted(own_cache.rglob("*.tokens"))
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content[: len(content) // 2] if file == files[0] else content)
    assert taken(opened(source_of(corpus, val_path=held), tokenizer), 0, 100) == expected


def test_the_cache_keeps_to_its_bound(
    corpus: Path, held: Path, tokenizer: Tokenizer, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.extensions.streamed_corpora.token_cache._BETWEEN_LOOKS_BYTES", 1)
    taken(opened(source_of(corpus, val_path=held, cache_gib=6000 / 2**30), tokenizer), 0, 700)
    sizes = [file.stat().st_size for file in own_cache.rglob("*.tokens")]
    assert sizes and sum(sizes) <= 6000


def test_a_fingerprint_says_what_decides_the_samples(
    corpus: Path, held: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def fingerprint(path: Path = corpus, **options: Any) -> str:
        return open_stream(
            source_of(path, **{"val_path": held} | options), tokenizer, LENGTH
        ).fingerprint

    known = fingerprint()
    assert known == fingerprint(windows_ahead=2, cache_gib=1)
    assert known == fingerprint(corpus.rename(tmp_path / "moved"))
    moved = tmp_path / "moved"
    others = [{"piece_kib": 2}, {"window_pieces": 4}, {"join_documents": False}, {"val_path": None}]
    found = {known, *(fingerprint(moved, **other) for other in others)}
    content = (moved / "b.jsonl").read_bytes()
    (moved / "b.jsonl").write_bytes(content[:-3] + b"x" + content[-2:])
    found.add(fingerprint(moved))
    (moved / "b.jsonl").rename(moved / "g.jsonl")
    found.add(fingerprint(moved))
    assert len(found) == 7


@pytest.mark.parametrize("count", [2, 3, 17, 1000, 4096])
def test_of_too_many_pieces_an_order_is_computed_place_by_place(count: int) -> None:
    found = streams.scattered(np.arange(count), count, SEED, 1, 0)
    assert sorted(found.tolist()) == list(range(count))
    assert found.tolist() == [scattered(place, count, SEED, 1, 0) for place in range(count)]
    assert (
        streams.scattered(np.arange(count)[-2:], count, SEED, 1, 0).tolist() == found.tolist()[-2:]
    )
    if count > 100:
        assert abs(np.corrcoef(np.arange(count), found)[0, 1]) < 0.1
        assert found.tolist() != streams.scattered(np.arange(count), count, SEED, 2, 0).tolist()


def test_an_epoch_of_too_many_pieces_has_each_document_once(
    corpus: Path,
    held: Path,
    tokenizer: Tokenizer,
    encode: Encode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "_MOST_LISTED", 4)
    monkeypatch.setattr(
        "corpora.permuted",
        lambda number, seed, *key: (
            [scattered(place, number, seed, *key) for place in range(number)]
            if len(key) == 2
            else permuted(number, seed, *key)
        ),
    )
    expected = list(islice(defined(corpus, encode), 300))
    assert taken(opened(source_of(corpus, val_path=held), tokenizer), 0, 300) == expected
