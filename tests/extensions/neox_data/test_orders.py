"""The order of GPT-NeoX's samples: its own code, a plain definition and ftkit agree."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_checkpoints import BASE
from messages import says
from neox_orders import (
    CASES,
    CORPORA,
    EOD,
    ORDERS,
    options_of,
    plain_order,
    taken_by_neox,
)

from ftkit.data.dataset import DataSets, load_data
from ftkit.data.samples.layout import RankLayout
from ftkit.data.samples.sampler import ElasticOrder, Position
from ftkit.errors import UserError
from ftkit.extensions.neox_data import samples as samples_module
from ftkit.extensions.neox_data.index import make_index, split_documents
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component

MOST_TOKENS = 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def loaded(**options: Any) -> DataSets:
    data = Component(class_path="NeoX", init_args=options)
    return load_data(data, Tokenizer(BASE), MOST_TOKENS)


def tokens_of(data: DataSets) -> list[list[int]]:
    return [data.train[number].ids.tolist() for number in range(len(data.train))]


@pytest.mark.parametrize("case", CASES)
def test_a_plain_definition_gives_the_samples_of_gpt_neox(case: str) -> None:
    assert plain_order(options_of(case)) == taken_by_neox(case)["samples"].tolist()


@pytest.mark.parametrize("case", CASES)
def test_samples_are_those_of_gpt_neox_in_its_order(case: str) -> None:
    data = loaded(**options_of(case))
    theirs = taken_by_neox(case)["samples"].tolist()
    assert tokens_of(data) == theirs
    assert data.samples_per_epoch == len(theirs)
    epochs = data.epochs(seed=5)
    assert [epochs.of(epoch).tolist() for epoch in (0, 3)] == [[*range(len(theirs))]] * 2
    assert set(data.train.lengths.tolist()) == {CASES[case]["seq_length"]}
    assert [len(data.val), len(data.val[0].ids)] > [0, CASES[case]["seq_length"]]


@pytest.mark.parametrize("case", CASES)
def test_the_index_is_that_of_gpt_neox_s_files(case: str) -> None:
    theirs, settings = taken_by_neox(case), CASES[case]
    shared = {key: settings[key] for key in ("seq_length", "seed")}
    found = 0
    for name in theirs:
        if not name.endswith("_doc_idx") or "_train" not in name:
            continue
        begin = name.removesuffix("_doc_idx")
        corpus, samples = begin[0], begin.partition("indexmap_")[2].partition("ns_")[0]
        sizes = np.fromfile(CORPORA / f"{corpus}.idx", "<i4", offset=34)
        sizes = sizes[: int(np.fromfile(CORPORA / f"{corpus}.idx", "<u8", 1, offset=18)[0])]
        documents = range(len(sizes))
        if "split" in settings:
            shares = [float(one) for one in settings["split"].replace("/", ",").split(",")]
            documents = split_documents(shares, len(sizes))[0]
        count = None if samples == "None" else int(samples)
        index = make_index(sizes, documents, samples=count, **shared)
        assert index is not None
        for part, array in zip(("doc_idx", "sample_idx", "shuffle_idx"), index, strict=True):
            expected = theirs[f"{begin}_{part}"]
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)
        found += 1
    assert found == len(settings.get("train_data_paths", [1]))


def test_documents_are_split_as_gpt_neox_does() -> None:
    for split, size, (_, *ends) in json.loads((ORDERS / "splits.json").read_text()):
        shares = [float(share) for share in split.replace("/", ",").split(",")]
        parts = split_documents(shares, size)
        assert [part.stop for part in parts] == ends, split


@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_where_gpt_neox_does(case: str) -> None:
    data, settings = loaded(**options_of(case)), CASES[case]
    places = [name for name in taken_by_neox(case) if name.startswith("from_")]
    assert places
    for name in places:
        iteration = int(name.split("_")[1])
        at = iteration * settings["train_batch_size"] % data.samples_per_epoch
        assert tokens_of(data)[at:] == taken_by_neox(case)[name].tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_steps_take_the_same_samples_on_any_ranks_and_go_on_at_the_beginning(
    ranks: int, micro_batch_size: int
) -> None:
    data, theirs = loaded(**options_of("one")), taken_by_neox("one")["samples"].tolist()
    batch, start, steps = 6, 11, 2 + len(theirs) // 6
    taken: list[list[list[int]]] = [[] for _ in range(steps)]
    for rank in range(ranks):
        order = ElasticOrder(
            data.train.lengths,
            {"label_tokens": data.train.label_counts},
            epochs=data.epochs(seed=0),
            global_batch_size=batch,
            total_samples=(start + steps) * batch,
            layout=RankLayout(micro_batch_size=micro_batch_size, rank=rank, world_size=ranks),
            start=Position(step=start, samples=start * batch),
        )
        for step in range(steps):
            for numbers in order.micro_batches(start + step):
                taken[step] += [data.train[n].ids.tolist() for n in numbers if n >= 0]
    for step, samples in enumerate(taken):
        first = (start + step) * batch
        expected = [theirs[place % len(theirs)] for place in range(first, first + batch)]
        assert sorted(samples) == sorted(expected)


def test_no_loss_is_given_to_the_token_behind_the_end_of_a_document() -> None:
    for case in CASES:
        data = loaded(**options_of(case), eod_mask_loss=True)
        for number in range(len(data.train)):
            sample = data.train[number]
            carries = [False] * len(sample.ids)
            for first, end in sample.trained.tolist():
                carries[first:end] = [True] * (end - first)
            assert carries[1:] == (sample.ids[:-1] != EOD).tolist()
            assert data.train.label_counts[number] == sum(carries)
        assert data.fingerprint != loaded(**options_of(case)).fingerprint


@pytest.mark.parametrize("ending", ["_packedpi_ac", ""])
def test_an_index_that_gpt_neox_kept_beside_the_corpus_is_taken(
    tmp_path: Path, ending: str
) -> None:
    corpora = tmp_path / "corpora"
    shutil.copytree(CORPORA, corpora)
    theirs = taken_by_neox("one")
    made = loaded(**options_of("one", corpora))
    for name in theirs:
        if "indexmap" in name:
            # Not as it would be made: the last sample comes first.
            array = theirs[name][::-1] if name.endswith("shuffle_idx") else theirs[name]
            np.save(corpora / name.replace("_packedpi_ac", ending), array)
    data = loaded(**options_of("one", corpora))
    assert tokens_of(data)[0] != tokens_of(made)[0]
    assert data.fingerprint != made.fingerprint
    (name,) = (name for name in theirs if "_train_" in name and name.endswith("shuffle_idx"))
    kept = corpora / f"{name.replace('_packedpi_ac', ending)}.npy"
    np.save(kept, theirs[name].astype(np.int64))  # the same order, in another type
    assert loaded(**options_of("one", corpora)).fingerprint == made.fingerprint

    def shorter() -> None:
        np.save(kept, np.load(kept)[:-1])

    def no_header() -> None:
        kept.write_bytes(kept.read_bytes().replace(b"}", b"|", 1))

    for damage in (shorter, no_header):
        damage()
        with pytest.raises(UserError) as refused:
            loaded(**options_of("one", corpora))
        assert says(str(refused.value), kept.name.replace("shuffle", "doc"), "Delete")


def test_an_index_is_made_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    before = tokens_of(loaded(**options_of("mixed"), eod_mask_loss=True))
    assert [*cache.glob("neox/*/*.npy")]

    def unwanted(*arguments: Any, **options: Any) -> None:
        raise AssertionError

    for file in cache.glob("neox/*/order.npy"):  # what is damaged is made anew
        file.write_bytes(file.read_bytes().replace(b"}", b"|", 1))
    assert tokens_of(loaded(**options_of("mixed"), eod_mask_loss=True)) == before

    monkeypatch.setattr(samples_module, "make_index", unwanted)
    monkeypatch.setattr(samples_module, "mix", unwanted)
    monkeypatch.setattr(samples_module, "_places_of", unwanted)
    assert tokens_of(loaded(**options_of("mixed"), eod_mask_loss=True)) == before


def test_data_whose_tokens_differ_are_others(tmp_path: Path) -> None:
    corpora = tmp_path / "corpora"
    shutil.copytree(CORPORA, corpora)
    assert loaded(**options_of("one", corpora)).fingerprint == (
        before := loaded(**options_of("one")).fingerprint
    )
    tokens = bytearray((corpora / "a.bin").read_bytes())
    tokens[0] ^= 1
    (corpora / "a.bin").write_bytes(tokens)
    assert loaded(**options_of("one", corpora)).fingerprint != before
    assert loaded(**options_of("one") | {"seed": 8}).fingerprint != before


def test_validation_measures_training_samples_where_no_others_are(tmp_path: Path) -> None:
    data = loaded(**options_of("one") | {"split": "1"})
    assert len(data.val) == len(data.train)
    assert says(data.parts[0].part.summary, "to validate on")


def overwritten(name: str, at: int, content: bytes) -> Callable[[Path], None]:
    def change(corpora: Path) -> None:
        file = corpora / name
        before = file.read_bytes()
        file.write_bytes(before[:at] + content + before[at + len(content) :])

    return change


def shortened(name: str) -> Callable[[Path], None]:
    def change(corpora: Path) -> None:
        file = corpora / name
        file.write_bytes(file.read_bytes()[:-4])

    return change


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Path], None] | None, tuple[str, ...]]] = {
    "older kind": ({}, overwritten("a.idx", 0, b"TNTIDX\0\0"), ("a.idx", "TNTIDX", "mmap")),
    "other file": ({}, overwritten("a.idx", 0, b"{}"), ("a.idx", "damaged")),
    "rewards": ({}, overwritten("a.idx", 17, b"\6"), ("a.idx", "float32")),
    "type": ({}, overwritten("a.idx", 17, b"\x63"), ("a.idx", "99")),
    "size": ({}, overwritten("a.idx", 34, b"\xff" * 4), ("a.idx", "damaged")),
    "place": ({}, overwritten("a.idx", 34 + 4 * 37, b"\xfe" + b"\xff" * 5), ("a.bin", "damaged")),
    "cut index": ({}, shortened("a.idx"), ("a.idx", "damaged")),
    "cut tokens": ({}, shortened("a.bin"), ("a.bin", "damaged")),
    "foreign token": ({}, overwritten("a.bin", 0, b"\x18\0"), ("a.bin", "24", "checkpoint_dir")),
    "packing": ({"pack_impl": "unpacked"}, None, ("pack_impl", "unpacked", "packed")),
    "labels": ({"train_label_data_paths": ["l"]}, None, ("train_label_data_paths", "JSON")),
    "reward data": ({"train_reward_data_paths": ["l"]}, None, ("train_reward_data_paths",)),
    "pairs": ({"dataset_impl": "pairwise"}, None, ("dataset_impl", "gpt2")),
    "missing": ({"data_path": "nowhere/corpus"}, None, ("data_path", "corpus.idx")),
    "ending": ({"data_path": "nowhere/x.bin"}, None, ("data_path", "nowhere/x")),
    "both": ({"train_data_paths": ["x"]}, None, ("data_path", "train_data_paths")),
    "neither": ({"data_path": None}, None, ("data_path", "train_data_paths")),
    "length": ({"seq_length": None}, None, ("seq_length",)),
    "batch": ({"train_batch_size": None}, None, ("train_batch_size",)),
    "too long": ({"seq_length": 65}, None, ("seq_length", "65", "train.max_seq_length")),
    "no sample": ({"seq_length": 60, "split": "1,99"}, None, ("seq_length", "60")),
    "large batch": ({"train_batch_size": 999, "train_iters": None}, None, ("999",)),
    "parts": ({"gradient_accumulation_steps": 4}, None, ("6", "4", "train_batch_size")),
    "seed": ({"seed": -1}, None, ("seed", "-1")),
    "split": ({"split": "all"}, None, ("split", "all")),
    "unknown": ({"seq_lengths": 8}, None, ("seq_lengths", "seq_length")),
    "weights": ({"train_data_weights": [1.0]}, None, ("train_data_weights",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, damage, words = REFUSED[case]
    corpora = tmp_path / "corpora"
    shutil.copytree(CORPORA, corpora)
    if damage is not None:
        damage(corpora)
    with pytest.raises(UserError) as refused:
        loaded(**options_of("one", corpora) | changes)
    assert says(str(refused.value), *words)
