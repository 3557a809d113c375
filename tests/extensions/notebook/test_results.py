"""Results used from Python: one program uses all functions and records what they return."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import warm
from command import command_environment
from compared_runs import make_run
from local_tasks import LETTERS, SUMS, write_tasks
from messages import key_words

import ftkit
from ftkit.errors import UserError
from ftkit.extensions.comparison.plots import Picture
from ftkit.extensions.notebook import children, display, results
from ftkit.utils import progress

PROGRAM = """
import json, sys
from pathlib import Path
import ftkit

keys = json.loads(sys.argv[1])
seen = {}


def refused(what, *arguments, **options):
    try:
        what(*arguments, **options)
    except ftkit.UserError as error:
        return str(error)


run = ftkit.finetune(**keys, out_dir="run")
one = ftkit.generate(run, "Who is Lena?", max_new_tokens=4, compare_base=True)
several = ftkit.generate(run, ["Who is Lena?", "Who\\nis Max?"], max_new_tokens=4)
seen["answers"] = [one.text, one.base_text, one.tokens, *(answer.text for answer in several)]
seen["printed"] = str(one)
with ftkit.chat(run, max_new_tokens=4) as chat:
    first = chat.ask("Who is Lena?")
    seen["chat"] = [first.text, first.tokens, chat.has_history, repr(chat)]
    seen["too long"] = refused(chat.ask, "long " * 5000)
    seen["after"] = chat.ask("Who is Lena?\\nSay it.").text
