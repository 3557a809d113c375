"""Runs with a plugin: all documented examples at work, stored with the run, and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import command_environment, command_line
from messages import says
from plugins import documented, write_documented
from runs import TIMEOUT_S, losses, start
from warm import WHOLE

from ftkit.recipe.parsing import read_recipe
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.report import Report, read_report
from ftkit.training.callbacks import read_state

WITHIN = 0.02
"""Relative error of the predicted memory of a step."""
OWN = ("--objective", "Focal", "--objective.gamma", "1.5", "--optimizer", "Lion")
KEYS = {
    "accelerator": "cpu",
    "precision": "32-true",
    "data": "JSON",
    "data.val_split_fraction": 0.2,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 4,
    "train.epochs": 1,
    "train.max_seq_length": 100,
    "eval.interval": 2,
    "eval.max_new_tokens": 4,
    "eval.exact_match": 2,
    "lora_dropout": 0,
}


def ftkit(directory: Path, *words: object) -> tuple[int, str]:
    """Exit code and output of a command in a directory."""
    environment = command_environment() | {WHOLE: "yes"}
    process = start(command_line(*words), directory, environment)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode is not None
    return process.returncode, out + err


def json_in(said: str) -> dict[str, Any]:
    """The JSON of a command's standard output, before what it showed beside it."""
    found: dict[str, Any]
    found, _ = json.JSONDecoder().raw_decode(said[said.index("{") :])
    return found


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documented(tmp_path_factory.mktemp("plugin") / "my.py", *documented())


@pytest.fixture(scope="module")
def common(tiny_base: Path, tiny_data: Path) -> list[object]:
    keys = KEYS | {"data.path": tiny_data}
    return [tiny_base, *(word for key, value in keys.items() for word in (f"--{key}", value))]


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory: pytest.TempPathFactory, plugin: Path, common: list[object]) -> Path:
    """Directory of a run that --stop_after ended."""
    out_dir = tmp_path_factory.mktemp("run") / "out"
    switches = ("--plugin", plugin, "--stop_after", 3, "--out_dir", out_dir)
    code, said = ftkit(plugin.parent, "finetune", *common, *OWN, *switches)
    assert code == 0, said
    assert f"--resume auto --plugin {out_dir}/plugin.py" in said
    return out_dir


@pytest.fixture(scope="module")
def report(out_dir: Path) -> Report:
    return read_report(RunDirectory(out_dir).report)


def test_a_run_and_its_checkpoints_have_the_plugin_beside_the_recipe(
    out_dir: Path, plugin: Path
) -> None:
    run = RunDirectory(out_dir)
    recipe = read_recipe([run.recipe])
    assert recipe.objective == {"class_path": "plugin.Focal", "init_args": {"gamma": 1.5}}
    assert recipe.optimizer["class_path"] == "plugin.Lion"
    checkpoint = run.store.path(3)
    assert run.plugin.read_bytes() == plugin.read_bytes()
    assert (checkpoint / "plugin.py").read_bytes() == plugin.read_bytes()
    assert "plugin.py" in run.store.metadata(3).files
    assert 0 < read_state(checkpoint)["StopWhenGood"]["mean"] < 7


