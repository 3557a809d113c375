"""Weights of turns, parts and characters reach tokens, samples, cache and batches."""

import json
from pathlib import Path
from typing import Any

import pytest
from chats import said, write_chat_tokenizer
from messages import message_of, says

from ftkit.data.cache import cache_directory
from ftkit.data.dataset import load_data
from ftkit.data.prepare import NO_WEIGHT, fit, make_renderer
from ftkit.data.records.record import Record
from ftkit.data.records.shapes import RecordReader, reader_of
from ftkit.data.rendering import Rendered
from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import JoinedSamples, Sample, SampleSet
from ftkit.data.spec import Part, Rules
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASKED = said("user", "Red?")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chats")))


def weighted(sample: Rendered, tokenizer: Tokenizer) -> str:
    """What carries loss of a sample, in brackets with its weight."""
    weights = sample.weights or (1.0,) * len(sample.trained)
    return "".join(
        f"{weight:g}⟦{tokenizer.processor.decode(sample.ids[a:b], skip_special_tokens=False)}⟧"
        for (a, b), weight in zip(sample.trained, weights, strict=True)
    )


def rendered(
    tokenizer: Tokenizer, messages: list[Record], tmp_path: Path, **rules: Any
) -> list[str]:
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE)
    (record,) = RecordReader().records([(1, {"messages": messages})], str)
    part = Part(
        name="mine",
        shape="messages",
        rules=Rules(**{"chat_template": str(template)} | rules),
        train=[record],
        val=[],
    )
    (rendering,) = make_renderer(part, tokenizer).render([record])
    assert rendering.refused is None
    return [weighted(sample, tokenizer) for sample in rendering.samples]


def parts(*texts: tuple[str, float | None]) -> list[Record]:
    return [
        {"type": "text", "text": text} | ({} if weight is None else {"weight": weight})
        for text, weight in texts
    ]