seen["closed"] = [repr(chat), refused(chat.ask, "Hello")]
measured = ftkit.evaluate(run, exact_match=2)
report = run.report
seen["evaluated"] = [measured.loss, measured.values["loss"], measured.exact_match]
seen["reported"] = [report.loss.validation_last, repr(report), str(report)]
tasks = ftkit.evaluate(run, tasks=["tasks/sums.yaml", "tasks/letters.yaml"], limit=2)
seen["tasks"] = [tasks.scores, tasks.values["tasks"], repr(tasks)]
merged = ftkit.merge(run, "merged")
exported = ftkit.export(merged, "litgpt", format="litgpt")
seen["files"] = [sorted(path.name for path in place.iterdir()) for place in (merged, exported)]
seen["refusals"] = [
    refused(ftkit.generate, "nowhere/here", "x"),
    refused(ftkit.chat, run, temperatur=1),
    refused(ftkit.evaluate, run, max_iters=0),
    refused(ftkit.merge, run, "merged"),
    refused(ftkit.export, run, "x", format="pickle"),
    refused(ftkit.push, run, "no repository"),
]
plan = ftkit.plan(
    checkpoint_dir="random:pythia-14m", gpu="24GiB", **{"train.max_seq_length": 64}
)
seen["plan"] = [repr(plan), str(plan), str(ftkit.Plans([plan, plan]))]
Path("seen.json").write_text(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(common: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Values that the program recorded."""
    place = tmp_path_factory.mktemp("results")
    keys = {word[2:]: value for word, value in zip(common[::2], common[1::2], strict=True)}
    write_tasks(place / "tasks", SUMS, LETTERS)
    environment = command_environment()
    command = [sys.executable, "-c", PROGRAM, json.dumps(keys)]
    program = warm.SERVER.start(command, environment, cwd=place)
    out, err = program.communicate(timeout=300)
    assert program.returncode == 0, out + err
    found: dict[str, Any] = json.loads((place / "seen.json").read_text())
    return found | {"said": out}


@pytest.mark.slow
def test_answers_come_with_their_length_and_that_of_the_base_model(seen: dict[str, Any]) -> None:
    text, base_text, tokens, first, _ = seen["answers"]
    assert text == first == seen["printed"] and isinstance(base_text, str)
    assert 0 < tokens <= 4


@pytest.mark.slow
def test_a_conversation_stays_loaded_and_survives_a_refusal(seen: dict[str, Any]) -> None:
    text, tokens, has_history, shown = seen["chat"]
    assert text.strip() == seen["answers"][0].strip() and 0 < tokens <= 4
    assert (has_history, shown) == (True, "<ftkit chat: open>")
    assert seen["too long"].startswith("The prompt is ") and isinstance(seen["after"], str)
    assert seen["closed"][0] == "<ftkit chat: closed>"
    assert seen["closed"][1].startswith("This conversation has ended.")


@pytest.mark.slow
def test_what_is_measured_is_what_the_run_has_reported(seen: dict[str, Any]) -> None:
    loss, value, exact_match = seen["evaluated"]
    reported, shown, table = seen["reported"]
    assert loss == value == pytest.approx(reported, rel=1e-6)
    assert 0 <= exact_match <= 1
    assert shown == "<ftkit report: completed, train.max_steps of 5 reached>"
    assert "\nloss " in table


@pytest.mark.slow
def test_tasks_are_measured_as_the_command_does(seen: dict[str, Any]) -> None:
    scores, measured, shown = seen["tasks"]
    assert {task: set(metrics) for task, metrics in scores.items()} == {
        "sums": {"acc", "acc_norm"}, "letters": {"acc"},
    }  # fmt: skip
    for one in measured:
        assert scores[one["task"]][one["metric"]] == one["value"] and one["samples"] == 2
    assert shown == f"TaskEvaluation(scores={scores})"


def test_a_metric_of_a_task_with_filters_is_called_as_the_harness_calls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [
        {"task": "gsm8k", "metric": "exact_match", "filter": name, "value": value}
        for name, value in (("strict-match", 0.25), ("flexible-extract", 0.5))
    ]
    monkeypatch.setattr(results, "output_of", lambda words: json.dumps({"tasks": entries}))
    assert ftkit.evaluate("out/a", tasks="gsm8k").scores == {
        "gsm8k": {"exact_match,strict-match": 0.25, "exact_match,flexible-extract": 0.5}
    }


@pytest.mark.slow
def test_models_are_at_the_stated_paths(seen: dict[str, Any]) -> None:
    merged, exported = seen["files"]
    assert {"config.json", "model.safetensors"} <= set(merged)
    assert {"lit_model.pth", "model_config.yaml"} <= set(exported)


@pytest.mark.slow
def test_a_merge_reports_how_far_the_logits_moved(seen: dict[str, Any]) -> None:
    assert re.search(r"^merged +run/final into the original weights", seen["said"], re.MULTILINE)
    table = r"^merged into +mean logit difference.*\noriginal +\d"
    assert re.search(table, seen["said"], re.MULTILINE)


@pytest.mark.slow
def test_bad_input_raises_the_message_of_the_command(seen: dict[str, Any]) -> None:
    starts = (
        "nowhere/here",
        "--temperatur is not an option of ftkit chat. Did you mean --temperature?",
        "--max_iters is '0', but must be",
        "--out merged exists.",
        "--format is 'pickle', but must be",
        "REPO_ID is no repository, but must be ORG/NAME.",
    )
    for said, start in zip(seen["refusals"], starts, strict=True):
        assert said.startswith(start)


@pytest.mark.parametrize("options", [{"format": "table"}, {"out": "answers.jsonl"}])
def test_what_a_command_would_write_is_returned(options: dict[str, str]) -> None:
    (name,) = options
    with pytest.raises(UserError, match=key_words(f"{name} ... option of the command line")):
        ftkit.generate("out/a", "Who is Lena?", **options)


def test_no_prompts_have_no_answers() -> None:
    assert ftkit.generate("out/a", []) == []


def test_the_program_itself_loads_no_torch() -> None:
    program = "import sys, ftkit; ftkit.chat, ftkit.merge; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("False\n", "")


@pytest.mark.slow
def test_outside_a_notebook_plans_are_short_and_print_shows_them(seen: dict[str, Any]) -> None:
    shown, printed, several = seen["plan"]
    assert re.fullmatch(
        r"<ftkit plan: lora on random:pythia-14m: needs up to [\d.,]+ [MG]iB, fits on 24GiB>", shown
    )
    assert printed.startswith("plan: lora on random:pythia-14m ---") and "\nsequences " in printed
    assert len(several.splitlines()) < len(printed.splitlines())


def test_outside_a_notebook_a_plot_is_short() -> None:
    assert repr(Picture(b"\x89PNG" * 512)) == "<ftkit plot: PNG, 2 KiB>"


def test_every_function_of_the_api_has_an_example() -> None:
    for name in ("generate", "chat", "evaluate", "merge", "export", "push"):
        assert f"ftkit.{name}(" in getattr(ftkit, name).__doc__


def test_ipython_shows_the_message_alone() -> None:
    assert UserError("seed is x.")._render_traceback_() == ["UserError: seed is x."]


def test_one_run_or_directory_of_runs_is_compared_as_it_is(tmp_path: Path) -> None:
    for name in "ab":
        make_run(tmp_path / name)
    assert [run.name for run in ftkit.compare(tmp_path).runs] == ["a", "b"]
    assert [run.name for run in ftkit.compare(str(tmp_path / "a")).runs] == ["a"]


# --- While it takes long --------------------------------------------------------------------------


@pytest.mark.parametrize(("late_s", "printed"), [(0.0, "ftkit merge ...\n"), (60.0, "")])
def test_a_command_without_output_yet_is_shown_as_running(
    late_s: float,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(children, "LATE_S", late_s)
    with TemporaryFile() as said:
        looks = iter([False, False, True])
        children.show_progress("ftkit merge", lambda: next(looks), said)
        assert capsys.readouterr().out == printed
        said.write(b"writing merged ... 40 % 5.0 s\n")
        said.flush()
        looks = iter([False, False, True])
        children.show_progress("ftkit merge", lambda: next(looks), said)
        assert capsys.readouterr().out == "writing merged ... 40 % 5.0 s\n"


@pytest.mark.parametrize(("takes_s", "printed"), [(1.0, "ftkit plan ...\n"), (0.0, "")])
def test_progress_of_long_work_in_this_process_is_shown(
    takes_s: float,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "LATE_S", 0.05)
    with display.shown_if_late("ftkit plan ..."):
        time.sleep(takes_s)
    assert capsys.readouterr().out == printed
