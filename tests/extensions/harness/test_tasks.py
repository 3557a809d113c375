"""Task files: which are meant by a name or path, and that none of them runs anything."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from local_tasks import ALL, LETTERS, SUMS, write_tasks
from messages import message_of, says

from ftkit.extensions.harness.tasks import Code, TaskFiles, find_tasks, read_task_file


def files_of(*names: object, trusted: Path | None = None) -> TaskFiles:
    return find_tasks(list(map(str, names)), key="--tasks", trusted=trusted)


def found(*names: object, trusted: Path | None = None) -> list[str]:
    return files_of(*names, trusted=trusted).names


def mistake(*names: object, trusted: Path | None = None) -> str:
    return message_of(found, *names, trusted=trusted)


def with_file(directory: Path, **changes: Any) -> Path:
    """A task file with further keys."""
    write_tasks(directory, {**LETTERS, **changes})
    return directory / "letters.yaml"


# --- What is meant --------------------------------------------------------------------------------


def test_a_task_is_named_by_the_harness_by_its_file_or_by_its_directory(tmp_path: Path) -> None:
    write_tasks(tmp_path, *ALL)
    assert found("arc_easy") == ["arc_easy"]
    assert found(tmp_path / "sums.yaml", "arc_easy") == ["sums", "arc_easy"]
    assert found(tmp_path) == ["answers", "letters", "sums", "texts"]


def test_a_tag_stands_for_its_tasks_also_where_a_file_has_it_by_an_include() -> None:
    assert found("ai2_arc") == ["arc_challenge", "arc_easy"]


def test_a_group_has_the_tasks_and_groups_that_it_names() -> None:
    files = files_of("mmlu")
    assert (files.names, len(files.tasks)) == (["mmlu"], 57)
    assert files.groups == {
        "mmlu", "mmlu_stem", "mmlu_other", "mmlu_social_sciences", "mmlu_humanities",
    }  # fmt: skip
    assert files.files.keys() == {*files.tasks, *files.groups}


def test_a_custom_group_has_tasks_of_files_and_its_own(tmp_path: Path) -> None:
    write_tasks(tmp_path, SUMS, LETTERS)
    inner = {"group": "inner", "task": [{"task": "sums", "num_fewshot": 0}]}
    group = {"group": "both", "task": ["letters", inner, {"task": "own", "dataset_path": "json"}]}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(group))
    files = files_of(tmp_path)
    assert files.names == ["both"]
    assert files.tasks == ["letters", "sums", "both::own"]


@pytest.mark.parametrize("key", ["unsafe_code", "process_docs"])
def test_what_a_group_changes_of_its_tasks_is_checked_too(tmp_path: Path, key: str) -> None:
    write_tasks(tmp_path, LETTERS)
    value = "true" if key == "unsafe_code" else "!function code.run"
    (tmp_path / "both.yaml").write_text(f"group: both\ntask: [{{task: letters, {key}: {value}}}]\n")
    assert key in mistake(tmp_path)


def test_an_include_gives_what_a_file_does_not_say_itself(tmp_path: Path) -> None:
    write_tasks(tmp_path, SUMS)
    (tmp_path / "fewer.yaml").write_text("include: sums.yaml\ntask: fewer\nnum_fewshot: 1\n")
    settings = read_task_file(tmp_path / "fewer.yaml", tmp_path)
    assert (settings["num_fewshot"], settings["doc_to_target"]) == (1, "answer")


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    assert "Did you mean arc_easy?" in mistake("arc_esay")
    assert says(mistake("missing/task.yaml"), "no such task file")


def test_a_task_named_twice_is_refused(tmp_path: Path) -> None:
    assert says(mistake("arc_easy", "ai2_arc"), "arc_easy twice")
    assert says(mistake("mmlu_anatomy", "mmlu"), "mmlu_anatomy twice")


def test_without_the_harness_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "Try pip install 'ftkit[tasks]'." in mistake("arc_easy")
    assert found() == []


# --- What is not run ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "doc_to_text: !!python/object/apply:os.system ['touch {mark}']",
        "doc_to_text: !!python/name:os.system",
        "doc_to_text: !include other.yaml",
    ],
)
def test_a_file_with_more_than_plain_values_is_refused(tmp_path: Path, line: str) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "evil.yaml").write_text(f"task: evil\n{line.format(mark=mark)}\n")
    assert says(mistake(tmp_path / "evil.yaml"), "plain values")
    assert not mark.exists()


def test_python_code_runs_only_where_its_directory_is_trusted(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    other.mkdir()
    file = with_file(own)
    file.write_text(file.read_text() + "process_docs: !function code.shorter\n")
    (own / "code.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    message = mistake(file)
    assert "process_docs is !function code.shorter" in message
    assert message.endswith(f"add --trust_task_code {own}.")
    assert f"lies outside of --trust_task_code {other}" in mistake(file, trusted=other)
    assert found(file, trusted=own) == ["letters"]
    assert isinstance(read_task_file(file, own)["process_docs"], Code)
    assert not (tmp_path / "mark").exists()  # nothing is imported to look at it


def test_a_function_outside_of_the_trusted_directory_is_refused(tmp_path: Path) -> None:
    file = with_file(tmp_path / "own")
    file.write_text(file.read_text() + "process_docs: !function ..other.code.run\n")
    assert "lies outside of" in mistake(file, trusted=tmp_path / "own")
    file.write_text(file.read_text().replace("..other.code.run", "os.system"))
    assert "there is no" in mistake(file, trusted=tmp_path / "own")


@pytest.mark.parametrize("name", ["hellaswag", "squadv2", "wikitext"])
def test_the_harness_own_code_is_refused_by_name_and_the_way_out_works(name: str) -> None:
    message = mistake(name)
    assert says(message, f"{name} ... Python code")
    directory = message.rpartition("--trust_task_code ")[2].removesuffix(".")
    assert found(name, trusted=Path(directory)) == [name]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"unsafe_code": True}, "runs programs"),
        ({"doc_to_image": "picture"}, "needs images"),
        ({"use_prompt": "promptsource:*"}, "another package"),
        ({"dataset_path": "owner/data.py"}, "reads its data by a program"),
        ({"metric_list": [{"metric": "f1", "hf_evaluate": True}]}, "loads the metric f1"),
        ({"dataset_kwargs": {"trust_remote_code": True}}, "says trust_remote_code"),
        ({"class": "os.system"}, "names a class without !function"),
    ],
)
def test_settings_that_would_run_code_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    message = mistake(with_file(tmp_path, **changes))
    assert text in message and "letters" in message


@pytest.mark.parametrize("name", ["../outside.yaml", "/etc/hostname"])
def test_a_file_elsewhere_is_not_included(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside.yaml").write_text("doc_to_text: x\n")
    file = with_file(tmp_path / "own", include=name)
    assert "lies outside of" in mistake(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [", "is not valid YAML"),
        ("- task\n", "holds no keys"),
        ("include: own.yaml\ntask: own\n", "includes itself"),
        ("doc_to_text: x\n", "which task"),
        ("group: own\ntask: [own]\n", "is in itself"),
        ("group: own\ntask: [nothing_known]\n", "which is not a task"),
        ("group: own\ntask: [{num_fewshot: 1}]\n", "a member without a name"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
    assert message in mistake(tmp_path / "own.yaml")


def test_the_trusted_directory_must_exist(tmp_path: Path) -> None:
    assert "is not a directory" in mistake("arc_easy", trusted=tmp_path / "missing")
