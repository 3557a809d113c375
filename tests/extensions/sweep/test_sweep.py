"""ftkit sweep: what is run, what is skipped, what goes on; the committed sweeps at tiny scale."""

import dataclasses
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import ROOT, command_environment, command_line, start_up_of_ranks
from compared_runs import at_work, make_run, note_in_ranks
from messages import key_words, message_of, says
from plugins import opened, write_documented
from rank_jobs import HAS_DEEPSPEED
from runs import DEFAULT_SIGNALS, rows, wait_for, watched

from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.extensions.sweep.combinations import differences, runs_of_keys
from ftkit.recipe.parsing import to_yaml
from ftkit.recipe.sweep import runs_of_file
from ftkit.runs.report.report import OutcomeName, Report, read_report

SWEEPS = ROOT / "recipes" / "sweeps"
BASE = "random:pythia-14m"


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Lines that `ftkit sweep` prints in an empty directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(f"checkpoint_dir: {BASE}\naccelerator: cpu\nout_dir: out/r\n")

    def run_(*argv: object) -> list[str]:
        assert run(["sweep", *map(str, argv)]) == 0
        return capsys.readouterr().out.splitlines()

    return run_


def write_sweep(path: Path, *runs: object, **keys: object) -> Path:
    path.write_text(yaml.safe_dump({"runs": list(runs), **keys}))
    return path


SMALL = {"name": "small", "command": "finetune", "config": "r.yaml", "train.micro_batch_size": 2}


# --- What is run --------------------------------------------------------------------------------


def test_every_combination_of_values_is_a_run_with_a_name_of_its_own(
    said: Callable[..., list[str]],
) -> None:
    lines = said(
        "finetune", "--config", "r.yaml", "--sweep", "train.micro_batch_size=1,2",
        "--sweep", "optimizer=AdamW,SGD", "--seed", "7", "--dry_run",
    )  # fmt: skip
    assert says(
        lines[0], "1 of 4 ... micro_batch_size=1,optimizer=AdamW (train.micro_batch_size 1,"
    )
    assert lines[1] == (
        "  ftkit finetune --config=r.yaml --train.micro_batch_size=1 --optimizer=AdamW --seed=7 "
        "--out_dir=out/r-sweep/micro_batch_size=1,optimizer=AdamW"
    )
    assert len(lines) == 8


def test_commands_that_are_shown_have_no_token(said: Callable[..., list[str]]) -> None:
    words = ("finetune", "--config", "r.yaml", "--sweep", "seed=1", "--dry_run")
    lines = said(*words, "--access_token", "my-secret")
    assert "--access_token=***" in lines[1] and "my-secret" not in "".join(lines)


def test_names_are_directories_whatever_the_values_are(said: Callable[..., list[str]]) -> None:
    lines = said(
        "finetune", "--config", "r.yaml", "--sweep", "data.seed=1,2", "--sweep", "seed=1",
        "--sweep", "lora_targets=[q_proj, v_proj],.*(q|v)_proj", "--out_dir", "all", "--dry_run",
    )  # fmt: skip
    names = [line.split("--out_dir=")[1].strip("'") for line in lines[1::2]]
    assert names[0] == "all/data.seed=1,seed=1,lora_targets=_q_proj,_v_proj_"
    assert len(set(names)) == 4
    assert all(name.count("/") == 1 for name in names)


