"""ftkit compare: what differs, what came out, as tables of any width, and as pictures."""

import csv
import dataclasses
import io
import json
import os
import re
import threading
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compared_runs import GIB, at_work, make_all, make_run, note_in_ranks
from messages import message_of, says
from rich.console import Console

from ftkit.cli.app import run
from ftkit.extensions.comparison import plots
from ftkit.extensions.comparison.columns import in_order, number_columns
from ftkit.extensions.comparison.compare import compare
from ftkit.launch.conclude import next_commands
from ftkit.recipe.recipe import LoraRecipe
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.answers import AnswerScore, TaskScore
from ftkit.runs.report.report import ChosenResult, PeakMemory, Source, read_report, write_report
from ftkit.strategies.step_memory import StepMemory


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a run of every kind, by a path as people write it."""
    monkeypatch.chdir(tmp_path)
    make_all(Path("out"))
    return Path("out")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Output of the command: `out, err = said("out", "--format", "csv")`."""

    def run_(*argv: object) -> tuple[str, str]:
        assert run(["compare", *map(str, argv)]) == 0
        return capsys.readouterr()

    return run_


def mistake(*argv: object) -> str:
    return message_of(run, ["compare", *map(str, argv)])


def at_width(width: int, *paths: object, **options: str) -> str:
    """The table as a terminal of that width shows it, without colours."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(compare(paths, **options).table())
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def names(*paths: object, **options: str) -> list[str]:
    return [run.name for run in compare(paths, **options).runs]


# --- The table ------------------------------------------------------------------------------------


def test_a_wide_terminal_has_a_row_for_each_run(out: Path) -> None:
    lines = at_width(240, out).splitlines()
    assert [re.split("  +", line.strip()) for line in lines[:3]] == [
        ["micro_"],
        ["run", "outcome", "batch_size", "steps", "loss", "val loss", "tokens/s", "time",
         "training", "peak memory", "reserved", "tensors", "predicted", "off by", "parameters",
         "gradients", "optimizer state", "activations", "temporaries", "host memory"],
        ["four", "completed", "4", "40", "0.5050", "0.6050", "* 4,000", "* 25.0 s", "* 20.0 s",
         "14.0 GiB", "15.0 GiB", "14.0 GiB", "14.2 GiB", "+1.8 %", "2.0 GiB", "1.0 GiB", "2.0 GiB",
         "8.5 GiB", "512 MiB", "3.0 GiB"],
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[2:6]] == ["four", "one", "ctrl-c", "eight"]


def test_a_terminal_of_80_columns_has_a_column_for_each_run(out: Path) -> None:
    assert at_width(80, out) == TURNED


TURNED = """\
run               four       one        ctrl-c       eight
outcome           completed  completed  interrupted  out of memory
micro_batch_size  4          1          2            8
steps             40         40         12/40        0/40
loss              0.5050     0.5050     0.8306
val loss          0.6050     0.6050     0.9306
tokens/s          * 4,000    2,500      4,000
time              * 25.0 s   37.0 s     11.0 s       5.0 s
training          * 20.0 s   32.0 s     6.0 s        0 ms
peak memory       14.0 GiB   * 8.0 GiB  9.0 GiB      23.0 GiB
reserved          15.0 GiB   * 9.0 GiB  10.0 GiB     24.0 GiB
tensors           14.0 GiB   * 8.0 GiB  9.0 GiB
predicted         14.2 GiB   8.2 GiB    9.2 GiB
off by            +1.8 %     +3.1 %     +2.8 %
parameters        2.0 GiB    2.0 GiB    2.0 GiB
gradients         1.0 GiB    1.0 GiB    1.0 GiB
optimizer state   2.0 GiB    2.0 GiB    2.0 GiB
activations       8.5 GiB    2.5 GiB    3.5 GiB
temporaries       512 MiB    512 MiB    512 MiB
host memory       3.0 GiB    3.0 GiB    3.0 GiB      3.0 GiB
* best of the successful runs
ctrl-c: Ctrl+C
eight: CUDA out of memory. Tried to allocate 2.00 GiB"""


def test_a_narrower_terminal_has_blocks_of_such_columns(out: Path) -> None:
    lines = at_width(52, out).splitlines()
    second = lines.index("") + 1
    assert lines[:2] == [
        "run               four       one        ctrl-c",
        "outcome           completed  completed  interrupted",
    ]
    assert lines[second : second + 2] == [
        "run               eight",
        "outcome           out of memory",
    ]


def test_of_many_runs_a_narrow_terminal_keeps_what_counts_most(out: Path) -> None:
    for number in range(8):
        make_run(out / f"more-{number}", train__micro_batch_size=16, step_s=1, peak_bytes=9 * GIB)
    lines = at_width(60, out).splitlines()
    assert lines[:3] == [
        "                           micro_",
        "run     outcome        batch_size  tokens/s  peak memory",
        "four    completed               4   * 4,000     14.0 GiB",
    ]
    assert lines[-7:] == [
        "left out for width: steps, loss, val loss, time, training,",
        "reserved, tensors, predicted, off by, parameters, gradients,",
        "optimizer state, activations, temporaries, host memory",
        "(--format csv has all)",
        "* best of the successful runs",
        "ctrl-c: Ctrl+C",
        "eight: CUDA out of memory. Tried to allocate 2.00 GiB",
    ]


def test_where_there_is_no_terminal_the_table_has_80_columns(
    said: Callable[..., tuple[str, str]], out: Path
) -> None:
    assert said(out) == (TURNED + "\n", "")


@pytest.mark.slow
def test_no_line_is_wider_than_the_terminal(tmp_path: Path) -> None:
    for number in range(12):
        name = f"{number}-a-run-with-a-name-that-is-longer-than-a-column-{number % 3}"
        make_run(tmp_path / name, lora_r=2 ** (number % 4), optimizer__lr=0.001 * (number + 1))
    for width in range(20, 240, 5):
        assert max(map(len, at_width(width, tmp_path).splitlines())) <= width


def test_long_names_are_cut_in_the_middle_but_stay_distinct(tmp_path: Path) -> None:
    stem = "run-with-a-long-name-that-has-to-be-cut"
    for name in (f"{stem}-1", f"{stem}-2"):
        make_run(tmp_path / name)
    assert re.search(r"run-with-a-lo\.\..*-1.*run-with-a-lo\.\..*-2", at_width(80, tmp_path))
    make_run(tmp_path / f"run-with-a-lo{'x' * 40}s-to-be-cut-2")
    assert f"{stem}-2" in at_width(400, tmp_path)  # the short form would stand for two


def test_only_settings_that_differ_are_shown_with_the_values_that_were_used(tmp_path: Path) -> None:
    make_run(tmp_path / "a", precision="bf16-mixed", optimizer__lr=0.001)
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}}
    make_run(tmp_path / "b", optimizer=sgd, lora_r=4)
    found = compare([tmp_path]).to_json()["runs"]
    settings = {run["run"]: run["settings"] for run in found}
    assert (settings["a"]["optimizer"], settings["b"]["optimizer"]) == (
        "torch.optim.AdamW", "torch.optim.SGD",
    )  # fmt: skip
    assert (settings["a"]["lora_r"], settings["b"]["lora_r"]) == (16, 4)
    assert "precision" not in settings["a"]  # set in one, the default of the other
    assert not settings["a"].keys() & {"out_dir", "seed", "checkpoint_dir"}


def test_data_are_one_setting_by_either_of_its_names(tmp_path: Path) -> None:
    for name, key in (("a", "json_path"), ("b", "path")):
        data = {"class_path": "litgpt.data.JSON", "init_args": {key: f"{name}.json"}}
        make_run(tmp_path / name, data=data)
    found = compare([tmp_path]).to_json()["runs"]
    assert [run["settings"] for run in found] == [
        {"data.path": "a.json"}, {"data.path": "b.json"},
    ]  # fmt: skip


def test_sets_to_validate_on_are_settings_by_their_names(tmp_path: Path) -> None:
    make_run(tmp_path / "a", eval={"sets": {"code": "b.json", "path": {"path": "c.json"}}})
    make_run(tmp_path / "b", eval={"sets": None})
    shown = at_width(100, tmp_path)
    assert re.search(r"^sets\.code +b\.json *$", shown, re.M)
    assert re.search(r"^sets\.path\.path +c\.json *$", shown, re.M)


class AtOnce(threading.Timer):
    """A timer to which any time is long."""

    def start(self) -> None:
        self.function()


def test_progress_of_a_long_comparison_is_on_standard_error(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., tuple[str, str]]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    monkeypatch.setattr("ftkit.utils.progress.threading", SimpleNamespace(Timer=AtOnce))
    picture = tmp_path / "x.png"
    shown, progress = said(out, "--format", "json", "--plot", picture)
    assert json.loads(shown)["runs"]
    assert "reading runs ...\n" in progress and f"drawing {picture} ...\n" in progress


def test_settings_of_lora_do_not_differ_from_those_of_a_full_fine_tune(tmp_path: Path) -> None:
    make_run(tmp_path / "full", method="full")
    make_run(tmp_path / "lora")
    found = compare([tmp_path]).to_json()["runs"]
    assert [run["settings"] for run in found] == [{"method": "full"}, {"method": "lora"}]


def test_a_setting_that_an_earlier_version_did_not_have_counts_as_its_default(
    tmp_path: Path,
) -> None:
    then = make_run(tmp_path / "then", write=False)
    del then.recipe["deterministic"]
    write_report(then, tmp_path / "then")
    make_run(tmp_path / "now")
    assert [run["settings"] for run in compare([tmp_path]).to_json()["runs"]] == [{}, {}]
    make_run(tmp_path / "changed", deterministic=True)
    shown = {run["run"]: run["settings"] for run in compare([tmp_path]).to_json()["runs"]}
    assert shown == {
        "then": {"deterministic": None},  # not recorded there
        "now": {"deterministic": False},
        "changed": {"deterministic": True},
    }


def test_what_a_lora_run_has_beyond_the_defaults_is_shown_beside_a_full_fine_tune(
    tmp_path: Path,
) -> None:
    make_run(tmp_path / "full", method="full")
    make_run(tmp_path / "qlora", quantize="bnb.nf4")
    found = compare([tmp_path]).to_json()["runs"]
    assert [run["settings"] for run in found] == [
        {"method": "full", "quantize": None},
        {"method": "lora", "quantize": "bnb.nf4"},
    ]


# --- Best, order ----------------------------------------------------------------------------------


def best(*paths: object) -> dict[str, list[str]]:
    return {run["run"]: run["best"] for run in compare(paths).to_json()["runs"]}


def test_best_are_values_of_runs_that_ended_well(out: Path) -> None:
    assert best(out) == {
        "four": ["tokens_per_s", "time_s", "training_s"],
        "one": ["allocated_bytes", "reserved_bytes", "tensors_bytes"],
        "ctrl-c": [],
        "eight": [],
    }


def test_scores_of_answers_are_compared_and_functions_of_one_name_distinguished(
    said: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    rouge = AnswerScore(name="rouge_l", samples=8, before=0.1, after=0.5)
    close = AnswerScore(name="close", samples=8, before=1, after=3, file="a.py", sha256="aa" * 32)
    for name, scores in {
        "a": [rouge, close],
        "b": [dataclasses.replace(rouge, after=0.4), dataclasses.replace(close, after=4)],
        "c": [dataclasses.replace(close, sha256="bb" * 32, after=5)],
    }.items():
        write_report(dataclasses.replace(make_run(tmp_path / name), scores=scores), tmp_path / name)
    names = ("rouge_l", "metric.close (aaaaaaaa)", "metric.close (bbbbbbbb)")
    runs = json.loads(said(tmp_path, "--format", "json", "--sort", "rouge_l")[0])["runs"]
    assert [run["run"] for run in runs] == ["a", "b", "c"]
    assert [[run["results"][name] for name in names] for run in runs] == [
        [0.5, 3, None],
        [0.4, 4, None],
        [None, None, 5],
    ]
    assert [run["best"].count("rouge_l") for run in runs] == [1, 0, 0]
    assert not any(name in run["best"] for run in runs for name in names[1:])
    two = said(tmp_path / "a", tmp_path / "b", "--sort", "metric.close")[0]
    assert re.search(r"^ROUGE-L +\* 0.5 +0.4$", two, re.MULTILINE)
    assert re.search(r"^close +3 +4$", two, re.MULTILINE)


def test_a_score_of_zero_is_shown_but_not_a_count_of_zero(tmp_path: Path) -> None:
    score = AnswerScore(name="rouge_l", samples=8, before=0.0, after=0.0)
    for name in "ab":
        report = make_run(tmp_path / name)
        write_report(dataclasses.replace(report, scores=[score]), tmp_path / name)
    shown = at_width(400, tmp_path).splitlines()[0]
    assert "ROUGE-L" in shown
    assert "restarts" not in shown and "exact match" not in shown


def test_nothing_is_best_where_all_are_equal_as_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "a", final_loss=0.5)
    make_run(tmp_path / "b", final_loss=0.500001)
    assert best(tmp_path) == {"a": [], "b": []}


def test_a_validation_before_the_first_step_is_not_the_loss_of_a_run(tmp_path: Path) -> None:
    report = make_run(tmp_path / "a", "interrupted", steps=5, validated=False)
    assert report.loss is not None
    sources = {"code": Source(validation_first=4.25, validation_last=4.25)}
    for name, step, shown in (("a", 0, [None, None]), ("b", 5, [4.5, 4.25])):
        loss = report.loss.with_validation(step, 4.5)
        (tmp_path / name).mkdir(exist_ok=True)
        write_report(dataclasses.replace(report, loss=loss, sources=sources), tmp_path / name)
        columns = {column.key: column for column in number_columns(compare([tmp_path / name]).runs)}
        found = [columns.get(key) for key in ("validation_loss", "val_loss/code")]
        assert [None if column is None else column.values[0] for column in found] == shown


@pytest.mark.parametrize("changes", [{"steps": 20, "total_steps": 20}, {"resumed": True}])
def test_no_time_is_best_where_one_run_did_less(tmp_path: Path, changes: dict[str, Any]) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", step_s=0.1, **changes)
    assert not {"time_s", "training_s"} & set(best(tmp_path)["b"])


def test_runs_that_ended_well_come_first_by_validation_loss_and_equal_ones_by_speed(
    tmp_path: Path,
) -> None:
    make_run(tmp_path / "worse", final_loss=0.7, step_s=0.1)
    make_run(tmp_path / "slow", final_loss=0.5, step_s=0.9)
    make_run(tmp_path / "fast", final_loss=0.500001, step_s=0.3)
    make_run(tmp_path / "failed", "failed", final_loss=0.1)
    assert names(tmp_path) == ["fast", "slow", "worse", "failed"]


DPO = {"class_path": "dpo", "init_args": {}}


@pytest.mark.parametrize(
    ("one", "other", "compares"),
    [
        (None, {"class_path": "dft", "init_args": {}}, True),
        (DPO, DPO, True),
        (None, DPO, False),
        (DPO, DPO | {"init_args": {"beta": 0.5}}, False),
    ],
)
def test_validation_losses_of_other_objectives_do_not_compare(
    one: dict[str, Any] | None, other: dict[str, Any], compares: bool, tmp_path: Path
) -> None:
    objectives = {"low": one, "high": other}
    for name, loss in (("low", 0.4), ("high", 0.6)):
        keys = {} if objectives[name] is None else {"objective": objectives[name]}
        make_run(tmp_path / name, final_loss=loss, **keys)
    assert ("validation_loss" in best(tmp_path)["low"]) is compares


@pytest.mark.parametrize(
    ("key", "order"),
    [
        ("tokens_per_s", ["ctrl-c", "four", "one", "eight"]),
        ("allocated_bytes", ["one", "ctrl-c", "four", "eight"]),
        ("train.micro_batch_size", ["one", "ctrl-c", "four", "eight"]),
        ("run", ["ctrl-c", "eight", "four", "one"]),
        ("validation_loss", ["four", "one", "ctrl-c", "eight"]),
    ],
)
def test_sort_puts_the_best_or_lowest_first_and_missing_values_last(
    out: Path, key: str, order: list[str]
) -> None:
    found = names(out, sort=key)
    if key in ("tokens_per_s", "validation_loss"):  # the first two are equal
        found, order = [*sorted(found[:2]), *found[2:]], [*sorted(order[:2]), *order[2:]]
    assert found == order


# --- What is compared -----------------------------------------------------------------------------


def test_a_run_ends_with_its_comparison_to_the_newest_run_of_its_data_and_model(
    tmp_path: Path,
) -> None:
    ours = {"data__path": "chats.jsonl"}
    others = {
        "same": ours,
        "b run": ours | {"lora_r": 64},
        "other data": {"data__path": "documents.jsonl"},
        "other model": ours | {"checkpoint_dir": "larger"},
    }
    make_run(tmp_path / "a", **ours)
    recipe = LoraRecipe(checkpoint_dir="base")
    commands = []
    for second, (name, keys) in enumerate(others.items()):
        make_run(tmp_path / name, **keys)
        os.utime(tmp_path / name, (second, second))
        commands.append(next_commands(RunDirectory(tmp_path / "a"), recipe))
    this = f"ftkit compare {tmp_path / 'a'}"
    with_space = [f"{this} '{tmp_path / 'b run'}'"]
    assert commands == [[f"{this} {tmp_path / 'same'}"], with_space, with_space, with_space]
    (tmp_path / "b run/report.json").write_text("{")
    assert next_commands(RunDirectory(tmp_path / "a"), recipe) == commands[0]


def test_a_default_micro_batch_is_compared_by_its_resolved_value(tmp_path: Path) -> None:
    make_run(tmp_path / "one", train__micro_batch_size=1)
    left_open = make_run(tmp_path / "open")
    assert left_open.resolved
    came_to = dataclasses.replace(left_open.resolved, micro_batch_size=1)
    write_report(dataclasses.replace(left_open, resolved=came_to), tmp_path / "open")
    runs = compare((tmp_path,)).runs
    assert [run.settings["train.micro_batch_size"] for run in runs] == [1, 1]


def test_a_number_of_a_task_is_a_column_where_any_run_has_it(tmp_path: Path) -> None:
    for name, share in (("good", 0.75), ("poor", 0.25), ("none", None)):
        report = make_run(tmp_path / name)
        score = TaskScore(
            task="arc_easy", metric="acc", samples=8, higher_is_better=True, after=share
        )
        tasks = [] if share is None else [score]
        write_report(dataclasses.replace(report, tasks=tasks), tmp_path / name)
    runs = in_order(compare((tmp_path,)).runs, "tasks/arc_easy/acc")
    assert [run.name for run in runs] == ["good", "poor", "none"]
    (column,) = (c for c in number_columns(runs) if c.key == "tasks/arc_easy/acc")
    assert (column.label, list(column.best)) == ("arc_easy acc", [0])
    assert column.texts == ["0.7500", "0.2500", ""]


def test_runs_at_any_depth_are_named_by_how_their_paths_differ(tmp_path: Path) -> None:
    make_run(tmp_path / "out/finetune/lora")
    make_run(tmp_path / "out/finetune/full")
    make_run(tmp_path / "out/quickstart")
    assert sorted(names(tmp_path)) == ["finetune/full", "finetune/lora", "quickstart"]
    assert names(tmp_path / "out/quickstart") == ["quickstart"]


def test_a_run_counts_once_however_it_is_named(out: Path) -> None:
    paths = (out / "one", out / "one/report.json", out / "../out/four", out / "one/")
    assert sorted(names(*paths)) == ["four", "one"]


def test_directories_without_a_run_are_left_out_with_a_notice(
    said: Callable[..., tuple[str, str]], out: Path
) -> None:
    (out / "notes.txt").write_text("x")
    (out / "empty").mkdir()
    (out / "cut").mkdir()
    (out / "cut/report.json").write_text('{"schema_version": ')
    printed, err = said(out / "one", out / "notes.txt", out / "empty", out / "cut", "none")
    assert "one" in printed
    lines = err.splitlines()
    assert lines[:3] == [
        "ftkit: out/notes.txt holds no run: left out",
        "ftkit: out/empty holds no run: left out",
        "ftkit: none does not exist: left out",
    ]
    assert lines[3].startswith("ftkit: out/cut ") and "is damaged" in lines[3]


def test_runs_at_work_and_killed_ones_are_compared_by_what_their_ranks_have_noted(
    tmp_path: Path,
) -> None:
    for name in ("at-work", "killed"):
        report = make_run(tmp_path / name, "failed", steps=12, write=False)
        other = dataclasses.replace(report.peak_memory.ranks[0], rank=1, allocated_bytes=12 * GIB)
        second = dataclasses.replace(report, peak_memory=PeakMemory.of([other]))
        note_in_ranks(tmp_path / name, report, second)
    with at_work(tmp_path / "at-work"):
        runs = compare([tmp_path]).runs
        shown = at_width(100, tmp_path)
    assert [(run.name, run.state) for run in runs] == [("at-work", "running"), ("killed", "killed")]
    assert runs[0].report.peak_memory.allocated_bytes == 12 * GIB
    assert says(shown, "at-work ... ftkit watch")
    assert says(shown, "killed ... report")


def test_a_run_that_was_killed_in_a_later_session_is_not_taken_for_completed(
    tmp_path: Path,
) -> None:
    report = make_run(tmp_path / "run")
    note_in_ranks(tmp_path / "run", dataclasses.replace(report, outcome="failed"))
    assert [run.state for run in compare([tmp_path]).runs] == ["killed"]


def test_times_of_a_last_session_are_labelled(tmp_path: Path) -> None:
    make_run(tmp_path / "run", resumed=True)
    note = "run: time, speed and memory are of its last session, from step 20"
    assert note in at_width(100, tmp_path)


def test_the_parts_of_memory_add_up_to_the_peak_of_the_fullest_rank(tmp_path: Path) -> None:
    report = make_run(tmp_path / "gpu", peak_bytes=10 * GIB)
    make_run(tmp_path / "cpu", peak_bytes=10 * GIB, gpu=False)
    make_run(tmp_path / "early", "out_of_memory", steps=0, peak_bytes=10 * GIB)
    parts = {run.name: run.memory_parts for run in compare([tmp_path]).runs}
    assert {name: sum(found.values()) for name, found in parts.items()} == {
        "gpu": 11 * GIB, "early": 11 * GIB, "cpu": 10 * GIB,
    }  # fmt: skip
    assert parts["gpu"]["reserved, not used"] == GIB
    assert parts["early"] == {"other tensors": 10 * GIB, "reserved, not used": GIB}
    low = report.step_memory.fullest.peak_breakdown_bytes
    low = dataclasses.replace(low, activations=low.activations - GIB)
    rank = dataclasses.replace(report.step_memory.fullest, peak_breakdown_bytes=low)
    changed = dataclasses.replace(report, step_memory=StepMemory(ranks=[rank]))
    write_report(changed, tmp_path / "gpu")  # the peak was outside the measured steps
    (run_,) = compare([tmp_path / "gpu"]).runs
    assert run_.memory_parts["other tensors"] == GIB


def test_the_limit_is_the_memory_of_the_device_or_a_share_of_the_host(tmp_path: Path) -> None:
    make_run(tmp_path / "gpu")
    report = make_run(tmp_path / "cpu", gpu=False)
    resolved = dataclasses.replace(report.resolved, devices=4)  # type: ignore[type-var]
    write_report(dataclasses.replace(report, resolved=resolved), tmp_path / "cpu")
    limits = {run.name: run.memory_limit_bytes for run in compare([tmp_path]).runs}
    assert limits == {"gpu": 24 * GIB, "cpu": 16 * GIB}


# --- Other formats --------------------------------------------------------------------------------


def test_json_has_raw_values_and_nothing_else_is_written(
    said: Callable[..., tuple[str, str]], out: Path
) -> None:
    printed, err = said(out, "none", "--format", "json")
    found = json.loads(printed)
    assert says(err, "none does not exist")
    assert found["left_out"] == [{"path": "none", "reason": "does not exist"}]
    eight = found["runs"][-1]
    assert (eight["run"], eight["out_dir"], eight["state"]) == (
        "eight",
        "out/eight",
        "out_of_memory",
    )
    assert eight["settings"] == {"train.micro_batch_size": 8}
    assert eight["results"]["allocated_bytes"] == 23 * GIB
    assert eight["results"]["tokens_per_s"] is None


def test_csv_has_a_row_for_each_run_and_all_measures(
    said: Callable[..., tuple[str, str]], out: Path
) -> None:
    rows = list(csv.DictReader(io.StringIO(said(out, "--format", "csv")[0])))
    four = read_report(out / "four")
    assert [row["run"] for row in rows] == ["four", "one", "ctrl-c", "eight"]
    assert float(rows[0]["loss"]) == four.loss.last
    assert rows[0]["train.micro_batch_size"] == "4"
    assert rows[3]["tokens_per_s"] == rows[3]["mfu"] == ""
    assert says(rows[3]["exit_reason"], "CUDA out of memory ... 2.00 GiB")


def test_markdown_is_one_table_with_the_best_in_bold(
    said: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    make_run(tmp_path / "a|b_c_", step_s=0.1)
    make_run(tmp_path / "<i>", step_s=0.2)
    lines = said(tmp_path, "--format", "markdown")[0].splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert lines[2].startswith(r"| a\|b_c\_ | completed | 40 |") and "| **20,000** |" in lines[2]
    assert lines[3].startswith(r"| \<i> | completed |")


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: Any, attrs: Any) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: Any) -> None:
        self.text += data


EVIL = "<script>alert(1)<&script>"


def test_a_notebook_shows_a_comparison_as_a_table_with_names_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / EVIL, "failed")
    make_run(tmp_path / "b")
    shown = _Tags(compare([tmp_path])._repr_html_())
    assert EVIL in shown.text and "script" not in shown.tags
    assert shown.tags.count("tr") == 3


# --- Pictures -------------------------------------------------------------------------------------


@pytest.fixture
def matplotlib() -> Any:
    return pytest.importorskip("matplotlib")


def panels(*paths: object) -> Any:
    runs = compare(paths).runs
    figure = plots.figure(runs)
    return (
        runs,
        figure,
        {axes.get_title(loc="left") or axes.get_title(): axes for axes in figure.axes},
    )


def test_every_run_has_its_curve_by_step_and_by_time(matplotlib: Any, out: Path) -> None:
    runs, _, found = panels(out)
    by_step = found["Loss by step, mean of 2 steps; points: validation"]
    curves = [line for line in by_step.lines if line.get_linestyle() != "None"]
    losses = [
        [(a + b) / 2 for a, b in pairwise([*run.training.losses[:1], *run.training.losses])]
        for run in runs
    ]
    assert [list(line.get_ydata()) for line in curves] == [pytest.approx(part) for part in losses]
    assert [len(line.get_xdata()) for line in curves] == [40, 40, 12, 0]
    by_time = found["Loss by time of training"]
    ends = [line.get_xdata()[-1] for line in by_time.lines if len(line.get_xdata()) > 4]
    assert ends == pytest.approx([20, 32, 6])
    assert len({line.get_color() for line in curves}) == 4


def test_runs_of_other_models_and_objectives_have_scales_of_their_own(
    matplotlib: Any, tmp_path: Path
) -> None:
    dpo = {"class_path": "dpo", "init_args": {}}
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", checkpoint_dir="larger", final_loss=40)
    make_run(tmp_path / "c", final_loss=0.01)
    make_run(tmp_path / "d", objective=dpo)
    _, figure, _ = panels(tmp_path)
    by_step = {axes.get_ylabel(): axes for axes in figure.axes if "loss" in axes.get_ylabel()}
    assert set(by_step) == {f"{of}\nloss (nats)" for of in ("base", "larger", "base, dpo")}
    assert by_step["larger\nloss (nats)"].get_ylim()[0] > 30
    assert by_step["base\nloss (nats)"].get_ylim()[1] < 5
    curves = [line for axes in by_step.values() for line in axes.lines if len(line.get_xdata()) > 4]
    assert len(curves) == 4 == len({line.get_color() for line in curves})
    legend, _ = (part.legends[0] for part in figure.subfigs)
    assert {text.get_text() for text in legend.get_texts()} == {"a", "b", "c", "d"}


def test_memory_is_stacked_up_to_the_peak_beside_the_limit(matplotlib: Any, out: Path) -> None:
    runs, figure, found = panels(out)
    axes = found["Peak memory of a rank"]
    ends = [0.0] * len(runs)
    for bar in axes.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        ends[row] = max(ends[row], bar.get_x() + bar.get_width())
    assert ends == pytest.approx([15, 9, 10, 24])
    assert {line.get_xdata()[0] for line in axes.lines} == {24}
    assert [label.get_text() for label in axes.get_yticklabels()] == [run.name for run in runs]
    named = [text.get_text() for part in figure.subfigs for text in part.legends[0].get_texts()]
    assert named == [
        "four", "one", "ctrl-c", "limit of the device: 24.0 GiB", "parameters", "gradients",
        "optimizer state", "activations", "temporaries", "other tensors", "reserved, not used",
    ]  # fmt: skip


def test_a_distant_limit_is_written_and_not_drawn(matplotlib: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "small", peak_bytes=6 * GIB, gpu=False)
    _, _, found = panels(tmp_path)
    axes = found["Peak memory of a rank (limit: 64.0 GiB)"]
    assert not axes.lines
    assert axes.get_xlim()[1] < 10


def test_throughput_says_how_a_run_without_one_ended(matplotlib: Any, out: Path) -> None:
    axes = panels(out)[2]["Throughput"]
    assert [bar.get_width() for bar in axes.patches] == [4000, 2500, 4000, 0]
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["4,000", "2,500", "4,000, interrupted", "out of memory"]


def test_twenty_one_runs_all_look_different(matplotlib: Any) -> None:
    assert len({plots._look(i) for i in range(21)}) == 21


def test_a_png_has_a_sensible_size_also_of_twenty_runs(
    matplotlib: Any, said: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    for number in range(20):
        make_run(tmp_path / f"out/{number}", lora_r=number + 1, steps=200, total_steps=200)
    picture = tmp_path / "runs.png"
    said(tmp_path / "out", "--plot", picture)
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert width == 1800 and 1500 < height < 2500
    assert 50_000 < len(content) < 2_000_000


def test_runs_without_a_step_and_without_memory_can_be_drawn(
    matplotlib: Any, tmp_path: Path
) -> None:
    make_run(tmp_path / "a", "failed", steps=0, peak_bytes=None)
    _, figure, found = panels(tmp_path)
    figure.canvas.draw()
    assert found["Loss by step"].texts[0].get_text() == "no run has done a step"


def test_a_run_may_have_any_name(matplotlib: Any, tmp_path: Path) -> None:
    odd = ["_hidden", "a $x^2$ b", "$", "ü 漢字", EVIL]
    for name in odd:
        make_run(tmp_path / "out" / name, steps=5)
    _, figure, _ = panels(tmp_path / "out")
    named = [text.get_text() for text in figure.subfigs[0].legends[0].get_texts()]
    assert sorted(named) == sorted(odd)
    compare([tmp_path / "out"]).plot(tmp_path / "x.png")


def test_a_page_holds_table_and_picture_refers_to_nothing_and_runs_nothing(
    matplotlib: Any, tmp_path: Path
) -> None:
    make_run(tmp_path / "out" / EVIL)
    make_run(tmp_path / "out/b", "out_of_memory")
    pages = [compare([tmp_path / "out"]).plot(tmp_path / name) for name in ("1.html", "2.html")]
    text = pages[0].read_text()
    assert text == pages[1].read_text()  # the same each time
    shown = _Tags(text)
    assert EVIL in shown.text
    assert not {"script", "link", "img", "iframe", "image", "foreignobject"} & set(shown.tags)
    assert {"svg", "table"} <= set(shown.tags)
    assert all(link.startswith("#") for link in shown.links)


@pytest.mark.parametrize(
    ("arguments", "said_"),
    [
        (["none"], "none does not exist ... out_dir"),
        (["out", "--sort", "token_per_s"], "Did you mean tokens_per_s? Try --sort tokens_per_s."),
        (["out", "--plot", "x.pdf"], "--plot is 'x.pdf' ... .png or .html ... --plot"),
        (["out", "--plot", "none/x.png"], "--plot none/x.png ... No such file"),
    ],
)
def test_a_mistake_is_one_clear_error(out: Path, arguments: list[Any], said_: str) -> None:
    assert says(mistake(*arguments), said_)


def test_without_matplotlib_the_error_names_the_extra(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'ftkit[plot]'" in mistake(out, "--plot", "x.png")


def test_losses_on_sources_and_sets_are_those_of_the_result(tmp_path: Path) -> None:
    """They are of the last validation, or of the checkpoint that was chosen."""
    chosen = ChosenResult(step=10, validation_loss=0.5, losses={"my_data.json": 4.0, "code": 5.0})
    for name, result in (("last", None), ("best", chosen), ("without", None)):
        report = make_run(tmp_path / name)
        if name != "without":
            sources = {"my data.json": Source(validation_last=1.0), "b": Source()}
            sets = {"code": Source(validation_last=2.0)}
            report = dataclasses.replace(report, sources=sources, sets=sets, result=result)
            write_report(report, tmp_path / name)
    runs = in_order(compare((tmp_path,)).runs, "val_loss/code")
    columns = {column.key: column for column in number_columns(runs)}
    assert [run.name for run in runs] == ["last", "best", "without"]
    assert columns["val_loss/code"].label == "loss on code"
    assert columns["val_loss/code"].values == [2.0, 5.0, None]
    assert columns["val_loss/my_data.json"].values == [1.0, 4.0, None]
    assert columns["validation_loss"].priority < columns["val_loss/code"].priority
