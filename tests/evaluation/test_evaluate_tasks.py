"""ftkit evaluate --tasks: on a run, an adapter and a model, and what it does not do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Command
from evaluating import mistake, values_from
from local_tasks import ALL, LETTERS, SUMS, write_tasks
from messages import says
from results import Ended

from ftkit.cli.app import run


@pytest.fixture
def values(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """JSON that `ftkit evaluate` prints."""
    return values_from(capsys)


@pytest.mark.slow
def test_a_run_its_adapter_and_the_merged_model_say_the_same(
    ended: dict[str, Ended], values: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    tasks = write_tasks(tmp_path / "tasks", *ALL)
    merged = tmp_path / "merged"
    assert run(["merge", str(ended["lora"].out_dir), "--out", str(merged)]) == 0
    places = (ended["lora"].out_dir, ended["lora"].final, merged)
    of_run, of_adapter, of_model = (
        values(place, "--tasks", tasks, "--precision", "32-true")["tasks"] for place in places
    )
    assert len(of_run) == 6
    for found in (of_adapter, of_model):
        for one, other in zip(found, of_run, strict=True):
            assert (one["task"], one["metric"]) == (other["task"], other["metric"])
            assert one["value"] == pytest.approx(other["value"], rel=1e-4)


@pytest.mark.extensions
def test_the_table_has_a_row_for_each_number_and_nothing_else_is_printed(
    ended: dict[str, Ended], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_tasks(tmp_path, SUMS, LETTERS)
    words = ["evaluate", ended["full"].out_dir, "--tasks", tmp_path, "--limit", 5]
    assert run([*map(str, words), "--accelerator", "cpu"]) == 0
    lines = capfd.readouterr().out.splitlines()
    base = next(i for i, line in enumerate(lines) if line.startswith("base model "))
    assert lines[0].startswith("result ") and base <= 3, "a long path takes several lines"
    assert [line.split()[:2] for line in lines[base + 1 :]] == [
        ["letters", "acc"], ["sums", "acc"], ["sums", "acc_norm"],
    ]  # fmt: skip
    assert all(line.endswith(" of 5 records") for line in lines[base + 1 :])


@pytest.mark.extensions
def test_the_chat_template_of_the_result_is_used_on_request(
    ended: dict[str, Ended], values: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    tasks = write_tasks(tmp_path, {**SUMS, "num_fewshot": 1})
    plain = values(ended["lora"].out_dir, "--tasks", tasks)
    chat = values(ended["lora"].out_dir, "--tasks", tasks, "--apply_chat_template")
    assert plain["chat_template"] is None and chat["chat_template"] is not None


@pytest.mark.extensions
def test_a_task_is_refused_before_the_result_is_loaded(
    ended: dict[str, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.evaluation.evaluate.start_session", None)
    path = ended["lora"].out_dir
    assert "Did you mean arc_easy?" in mistake(path, "--tasks", "arc_easi")
    assert "--trust_task_code" in mistake(path, "--tasks", "hellaswag")
    assert "--tasks is empty" in mistake(path, "--tasks", ",")


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--limit", 3), "--limit ... tasks ... --tasks NAME"),
        (("--trust_task_code", "."), "--trust_task_code is for tasks"),
        (("--tasks", "arc_easy", "--exact_match", 3), "--tasks and --exact_match exclude"),
        (("--tasks", "arc_easy", "--data.path", "x.json"), "--tasks and --data exclude"),
        (("--tasks", "arc_easy", "--limit", 0), "limit"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    ended: dict[str, Ended], words: tuple[object, ...], text: str
) -> None:
    assert says(mistake(ended["lora"].out_dir, *words), text)


@pytest.mark.slow
def test_the_harness_is_quiet_in_a_process_of_its_own(
    ftkit: Command, tiny_base: Path, tmp_path: Path
) -> None:
    write_tasks(tmp_path / "tasks", LETTERS)
    found = ftkit("evaluate", tiny_base, "--tasks", "tasks", "--accelerator", "cpu", cold=True)
    assert found.returncode == 0
    assert "letters" in found.stdout
    for word in ("lm_eval", "INFO", "Building contexts", "it/s", "Warning"):
        assert word not in found.stdout + found.stderr