def test_a_plugin_is_passed_on_to_every_run(
    said: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.cli.app.open_plugin", lambda file: file and opened(Path(file)))
    write_documented(tmp_path / "my.py", "An objective")
    words = ("--plugin", "my.py", "--objective", "Focal", "--sweep", "objective.gamma=1,2")
    lines = said("finetune", "--config", "r.yaml", *words, "--dry_run")
    commands = [line for line in lines if line.startswith("  ftkit")]
    assert len(commands) == 2
    assert all(f"--plugin={tmp_path / 'my.py'}" in command for command in commands)


def test_a_file_names_runs_over_recipes_beside_it_and_options_hold_for_all(
    said: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "deep").mkdir()
    file = write_sweep(
        tmp_path / "deep/s.yaml",
        SMALL | {"config": "../r.yaml"},
        {"name": "sgd", "command": "finetune_full", "config": ["../r.yaml"],
         "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1}}},
    )  # fmt: skip
    lines = said(file, "--train.micro_batch_size", "4", "--dry_run")
    assert lines[1].endswith(
        "--train.micro_batch_size=2 --train.micro_batch_size=4 --out_dir=out/sweeps/s/small"
    )
    assert said(file, "--only", "sg*", "--out_dir", "o", "--dry_run")[0].startswith(
        "1 of 1: start sgd"
    )
    _, sgd = runs_of_file(file, [("train.micro_batch_size", "4")], None)
    assert sgd.recipe().optimizer["init_args"]["lr"] == 0.1
    assert sgd.recipe().train.micro_batch_size == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"runs": []}, "must hold a list of runs"),
        ({"runs": [SMALL], "seed": 1}, "'seed' ... out_dir and runs"),
        ({"runs": ["small"]}, "'small' ... name and a command"),
        ({"runs": [SMALL | {"name": "../up"}]}, "name of a run ... '../up'"),
        ({"runs": [SMALL | {"command": "train"}]}, "command of small is 'train'"),
        ({"runs": [SMALL | {"resume": "auto"}]}, "small has the key resume"),
        ({"runs": [SMALL | {"note": 8}]}, "note of small is 8"),
        ({"runs": [SMALL, SMALL]}, "2 runs have the name small"),
        ({"runs": [SMALL | {"train.micro_batch": 1}]}, "small ... train.micro_batch"),
        ({"runs": [SMALL | {"config": "no.yaml"}]}, "small ... --config no.yaml"),
        ({"runs": [SMALL | {"devices": 0}]}, "small: devices is 0"),
    ],
)
def test_a_mistake_in_the_last_run_is_reported_before_the_first_one_starts(
    said: Callable[..., list[str]], tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    Path("s.yaml").write_text(yaml.safe_dump(content))
    assert says(message_of(said, "s.yaml"), message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.yaml", "s.yaml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Name a file ... ftkit sweep"),
        (["finetune", "--config", "r.yaml"], "--sweep is missing"),
        (["finetune", "--config", "r.yaml", "--sweep", "seed"], "key and its values"),
        (["finetune", "--config", "r.yaml", "--sweep", "out_dir=a,b"], "which is set already"),
        (["s.yaml", "--sweep", "seed=1"], "--config and --sweep"),
        (["s.yaml", "--resume", "auto"], "--resume is not for sweeps"),
        (["s.yaml", "--only", "larg*"], "--only is 'larg*'"),
        (["s.yaml", "--plot", "a.txt"], "--plot is 'a.txt'"),
        (["none.yaml"], "none.yaml does not exist"),
    ],
)
def test_a_mistake_on_the_command_line_is_reported_with_a_remedy(
    said: Callable[..., list[str]], tmp_path: Path, words: list[Any], message: str
) -> None:
    write_sweep(tmp_path / "s.yaml", SMALL)
    assert says(message_of(said, *words), message)


# --- What is skipped, and what goes on ----------------------------------------------------------


@pytest.fixture
def action(said: Callable[..., list[str]], tmp_path: Path) -> Callable[..., str]:
    """Action that a sweep would take for its run `small` now."""
    file = write_sweep(tmp_path / "s.yaml", SMALL, out_dir="o")

    def action_(*words: str) -> str:
        line, command = said(file, "--dry_run", *words)
        assert ("--overwrite" in command) == ("start again" in line)
        assert ("--resume=auto" in command) == ("resume small" in line)
        return line.removeprefix("1 of 1: ").replace(" (train.micro_batch_size 2)", "")

    return action_


def record(tmp_path: Path, **keys: object) -> None:
    """The recipe of the run, as the run itself writes it."""
    settings = {"checkpoint_dir": BASE, "accelerator": "cpu", "train": {"micro_batch_size": 2}}
    (tmp_path / "o/small/recipe.yaml").write_text(yaml.safe_dump(settings | keys))


@pytest.mark.parametrize("outcome", ["completed", "out_of_memory"])
def test_complete_runs_are_skipped(
    action: Callable[..., str], tmp_path: Path, outcome: OutcomeName
) -> None:
    make_run(tmp_path / "o/small", outcome)
    record(tmp_path)
    assert action() == f"skip small: {outcome.replace('_', ' ')}"
    assert action("--overwrite").startswith("start again small: ")


def test_a_resolved_auto_value_is_the_same_recipe(
    action: Callable[..., str], tmp_path: Path
) -> None:
    make_run(tmp_path / "o/small")
    record(tmp_path, train={"micro_batch_size": 2, "micro_batch_tokens": 4096})
    assert action("--train.micro_batch_tokens", "auto") == "skip small: completed"


def test_a_precision_that_a_continued_run_has_kept_is_the_same_recipe(
    action: Callable[..., str], tmp_path: Path
) -> None:
    make_run(tmp_path / "o/small")
    record(tmp_path, precision="bf16-mixed")
    assert action() == "skip small: completed"
    with pytest.raises(UserError, match=key_words("precision is bf16-mixed there")):
        action("--precision", "32-true")


