"""Runs of earlier versions are read, verified and gone on with, step for step.

Those in tests/runs/earlier/COMMIT were written by the ftkit of that commit itself
(`scripts/make_earlier_runs`): completed ones, whose losses are to come out, and stopped ones.
"""

import csv
import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from command import Command
from rank_jobs import needs_deepspeed
from runs import losses

from ftkit.checkpoint.metadata import METADATA
from ftkit.cli import app
from ftkit.recipe.lora_layers import kept_from
from ftkit.recipe.parsing import read_keys, read_recipe, to_dict
from ftkit.recipe.recipe import Method
from ftkit.recipe.recipe_sections import recipe_type
from ftkit.utils.names import leaves

EARLIER = Path(__file__).parent / "earlier"
COMMITS = sorted(path.parent.name for path in EARLIER.glob("*/lora-whole"))
RUNS = sorted(str(path.relative_to(EARLIER)) for path in EARLIER.glob("*/*"))
RUNS = [name for name in RUNS if (EARLIER / name / "recipe.yaml").is_file()]
STOPPED = [name for name in RUNS if (EARLIER / name / "checkpoints").is_dir()]
NAMES = [pytest.param(name, id=name.replace("/", "-")) for name in RUNS]

OF_EACH_VERSION = ("7440d45/lora-dropout-single", "18499ae/lora-ddp", "ff71ef0/full-fsdp")
"""A stopped run of each, between them of every kind; the others repeat them."""
STOPPED_CASES = [
    pytest.param(
        name,
        id=name.replace("/", "-"),
        marks=pytest.mark.slow if name in OF_EACH_VERSION else pytest.mark.matrix,
    )
    for name in STOPPED
]
OTHERS = [
    ("fsdp", 2),
    pytest.param("ddp", 2, marks=pytest.mark.matrix),
    pytest.param("deepspeed", 2, marks=[pytest.mark.matrix, needs_deepspeed]),
]


def command_of(name: str) -> tuple[str, Method]:
    return ("finetune", "lora") if "/lora-" in name else ("finetune_full", "full")


