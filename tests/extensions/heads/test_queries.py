"""Queries with their documents, as other programs write them, and those that are refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from messages import message_of, says
from tiny import make_llama
from tokenizers.processors import TemplateProcessing

from ftkit.data.dataset import load_data
from ftkit.data.records.shapes import reader_of
from ftkit.data.rendering import TextRenderer
from ftkit.data.samples.sample_set import SampleSet
from ftkit.data.sources import data_source
from ftkit.extensions.heads.rendering import QueryRenderer
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def preference(**options: Any) -> str:
    return f"queries {json.dumps(options)}"


SWIFT = {
    "messages": said("user", "q"),
    "positive_messages": [said("assistant", "p")],
    "negative_messages": [said("assistant", "n"), said("assistant", "m")],
}
WHOLE = ["q", "p", "n", "m"]
LISTS: list[tuple[dict[str, Any], dict[str, str], str]] = [
    # sentence-transformers
    ({"anchor": "q", "positive": "p", "negative": ["n", "m"]}, {}, "anchor, positive, negative"),
    (
        {"query": "q", "positive": "p", "negative_10": "m", "negative_9": "n", "id": 3},
        {},
        "query, positive, negative_9, negative_10",
    ),
    (
        {"question": "q", "answer": "p", "negative_1": "n", "negative_2": "m", "negative_3": ""},
        {},
        "question, answer, negative_1, negative_2",
    ),
    # FlagEmbedding; a score is one of mining
    ({"query": "q", "pos": ["p"], "neg": ["n", "m"], "score": 3}, {}, "query, pos, neg"),
    # ms-swift
    (
        {"query": "q", "response": "p", "rejected_response": ["n", "m"]},
        {},
        "query, response, rejected_response",
    ),
    # any other names; those beside them do not count
    (
        {"q": "q", "d": "p", "hard": ["n", None, "m"], "document": "x", "question": "y"},
        {"query": "q", "positive": "d", "negative": "hard"},
        "q, d, hard",
    ),
]
CHATS: list[dict[str, Any]] = [SWIFT, {"query": "q", **SWIFT} | {"messages": None}]


@pytest.mark.parametrize(("row", "columns", "keys"), LISTS)
def test_texts_of_a_query_and_its_documents_are_read(
    row: dict[str, Any], columns: dict[str, str], keys: str
) -> None:
    reader = reader_of(columns, preference=preference())
    (record,) = reader.records([(1, row)], str)
    assert record == {"texts": [{"text": text} for text in WHOLE]}
    form = reader.finish("data")
    assert form.shape == "text" and form.counted(2) == f"2 groups of documents ({keys})"
    assert {*reader.unused.names} == row.keys() - {*keys.split(", "), "negative_3"}
    of_one = reader_of(columns, preference=preference(negatives=1, labelled=False, together=True))
    pairs = [{"text": "q", "text_pair": one} for one in ("p", "n")]
    assert of_one.records([(1, row)], str) == [{"texts": pairs}]


@pytest.mark.parametrize("row", CHATS)
def test_conversations_of_a_query_and_its_documents_are_read(row: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    reader = reader_of(preference=preference())
    (record,) = reader.records([(1, row | {"tools": tools})], str)
    assert [one["messages"][-1]["content"] for one in record["texts"]] == WHOLE
    assert all(one["tools"] for one in record["texts"]) and not reader.unused.names
    assert reader.finish("data").shape == "messages"
    together = reader_of(preference=preference(together=True))
    (record,) = together.records([(1, row)], str)
    expected = [[*said("user", "q"), *said("assistant", text)] for text in WHOLE[1:]]
    found = [
        [{key: turn[key] for key in ("role", "content")} for turn in one["messages"]]
        for one in record["texts"]
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("row", "columns", "target"),
    [
        ({"sentence1": "q", "sentence2": "p", "label": 1}, {}, 1),
        ({"sentence1": "q", "sentence2": "p", "score": 0.25}, {}, 0.25),
        ({"query": "q", "document": "p", "label": False}, {}, 0),
        ({"query": "q", "passage": "p", "is_it": 1.0}, {"label": "is_it"}, 1),
        (SWIFT | {"negative_messages": [], "label": 0.5}, {}, 0.5),
    ],
)
@pytest.mark.parametrize("labelled", [None, True])
def test_a_label_beside_one_document_is_the_target(
    row: dict[str, Any], columns: dict[str, str], target: float, labelled: bool | None
) -> None:
    reader = reader_of(columns, preference=preference(labelled=labelled))
    (record,) = reader.records([(1, row)], str)
    assert record["target"] == [target] and len(record["texts"]) == 2
    assert not reader.unused.names


PLAIN = {"query": "q", "positive": "p", "negative": "n"}


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({"query": "q"}, {}, ["no positive", "--data.columns.positive"]),
        ({"positive": "p"}, {}, ["no query", "--data.columns.query"]),
        ({"query": "q", "positive": ""}, {}, ["no positive"]),
        (PLAIN | {"anchor": "r"}, {}, ["query", "anchor", "--data.columns.query"]),
        (PLAIN | {"positive": ["p", "r"]}, {}, ["2 documents", "a record for each"]),
        (PLAIN | {"query": 3}, {}, ["query", "a number"]),
        (PLAIN | {"negative": 5}, {}, ["negative", "5", "list of texts"]),
        (PLAIN | {"negative": ["n", 5]}, {}, ["negative", "5"]),
        (PLAIN, {"negatives": 2}, ["one negative", "2", "--objective.negatives 1"]),
        ({"query": "q", "positive": "p"}, {"negatives": 1}, ["no negatives", "skip_bad_records"]),
        (PLAIN | {"label": 0}, {"labelled": False}, ["label", "learn from labels"]),
        (PLAIN | {"label": 1}, {}, ["label", "negatives"]),
        (
            {"sentence1": "q", "sentence2": "p", "score": 1},
            {"labelled": False},
            ["score", "learn from labels"],
        ),
        ({"query": "q", "positive": "p"}, {"labelled": True}, ["no label", "0", "1"]),
        ({"query": "q", "positive": "p", "label": 2}, {"labelled": True}, ["label is 2", "0 to 1"]),
        ({"query": "q", "positive": "p", "label": "a"}, {"labelled": True}, ['label is "a"']),
        (PLAIN | {"loss_weight": 0.5}, {}, ["weights"]),
        (SWIFT | {"images": ["a.png"]}, {}, ["images"]),
        (SWIFT | {"messages": said("user", "<image>"), "images": ["a.png"]}, {}, ["images"]),
        (
            SWIFT | {"positive_messages": [[*said("system", "s"), *said("user", "p")]]},
            {"together": True},
            ["system"],
        ),
        (SWIFT | {"negative_messages": ["n"]}, {}, ["texts", "messages"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {}, ["--objective dpo"]),
    ],
)
def test_records_that_say_something_else_are_refused(
    row: dict[str, Any], options: dict[str, Any], words: list[str]
) -> None:
    reader = reader_of(preference=preference(**options))
    assert says(message_of(reader.records, [(1, row)], str), *words)


def test_records_of_two_kinds_are_sources_of_their_own() -> None:
    reader = reader_of(preference=preference())
    assert says(message_of(reader.records, [(1, PLAIN), (2, SWIFT)], str), "data.sources")


def test_a_record_without_weight_stays_without() -> None:
    reader = reader_of(preference=preference())
    (record,) = reader.records([(1, PLAIN | {"loss_weight": 0})], str)
    assert record["weight"] == 0 and not reader.unused.names


ROWS = [
    {"query": f"q {n}", "positive": "12", "negative": ["007", "[x]"], "note": "[a]"} for n in (1, 2)
]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        import csv

        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            for row in rows:
                writer.writerow(
                    {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()}
                )


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_every_format_has_the_same_records(ending: str, tmp_path: Path) -> None:
    def records(rows: list[dict[str, Any]], **options: Any) -> list[Any]:
        file = tmp_path / f"data{ending}"
        write(file, rows)
        data = Component(class_path="JSON", init_args={"path": str(file)})
        return [*data_source(data, preference=preference(**options)).given_records()]

    texts = [[one["text"] for one in record["texts"]] for record in records(ROWS)]
    assert texts == [[f"q {n}", "12", "007", "[x]"] for n in (1, 2)]
    labelled = [{"sentence1": "1", "sentence2": "2", "score": value} for value in (0.5, 1.0)]
    assert [record["target"] for record in records(labelled)] == [[0.5], [1.0]]
    swift = [SWIFT, SWIFT]
    assert [len(record["texts"]) for record in records(swift)] == [4, 4]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_llama(tmp_path_factory.mktemp("base")))


def samples_of(tokenizer: Tokenizer, texts: list[Any], **options: Any) -> SampleSet:
    renderer = QueryRenderer(TextRenderer(tokenizer), tokenizer, **options)
    (rendering,) = renderer.render([{"texts": texts}])
    assert rendering.refused is None and len(rendering.samples) == renderer.per_sample
    return SampleSet.of(rendering.samples, per_sample=renderer.per_sample)


def test_each_text_is_a_sequence_as_other_programs_encode_it(tokenizer: Tokenizer) -> None:
    texts = [{"text": text} for text in ("red", "a red cat", "sky", "the sun")]
    found = samples_of(tokenizer, texts, negatives=2).sequences(0)
    assert [one.ids.tolist() for one in found] == [
        tokenizer.processor.encode(one["text"]).ids for one in texts
    ]


def test_a_query_and_a_document_are_one_text_with_a_line_break(tokenizer: Tokenizer) -> None:
    texts = [{"text": "red", "text_pair": text} for text in ("a red cat", "sky")]
    found = samples_of(tokenizer, texts, negatives=1, together=True).sequences(0)
    assert [one.ids.tolist() for one in found] == [
        tokenizer.encode(f"red\n{text}").tolist() for text in ("a red cat", "sky")
    ]
    assert written(tokenizer, texts) == [one.ids.tolist() for one in found]


def written(tokenizer: Tokenizer, texts: list[dict[str, str]]) -> list[list[int]]:
    """The same by the chat template that lies beside the result."""
    renderer = QueryRenderer(TextRenderer(tokenizer), tokenizer, negatives=1, together=True)
    return [
        tokenizer.encode_rendered(
            renderer.template.render(
                [
                    {"role": "query", "content": one["text"]},
                    {"role": "document", "content": one["text_pair"]},
                ]
            )
        ).ids
        for one in texts
    ]


def test_a_tokenizer_that_separates_two_texts_encodes_them_as_a_pair(tmp_path: Path) -> None:
    separating = Tokenizer(make_llama(tmp_path / "base"))
    bos, eos = (separating.token_text(i) for i in (separating.bos_id or 0, separating.eos_id))
    separating.processor.post_processor = TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {eos} $B:1 {eos}:1",
        special_tokens=[(bos, separating.bos_id or 0), (eos, separating.eos_id)],
    )
    texts = [{"text": "red", "text_pair": "a cat"}, {"text": "red", "text_pair": "sky"}]
    found = samples_of(separating, texts, negatives=1, together=True).sequences(0)
    assert [one.ids.tolist() for one in found] == [
        separating.processor.encode("red", text).ids for text in ("a cat", "sky")
    ]
    assert all(one.ids[-1] == separating.eos_id for one in found)
    assert written(separating, texts) == [one.ids.tolist() for one in found]


@pytest.mark.parametrize("together", [True, False])
def test_conversations_are_written_by_the_chat_template(
    together: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write(tmp_path / "data.jsonl", [SWIFT, SWIFT])
    options = {"path": str(tmp_path / "data.jsonl"), "chat_template": "chatml"}
    data = Component(class_path="JSON", init_args=options | {"val_split_fraction": 0.5})
    wanted = preference(negatives=2, labelled=False, together=together)
    found = load_data(data, tokenizer, 200, preference=wanted).train.sequences(0)
    query = "<|im_start|>user\nq<|im_end|>\n"
    documents = [f"<|im_start|>assistant\n{one}<|im_end|>\n" for one in WHOLE[1:]]
    texts = [query + one for one in documents] if together else [query, *documents]
    assert [one.ids.tolist() for one in found] == [
        tokenizer.encode_rendered(text).ids for text in texts
    ]


def test_a_record_with_an_empty_text_is_no_sample(tokenizer: Tokenizer) -> None:
    renderer = QueryRenderer(TextRenderer(tokenizer), tokenizer, negatives=0)
    (rendering,) = renderer.render([{"texts": [{"text": "a"}, {"text": " "}]}])
    assert rendering.refused == "no text"
