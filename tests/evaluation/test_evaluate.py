"""ftkit evaluate: the numbers that the run reported, from its result and from its checkpoints."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluating import mistake, values_from
from fixed_shapes import compile_shapes
from messages import says
from results import Ended
from tiny import make_records

from ftkit.cli.app import run
from ftkit.evaluation.result import find_result

NAMES = ["lora", "qlora", "dora", "pissa", "full", "tied", "mixed", "bf16"]


@pytest.fixture
def values(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """JSON that `ftkit evaluate` prints."""
    return values_from(capsys)


# --- The numbers of the run -----------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["out_dir", "checkpoint"])
def test_a_result_has_the_numbers_that_its_run_reported(
    ended: dict[str, Ended], values: Callable[..., dict[str, Any]], name: str, where: str
) -> None:
    ended_run = ended[name]
    found = values(getattr(ended_run, where))
    assert found["loss"] == pytest.approx(ended_run.validation_loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    matches = ended_run.report.exact_match
    assert found["exact_match"] == {"records": matches.samples, "share": matches.after}
    rouge, _ = ended_run.report.scores
    assert found["scores"] == [{"name": "rouge_l", "records": 4, "score": rouge.after}]
    assert found["records"] == ended_run.report.data["val"].used
    assert found["label_tokens"] == ended_run.report.data["val"].label_tokens
    assert found["precision"] == ended_run.report.resolved.precision
    assert found["quantize"] == ended_run.report.resolved.quantize
    assert found["step"] == ended_run.report.progress.steps
    assert found["base_model"] == ended_run.report.resolved.base_model
    sets = {of_set: one.validation_last for of_set, one in ended_run.report.sets.items()}
    assert found.get("losses", {}) == pytest.approx(sets, rel=1e-5)
    assert list(sets) == (["further"] if name == "full" else [])


@pytest.mark.extensions
def test_the_loss_on_a_set_is_that_on_its_records_alone(
    ended: dict[str, Ended], values: Callable[..., dict[str, Any]], held_out: Path
) -> None:
    run_, few = ended["full"], ("--exact_match", 0, "--max_iters", 1)  # of 11 records
    own = values(run_.out_dir, *few)
    alone = values(run_.out_dir, *few, "--data.json_path", held_out)
    assert "losses" not in alone and alone["records"] == 11, "other data have no sets of the run"
    named = values(run_.out_dir, *few, "--sets", json.dumps({"mine": str(held_out)}))
    assert named["losses"] == {"mine": pytest.approx(alone["loss"], rel=1e-5)}
    assert named["loss"] == own["loss"] and list(own["losses"]) == ["further"]
    assert "losses" not in values(run_.out_dir, *few, "--sets", "null")


@pytest.mark.extensions
def test_a_missing_set_is_named(ended: dict[str, Ended]) -> None:
    said = mistake(ended["full"].out_dir, "--sets", "{mine: none.json}")
    assert says(said, "eval.sets.mine.path is none.json")
    said = mistake(ended["full"].out_dir, "--tasks", "x", "--sets", "null")
    assert says(said, "--tasks and --sets")


@pytest.mark.extensions
def test_another_storage_of_the_base_gives_other_numbers(
    ended: dict[str, Ended], values: Callable[..., dict[str, Any]]
) -> None:
    path = ended["qlora"].out_dir
    plain = values(path, "--quantize", "none", "--exact_match", 0)
    assert plain["quantize"] is None and plain["exact_match"] is None
    assert plain["loss"] != pytest.approx(ended["qlora"].validation_loss, rel=1e-5)
    assert plain["loss"] == pytest.approx(ended["qlora"].validation_loss, rel=0.05)


@pytest.mark.extensions
@pytest.mark.parametrize("size", [1, 5, 11])
def test_the_micro_batch_changes_nothing(
    ended: dict[str, Ended], values: Callable[..., dict[str, Any]], size: int
) -> None:
    found = values(ended["lora"].out_dir, "--micro_batch_size", size)
    assert found["loss"] == pytest.approx(ended["lora"].validation_loss, rel=1e-5)


@pytest.mark.extensions
def test_max_iters_counts_batches_of_the_global_size(
    ended: dict[str, Ended], values: Callable[..., dict[str, Any]]
) -> None:
    found = values(ended["lora"].out_dir, "--max_iters", 1, "--exact_match", 5)
    assert (found["records"], found["exact_match"]["records"]) == (11, 5)
    assert found["loss"] != pytest.approx(ended["lora"].validation_loss, rel=1e-7)


@pytest.mark.extensions
def test_an_exact_match_is_an_answer_that_equals_the_expected_text(
    ended: dict[str, Ended], values: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def every_second(_: Any, tokenizer: Any, questions: Any, **__: Any) -> Any:
        said = [q.expected if i % 2 else tokenizer.encode("no") for i, q in enumerate(questions)]
        return [torch.as_tensor(ids) for ids in said]

    monkeypatch.setattr("ftkit.evaluation.validation.answer_records", every_second)
    found = values(ended["lora"].out_dir, "--micro_batch_size", 4, "--exact_match", 8)
    assert found["exact_match"] == {"records": 8, "share": 0.5}


@pytest.mark.extensions
def test_answers_are_scored_by_rouge_l_and_a_custom_function(
    ended: dict[str, Ended],
    values: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def half(_: Any, __: Any, questions: Any, **options: Any) -> Any:
        assert options["max_new_tokens"] == 7
        return [torch.tensor(q.expected[: len(q.expected) // 2]) for q in questions]

    file = tmp_path / "mine.py"
    file.write_text(
        "def begun(answer, expected, record):\n"
        "    print('scored')\n"
        "    return expected.startswith(answer) and expected in record['output']\n"
    )
    monkeypatch.setattr("ftkit.evaluation.validation.answer_records", half)
    words = ["--exact_match", 0, "--max_new_tokens", 7]
    assert values(ended["lora"].out_dir, *words, "--rouge_l", 0)["scores"] == []
    words += ["--rouge_l", 5, "--metric", f"{file}:begun"]
    rouge, own = values(ended["lora"].out_dir, *words)["scores"]
    assert (rouge["name"], rouge["records"]) == ("rouge_l", 5)
    assert 0 < rouge["score"] < 1
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    expected = {"name": "begun", "records": 5, "score": 1.0, "file": "mine.py", "sha256": sha256}
    assert own == expected
    path = str(ended["lora"].out_dir)
    assert run(["evaluate", path, "--accelerator", "cpu", *map(str, words)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row for row in rows if row.startswith("ROUGE-L")] == [
        f"ROUGE-L     {rouge['score']:.3g} on 5 answers"
    ]
    assert [row for row in rows if row.startswith("begun")] == ["begun       1 on 5 answers"]


# --- Other data -----------------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("lora", "full") else pytest.mark.matrix)
        for name in NAMES
    ],
)
def test_a_device_that_compiles_programs_for_each_shape_measures_the_same(
    ended: dict[str, Ended],
    values: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    usual = values(ended[name].out_dir)
    compile_shapes(monkeypatch)
    found = values(ended[name].out_dir)
    assert found["loss"] == pytest.approx(usual["loss"], rel=1e-5)  # one is in bfloat16
    for key in ("label_tokens", "exact_match", "scores"):
        assert found[key] == usual[key]


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    """Records that no run has seen."""
    file = tmp_path / "held_out.json"
    file.write_text(json.dumps(make_records(20, seed=5)))
    return file


@pytest.mark.extensions
def test_the_loss_on_each_of_several_sources_is_reported(
    ended: dict[str, Ended], values: Callable[..., dict[str, Any]], held_out: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(make_records(10, seed=6)))
    entries = json.dumps([{"path": str(held_out)}, {"path": str(other)}])
    words = ("--data", "JSON", "--data.sources", entries, "--exact_match", 2)
    found = values(ended["lora"].out_dir, *words)
    alone = values(
        ended["lora"].out_dir, "--data", "JSON", "--data.path", other, "--exact_match", 2
    )
    assert list(found["losses"]) == ["held_out.json", "other.json"]
    assert found["losses"]["other.json"] == pytest.approx(alone["loss"], rel=1e-5)
    assert "losses" not in alone
    low, high = sorted(found["losses"].values())
    assert low < found["loss"] < high


@pytest.mark.extensions
def test_a_file_of_its_own_is_taken_whole(
    ended: dict[str, Ended], values: Callable[..., dict[str, Any]], held_out: Path
) -> None:
    found = values(ended["lora"].out_dir, "--data.json_path", held_out)
    assert found["records"] == 20
    assert found["data"]["init_args"]["mask_prompt"] is True  # as in the run
    part = values(
        ended["lora"].out_dir, "--data.json_path", held_out, "--data.val_split_fraction", 0.25
    )
    assert part["records"] == 5


@pytest.mark.extensions
def test_the_validation_part_of_a_directory_is_taken(
    ended: dict[str, Ended], values: Callable[..., dict[str, Any]], held_out: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    shutil.copy(held_out, directory / "val.json")
    (directory / "train.json").write_text(json.dumps(make_records(7)))
    whole = values(ended["lora"].out_dir, "--data.json_path", held_out)
    found = values(ended["lora"].out_dir, "--data", "JSON", "--data.json_path", directory)
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-6)


def test_models_without_a_run_need_data(
    values: Callable[..., dict[str, Any]], tiny_base: Path, held_out: Path
) -> None:
    message = mistake(tiny_base)
    assert "Try --data JSON --data.path FILE." in message
    options = ["--data", "JSON", "--data.json_path", held_out, "--data.mask_prompt", "true"]
    found = values(tiny_base, *options, "--exact_match", 2)
    assert found["loss"] == pytest.approx(math.log(400), rel=0.05)
    assert (found["step"], found["exact_match"]["records"]) == (None, 2)


@pytest.mark.extensions
def test_the_base_of_a_run_can_be_measured_on_the_same_data(
    ended: dict[str, Ended], values: Callable[..., dict[str, Any]]
) -> None:
    outcome = ended["lora"]
    base = find_result(str(outcome.out_dir)).base
    data = find_result(str(outcome.out_dir)).recipe.data["init_args"]
    options = [f"--data.{key}={json.dumps(value)}" for key, value in data.items()]
    found = values(base, "--data", "JSON", *options)
    assert found["loss"] == pytest.approx(outcome.report.loss.validation_first, rel=1e-5)


# --- What is shown, and mistakes ------------------------------------------------------------------


@pytest.mark.extensions
def test_a_table_shows_the_same_numbers(
    ended: dict[str, Ended], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = ended["qlora"]
    assert run(["evaluate", str(outcome.out_dir), "--accelerator", "cpu"]) == 0
    out = capsys.readouterr().out
    rows = dict(line.split("  ", 1) for line in out.splitlines() if not line.startswith(" "))
    assert rows["loss"].strip() == f"{outcome.validation_loss:.4f}"
    assert rows["perplexity"].strip() == f"{math.exp(outcome.validation_loss):.4g}"
    assert rows["base model"].strip() == "tiny, 32-true, bnb.nf4-dq"
    assert rows["exact match"].strip() == "0 % of 3 answers"
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data.json_path", "none.json"], "no such file or directory"),
        (["--data", "Nonsense"], "data is litgpt.data.Nonsense"),
        (["--data.val_split_fraction", "2"], "between 0 and 1"),
        (["--micro_batch_size", "0"], "a whole number of at least 1"),
        (["--max_iters", "x"], "at least 1 ... --max_iters 100"),
        (["--exact_match", "-1"], "a whole number of at least 0"),
        (["--rouge_l", "-1"], "a whole number of at least 0"),
        (["--max_new_tokens", "0"], "a whole number of at least 1"),
        (["--metric", "missing.py:score"], "missing.py is not a file"),
    ],
)
def test_a_mistake_names_what_works(
    ended: dict[str, Ended], options: list[str], words: str
) -> None:
    assert says(mistake(ended["lora"].out_dir, *options), words)