def test_everything_that_the_plugin_defines_was_at_work(out_dir: Path, report: Report) -> None:
    (score,) = report.scores
    assert (score.name, score.file) == ("words_in_common", "my.py")
    assert score.before is not None
    lines = [json.loads(line) for line in (out_dir / "values.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 0, "seed": 1337}
    found = {key for line in lines for key in line}
    assert found >= {"loss", "val_loss", "mean_loss"}
    assert [line["loss"] for line in lines if "loss" in line] == losses(out_dir)


def test_the_memory_of_its_step_is_predicted(report: Report) -> None:
    memory = report.step_memory
    assert memory is not None and memory.predicted is not None
    assert abs(memory.predicted.error_fraction) < WITHIN


@pytest.mark.parametrize("change", [None, "# changed\n"])
def test_another_plugin_is_refused_on_resume_with_a_command_that_works(
    change: str | None, out_dir: Path, plugin: Path, tmp_path: Path
) -> None:
    run = RunDirectory(out_dir)
    before = run.report.read_bytes()
    words: list[object] = ["finetune", "--config", run.recipe, "--resume", "auto"]
    checksum = run.store.metadata(3).files["plugin.py"].sha256[:16]
    if change is not None:
        other = tmp_path / "my.py"
        other.write_text(plugin.read_text() + change)
        words += ["--plugin", other]
    code, said = ftkit(tmp_path, *words)
    assert code == 2
    works = f"--resume auto --plugin {run.store.path(3)}/plugin.py"
    assert says(said, checksum, works, "my.py has" if change else "there is none now")
    assert run.report.read_bytes() == before


def test_a_result_is_evaluated_and_planned_with_it(
    out_dir: Path, plugin: Path, common: list[object], report: Report
) -> None:
    with_plugin = ("--plugin", plugin)
    code, said = ftkit(plugin.parent, "evaluate", out_dir, *with_plugin, "--format", "json")
    assert code == 0, said
    found = json_in(said)
    assert report.loss is not None
    assert [score["name"] for score in found["scores"]] == ["words_in_common"]
    code, said = ftkit(plugin.parent, "plan", *common, *OWN, *with_plugin, "--format", "json")
    assert code == 0, said
    planned = json_in(said)
    assert report.step_memory is not None
    measured = report.step_memory.fullest.peak_bytes
    assert planned["peak_bytes"] > measured * (1 - WITHIN)


def test_an_exception_in_a_plugin_names_its_line(common: list[object], tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(
        "import ftkit\n\nclass Fails(ftkit.Callback):\n"
        "    def on_step(self, run, record):\n        1 / (record.step - 2)\n"
    )
    out_dir = tmp_path / "out"
    code, said = ftkit(tmp_path, "finetune", *common, "--plugin", file, "--out_dir", out_dir)
    assert code == 1
    assert "ZeroDivisionError: division by zero (my.py, line 5)" in said
    log = RunDirectory(out_dir).log.read_text()
    assert "1 / (record.step - 2)" in log


EVENTS = """
import ftkit

class Events(ftkit.Callback):
    events = []
    def note(self, run, event): self.events.append(f"{event} {run.step}")
    def on_begin(self, run): self.note(run, "begin")
    def on_step(self, run, record): self.note(run, f"step {record.step} of {run.total_steps} at")
    def on_validation(self, run, values): self.note(run, f"validation {sorted(values)} at")
    def on_save(self, run): self.note(run, "save")
    def on_end(self, run):
        self.note(run, "end")
        (run.out_dir / "events.txt").write_text("\\n".join(self.events))
    def state_dict(self): return {"events": self.events}
    def load_state_dict(self, state): self.events = state["events"] + ["loaded"]
"""


@pytest.mark.slow
def test_a_callback_is_called_at_every_event_of_every_session(
    common: list[object], tmp_path: Path
) -> None:
    (tmp_path / "my.py").write_text(EVENTS)
    words = ("finetune", *common, "--plugin", "my.py", "--out_dir", "out", "--eval.exact_match", 0)
    words += ("--train.max_steps", 4, "--eval.initial_validation", "true", "--resume", "auto")
    code, said = ftkit(tmp_path, *words, "--stop_after", 2)
    assert code == 0, said
    code, said = ftkit(tmp_path, *words)
    assert code == 0, said
    assert (tmp_path / "out/events.txt").read_text().splitlines() == [
        "begin 0",
        "validation ['loss'] at 0",
        "step 1 of 4 at 1",
        "step 2 of 4 at 2",
        "validation ['loss'] at 2",
        "loaded",  # what follows a save is not in it
        "begin 2",
        "step 3 of 4 at 3",
        "step 4 of 4 at 4",
        "save 4",
        "validation ['loss'] at 4",
        "end 4",
    ]


def test_an_objective_that_reads_numbers_trains_and_is_not_planned(
    common: list[object], tmp_path: Path, plugin: Path
) -> None:
    file = tmp_path / "my.py"
    text = write_documented(file, "An objective").read_text()
    sums = "    def sums(self, output, batch):\n"
    assert sums in text
    file.write_text(text.replace(sums, f"{sums}        assert output.sum().item() <= 0\n"))
    words = (*common, "--plugin", file, "--objective", "Focal")
    code, said = ftkit(tmp_path, "plan", *words)
    assert (code, says(said, "--plugin my.py, line 19 ... .item()")) == (2, True)
    code, said = ftkit(tmp_path, "finetune", *words, "--out_dir", "out", "--train.max_steps", 1)
    assert (code, says(said, "memory was not predicted ... line 19")) == (0, True)


def test_a_result_answers_without_the_plugin(out_dir: Path, plugin: Path) -> None:
    words = ("generate", out_dir, "--prompt", "red", "--max_new_tokens", 2)
    code, said = ftkit(plugin.parent, *words)
    assert code == 0, said
    code, said = ftkit(plugin.parent, "evaluate", out_dir)
    assert (code, says(said, f"plugin.Focal ... --plugin {out_dir}", "plugin.py")) == (2, True)
