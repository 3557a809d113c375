"""The harness on a model in memory: the numbers that its own class for models gives."""

import dataclasses
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import lm_eval.utils
import pytest
import torch
import yaml
from fixed_shapes import compile_shapes
from jinja2.exceptions import SecurityError
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from local_tasks import ALL, ANSWERS, LETTERS, write_tasks
from messages import message_of, says
from tiny import make_llama

from ftkit.evaluation.loading import Loaded, load_result
from ftkit.evaluation.result import find_result
from ftkit.evaluation.task_programs import EvaluationAborted, TaskOptions
from ftkit.extensions.harness import harness
from ftkit.extensions.harness.harness import TaskSet
from ftkit.extensions.harness.scorer import Scorer
from ftkit.extensions.harness.tasks import find_tasks
from ftkit.models.chat_templates.template import ChatTemplate

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_llama(tmp_path_factory.mktemp("base") / "tiny", initializer_range=0.3)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def loaded(base: Path) -> Loaded:
    found = find_result(str(base))
    return load_result(found, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def theirs(base: Path) -> HFLM:
    """The same model in the harness's own class."""
    # The tiny tokenizer has no rule of its own that puts BOS first.
    return HFLM(
        pretrained=str(base), device="cpu", dtype="float32", batch_size=1, add_bos_token=True
    )


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), *ALL)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """All that the harness says of our model, each record too."""
    found: list[dict[str, Any]] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        found.append(lm_eval.evaluator.evaluate(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(harness, "evaluate", noted)
    return found


def scorer_of(
    loaded: Loaded, rows: int = 3, stopped: Callable[[], object] = lambda: False
) -> Scorer:
    return Scorer(
        loaded.model,
        loaded.base.tokenizer,
        stop_ids=loaded.prompting.stop_ids(loaded.base.tokenizer),
        world_size=1,
        rows_of=lambda _: rows,
        context=nullcontext,
        stopped=stopped,
    )


def task_set(loaded: Loaded, *names: object, trusted: Path | None = None, **asking: Any) -> TaskSet:
    files = find_tasks(list(map(str, names)), key="--tasks", trusted=trusted)
    return TaskSet(files, TaskOptions(**asking), loaded.base.architecture.context_length)


def mistake(loaded: Loaded, *names: object, **options: Any) -> str:
    return message_of(task_set, loaded, *names, **options)


def assert_close(found: Any, expected: Any) -> None:
    """Numbers to 1e-5, texts and choices as they are."""
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5)
    else:
        assert found == expected


# --- The same numbers -----------------------------------------------------------------------------


def test_few_shapes_give_the_same_numbers(
    loaded: Loaded, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU takes the part of a device that compiles programs for each shape."""
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    tasks = task_set(loaded, local)
    usual = tasks.evaluate(scorer_of(loaded))
    compile_shapes(monkeypatch)
    shapes: set[tuple[Any, ...]] = set()

    def note(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        shapes.add(tuple(tuple(one.shape) for one in inputs[:2]))

    hook = loaded.model.register_forward_pre_hook(note)
    try:
        found = tasks.evaluate(scorer_of(loaded))
    finally:
        hook.remove()
    for one, other in zip(found, usual, strict=True):
        assert_close(dataclasses.astuple(one), dataclasses.astuple(other))
    # Widths, and the places that the head computes.
    widths = {inputs[1] for inputs, *_ in shapes}
    assert widths <= {1, 64, 128, 256}
    assert {count for *_, (count,) in shapes} <= {1, 2, 3} | {2**n for n in range(6, 11)}


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_numbers_and_every_record_are_those_of_the_harness_own_model(
    loaded: Loaded,
    theirs: HFLM,
    local: Path,
    kept: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    chat: bool,
) -> None:
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # of bootstrapping, which is not compared
    template = ChatTemplate(TEMPLATE, "own", {"eos_token": "</s>"}) if chat else None
    task_list = task_set(loaded, local, chat_template=template)
    results = task_list.evaluate(scorer_of(loaded))
    expected: Any = lm_eval.evaluator.simple_evaluate(
        theirs,
        tasks=[str(file) for file in sorted(local.glob("*.yaml"))],
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        bootstrap_iters=2,
        task_manager=TaskManager(include_defaults=False),
    )
    assert task_list.names == ["answers", "letters", "sums", "texts"]
    for result in results:
        numbers = expected["results"][result.task]
        assert result.value == pytest.approx(numbers[f"{result.metric},none"], rel=1e-5)
        if result.stderr is not None:
            stderr = numbers[f"{result.metric}_stderr,none"]
            assert result.stderr == pytest.approx(stderr, rel=1e-5)
        assert result.samples == 7
    assert {(one.task, one.metric) for one in results} == {
        ("answers", "exact_match"),
        ("letters", "acc"),
        ("sums", "acc"),
        ("sums", "acc_norm"),
        ("texts", "word_perplexity"),
        ("texts", "bits_per_byte"),
    }
    (ours,) = kept
    for name in task_list.names:
        for found, wanted in zip(ours["samples"][name], expected["samples"][name], strict=True):
            assert found["arguments"] == wanted["arguments"]
            assert_close(found["filtered_resps"], wanted["filtered_resps"])


def test_texts_are_longer_than_the_model_takes_and_answers_are_cut(
    loaded: Loaded, local: Path, kept: list[dict[str, Any]]
) -> None:
    task_set(loaded, local).evaluate(scorer_of(loaded))
    (found,) = kept
    for name in ("sums", "texts"):
        texts = [one["arguments"][0][0] for one in found["samples"][name]]
        longest = max(len(loaded.base.tokenizer.encode(text)) for text in texts)
        assert longest > loaded.base.architecture.context_length
    answers = [one["filtered_resps"][0] for one in found["samples"]["answers"]]
    assert not any("e" in answer for answer in answers) and len(set(answers)) > 1


@pytest.mark.parametrize("rows", [1, 100])
def test_the_size_of_batches_changes_nothing(loaded: Loaded, local: Path, rows: int) -> None:
    task_list = task_set(loaded, local)
    first, second = (task_list.evaluate(scorer_of(loaded, size)) for size in (3, rows))
    assert [one.value for one in first] == pytest.approx([one.value for one in second], rel=1e-5)


def test_a_task_uses_the_given_numbers_of_records_and_examples(
    loaded: Loaded, local: Path, kept: list[dict[str, Any]]
) -> None:
    results = task_set(loaded, local / "sums.yaml", limit=3, num_fewshot=1).evaluate(
        scorer_of(loaded)
    )
    assert [one.samples for one in results] == [3, 3]
    for sample in kept[0]["samples"]["sums"]:
        assert sample["arguments"][0][0].count("Question:") == 2


def test_a_group_has_the_mean_of_its_tasks(loaded: Loaded, tmp_path: Path) -> None:
    write_tasks(tmp_path, LETTERS, {**LETTERS, "task": "more"})
    (tmp_path / "both.yaml").write_text(
        "group: both\ntask: [letters, more]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    found = {one.task: one for one in task_set(loaded, tmp_path).evaluate(scorer_of(loaded))}
    assert found["both"].value == pytest.approx(found["letters"].value)
    assert (found["both"].samples, found["letters"].samples) == (14, 7)


def test_a_group_changes_settings_of_its_tasks_and_may_have_tasks_of_its_own(
    loaded: Loaded, tmp_path: Path, kept: list[dict[str, Any]]
) -> None:
    write_tasks(tmp_path, LETTERS)
    own = yaml.safe_load((tmp_path / "letters.yaml").read_text()) | {"task": "own"}
    changed = {"task": "letters", "doc_to_text": "Which? "}
    group = {"group": "both", "task": [{"group": "inner", "task": [changed]}, own]}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(group))
    task_set(loaded, tmp_path).evaluate(scorer_of(loaded))
    samples = kept[0]["samples"]
    assert samples.keys() == {"letters", "both::own"}
    assert {one["arguments"][0][0] for one in samples["letters"]} == {"Which? "}


def test_a_group_whose_members_the_harness_would_mix_up_is_refused(
    loaded: Loaded, tmp_path: Path
) -> None:
    write_tasks(tmp_path, LETTERS, {**LETTERS, "task": "more"})
    (tmp_path / "inner.yaml").write_text("group: inner\ntask: [letters, more]\n")
    outer = {"group": "outer", "task": [{"task": "inner", "num_fewshot": 1}]}
    (tmp_path / "outer.yaml").write_text(yaml.safe_dump(outer))
    assert "by group: NAME" in mistake(loaded, tmp_path)


def test_drawn_answers_follow_from_the_seed_whatever_the_batches(
    loaded: Loaded, tmp_path: Path, kept: list[dict[str, Any]]
) -> None:
    drawn = {"until": ["e"], "max_gen_toks": 8, "do_sample": True, "temperature": 2.0, "top_k": 50}
    write_tasks(tmp_path, {**ANSWERS, "generation_kwargs": drawn})
    task_list = task_set(loaded, tmp_path)
    for rows in (1, 4):
        task_list.evaluate(scorer_of(loaded, rows))
    first, second = ([s["filtered_resps"] for s in one["samples"]["answers"]] for one in kept)
    assert first == second and len({one[0] for one in first}) > 1


# --- What an evaluation leaves as it was ----------------------------------------------------------


def test_random_numbers_positions_and_the_terminal_are_left_alone(
    loaded: Loaded, local: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    positions = loaded.model.body.max_length
    scorer = scorer_of(loaded)
    task_set(loaded, local).evaluate(scorer)
    scorer.restore()
    assert torch.equal(torch.rand(3), expected)
    assert loaded.model.body.max_length == positions
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("lm_eval").getEffectiveLevel() >= logging.ERROR


def test_an_evaluation_ends_early_when_the_run_is_to_stop(loaded: Loaded, local: Path) -> None:
    with pytest.raises(EvaluationAborted):
        task_set(loaded, local).evaluate(scorer_of(loaded, stopped=lambda: True))


# --- Code -----------------------------------------------------------------------------------------


def test_trusted_code_is_run(loaded: Loaded, tmp_path: Path, kept: list[dict[str, Any]]) -> None:
    file = write_tasks(tmp_path, LETTERS) / "letters.yaml"
    file.write_text(file.read_text() + "process_docs: !function code.fewer\n")
    (tmp_path / "code.py").write_text("def fewer(docs):\n    return docs.select(range(2))\n")
    task_set(loaded, file, trusted=tmp_path).evaluate(scorer_of(loaded))
    assert len(kept[0]["samples"]["letters"]) == 2
    (tmp_path / "code.py").write_text("import nowhere_to_be_found\n")
    other = write_tasks(tmp_path / "other", LETTERS) / "letters.yaml"
    other.write_text(other.read_text() + "process_docs: !function broken.fewer\n")
    (tmp_path / "other" / "broken.py").write_text("import nowhere_to_be_found\n")
    assert "nowhere_to_be_found" in mistake(loaded, other, trusted=tmp_path)


def test_templates_of_tasks_reach_no_code(loaded: Loaded, tmp_path: Path) -> None:
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    write_tasks(tmp_path, {**LETTERS, "doc_to_text": template})
    assert "SecurityError" in mistake(loaded, tmp_path)
    with pytest.raises(SecurityError):
        lm_eval.utils.apply_template(template, {})
    assert lm_eval.utils.apply_template("{{ x | regex_replace('a', 'b') }}\n", {"x": "a"}) == "b\n"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"metric_list": [{"metric": "of_a_hub"}]}, "has the metric of_a_hub"),
        ({"dataset_path": "pandas"}, "has data of the kind pandas"),
        ({"doc_to_text": "{{nothing}}"}, "cannot be set up: UndefinedError"),
        (
            {"output_type": "generate_until", "generation_kwargs": {"num_beams": 2}},
            "has num_beams in generation_kwargs",
        ),
        (
            {"output_type": "generate_until", "generation_kwargs": {"max_gen_toks": 256}},
            "has answers of 256 tokens",
        ),
    ],
)
def test_a_task_that_cannot_run_is_refused_by_name(
    loaded: Loaded, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    write_tasks(tmp_path, {**LETTERS, **changes})
    message = mistake(loaded, tmp_path)
    assert text in message and "letters" in message


def test_a_task_whose_target_is_no_number_of_a_choice_is_named_when_it_runs(
    loaded: Loaded, tmp_path: Path
) -> None:
    inherited = {"doc_to_choice": "{{choices}}", "doc_to_target": "{{choices[0]}}"}
    write_tasks(tmp_path, {**ANSWERS, **inherited})
    message = message_of(task_set(loaded, tmp_path).evaluate, scorer_of(loaded))
    assert says(message, "task answers ... doc_to_target ... number")


def test_a_fault_of_other_code_is_not_put_down_to_a_task(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Scorer, "log_likelihoods", fails)
    write_tasks(tmp_path, LETTERS)
    with pytest.raises(ZeroDivisionError):
        task_set(loaded, tmp_path).evaluate(scorer_of(loaded))
