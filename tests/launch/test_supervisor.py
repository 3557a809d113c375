"""The supervisor: what a run leaves behind, however it ends. Real processes, no mocks."""

import json
import re
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from command import Start
from messages import key_words, says
from runs import (
    DEFAULT_SIGNALS,
    ENDLESS_STEP,
    FILES,
    FOREVER,
    NOHUP,
    TIMEOUT_S,
    Run,
    content,
    rows,
)

from ftkit.cli.app import run as run_command
from ftkit.errors import UserError
from ftkit.recipe.parsing import read_recipe
from ftkit.runs.lock import claim
from ftkit.runs.report.report import FILE_NAME, read_report

# --- A run that completes -----------------------------------------------------------------------


End = tuple[int, str, str]


@pytest.fixture(scope="module")
def completed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, End]:
    out_dir = tmp_path_factory.mktemp("completed") / "a deep path" / "out"
    with start(out_dir) as run:
        return run, run.end()


@pytest.mark.extensions
def test_a_run_leaves_exactly_its_results(completed: tuple[Run, End]) -> None:
    run, (code, _, err) = completed
    assert (code, err) == (0, "")
    assert sorted(path.name for path in run.out_dir.iterdir()) == FILES
    assert sorted(path.name for path in (run.out_dir / "final").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_its_recipe_can_be_read_again(completed: tuple[Run, End]) -> None:
    run, _ = completed
    recipe = read_recipe([run.out_dir / "recipe.yaml"])
    assert (recipe.method, recipe.out_dir, recipe.train.max_steps) == ("lora", run.out_dir, 5)


def test_its_report_has_the_outcome_and_the_measurements(completed: tuple[Run, End]) -> None:
    run, _ = completed
    report = json.loads((run.out_dir / FILE_NAME).read_text())
    assert (report["outcome"], report["exit_code"]) == ("completed", 0)
    assert report["exit_reason"] == "train.max_steps of 5 reached"
    assert report["progress"]["steps"] == len(rows(run.out_dir)) == 5
    for key in ("recipe", "phases_s", "tokens", "throughput", "peak_memory", "loss"):
        assert report[key], key
    assert report["command"][:2] == ["ftkit", "finetune"]


@pytest.mark.extensions
def test_output_in_a_pipe_is_plain_lines(completed: tuple[Run, End]) -> None:
    run, (_, out, _) = completed
    assert says(out, "completed ... train.max_steps of 5")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\x9b]", out), "control characters"
    assert "it/s" not in out and "GPU available" not in out
    lines, _, commands = out.partition("\nnext:\n")
    assert max(map(len, lines.splitlines())) <= 100
    this = shlex.quote(str(run.out_dir))
    assert commands.splitlines() == [
        f"  ftkit chat {this}",
        f"  ftkit merge {this} --out {shlex.quote(f'{run.out_dir}-merged')}",
    ]


# --- Directories --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_more(
    completed: tuple[Run, End], start: Start, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, bytes], Path, End, Path, End]:
    """At one time: a second run into a used directory, and one that overwrites its own."""
    first, _ = completed
    other = tmp_path_factory.mktemp("overwritten") / "out"
    (other / "final").mkdir(parents=True)
    (other / "final" / "old").write_text("old")
    before = content(first.out_dir)
    trap = tmp_path_factory.mktemp("cwd")
    (trap / "random.py").write_text("raise SystemExit('a file of the user was imported')")
    installed = "import sys; sys.path.remove('')\n"
    with (
        start(first.out_dir) as second,
        start(other, "--overwrite", before=installed + DEFAULT_SIGNALS, cwd=trap) as overwriting,
    ):
        return before, first.out_dir, second.end(), other, overwriting.end()


@pytest.mark.slow
def test_modules_in_the_current_directory_are_not_imported(
    two_more: tuple[dict[str, bytes], Path, End, Path, End],
) -> None:
    """Python puts it first on the path of `python -m`; what lies there is not ours."""
    assert two_more[-1][0] == 0


@pytest.mark.slow
def test_a_second_run_takes_another_directory_and_shows_it(
    two_more: tuple[dict[str, bytes], Path, End, Path, End],
) -> None:
    before, first, (code, out, err), _, _ = two_more
    other = first.with_name("out-2")
    assert (code, err) == (0, "")
    assert says(out, f"{first} ... {other}")
    assert sorted(path.name for path in other.iterdir()) == FILES
    assert content(first) == before
    assert str(other) in (other / "recipe.yaml").read_text()