@pytest.mark.parametrize("outcome", ["failed", "interrupted", "stopped"])
def test_a_run_that_ended_early_continues_from_its_checkpoint_or_starts_again(
    action: Callable[..., str], tmp_path: Path, outcome: OutcomeName
) -> None:
    make_run(tmp_path / "o/small", outcome)
    assert says(action(), f"start again small ... {outcome}")
    checkpoint = tmp_path / "o/small/checkpoints/step-00000030"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text("{}")
    assert says(action(), f"resume small ... {outcome} ... step 30")


def test_a_run_that_could_not_write_its_report_starts_again(
    action: Callable[..., str], tmp_path: Path
) -> None:
    make_run(tmp_path / "o/small", write=False)
    assert says(action(), "start again small ... failed")


def test_a_run_at_work_is_left_alone(action: Callable[..., str], tmp_path: Path) -> None:
    report = make_run(tmp_path / "o/small", "failed", write=False)
    note_in_ranks(tmp_path / "o/small", report)
    with at_work(tmp_path / "o/small"):
        assert action("--overwrite") == "skip small: running"


def test_a_result_of_other_settings_is_not_reused(
    action: Callable[..., str], tmp_path: Path
) -> None:
    make_run(tmp_path / "o/small")
    record(tmp_path, seed=7)
    with pytest.raises(UserError, match=key_words("seed is 7 ... 1337")):
        action()


def test_a_directory_of_something_else_is_refused(
    action: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "o/small").mkdir(parents=True)
    (tmp_path / "o/small/thesis.tex").touch()
    with pytest.raises(UserError, match=key_words("o/small ... something else")):
        action()


# --- Real ones ----------------------------------------------------------------------------------

IN_RANKS = """
name = sys.orig_argv[-2]
if "/memory/" in name or "/long/" in name:
    import time, torch, ftkit.training.step
    step = ftkit.training.step.TrainStep.update
    def slow(*args, **kwargs):
        if "/memory/" in name:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        time.sleep(0.2)
        return step(*args, **kwargs)
    ftkit.training.step.TrainStep.update = slow
"""
"""One run has no memory, and one takes its time."""


@pytest.mark.slow
def test_a_sweep_continues_after_an_out_of_memory_and_after_an_interrupt(
    common: list[str], tmp_path: Path
) -> None:
    run_of = {"command": "finetune"}
    file = write_sweep(
        tmp_path / "s.yaml",
        {"name": "memory", "train.max_steps": 2, **run_of},
        {"name": "wrong", "train.max_steps": 2, "train.max_seq_length": 5000, **run_of},
        {"name": "long", "train.max_steps": 30, **run_of},
        {"name": "last", "train.max_steps": 2, **run_of},
        out_dir=str(tmp_path / "o"),
    )
    kept = [word for pair in zip(common[::2], common[1::2], strict=True)
            if pair[0] != "--train.max_steps" for word in pair]  # fmt: skip
    environment = command_environment()
    environment["PYTHONPATH"] += f":{start_up_of_ranks(tmp_path, IN_RANKS)}"
    command = command_line("sweep", file, *kept, before=DEFAULT_SIGNALS)
    long = tmp_path / "o/long"
    with watched(tmp_path / "o", command, tmp_path, environment) as sweep:
        wait_for(lambda: len(rows(long)) >= 2)
        sweep.process.send_signal(signal.SIGINT)
        code, out, _ = sweep.end()
    assert code == 130
    assert says(out.splitlines()[-1], "stopped by Ctrl+C ... 1 of 4 ... continues")
    assert read_report(tmp_path / "o/memory").outcome == "out_of_memory"
    steps = len(rows(long))
    assert read_report(long).outcome == "interrupted" and steps < 30
    assert not (tmp_path / "o/last").exists()

    with watched(tmp_path / "o", command, tmp_path, environment) as sweep:
        code, out, err = sweep.end()
    assert code == 1
    lines = out.splitlines()
    assert "1 of 4: skip memory (train.max_steps 2): out of memory" in lines
    assert (
        f"3 of 4: resume long (train.max_steps 30): interrupted before, from step {steps}" in lines
    )
    assert "ftkit: train.max_seq_length is 5000" in err
    assert says(lines[-1], "wrong ... not started")
    assert len(rows(long)) == 30 and len(rows(tmp_path / "o/last")) == 2
    compared = out[out.rindex("ftkit lora on") :]
    assert all(name in compared for name in ("memory", "long", "last", "out of memory"))