def span(first: int, last: int, **mark: Any) -> Record:
    return {"begin_offset": first, "end_offset": last, **mark}


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (said("assistant", "Red", weight=0.5), "0.5⟦Red<|end|>⟧"),
        (said("assistant", "Red", weight=1), "1⟦Red<|end|>⟧"),
        (
            said("assistant", parts(("Hm.", 0.25), (" Red", 2))),
            "0.25⟦Hm.⟧2⟦ Red⟧1⟦<|end|>⟧",
        ),
        (
            said("assistant", parts(("Hm.", 0), (" Red", 2), (" or", None)), weight=0.5),
            "2⟦ Red⟧0.5⟦ or<|end|>⟧",
        ),
        pytest.param(
            said("assistant", "Hm. Red", train_detail=[span(0, 3, weight=3)]),
            "3⟦Hm.⟧1⟦ Red<|end|>⟧",
            id="white space belongs to the word behind it",
        ),
        pytest.param(
            said("assistant", parts(("Hm.", 2), ("  ", 3), ("Red", 4))),
            "2⟦Hm.⟧4⟦  Red⟧1⟦<|end|>⟧",
            id="a part of white space",
        ),
        pytest.param(
            said("assistant", "the the", train_detail=[span(0, 0, weight=2), span(5, 6, weight=3)]),
            "2⟦the⟧1⟦ the<|end|>⟧",
            id="a token has the weight of its first character",
        ),
        pytest.param(
            said("assistant", "the the", train_detail=[span(4, 6, weight=2), span(2, 2, train=0)]),
            "2⟦ the⟧1⟦<|end|>⟧",
            id="but an untrained character takes its whole token",
        ),
    ],
)
def test_tokens_have_the_weights_of_their_text(
    turn: Record, expected: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert rendered(tokenizer, [ASKED, turn], tmp_path) == [expected]


@pytest.mark.extensions
def test_where_everything_is_trained_a_turn_can_weigh_more(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    turn = said("assistant", "Red", weight=2)
    found = rendered(tokenizer, [ASKED, turn, ASKED], tmp_path, train_on="all")
    question = "<|user|>Red?<|end|>"
    assert found == [f"1⟦{question}<|assistant|>⟧2⟦Red<|end|>⟧1⟦{question}⟧"]


@pytest.mark.extensions
def test_each_turn_of_a_conversation_that_is_split_keeps_its_weights(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    first = said("assistant", "Red", thinking="Hm", weight=0.5)
    second = said("assistant", parts(("No", 3), (", red", None)), thinking="Hm", weight=2)
    texts = rendered(
        tokenizer,
        [ASKED, first, ASKED, second],
        tmp_path,
        chat_template="qwen",
        train_on="assistant",
    )
    thought = "<think>\nHm\n</think>"
    assert texts == [
        f"0.5⟦{thought}\n\nRed<|im_end|>⟧",
        f"2⟦{thought}⟧3⟦\n\nNo⟧2⟦, red<|im_end|>⟧",
    ]


def test_cut_samples_keep_the_weights_of_what_is_left() -> None:
    whole = Rendered(list(range(10)), ((0, 3), (3, 6), (8, 10)), (2.0, 0.5, 3.0))
    assert [part.weights for part in fit(whole, 5, "truncate")] == [(2.0, 0.5)]
    assert [part.weights for part in fit(whole, 5, "split")] == [(2.0, 0.5), (0.5, 3.0), (3.0,)]


WEIGHTED = [
    Rendered([1, 2, 3, 4], ((0, 2), (2, 4)), (0.5, 2.0)),
    Rendered([5, 6, 7], ((1, 3),)),
]
PLAIN = [sample._replace(weights=()) for sample in WEIGHTED]


def test_samples_know_the_sums_of_their_weights() -> None:
    samples = SampleSet.of(WEIGHTED)
    assert samples.label_counts.tolist() == [3, 2], "nothing predicts the first token"
    assert samples.label_weights is not None
    assert samples.label_weights.tolist() == [0.5 + 2 * 2, 2]
    plain = SampleSet.of([PLAIN[1], PLAIN[0]])
    joined = JoinedSamples.one_after_another([samples, plain])
    assert joined.label_weights is not None
    assert joined.label_weights.tolist() == [4.5, 2, 2, 3]
    assert JoinedSamples.one_after_another([plain, plain]).label_weights is None


def test_weights_of_one_are_no_weights() -> None:
    ones = SampleSet.of([sample.times(1) for sample in PLAIN])
    assert ones.label_weights is None
    assert ones[0].weights is None
    assert ones.fingerprint == SampleSet.of(PLAIN).fingerprint
    others = [SampleSet.of([sample.times(w) for sample in PLAIN]).fingerprint for w in (0.5, 2)]
    assert len({ones.fingerprint, *others}) == 3


def test_a_batch_has_the_weight_of_each_label() -> None:
    samples = SampleSet.of(WEIGHTED)
    sequences: list[Sample | None] = [samples[0], None, samples[1]]
    for padding_free in (False, True):
        batch = collate(sequences, {}, weighted=True, padding_free=padding_free)
        assert batch["labels"].tolist() == [2, 3, 4, 6, 7]
        assert batch["weights"].tolist() == [0.5, 2, 2, 1, 1]
    assert collate([None], {}, weighted=True)["weights"].shape == (0,)
    assert "weights" not in collate(sequences, {})


@pytest.mark.extensions
def test_weights_of_records_and_turns_are_multiplied_and_cached(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "chats.jsonl"
    answers = [said("assistant", "Red", weight=w) for w in (1, 1, 0.5, 0.5)]
    of_records = [1, 4, 4, 0]
    rows = [
        {"messages": [ASKED, answer], "loss_weight": weight}
        for answer, weight in zip(answers, of_records, strict=True)
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, *rows]))
    settings = {"path": str(file), "chat_template": "zephyr", "val_split_fraction": 0.5}
    component: Component = {"class_path": "JSON", "init_args": settings}
    loaded = [load_data(component, tokenizer, 100) for _ in range(2)]
    found = [
        sorted(
            weight
            for split in (data.train, data.val)
            for index in range(len(split))
            for weight in (split[index].weights if split[index].weights is not None else [1])
        )
        for data in loaded
    ]
    assert found == [[1, 1, 2, 2, 4, 4]] * 2
    assert loaded[0].fingerprint == loaded[1].fingerprint
    counts = loaded[0].counts
    assert sum(one.refused.get(NO_WEIGHT, 0) for one in counts.values()) == 2
    assert list(cache_directory().glob("*/train/weights"))


def test_a_cache_of_records_without_weights_has_no_file_of_them(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "texts.json"
    file.write_text(json.dumps([{"prompt": "a", "completion": f"b{i}"} for i in range(30)]))
    data = load_data({"class_path": "JSON", "init_args": {"path": str(file)}}, tokenizer, 100)
    assert data.train.label_weights is None
    names = {path.name for path in cache_directory().glob("*/train/*")}
    assert "spans" in names and "weights" not in names


@pytest.mark.extensions
@pytest.mark.parametrize(
    "pair",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c", "loss_weight": 0.5},
        {"prompt": [ASKED], "chosen": [said("assistant", "b", weight=0.5)], "rejected": [ASKED]},
        {
            "prompt": [ASKED],
            "chosen": [said("assistant", "b")],
            "rejected": [said("assistant", parts(("b", 0.5), ("c", None)))],
        },
    ],
)
def test_pairs_have_no_weights(pair: Record) -> None:
    reader = reader_of(preference="pairs")
    said_ = message_of(reader.records, [(1, pair)], "a.jsonl, line {}".format)
    assert says(said_, "line 1 has weights ... Remove the weights")


@pytest.mark.extensions
def test_untrained_turns_of_pairs_are_no_weights() -> None:
    answer = said("assistant", parts(("b", 0), ("c", None)))
    pair = {"prompt": [ASKED], "chosen": [answer], "rejected": [said("assistant", "b", weight=1)]}
    assert len(reader_of(preference="pairs").records([(1, pair)], str)) == 1
