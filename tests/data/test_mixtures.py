"""Data of several sources: what an epoch takes of each, and what is validated on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import key_words
from tiny import make_tokenizer

from ftkit.data.dataset import DataSets, load_data
from ftkit.data.samples.layout import FILLER, RankLayout
from ftkit.data.samples.loader import validation_loader
from ftkit.data.samples.sample_set import interleave
from ftkit.errors import UserError
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return Tokenizer(directory)


def write(file: Path, count: int) -> str:
    records = [
        {"instruction": f"{file.stem} {i}?", "output": "red " * (1 + i % 5)} for i in range(count)
    ]
    file.write_text(json.dumps(records))
    return str(file)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return [write(tmp_path / "some.json", 40), write(tmp_path / "others.json", 20)]


def load(tokenizer: Tokenizer, *sources: dict[str, Any], **options: Any) -> DataSets:
    init_args = {"sources": list(sources), "val_split_fraction": 0.2, **options}
    return load_data(Component(class_path="JSON", init_args=init_args), tokenizer, 200)


def test_a_weight_is_how_often_an_epoch_takes_the_samples(
    tokenizer: Tokenizer, paths: list[str]
) -> None:
    data = load(tokenizer, {"path": paths[0], "weight": 0.5}, {"path": paths[1], "weight": 3})
    assert data.names == ("some.json", "others.json")
    assert len(data.train) == 32 + 16
    assert data.takes == (16, 48)
    assert data.samples_per_epoch == 64
    assert set(data.repetitions[:32]) == {0.5} and set(data.repetitions[32:]) == {3.0}


@pytest.mark.extensions
def test_a_result_is_prompted_like_the_conversations_among_its_sources(
    tokenizer: Tokenizer, paths: list[str], tmp_path: Path
) -> None:
    chats = tmp_path / "chats.json"
    turns = [{"role": "user", "content": "red?"}, {"role": "assistant", "content": "blue"}]
    chats.write_text(json.dumps([{"messages": turns}] * 10))
    data = load(tokenizer, {"path": paths[0]}, {"path": str(chats), "chat_template": "zephyr"})
    assert data.prompt_source.source.name == "chats.json"
    assert data.prompt_source.renderer.template.name == "zephyr"
    assert data.stop_ids == {tokenizer.eos_id}


def test_samples_are_a_number_of_their_own(tokenizer: Tokenizer, paths: list[str]) -> None:
    data = load(tokenizer, {"path": paths[0], "samples": 5}, {"path": paths[1]})
    assert data.takes == (5, 16)


def test_a_weight_that_takes_nothing_is_refused(tokenizer: Tokenizer, paths: list[str]) -> None:
    with pytest.raises(UserError, match=key_words("others.json is 0.01 ... samples: 1")):
        load(tokenizer, {"path": paths[0]}, {"path": paths[1], "weight": 0.01})


def test_sources_of_weight_1_are_taken_in_the_order_of_one(
    tokenizer: Tokenizer, paths: list[str]
) -> None:
    data = load(tokenizer, {"path": paths[0], "weight": 1}, {"path": paths[1]})
    alone = load(tokenizer, {"path": paths[0]})
    for index in range(32):
        assert data.train[index].ids.tolist() == alone.train[index].ids.tolist()
    assert data.train.sources.tolist() == [0] * 32 + [1] * 16
    assert data.epochs(7).of(0).tolist() == load_order(48, 7)


def load_order(samples: int, seed: int) -> list[int]:
    from ftkit.data.samples.sampler import permutation

    return permutation(samples, seed, 0).tolist()


def test_the_fingerprint_covers_samples_and_what_an_epoch_takes(
    tokenizer: Tokenizer, paths: list[str]
) -> None:
    first, second = ({"path": path} for path in paths)
    one = load(tokenizer, first)
    same = [
        load(tokenizer, first, second),
        load(tokenizer, first | {"weight": 1.0}, second),
        load(tokenizer, first, second | {"samples": 16}),
    ]
    others = [
        load(tokenizer, second, first),
        load(tokenizer, first, second | {"weight": 2}),
        load(tokenizer, first | {"weight": 2}),
    ]
    assert len({data.fingerprint for data in same}) == 1
    assert len({data.fingerprint for data in (one, same[0], *others)}) == 5


def test_a_source_is_spread_evenly_over_the_validation_samples() -> None:
    groups, numbers = interleave([4, 0, 100, 1])
    assert sorted(zip(groups.tolist(), numbers.tolist(), strict=True)) == [
        (group, number) for group, size in ((0, 4), (2, 100), (3, 1)) for number in range(size)
    ]
    assert set(groups[:3]) == {0, 2, 3}
    for limit in range(10, 105):
        share = np.count_nonzero(groups[:limit] == 0) / limit
        assert share == pytest.approx(4 / 105, abs=1.5 / limit)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("limit", [2, 5, 12, 100])
def test_a_batch_of_a_validation_is_of_one_source(
    tokenizer: Tokenizer, paths: list[str], limit: int, world_size: int
) -> None:
    data = load(tokenizer, {"path": paths[0]}, {"path": paths[1]})
    assert len(data.val) == 12
    ranks = [
        list(
            validation_loader(
                data.val,
                {},
                limit,
                RankLayout(micro_batch_size=2, rank=rank, world_size=world_size),
            )
        )
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    labels = np.zeros(2, dtype=int)
    for batch in (batch for batches in ranks for batch in batches):
        labels[batch["source"]] += len(batch["labels"])
    chosen = data.val.sources[:limit]
    counts = data.val.label_counts[:limit]
    assert labels.tolist() == [counts[chosen == source].sum() for source in range(2)]
    assert min(labels) > 0


@pytest.mark.extensions
def test_questions_are_of_all_sources(tokenizer: Tokenizer, paths: list[str]) -> None:
    data = load(tokenizer, {"path": paths[0]}, {"path": paths[1], "prompt_style": "phi-2"})
    prompts = [question.instruction for question in data.questions]
    assert len(prompts) == len(data.questions) == 12
    assert {text.split()[0] for text in prompts[:2]} == {"some", "others"}
    texts = [tokenizer.decode(np_tensor(question.prompt)) for question in data.questions[:2]]
    assert sum(text.startswith("Instruct:") for text in texts) == 1


def np_tensor(ids: list[int]) -> Any:
    import torch

    return torch.tensor(ids)


def test_counts_are_known_for_each_source_and_in_all(
    tokenizer: Tokenizer, tmp_path: Path, paths: list[str]
) -> None:
    broken = tmp_path / "broken.json"
    records = [{"instruction": "?", "output": ""}] * 3 + [{"instruction": "?", "output": "!"}] * 7
    broken.write_text(json.dumps(records))
    data = load(tokenizer, {"path": paths[0]}, {"path": str(broken)})
    of_sources = [part.splits["train"].counts for part in data.parts]
    assert of_sources[0].skipped_empty_output == 0
    both = data.counts["train"].skipped_empty_output + data.counts["val"].skipped_empty_output
    assert both == 3
    assert data.counts["train"].records == sum(counts.records for counts in of_sources) == 40


def test_fillers_belong_to_no_source(tokenizer: Tokenizer, paths: list[str]) -> None:
    data = load(tokenizer, {"path": paths[0]}, {"path": paths[1]})
    with pytest.raises(IndexError):
        data.train[FILLER]


ROWS = [{"instruction": f"blue {i % 30}?", "output": "red"} for i in range(40)]


def as_file(file: Path, rows: list[dict[str, Any]]) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(json.dumps(row | {"id": i}) for i, row in enumerate(rows)))
    return str(file)


def tokens(data: DataSets, split: str) -> list[list[int]]:
    samples = data.train if split == "train" else data.val
    return [samples.sequences(i)[0].ids.tolist() for i in range(len(samples))]


def test_samples_are_taken_in_the_order_of_the_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"instruction": f"{'red ' * i}?", "output": "red"} for i in range(10)]
    paths = [as_file(tmp_path / f"{name}.jsonl", rows) for name in "ab"]
    sources = [{"path": path} for path in paths]
    data = load(tokenizer, *sources, shuffle=False, val_split_fraction=0.2)
    order = data.epochs(7)
    assert [order.of(epoch).tolist() for epoch in (0, 3)] == [list(range(16))] * 2
    lengths = [len(ids) for ids in tokens(data, "train")]
    assert lengths == [*sorted(lengths[:8]), *sorted(lengths[8:])]
    shuffled = load(tokenizer, *sources, val_split_fraction=0.2)
    assert sorted(map(len, tokens(shuffled, "train"))) == sorted(lengths)
    assert tokens(shuffled, "train") != tokens(data, "train")
    assert shuffled.epochs(7).of(0).tolist() != list(range(16))
    for key in ("weight", "samples"):
        with pytest.raises(UserError, match=key_words(f"data.shuffle ... data.sources[1].{key}")):
            load(tokenizer, sources[0], sources[1] | {key: 2}, shuffle=False)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("place", "written"),
    [("message.content ~ '; ' ~ message.input", "red; cat"), ("message.content", "red\n\ncat")],
)
def test_a_chat_template_has_the_input_apart_where_it_has_a_place_for_it(
    place: str, written: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = as_file(tmp_path / "a.jsonl", [{"instruction": "red", "input": "cat", "output": "the"}])
    template = (
        "{% for message in messages %}{% if message.role == 'user' %}Q {{ " + place + " }} A "
        "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    options = {"chat_template": template, "val_split_fraction": 0, "train_on": "all"}
    data = load(tokenizer, {"path": path}, **options)
    (ids,) = tokens(data, "train")
    assert f"Q {written} A the" in tokenizer.processor.decode(ids)


def test_of_equal_records_one_is_left_and_either_trained_or_validated_on(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = as_file(tmp_path / "rows.jsonl", ROWS)
    once = as_file(tmp_path / "once.jsonl", ROWS[:30])
    data = load(tokenizer, {"path": path}, drop_equal=True)
    assert "10 equal ones left out" in data.parts[0].part.description
    alone = load(tokenizer, {"path": once})
    for split in ("train", "val"):
        assert tokens(data, split) == tokens(alone, split)
    assert not {*map(tuple, tokens(data, "train"))} & {*map(tuple, tokens(data, "val"))}


def test_records_of_an_earlier_source_are_left_out_of_later_ones(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = as_file(tmp_path / "rows.jsonl", ROWS)
    more = as_file(tmp_path / "more.jsonl", [*ROWS, {"instruction": "new", "output": "red"}])
    sources = [{"path": rows}, {"path": rows}, {"path": more}]
    data = load(tokenizer, *sources, drop_equal=True)
    assert data.takes == (24, 0, 1)
    again = load(tokenizer, *sources, drop_equal=True)  # from the cache
    assert again.fingerprint == data.fingerprint
    assert sorted(data.epochs(1).of(0).tolist()) == list(range(25))
    assert data.epochs(1).sources(np.arange(25)).tolist() == [24, 0, 1]
    assert set(data.repetitions) == {1.0}
    as_file(tmp_path / "rows.jsonl", ROWS[:20])  # what is left of the others follows from it
    changed = load(tokenizer, *sources, drop_equal=True)
    assert changed.takes == (16, 0, 9)
    with pytest.raises(UserError, match=key_words("samples ... drop_equal")):
        load(tokenizer, {"path": rows}, {"path": rows, "samples": 3}, drop_equal=True)


def test_records_are_only_equal_if_they_are_rendered_alike(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = as_file(tmp_path / "rows.jsonl", ROWS)
    other = {"path": path, "prompt_style": "{instruction}"}
    data = load(tokenizer, {"path": path}, other, drop_equal=True)
    assert data.takes == (24, 24)


def test_validation_files_lose_what_is_trained_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    as_file(tmp_path / "both/train.jsonl", ROWS[:20])
    as_file(tmp_path / "both/val.jsonl", ROWS[15:])
    data = load(
        tokenizer, {"path": str(tmp_path / "both")}, drop_equal=True, val_split_fraction=None
    )
    assert (len(data.train), len(data.val)) == (20, 10)


def test_where_nothing_is_held_out_both_splits_have_the_same_records(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = as_file(tmp_path / "rows.jsonl", ROWS)
    data = load(tokenizer, {"path": path}, drop_equal=True, val_split_fraction=0)
    assert tokens(data, "train") == tokens(data, "val") and len(data.train) == 30