@pytest.mark.slow
def test_overwrite_replaces_the_old_run(
    two_more: tuple[dict[str, bytes], Path, End, Path, End],
) -> None:
    _, _, _, out_dir, (code, _, err) = two_more
    assert (code, err) == (0, "")
    assert sorted(path.name for path in out_dir.iterdir()) == FILES
    assert not (out_dir / "final" / "old").exists()


class TestClaim:
    """The directory of a run, without a run."""

    def test_the_first_free_number_is_taken(self, tmp_path: Path) -> None:
        for name in ("out", "out-2"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "x").touch()
        with claim(tmp_path / "out", "new") as run:
            assert run.path == tmp_path / "out-3"

    def test_an_empty_directory_is_free(self, tmp_path: Path) -> None:
        with claim(tmp_path, "new") as run:
            assert run.path == tmp_path
        assert tmp_path.exists()

    def test_a_directory_in_use_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        out_dir = tmp_path / "out"
        with claim(out_dir, "overwrite"):
            (out_dir / "metrics.csv").write_text("1")
            before = content(out_dir)
            with (
                pytest.raises(UserError, match=key_words("belongs to a run ... Wait")),
                claim(out_dir, "overwrite"),
            ):
                pass
            assert content(out_dir) == before

    def test_a_mistake_leaves_no_directory(self, tmp_path: Path) -> None:
        def fail() -> None:
            with claim(tmp_path / "a/b/c", "new") as run:
                run.recipe.touch()
                raise UserError("x")

        with pytest.raises(UserError):
            fail()
        assert list(tmp_path.iterdir()) == []

    def test_a_mistake_leaves_an_overwritten_run_as_it_was(self, tmp_path: Path) -> None:
        (tmp_path / "final").mkdir()
        (tmp_path / "final/model").write_text("old")
        (tmp_path / "link").symlink_to(tmp_path / "final")

        def fail() -> None:
            with claim(tmp_path, "overwrite"):
                assert sorted(p.name for p in tmp_path.iterdir()) == [".run"]
                (tmp_path / "final").mkdir()
                (tmp_path / "final/new").touch()
                raise UserError("x")

        with pytest.raises(UserError):
            fail()
        assert content(tmp_path) == {"final/model": b"old"}
        assert (tmp_path / "link").is_symlink()

    def test_state_of_a_killed_run_does_not_block_a_new_one(self, tmp_path: Path) -> None:
        state = tmp_path / ".run"
        for directory in (state / "replaced/final", tmp_path / "final"):
            directory.mkdir(parents=True)
            (directory / "model").touch()
        (state / "error.json").write_text("{}")
        (state / "lock").touch()
        with claim(tmp_path, "overwrite"):
            assert sorted(p.name for p in state.iterdir()) == ["lock", "replaced"]
        assert list(tmp_path.iterdir()) == []

    def test_a_file_in_its_place_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "out"):
            with pytest.raises(UserError, match="cannot be written"), claim(path, "new"):
                pass

    def test_nothing_of_it_stays(self, tmp_path: Path) -> None:
        with claim(tmp_path / "out", "overwrite") as run:
            run.report.touch()
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.json"]


# --- Mistakes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bad_data(
    start: Start, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, End, End]:
    """At one time: bad data into a new directory, and over an old run."""
    root = tmp_path_factory.mktemp("bad")
    records = json.loads(tiny_data.read_text())
    del records[2]["output"]
    file = root / "records.json"
    file.write_text(json.dumps(records))
    old = root / "old"
    old.mkdir()
    (old / "report.json").write_text("{}")
    with (
        start(root / "a" / "new", data__json_path=file) as new,
        start(old, "--overwrite", data__json_path=file) as over,
    ):
        return root, file, new.end(), over.end()


def test_bad_data_names_file_and_record_and_leaves_nothing_behind(
    bad_data: tuple[Path, Path, End, End],
) -> None:
    root, file, (code, _, err), _ = bad_data
    assert code == 2
    assert says(err, f"{file}, record 3 ... output ... instruction, input")
    assert "Traceback" not in err
    assert not (root / "a").exists()


