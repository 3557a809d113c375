"""Output of a run beside its result: with --quiet none, else also the next commands."""

import io
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command import Start, command_environment, command_line
from command_table import COMMANDS
from messages import says
from runs import DEFAULT_SIGNALS, watched

from ftkit.cli.app import main, run
from ftkit.cli.parser import parse
from ftkit.errors import UserError
from ftkit.launch.conclude import next_commands
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe import Component, LoraRecipe, Recipe
from ftkit.runs.directory import RunDirectory
from ftkit.utils import progress
from ftkit.utils.console.display import Display

RECIPE = "checkpoint_dir: random:pythia-14m\nout_dir: out/piped\nlora_r: 4\n"


# --- --quiet ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_quiet_run_shows_its_end_in_a_line_and_its_log_has_all(
    start: Start, tmp_path: Path
) -> None:
    out_dir = tmp_path / "run"
    with start(out_dir, "--quiet") as started:
        code, out, err = started.end()
    assert (code, err) == (0, "")
    assert says(out, f"{out_dir}: completed ... train.max_steps of 5 ... {out_dir}/final")
    log = (out_dir / "run.log").read_text()
    assert "loading weights" in log and "step 5/5" in log and "peak memory" in log


def test_a_quiet_run_shows_warnings_and_how_to_continue(start: Start, tmp_path: Path) -> None:
    out_dir = tmp_path / "run"
    with start(out_dir, "--quiet", stop_after=1, train__lr_warmup_steps=9) as started:
        code, out, _ = started.end()
    warning, *end = out.splitlines()
    assert code == 0
    assert says(warning, "9 steps ... 5")
    assert end == [
        f"{out_dir}: stopped, --stop_after 1 reached",
        f"stopped after step 1, saved to {out_dir}/checkpoints/step-00000001",
        f"continue with: ftkit finetune --config {out_dir}/recipe.yaml --resume auto",
    ]


def test_a_quiet_display_leaves_out_progress_and_notices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(progress, "_verbosity", "quiet")
    stream = io.StringIO()
    with Display(tmp_path, stream=stream) as display:
        display.message("a notice")
        with display.phase("a phase"), display.training(2) as training:
            training.step(1, 2.0, 1e-3, 10.0, 0.5)
        display.warning("a warning")
        display.show_text("a result")
    assert stream.getvalue() == "warning: a warning\na result\n"
    log = (tmp_path / "run.log").read_text()
    assert all(text in log for text in ("a notice", "a phase", "step 1/2", "a warning", "a result"))


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"watch"}))
def test_every_command_that_ends_by_itself_may_be_quiet(name: str) -> None:
    assert parse(COMMANDS[name], [*shlex.split(COMMANDS[name].examples[0]), "--quiet"]).quiet


def test_errors_are_shown_with_quiet_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ftkit", "finetune", "--quiet", "--train.max_stepz", "1"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr() == (
        "",
        "ftkit: train.max_stepz is not a key of a recipe. Did you mean train.max_steps?\n",
    )


# --- The end ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_complete_run_in_a_notebook_shows_no_next_commands(start: Start, tmp_path: Path) -> None:
    as_child = (
        f"{DEFAULT_SIGNALS}import functools\nimport ftkit.cli.app as app\n"
        "app.main = functools.partial(app.main, 'child')\n"
    )
    other = tmp_path / "other"
    with start(other, before=as_child) as started:
        code, out, err = started.end()
    assert code == 0, err
    assert "next:" not in out
    full = Recipe(checkpoint_dir="base")
    assert next_commands(RunDirectory(other), full) == [f"ftkit chat {other}"]


@pytest.mark.extensions
def test_chat_is_not_offered_without_a_result(tmp_path: Path) -> None:
    """As with a base of random weights, of which nothing is saved."""
    run = RunDirectory(tmp_path / "a")
    run.path.mkdir()
    lora = LoraRecipe(checkpoint_dir="base")
    assert next_commands(run, lora) == []
    run.final.mkdir()
    assert next_commands(run, lora)[0] == f"ftkit chat {run.path}"
    reward = replace(lora, objective=Component(class_path="reward", init_args={}))
    assert next_commands(run, reward)[0] == f"ftkit evaluate {run.path}"


# --- Standard input -----------------------------------------------------------------------------


def piped(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command_line(*words),
        input=RECIPE,
        capture_output=True,
        text=True,
        env=command_environment(),
        timeout=120,
    )


def test_a_recipe_may_come_from_standard_input(tmp_path: Path) -> None:
    done = piped("finetune", "--config", "-", "--train.epochs", "2", "--print_config")
    file = tmp_path / "printed.yaml"
    file.write_text(done.stdout)
    recipe = read_recipe([file], method="lora")
    assert (recipe.checkpoint_dir, recipe.train.epochs) == ("random:pythia-14m", 2)
    assert str(recipe.out_dir) == "out/piped"


@pytest.mark.slow
def test_a_run_from_standard_input_records_its_recipe_and_continues_with_it(
    start: Start, common: list[str], tmp_path: Path
) -> None:
    out_dir = tmp_path / "run"
    stdin = "import io, sys\nsys.stdin = io.StringIO('lora_r: 4\\nseed: 7\\n')\n"
    with start(out_dir, before=DEFAULT_SIGNALS + stdin, config="-", stop_after=2) as started:
        assert started.end()[0] == 0
    recorded = read_recipe([out_dir / "recipe.yaml"], method="lora")
    assert isinstance(recorded, LoraRecipe) and (recorded.seed, recorded.lora_r) == (7, 4)
    words = ["finetune", "--config", out_dir / "recipe.yaml", "--resume", "auto"]
    command = command_line(*words)
    with watched(out_dir, command, tmp_path, command_environment()) as started:
        code, out, _ = started.end()
    assert code == 0 and "continuing from step 2" in out


@pytest.mark.extensions
def test_standard_input_that_is_read_several_times_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(RECIPE))
    launched = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in (launched | {"LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    for words in (
        ["sweep", "finetune", "--config", "-", "--sweep", "seed=1,2"],
        ["finetune", "--config", "-"],
    ):
        with pytest.raises(UserError, match="--config is -, standard input"):
            run(words)
    assert sys.stdin.read() == RECIPE
