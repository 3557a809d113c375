"""Labels of texts, as tables and data sets write them, and those that are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from messages import message_of, says
from tiny import make_llama
from transformers_models import make_transformers_model

from ftkit.cli.app import run
from ftkit.data.records.shapes import reader_of
from ftkit.data.rendering import TextRenderer
from ftkit.data.sources import data_source, settled
from ftkit.extensions.heads.rendering import ClassRenderer
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.objectives import objective_rules
from ftkit.recipe.parsing import read_recipe

SINGLE, SEVERAL, VALUE = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)
TEXT = {"text": "a red cat"}
USER, ANSWER = {"role": "user", "content": "Red?"}, {"role": "assistant", "content": "Yes"}


def preference(problem: str | None = None, classes: list[str] | None = None) -> str:
    return f"classes {json.dumps({'problem_type': problem, 'classes': classes})}"


@pytest.mark.parametrize(
    ("problem", "classes", "label", "target"),
    [
        (SINGLE, ["bad", "good"], "good", [1]),
        (SINGLE, ["0", "1", "10"], 10, [2]),
        (SINGLE, ["0", "1"], 1.0, [1]),  # pandas, where some labels are missing
        (SINGLE, ["false", "true"], True, [1]),
        (SINGLE, ["bad", "good"], 1, [1]),  # the place of a class
        (SINGLE, ["1", "2", "5"], 2, [1]),  # and no place where classes are numbers
        (SEVERAL, ["a", "b", "c"], ["c", "a"], [1, 0, 1]),
        (SEVERAL, ["a", "b", "c"], "b", [0, 1, 0]),
        (SEVERAL, ["a", "b", "c"], [], [0, 0, 0]),
        (VALUE, None, 3, [3]),
        (VALUE, None, -0.5, [-0.5]),
    ],
)
def test_a_label_becomes_the_target(
    problem: str, classes: list[str] | None, label: Any, target: list[float]
) -> None:
    reader = reader_of(preference=preference(problem, classes))
    (record,) = reader.records([(1, TEXT | {"label": label})], str)
    assert record == TEXT | {"target": target}
    assert reader.finish("data").keys == "text, label"


@pytest.mark.parametrize(
    ("row", "columns", "shape", "key"),
    [
        (TEXT | {"labels": "a", "id": 7}, {}, "text", "labels"),
        ({"it": "a cat", "stars": "a"}, {"text": "it", "label": "stars"}, "text", "label"),
        ({"prompt": "a red cat", "label": "a"}, {}, "text", "label"),
        ({"prompt": "a red cat", "stars": "a"}, {"label": "stars"}, "text", "label"),
        ({"prompt": [USER], "label": "a"}, {}, "messages", "label"),
        ({"messages": [USER], "label": "a"}, {}, "messages", "label"),
        ({"messages": [USER, ANSWER], "label": "a"}, {}, "messages", "label"),
        ({"instruction": "Red?", "output": "Yes", "label": "a"}, {}, "instruction", "label"),
    ],
)  # fmt: skip
def test_records_of_any_shape_have_labels(
    row: dict[str, Any], columns: dict[str, str], shape: str, key: str
) -> None:
    reader = reader_of(columns, preference=preference(SINGLE, ["a", "b"]))
    (record,) = reader.records([(1, row)], str)
    form = reader.finish("data")
    assert record["target"] == [0]
    assert form.shape == shape and form.keys.endswith(key)
    assert reader.unused.names == (("id",) if "id" in row else ())


@pytest.mark.parametrize(
    ("row", "columns", "keys"),
    [
        ({"text": "a red cat", "text_pair": "a dog"}, {}, "text, text_pair"),
        ({"sentence1": "a red cat", "sentence2": "a dog", "id": 7}, {}, "sentence1, sentence2"),
        ({"premise": "a red cat", "hypothesis": "a dog"}, {}, "premise, hypothesis"),
        ({"a": "a red cat", "b": "a dog"}, {"text": "a", "text_pair": "b"}, "a, b"),
    ],
)
def test_two_texts_have_one_label(
    row: dict[str, Any], columns: dict[str, str], keys: str, base: Path
) -> None:
    reader = reader_of(columns, preference=preference(SINGLE, ["a", "b"]))
    (record,) = reader.records([(1, row | {"label": "b"})], str)
    assert record == TEXT | {"text_pair": "a dog", "target": [1]}
    form = reader.finish("data")
    assert form.shape == "text" and form.keys == f"{keys}, label"
    assert reader.unused.names == (("id",) if "id" in row else ())
    # Together, as a reranker's query and document.
    tokenizer = Tokenizer(base)
    (rendering,) = ClassRenderer(TextRenderer(tokenizer), tokenizer).render([record])
    assert rendering.samples[0].ids == tokenizer.encode("a red cat\na dog").tolist()


def test_an_empty_second_text_is_none() -> None:
    reader = reader_of(preference=preference(SINGLE, ["a", "b"]))
    (record,) = reader.records([(1, TEXT | {"text_pair": "", "label": "b"})], str)
    assert record == TEXT | {"target": [1]}


@pytest.mark.parametrize(
    ("problem", "row", "words"),
    [
        (SINGLE, TEXT, ["no label", "text", "--data.columns.label"]),
        (SINGLE, TEXT | {"label": None}, ["no label"]),
        (SINGLE, TEXT | {"label": "c"}, ['"c"', "a, b", "--objective.classes"]),
        (SINGLE, TEXT | {"label": 2}, ["2", "a, b"]),
        (SINGLE, TEXT | {"label": -1}, ["-1", "a, b"]),
        (SINGLE, TEXT | {"label": "9" * 5000}, ["none of the classes", "a, b"]),
        (SINGLE, TEXT | {"label": ["a"]}, ["one class", SEVERAL]),
        (SINGLE, TEXT | {"label": 0.5}, ["0.5", VALUE]),
        (SINGLE, TEXT | {"label": float("nan")}, ["NaN"]),
        (SINGLE, TEXT | {"label": {"a": 1}}, ["name"]),
        (SINGLE, TEXT | {"label": "a", "labels": ["a"]}, ["label", "labels"]),
        (SINGLE, TEXT | {"label": "a", "loss_weight": 0.5}, ["weights"]),
        (SINGLE, TEXT | {"text_pair": ["b"], "label": "a"}, ["text_pair", "a list"]),
        (SINGLE, {"premise": "b", "label": "a"}, ["premise", "text"]),
        (SINGLE, {"prompt": "a", "chosen": "b", "rejected": "c"}, ["--objective dpo"]),
        (SEVERAL, TEXT | {"label": ["a", "c"]}, ['"c"', "a, b"]),
        (SEVERAL, TEXT | {"label": ["a", "a"]}, ["twice"]),
        (SEVERAL, TEXT | {"label": [0.0, 1.0, 1.0]}, ["twice"]),
        (VALUE, TEXT | {"label": "a"}, ['"a"', "number", VALUE]),
        (VALUE, TEXT | {"label": True}, ["true", "number"]),
        (VALUE, TEXT | {"label": float("inf")}, ["Infinity", "finite"]),
        (VALUE, TEXT | {"label": [1.5]}, ["[1.5]", "number"]),
    ],
)  # fmt: skip
def test_records_without_a_sound_label_are_refused(
    problem: str, row: dict[str, Any], words: list[str]
) -> None:
    classes = None if problem == VALUE else ["a", "b"]
    reader = reader_of(preference=preference(problem, classes))
    assert says(message_of(reader.records, [(1, row)], str), *words)


def write_json(file: Path, labels: list[Any]) -> Path:
    rows = [{"text": f"text {number}", "label": one} for number, one in enumerate(labels)]
    file.with_suffix(".json").write_text(json.dumps(rows))
    return file.with_suffix(".json")


def write_lines(file: Path, labels: list[Any]) -> Path:
    rows = [{"text": f"text {number}", "label": one} for number, one in enumerate(labels)]
    file.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file.with_suffix(".jsonl")


def write_csv(file: Path, labels: list[Any]) -> Path:
    def cell(label: Any) -> str:
        text = label if isinstance(label, str) else json.dumps(label)
        return '"' + text.replace('"', '""') + '"'

    lines = [f"text {number},{cell(one)}\n" for number, one in enumerate(labels)]
    file.with_suffix(".csv").write_text("text,label\n" + "".join(lines))
    return file.with_suffix(".csv")


def write_parquet(file: Path, labels: list[Any]) -> Path:
    texts = [f"text {number}" for number in range(len(labels))]
    pq.write_table(pa.table({"text": texts, "label": labels}), file.with_suffix(".parquet"))
    return file.with_suffix(".parquet")


@pytest.mark.parametrize("write", [write_json, write_lines, write_csv, write_parquet])
@pytest.mark.parametrize(
    ("labels", "problem", "classes"),
    [
        (["b", "a", "b"], SINGLE, ["a", "b"]),
        ([10, 2, -1], SINGLE, ["-1", "2", "10"]),
        ([True, False, True], SINGLE, ["false", "true"]),
        ([["b"], ["a", "c"], []], SEVERAL, ["a", "b", "c"]),
        ([0.5, 1.0, 2.0], VALUE, None),
    ],
)
def test_data_decide_what_their_labels_are(
    labels: list[Any],
    problem: str,
    classes: list[str] | None,
    write: Callable[[Path, list[Any]], Path],
    tmp_path: Path,
) -> None:
    file = write(tmp_path / "data", labels)
    given = [("data", "JSON"), ("data.path", str(file)), ("objective", "classify")]
    recipe = settled(read_recipe([], [("checkpoint_dir", "any"), *given], method="full"))
    assert recipe.objective["init_args"] == {"problem_type": problem, "classes": classes}
    rules = objective_rules(recipe.objective)
    assert rules.scores is not None and rules.scores.problem_type == problem
    assert rules.scores.names == tuple(classes or ("LABEL_0",))
    assert settled(recipe) == recipe


def test_several_sources_have_the_classes_of_all(tmp_path: Path) -> None:
    files = [write_lines(tmp_path / name, [name, "both"]) for name in ("x", "y")]
    sources = json.dumps([{"path": str(file)} for file in files])
    given = [("data", "JSON"), ("data.sources", sources), ("objective", "classify")]
    recipe = settled(read_recipe([], [("checkpoint_dir", "any"), *given], method="full"))
    assert recipe.objective["init_args"]["classes"] == ["both", "x", "y"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    ("labels", "words", "named"),
    [
        (["a", "a"], [], ["a", "2 training records", "--objective.classes"]),
        ([[], []], [], ["[]", "--objective.classes"]),
        (["a", 0.5], [], ['"a"', VALUE, "line 1"]),
        ([["a"], 0.5], [], ["0.5", "line 2"]),
        ([["a"], ["b"]], ["--objective.problem_type", SINGLE], ["line 1", SEVERAL]),
        (["a", "b"], ["--objective.problem_type", VALUE], ['"a"', "line 1", "number"]),
        (["a", "b"], ["--objective.problem_type", "multi"], ["multi", SEVERAL]),
        (["a", "b"], ["--objective.classes", "[a]"], ["objective.classes", "two"]),
        (["a", "b"], ["--objective.classes", "[a, a]"], ["objective.classes", "different"]),
        (["a", "b"], ["--objective.clases", "[a]"], ["objective.classes"]),
        (
            [0.5, 1.5],
            ["--objective.problem_type", VALUE, "--objective.classes", "[a, b]"],
            ["objective.classes", VALUE],
        ),
        (["a", "b"], ["--data.columns.label", "stars"], ["data.columns.label", "stars"]),
        (["a", "b"], ["--data", "Alpaca"], ["Alpaca", "classes"]),
    ],
)
def test_options_and_data_that_do_not_fit_are_refused(
    labels: list[Any], words: list[str], named: list[str], base: Path, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "data", labels)
    data = [] if "Alpaca" in words else ["--data", "JSON", "--data.path", str(file)]
    command = ["data", str(base), "--objective", "classify", *data, *words]
    assert says(message_of(run, command), *named)


@pytest.mark.parametrize(
    ("key", "value", "works"),
    [
        ("eval.exact_match", "3", "0"),
        ("eval.tasks", "[arc_easy]", "null"),
        ("lora_head", "true", "false"),
        ("train.label_smoothing", "0.1", "0"),
        ("train.tie_embeddings", "true", "null"),
    ],
)
def test_settings_of_answers_are_refused(key: str, value: str, works: str, base: Path) -> None:
    words = ["--objective", "classify", "--data", "JSON", "--data.path", "none.json"]
    message = message_of(run, ["finetune", str(base), *words, f"--{key}", value])
    assert says(message, key, f"--{key} {works}")


def test_a_label_beside_the_named_classes_is_refused(base: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "data", ["a", "b"])
    given = [("data", "JSON"), ("data.path", str(file)), ("objective", "classify")]
    given += [("objective.classes", "[a, c]"), ("checkpoint_dir", str(base))]
    recipe = settled(read_recipe([], given, method="full"))
    rules = objective_rules(recipe.objective)
    reader = data_source(recipe.data, preference=rules.preference)
    message = message_of(list, reader.given_records())
    assert says(message, "data.jsonl, line 2", '"b"', "a, c", "--objective.classes")


def test_a_validation_label_that_training_lacks_is_refused(base: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "train", ["a", "b"])
    write_lines(tmp_path / "val", ["a", "new"])
    command = ["data", str(base), "--objective", "classify", "--data", "JSON"]
    message = message_of(run, [*command, "--data.path", str(tmp_path)])
    assert says(message, "val.jsonl, line 2", '"new"', "a, b", "--objective.classes")


def test_a_model_that_transformers_has_no_classifier_of_is_refused(tmp_path: Path) -> None:
    granite = make_transformers_model(tmp_path / "granite", "granite")
    file = write_lines(tmp_path / "data", ["a", "b"])
    words = ["--objective", "classify", "--data", "JSON", "--data.path", str(file)]
    message = message_of(run, ["plan", str(granite), *words])
    assert says(message, "checkpoint_dir granite", "GraniteForCausalLM", "classifier")


def test_an_encoder_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "data", ["a", "b"])
    settings = json.loads((base / "config.json").read_text())
    words = ["--objective", "classify", "--data", "JSON", "--data.path", str(file)]
    for model_type in ("bert", "modernbert"):
        encoder = tmp_path / model_type
        encoder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            (encoder / name).symlink_to(base / name)
        changed = settings | {"model_type": model_type, "architectures": ["Encoder"]}
        (encoder / "config.json").write_text(json.dumps(changed))
        message = message_of(run, ["plan", str(encoder), *words])
        assert says(message, model_type, "causal language models", "--objective classify")