TINY = {
    "accelerator": "cpu",
    "data": "JSON",
    "data.num_workers": 0,
    "train.global_batch_size": 4,
    "train.micro_batch_size": 1,
    "train.max_steps": 2,
    "train.max_seq_length": 128,
    "train.lr_warmup_steps": 1,
    "eval.interval": 0,
}


@pytest.fixture
def tiny_sweep(
    tiny_base: Path, tiny_data: Path, tmp_path: Path
) -> Callable[..., dict[str, Report]]:
    """Runs a committed sweep at tiny scale: the reports by name."""

    def ftkit(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command_line(*words),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=command_environment(),
        )

    def run_(name: str, *words: object) -> dict[str, Report]:
        keys = TINY | {"checkpoint_dir": tiny_base, "data.json_path": tiny_data}
        options = [word for key, value in keys.items() for word in (f"--{key}", value)]
        out = tmp_path / name
        done = ftkit("sweep", SWEEPS / f"{name}.yaml", *options, "--out_dir", out, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return {path.name: read_report(path) for path in sorted(out.iterdir())}

    return run_


@pytest.mark.matrix
def test_the_experiments_on_one_gpu_run_from_their_sweep(
    tiny_sweep: Callable[..., dict[str, Report]],
) -> None:
    runs = tiny_sweep("single_gpu")
    assert len(runs) == 14
    assert {report.outcome for report in runs.values()} == {"completed"}
    resolved = {name: report.resolved for name, report in runs.items()}
    assert {found.strategy for found in resolved.values()} == {"single"}
    assert resolved["05-tiny-full-bf16-mixed"].precision == "bf16-mixed"
    assert resolved["09-13b-full-sgd"].optimizer == "torch.optim.SGD"
    assert [name for name, found in resolved.items() if found.quantize] == ["13-7b-qlora"]
    assert [name for name, report in runs.items() if report.method == "lora"] == [
        "10-tiny-lora", "11-3b-lora", "12-7b-lora", "13-7b-qlora", "14-13b-lora",
    ]  # fmt: skip


@pytest.mark.matrix
def test_the_experiments_on_several_gpus_run_from_their_sweep(
    tiny_sweep: Callable[..., dict[str, Report]],
) -> None:
    """On two processes instead of four, in two goes."""
    names = [item.name for item in runs_of_file(SWEEPS / "multi_gpu.yaml", [], None)]
    if not HAS_DEEPSPEED:
        names.remove("a100-13b-deepspeed")
    for devices in (1, 2):
        some = [name for name in names if ("1device" in name) == (devices == 1)]
        only = [word for name in some for word in ("--only", name)]
        runs = tiny_sweep("multi_gpu", *only, "--devices", devices)
    assert runs.keys() == set(names)
    for name, report in runs.items():
        assert (report.outcome, report.resolved.precision) == ("completed", "bf16-true")
        strategies = [s for s in ("ddp", "fsdp", "deepspeed") if s in name] or ["single"]
        assert [report.resolved.strategy] == strategies
        assert report.resolved.world_size == (1 if "1device" in name else 2)


@pytest.mark.parametrize("name", ["single_gpu", "multi_gpu"])
def test_a_committed_sweep_has_every_experiment_of_the_tutorial(name: str) -> None:
    runs = runs_of_file(SWEEPS / f"{name}.yaml", [], None)
    assert len(runs) == {"single_gpu": 14, "multi_gpu": 10}[name]
    if name == "multi_gpu":
        recipes = {path.stem for path in (ROOT / "recipes/multi_gpu").glob("*.yaml")}
        assert {item.name for item in runs} == recipes
    assert all(item.recipe() for item in runs)


def test_a_run_with_the_earlier_layers_of_lora_is_that_of_the_sweep(tmp_path: Path) -> None:
    base = ("checkpoint_dir", "random:pythia-14m")
    (run,) = runs_of_keys("finetune", [], ["seed=7"], [base], tmp_path / "out")
    asked = run.recipe()
    earlier: dict[str, Any] = {"lora_targets": None, "lora_r": 8, "lora_alpha": 16}
    recorded = tmp_path / "recipe.yaml"
    recorded.write_text(to_yaml(dataclasses.replace(asked, **earlier)))
    assert differences(run, asked, recorded) == []
    recorded.write_text(to_yaml(dataclasses.replace(asked, **earlier | {"lora_r": 4})))
    assert differences(run, asked, recorded) == ["lora_r is 4 there and 16 here"]