def series(run: Path, file: str, column: str) -> list[float]:
    with (run / file).open(encoding="utf-8") as rows:
        return [float(row[column]) for row in csv.DictReader(rows)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of all of them, where the commands work."""
    shutil.copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_there_are_runs_of_earlier_versions() -> None:
    assert {"18499ae", "ff71ef0"} <= {*COMMITS}
    assert "7440d45/lora-dropout-single" in STOPPED, "whose names are of LitGPT's code"
    for commit in COMMITS:
        of_it = {name.partition("/")[2] for name in STOPPED if name.startswith(commit)}
        assert of_it >= {"lora-single", "lora-ddp", "full-fsdp"}


def recorded_command(run: Path) -> list[str]:
    """Words of the command that began a run, without `ftkit`."""
    program, *words = json.loads((run / "report.json").read_text())["command"]
    assert program == "ftkit"
    return [str(word) for word in words]


def assert_goes_on(
    ftkit: Command,
    place: Path,
    name: str,
    strategy: str,
    devices: int,
    words: Sequence[object] = (),
) -> str:
    """To the end, with the losses that the version of the run had recorded of a whole one.

    Args:
        ftkit: the command.
        place: where the runs are.
        name: of the run.
        strategy: to go on with.
        devices: to go on with.
        words: of the command; none: those that the run itself says continue it.

    Returns:
        What the command said.
    """
    command, _ = command_of(name)
    run = place / name
    words = words or (command, "--config", run / "recipe.yaml")
    ended = ftkit(*words, "--resume", "auto", "--strategy", strategy, "--devices", devices)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    before = len(losses(EARLIER / name))
    assert f"continuing from step {before}" in ended.stdout
    whole = EARLIER / f"{name.rpartition('-')[0]}-whole"
    assert before < len(losses(whole))
    for file, column in [("metrics.csv", "loss"), ("validation.csv", "val_loss")]:
        assert series(run, file, column) == pytest.approx(series(whole, file, column), rel=1e-5)
    assert series(run, "metrics.csv", "lr") == series(whole, "metrics.csv", "lr")
    return ended.stdout


@pytest.mark.parametrize("name", STOPPED_CASES)
def test_a_stopped_run_continues_with_the_losses_of_its_own_version(
    ftkit: Command, place: Path, name: str
) -> None:
    assert_goes_on(ftkit, place, name, "single", 1)


@pytest.mark.slow
@pytest.mark.parametrize("commit", COMMITS)
def test_a_run_that_adapts_fewer_layers_by_default_continues_with_its_own_command(
    ftkit: Command, place: Path, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    name = f"{commit}/lora-single"
    words = recorded_command(place / name)
    assert not {"--lora_query", "--lora_targets", "--lora_alpha"} & {*words}
    stop = words.index("--stop_after")
    del words[stop : stop + 2]
    said = assert_goes_on(ftkit, place, name, "single", 1, words)
    assert "kept, as the defaults were when the run began: lora_targets null, lora_alpha 16" in said
    assert "changed:" not in said
    continued = read_keys(place / name / "recipe.yaml")
    then = read_keys(EARLIER / name / "recipe.yaml")
    assert {k: continued[k] for k in then if k.startswith("lora_")} == {
        k: value for k, value in then.items() if k.startswith("lora_")
    }


@pytest.mark.parametrize(("strategy", "devices"), OTHERS)
@pytest.mark.parametrize("name", STOPPED_CASES)
def test_it_continues_under_another_strategy(
    ftkit: Command, place: Path, name: str, strategy: str, devices: int
) -> None:
    assert_goes_on(ftkit, place, name, strategy, devices)


Said = Callable[..., str]


@pytest.fixture
def said(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """The output of a command in this process, which ends with a code."""
    monkeypatch.chdir(place)

    def said(*words: object, code: int = 0) -> str:
        assert app.run([str(word) for word in words]) == code
        return capsys.readouterr().out

    return said


def test_its_checkpoints_are_listed_and_verified_and_damage_is_detected(
    said: Said, place: Path
) -> None:
    for name in STOPPED:
        (checkpoint,) = (place / name / "checkpoints").glob("step-*")
        assert " 3 " in said("checkpoints", "list", place / name)
        said("checkpoints", "verify", place / name)
        assert json.loads((checkpoint / METADATA).read_text())["format_version"] == 1
        shard = max(checkpoint.glob("*.safetensors"), key=lambda file: file.stat().st_size)
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        assert shard.name in said("checkpoints", "verify", place / name, code=1)


@pytest.mark.extensions
@pytest.mark.parametrize("name", NAMES)
def test_its_recipe_has_the_same_meaning_today(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded one, with every default of that version; new keys have their defaults."""
    monkeypatch.chdir(place)
    _, method = command_of(name)
    file = place / name / "recipe.yaml"
    then = read_keys(file)
    now = dict(leaves(to_dict(read_recipe([file], method=method))))
    of_today = dict(leaves(to_dict(recipe_type(method)(checkpoint_dir="base"))))
    for key, value in then.items():
        assert now[key] == value, key
    for key in now.keys() - then.keys():
        assert now[key] == of_today[key], key


@pytest.mark.extensions
@pytest.mark.parametrize("name", NAMES)
def test_its_command_line_has_the_same_meaning_today(name: str, place: Path, said: Said) -> None:
    """But for the defaults that a run keeps when it continues."""
    (place / "today.yaml").write_text(said(*recorded_command(place / name), "--print_config"))
    _, method = command_of(name)
    now, then = (
        read_recipe([file], method=method)
        for file in (place / "today.yaml", place / name / "recipe.yaml")
    )
    assert to_dict(dataclasses.replace(now, **kept_from(then, now))) == to_dict(then)


@pytest.mark.parametrize(
    "commit",
    [
        pytest.param(commit, marks=pytest.mark.matrix if number else pytest.mark.slow)
        for number, commit in enumerate(COMMITS)
    ],
)
def test_a_completed_run_is_compared_prompted_evaluated_and_merged(
    ftkit: Command, place: Path, commit: str
) -> None:
    def said(*words: object) -> str:
        ended = ftkit(*words)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    run = place / commit / "lora-whole"
    (row,) = json.loads(said("compare", run, "--format", "json"))["runs"]
    assert row["state"] == "completed" and row["results"]["steps"] == 6
    measured = json.loads(said("evaluate", run, "--exact_match", 0, "--format", "json"))
    last = series(run, "validation.csv", "val_loss")[-1]
    assert measured["loss"] == pytest.approx(last, rel=1e-5)
    assert said("generate", run, "--prompt", "red cat", "--max_new_tokens", 3)
    said("merge", run, "--out", place / "merged")
    assert said("generate", place / "merged", "--prompt", "red cat", "--max_new_tokens", 3)