def test_bad_data_leaves_the_run_that_was_to_be_overwritten(
    bad_data: tuple[Path, Path, End, End],
) -> None:
    root, _, _, (code, _, err) = bad_data
    assert code == 2 and "record 3 has no output" in err
    assert content(root / "old") == {"report.json": b"{}"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data__json_path": "none.json"}, "data.json_path is none.json"),
        ({"checkpoint_dir": "no-where"}, "checkpoint_dir no-where does not exist."),
        pytest.param(
            {"checkpoint_dir": "org/name"},
            "http://127.0.0.1:9 cannot be reached",
            marks=pytest.mark.extensions,
        ),
        ({"train__epochs": 0}, "train.epochs is 0 ... at least 1"),
        ({"num_nodes": 2}, "every machine ... torchrun or srun"),
        ({"metric": "no.py:score"}, "--metric no.py:score ... not a file"),
        ({"out_dir": "/proc/out"}, "out_dir /proc/out cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_mistake_is_reported_before_anything_starts(
    start: Start, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with start(tmp_path / "out", cwd=tmp_path, **keys) as run:
        code, out, err = run.end()
    assert (code, out) == (2, "")
    assert says(err, message) and err.startswith("ftkit: ") and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_custom_metric_needs_answers(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def close(answer, expected, record): ...\n")
    words = ["finetune", "base", "--metric", f"{file}:close", "--eval.max_new_tokens", "0"]
    with pytest.raises(UserError, match=key_words("eval.max_new_tokens is 0 ... Try")):
        run_command(words)


def test_a_custom_metric_that_fails_names_the_record_and_leaves_nothing_behind(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def close(answer, expected, record):\n    return 1 / ('input' not in record)\n"
    )
    metric = f"{file}:close"
    with start(tmp_path / "out", metric=metric, eval__exact_match=2, eval__max_new_tokens=1) as run:
        code, _, err = run.end()
    assert code == 2 and "Traceback" not in err
    assert says(err, "--metric mine.py:close ... record")
    assert says(err, "ZeroDivisionError: division by zero (line 2)")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_the_directory_of_a_run_at_work_is_refused(start: Start, tmp_path: Path) -> None:
    with start(tmp_path / "out", **ENDLESS_STEP) as run:
        run.wait_for_rank()
        with start(tmp_path / "out", "--overwrite") as other:
            _, err = other.process.communicate(timeout=TIMEOUT_S)
            assert other.process.returncode == 2
            assert says(err, "belongs to a run")
            assert run.process.poll() is None


@pytest.mark.slow
def test_a_result_that_cannot_be_written_costs_nothing_that_was_measured(
    start: Start, tmp_path: Path
) -> None:
    with start(tmp_path / "out", command="finetune_full") as run:
        run.wait_for(run.state.exists)
        (run.out_dir / "final" / "taken").mkdir(parents=True)
        code, out, _ = run.end()
    report = read_report(run.out_dir)
    assert (code, report.outcome, report.phase) == (1, "failed", "saving")
    assert "exists already" in report.exit_reason and "exists already" in " ".join(out.split())
    assert len(rows(run.out_dir)) == 5
    assert (run.out_dir / "final" / "taken").exists()


# --- Signals ------------------------------------------------------------------------------------


def assert_interrupted(run: Run, code: int, reason: str) -> None:
    report = json.loads((run.out_dir / FILE_NAME).read_text())
    assert (report["outcome"], report["exit_code"]) == ("interrupted", code)
    assert report["exit_reason"] == reason
    assert not run.state.exists()


@pytest.mark.slow
def test_ctrl_c_ends_training_after_the_step_with_every_step_on_record(
    start: Start, tmp_path: Path
) -> None:
    with start(tmp_path / "out", **FOREVER) as run:
        run.wait_for_steps(3)
        run.process.send_signal(signal.SIGINT)
        code, out, err = run.end()
    assert code == 130
    assert says(err, "stopping after the current step ... Ctrl+C")
    assert "interrupted" in out and "Traceback" not in out
    assert_interrupted(run, 130, "Ctrl+C")
    report = read_report(run.out_dir)
    assert report.progress and report.loss
    assert report.progress.steps == len(rows(run.out_dir)) >= 3
    assert report.loss.last == pytest.approx(float(rows(run.out_dir)[-1]["loss"]))
    assert not (run.out_dir / "final").exists()


@pytest.mark.slow
def test_ctrl_z_pauses_nohup_keeps_it_going_and_sigterm_ends_it_with_143(
    start: Start, tmp_path: Path
) -> None:
    with start(tmp_path / "out", before=NOHUP, **FOREVER) as run:
        run.wait_for_steps(2)
        run.process.send_signal(signal.SIGTSTP)
        run.wait_for(lambda: {p.status() for p in run.processes()} == {psutil.STATUS_STOPPED})
        run.process.send_signal(signal.SIGCONT)
        run.wait_for_steps(len(rows(run.out_dir)) + 5)
        run.process.send_signal(signal.SIGHUP)
        run.wait_for_steps(len(rows(run.out_dir)) + 5)
        run.process.send_signal(signal.SIGTERM)
        code, _, _ = run.end()
    assert code == 143
    assert_interrupted(run, 143, "SIGTERM")


@pytest.mark.parametrize("ready", [False, True], ids=["before it can answer", "when it can answer"])
def test_ctrl_c_during_set_up_ends_it_quietly(start: Start, tmp_path: Path, ready: bool) -> None:
    with start(tmp_path / "out", **ENDLESS_STEP) as run:
        run.wait_for_rank()
        if ready:
            run.wait_for(lambda: run.report.exists())
        run.process.send_signal(signal.SIGINT)
        if ready:  # the first step may have begun by now, and this one has no end
            time.sleep(0.2)
            run.process.send_signal(signal.SIGINT)
        code, _, err = run.end()
    assert code == 130
    assert "Traceback" not in err and "KeyboardInterrupt" not in err
    assert_interrupted(run, 130, "Ctrl+C")
    assert rows(run.out_dir) == []


INTO_ANOTHER_ERROR = """
import time
from pathlib import Path

import ftkit.models.pretrained.base_model


def open_base(*_):
    Path({mark!r}).touch()
    try:
        time.sleep(300)
    except BaseException:
        raise ValueError("could not determine the shape") from None


ftkit.models.pretrained.base_model.open_base = open_base
"""


@pytest.mark.extensions
def test_a_library_that_turns_an_interrupt_into_an_error_changes_nothing(
    start: Start, tmp_path: Path
) -> None:
    """As torch does while it looks at what is to become a tensor."""
    mark = tmp_path / "in the library"
    in_ranks = INTO_ANOTHER_ERROR.format(mark=str(mark))
    with start(tmp_path / "out", in_ranks=in_ranks) as run:
        run.wait_for(mark.exists)
        run.process.send_signal(signal.SIGINT)
        code, _, err = run.end()
    assert code == 130
    assert "could not determine" not in err and "Traceback" not in err
    assert_interrupted(run, 130, "Ctrl+C")


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_step(start: Start, tmp_path: Path) -> None:
    with start(tmp_path / "out", **ENDLESS_STEP) as run:
        run.wait_for_training()
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert run.process.poll() is None, "the first one waits for the step"
        run.process.send_signal(signal.SIGINT)
        code, _, _ = run.end()
    assert code == 130
    assert_interrupted(run, 130, "Ctrl+C")


# --- Killed -------------------------------------------------------------------------------------


def test_a_killed_rank_is_reported_by_the_name_of_the_signal(start: Start, tmp_path: Path) -> None:
    with start(tmp_path / "out", **FOREVER) as run:
        run.wait_for_steps(2)
        run.rank().kill()
        code, out, err = run.end()
    assert (code, err) == (1, "")
    report = read_report(run.out_dir)
    assert (report.outcome, report.exit_code, report.phase) == ("failed", 1, "training")
    assert says(report.exit_reason, "killed by SIGKILL")
    assert "failed" in out and "SIGKILL" in out
    assert not run.state.exists()


def test_no_process_outlives_a_killed_supervisor(start: Start, tmp_path: Path) -> None:
    with start(tmp_path / "out", **FOREVER) as run:
        run.wait_for_steps(2)
        assert len(run.processes()) == 2, "supervisor and rank"
        run.process.kill()
        run.end()  # waits until no process is left
        before = len(rows(run.out_dir))
    assert before >= 2 and (run.state / "lock").exists()
