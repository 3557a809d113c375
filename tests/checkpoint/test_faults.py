"""Promise P3: after a kill, a full disk or damage, a run resumes from its newest intact state."""

import dataclasses
import io
import itertools
import os
import pickle
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from command import Command
from faults import BALLAST
from preloaded import SUPERVISOR, Attempt, Preloaded
from rank_jobs import Outcome
from runs import options

from ftkit.checkpoint.file_checks import hash_file
from ftkit.checkpoint.metadata import read_metadata, write_metadata
from ftkit.checkpoint.store import Store
from ftkit.errors import UserError
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe import Method, Recipe
from ftkit.runs.report.report import read_report
from ftkit.runs.resume import find_start, verify_start
from ftkit.utils.console.display import Display

COMMANDS: dict[Method, str] = {"full": "finetune_full", "lora": "finetune"}
SINGLE: tuple[str, ...] = ()
FSDP = ("--devices", "2", "--strategy", "fsdp")


@dataclass(frozen=True)
class Runs:
    """Starts runs of one kind, all alike but for their directory."""

    server: Preloaded
    words: tuple[str, ...]

    def begin(
        self, out: Path, *more: object, faults: dict[int, list[object]] | None = None
    ) -> Attempt:
        """Start the run, or resume it if there is a checkpoint."""
        resume = () if "--resume" in more else ("--resume", "auto")
        return self.server.start(*self.words, "--out_dir", out, *resume, *more, faults=faults)

    def run(
        self, out: Path, *more: object, faults: dict[int, list[object]] | None = None
    ) -> Attempt:
        """Run to the end."""
        attempt = self.begin(out, *more, faults=faults)
        attempt.wait()
        return attempt

    def complete(self, out: Path, *more: object) -> Attempt:
        attempt = self.run(out, *more)
        assert attempt.code == 0, attempt.output
        return attempt


MakeRuns = Callable[..., Runs]


@pytest.fixture(scope="module")
def make_runs(server: Preloaded, common: list[str]) -> MakeRuns:
    """Makes runs that save every step."""

    def make(method: Method, steps: int, layout: tuple[str, ...] = SINGLE, **keys: object) -> Runs:
        settings: dict[str, object] = {
            "train__max_steps": steps,
            "train__save_interval": 1,
            "train__epochs": 5,
            "checkpoint__keep_last": 2,
            "eval__interval": 3,
            "eval__max_new_tokens": 0,
            "optimizer__lr": 3e-3,
        }
        if method == "lora":
            settings["lora_dropout"] = 0.1
        words = (COMMANDS[method], *common, *options(**settings | keys), *layout)
        return Runs(server, words)

    return make


@pytest.fixture
def runs(make_runs: MakeRuns) -> MakeRuns:
    return make_runs


def store_of(out: Path) -> Store:
    return Store(out / "checkpoints")


def steps_in(out: Path) -> list[object]:
    """Steps of the rows in metrics.csv."""
    return [row["step"] for row in Outcome(out).rows] if (out / "metrics.csv").exists() else []


def assert_whole(out: Path, lost: int) -> None:
    """All that is taken for a checkpoint is one, and hardly any step must be trained again."""
    store = store_of(out)
    for step in store.steps():
        assert store.verify(step) == []
    rows = steps_in(out)
    last = rows[-1] if rows else 0
    assert isinstance(last, int)
    assert (store.newest() or 0) >= last - lost


def assert_equal(out: Path, whole: Path, steps: int) -> None:
    """It is complete, and as if nothing had happened: to the last bit."""
    found, expected = Outcome(out), Outcome(whole)
    assert read_report(out).outcome == "completed"
    assert steps_in(out) == list(range(1, steps + 1))
    assert found.losses == expected.losses
    assert found.validation_losses == expected.validation_losses
    weights = found.weights()
    for name, tensor in expected.weights().items():
        assert torch.equal(weights.pop(name), tensor), name
    assert not weights
    assert store_of(out).leftovers() == []
    assert_whole(out, lost=0)


# --- Failing ranks --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_fails_says_so_before_it_completes_its_report(
    make_runs: MakeRuns, tmp_path: Path
) -> None:
    runs = make_runs("full", 2, ("--devices", "2", "--strategy", "ddp"), train__micro_batch_size=1)
    attempt = runs.run(tmp_path / "out", faults={0: ["fails_and_predicts_late"]})
    report = read_report(tmp_path / "out")
    assert (attempt.code, report.exit_reason) == (1, "rank 0: ZeroDivisionError: division by zero")
    assert "predicted when the others had ended" in report.warnings


# --- Kills ----------------------------------------------------------------------------------------


def wait_for_step(attempt: Attempt, out: Path, step: int) -> None:
    while attempt.running():
        rows = steps_in(out)
        if rows and max(rows) >= step:  # type: ignore[operator, type-var]
            return
        time.sleep(0.005)


def kill_at_random_moments(
    runs: Runs, out: Path, *, steps: int, kills: int, asynchronous: bool, seed: int
) -> None:
    """Kill a run now and then until it has no more than it needs to reach its end in one piece."""
    rng = random.Random(seed)
    lost = 2 if asynchronous else 1  # the newest checkpoint may still be written
    for left in range(kills, 0, -1):
        done = store_of(out).newest() or 0
        more = min(int(rng.uniform(0, 2 * (steps - done) / left)), steps - done - 2)
        attempt = runs.begin(out)
        if more > 0:
            wait_for_step(attempt, out, done + more)
            time.sleep(rng.uniform(0, 0.08))
        else:
            time.sleep(rng.uniform(0, 0.4))
        supervisor = psutil.Process(attempt.pid)
        everyone = [supervisor, *attempt.ranks()]
        victims = rng.choice([everyone, [supervisor], [rng.choice(everyone)]])
        code = attempt.kill(victims)
        assert code != 0, attempt.output  # it was not over yet
        assert_whole(out, lost)
    runs.complete(out)


@pytest.mark.parametrize(
    ("layout", "method", "asynchronous", "kills"),
    [
        pytest.param(SINGLE, "full", False, 8, id="single-full-waiting", marks=pytest.mark.matrix),
        pytest.param(FSDP, "full", True, 3, id="fsdp-full", marks=pytest.mark.slow),
        pytest.param(FSDP, "full", True, 7, id="fsdp-full-often", marks=pytest.mark.matrix),
        pytest.param(SINGLE, "lora", True, 8, id="single-lora", marks=pytest.mark.matrix),
        pytest.param(FSDP, "lora", False, 7, id="fsdp-lora-waiting", marks=pytest.mark.matrix),
    ],
)
def test_a_run_survives_kills_at_random_moments(
    runs: MakeRuns,
    tmp_path: Path,
    layout: tuple[Any, ...],
    method: Method,
    asynchronous: bool,
    kills: int,
) -> None:
    steps = 3 * kills
    wanted = runs(method, steps, layout, checkpoint__asynchronous=asynchronous)
    wanted.complete(tmp_path / "whole")
    kill_at_random_moments(
        wanted, tmp_path / "out", steps=steps, kills=kills, asynchronous=asynchronous, seed=kills
    )
    assert_equal(tmp_path / "out", tmp_path / "whole", steps)


@pytest.mark.slow
def test_a_run_survives_kills(runs: MakeRuns, tmp_path: Path) -> None:
    wanted = runs("full", 6)
    wanted.complete(tmp_path / "whole")
    kill_at_random_moments(wanted, tmp_path / "out", steps=6, kills=2, asynchronous=True, seed=1)
    assert_equal(tmp_path / "out", tmp_path / "whole", 6)


class Commit:
    """A run that is killed at chosen moments while it saves its last step, and then resumed."""

    STEPS = 4

    def __init__(self, runs: Runs, directory: Path) -> None:
        self._runs, self._directory = runs, directory
        runs.complete(directory / "whole")
        runs.complete(directory / "before", "--stop_after", self.STEPS - 1)
        self.states: set[tuple[str, ...]] = set()
        """States of the run after the kills."""

    def killed_at(self, number: int) -> bool:
        """Kill the run at a moment and resume it; returns whether the moment came."""
        out = self._directory / "out"
        shutil.copytree(self._directory / "before", out)
        attempt = self._runs.run(out, faults={0: ["killed_at", self.STEPS, number]})
        if attempt.code != 0:
            assert "killed by SIGKILL" in attempt.output
            assert_whole(out, lost=1)
            self.states.add(tuple(sorted(path.name for path in (out / "checkpoints").iterdir())))
            self._runs.complete(out)
        assert_equal(out, self._directory / "whole", self.STEPS)
        shutil.rmtree(out)
        return attempt.code != 0


@pytest.mark.slow
def test_a_run_survives_a_kill_while_it_commits(runs: MakeRuns, tmp_path: Path) -> None:
    assert Commit(runs("lora", Commit.STEPS), tmp_path).killed_at(20)


@pytest.mark.parametrize(
    ("every", "method"),
    [
        pytest.param(9, "full", marks=pytest.mark.slow, id="each ninth moment-full"),
        pytest.param(1, "full", marks=pytest.mark.matrix, id="each moment-full"),
        pytest.param(1, "lora", marks=pytest.mark.matrix, id="each moment-lora"),
    ],
)
def test_a_run_survives_a_kill_at_each_stage_of_a_commit(
    runs: MakeRuns, tmp_path: Path, every: int, method: Method
) -> None:
    """A commit of LoRA's writes, renames and deletes the same; one moment of it is above."""
    commit = Commit(runs(method, Commit.STEPS), tmp_path)
    assert all(itertools.takewhile(bool, map(commit.killed_at, itertools.count(step=every))))
    names = {name for state in commit.states for name in state}
    assert {".step-00000004.partial", ".step-00000002.deleted", "latest"} <= names


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(5, marks=pytest.mark.slow, id="each fifth moment"),
        pytest.param(1, marks=pytest.mark.matrix, id="each moment"),
    ],
)
def test_a_run_survives_a_kill_while_it_goes_back_to_an_earlier_step(
    stopped: "Callable[[Method], Stopped]", tmp_path: Path, every: int
) -> None:
    """Later checkpoints and rows are on their way to set_aside, or there already."""
    run, out = stopped("lora"), tmp_path / "out"
    back = ("--resume", 2)
    for number in itertools.count(step=every):
        run.copy(out)
        attempt = run.runs.run(out, *back, faults={SUPERVISOR: ["killed_in", str(out), number]})
        assert attempt.code == -signal.SIGKILL, attempt.output
        if store_of(out).steps() == [3, 4]:  # the ranks were done
            break
        backup = list(out.glob("set_aside/*/checkpoints/step-00000003"))
        assert len(backup) + (3 in store_of(out).steps()) >= 1
        run.runs.complete(out, *back)
        assert_equal(out, run.whole, 4)
        assert list(out.glob("set_aside/*/checkpoints/step-00000003"))
        shutil.rmtree(out)
    assert number > 5


# --- A full disk ----------------------------------------------------------------------------------

SMALL = 2**15
"""Bytes that metrics.csv and reports stay below in these runs, and shards do not."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of some MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        # A full disk is a tmpfs here, which only root on Linux can mount.
        pytest.skip("there is no mount command")
    if done.returncode:
        # As above: without root, and in some containers.
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_continues_when_saving_fails(
    runs: MakeRuns, tmp_path: Path, asynchronous: bool
) -> None:
    """Nothing over 32 KiB can be written for two saves; then there is space again."""
    wanted, out = runs("full", 6, checkpoint__asynchronous=asynchronous), tmp_path / "out"
    attempt = wanted.run(out, faults={0: ["small_files", SMALL, 3, 5]})
    assert attempt.code == 0, attempt.output
    report = read_report(out)
    for step in (3, 4):
        warning = f"The checkpoint of step {step} could not be saved: "
        assert f"warning: {warning}" in attempt.output
        assert any(text.startswith(warning) for text in report.warnings)
    assert "could not be saved" in attempt.output and "File too large" in attempt.output
    assert report.checkpoints is not None
    assert (report.checkpoints.saved, report.checkpoints.failed) == (4, 2)
    assert steps_in(out) == list(range(1, 7))
    assert_whole(out, lost=0)
    assert store_of(out).steps() == [5, 6]


@pytest.mark.slow
def test_saving_that_fails_repeatedly_ends_the_run(runs: MakeRuns, tmp_path: Path) -> None:
    wanted, out = runs("full", 8), tmp_path / "out"
    wanted.complete(tmp_path / "whole")
    attempt = wanted.run(out, faults={0: ["small_files", SMALL, 3, None]})
    assert attempt.code == 1
    assert "3 checkpoints in a row could not be saved" in attempt.output
    assert "Traceback" not in attempt.output
    report = read_report(out)
    assert report.exit_reason.startswith("3 checkpoints in a row could not be saved")
    assert report.checkpoints is not None and report.checkpoints.failed == 3
    assert len([text for text in report.warnings if "could not be saved" in text]) == 3
    assert store_of(out).steps() == [1, 2]
    assert_whole(out, lost=4)
    wanted.complete(out)
    assert_equal(out, tmp_path / "whole", 8)


@pytest.mark.slow
@pytest.mark.parametrize("logger", [pytest.param("csv", marks=pytest.mark.matrix), "tensorboard"])
def test_a_full_disk_costs_no_row(
    runs: MakeRuns, tmp_path: Path, small_disk: Path, logger: str
) -> None:
    """From step 20 to 60 not a byte can be written: no checkpoint, no row, no report."""
    steps, out = 65, small_disk / "out"
    wanted = runs(
        "lora",
        steps,
        train__save_interval=20,
        train__epochs=50,
        eval__interval=20,
        logger_name=logger,
    )
    wanted.complete(tmp_path / "whole")
    attempt = wanted.run(out, faults={0: ["full_disk", 20, 60]})
    assert attempt.code == 0, attempt.output
    warnings = read_report(out).warnings
    reason = "No space left on device"
    assert (
        f"metrics.csv cannot be written ({reason}): its rows wait until there is space" in warnings
    )
    assert f"warning: metrics.csv cannot be written ({reason})" in attempt.output
    assert [text.partition(" could")[0] for text in warnings if "be saved" in text] == [
        "The checkpoint of step 20",
        "The checkpoint of step 40",
    ]
    assert (logger == "tensorboard") == any("tensorboard gets no" in text for text in warnings)
    assert store_of(out).steps() == [60, 65]
    assert_equal(out, tmp_path / "whole", steps)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_which_resumes_once_there_is_space(
    runs: MakeRuns, tmp_path: Path, small_disk: Path
) -> None:
    steps, out = 30, small_disk / "out"
    wanted = runs("lora", steps, train__save_interval=5, train__epochs=50, eval__interval=20)
    wanted.complete(tmp_path / "whole")
    attempt = wanted.run(out, faults={0: ["full_disk", 10, None]})
    assert attempt.code == 1
    assert "3 checkpoints in a row could not be saved" in attempt.output
    assert "Traceback" not in attempt.output
    report = read_report(out)
    assert (report.outcome, report.exit_code) == ("failed", 1)
    assert report.exit_reason.startswith("3 checkpoints in a row could not be saved")
    assert store_of(out).steps() == [5]
    assert store_of(out).verify(5) == []
    refused = wanted.run(out)
    assert refused.code == 2
    assert "No space left on device" in refused.output and "Traceback" not in refused.output
    (out / BALLAST).unlink()
    wanted.complete(out)
    assert_equal(out, tmp_path / "whole", steps)


@pytest.mark.slow
def test_a_disk_that_fails_on_another_rank_fails_the_checkpoint_as_a_whole(
    runs: MakeRuns, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    attempt = runs("lora", 5, FSDP).run(out, faults={1: ["failing_shard", 3]})
    assert attempt.code == 0, attempt.output
    text = "The checkpoint of step 3 could not be saved: rank 1: Input/output error."
    assert text in attempt.output
    assert any(warning.startswith(text) for warning in read_report(out).warnings)
    assert_whole(out, lost=0)
    assert store_of(out).steps() == [4, 5]
    assert store_of(out).leftovers() == []


# --- Damage ---------------------------------------------------------------------------------------

FILES: dict[Method, list[str]] = {
    "lora": [
        "metadata.json",
        "recipe.yaml",
        "shard-00000-of-00001.safetensors",
        "adapter/adapter_model.safetensors",
        "adapter/adapter_config.json",
    ],
    "full": [
        "metadata.json",
        "recipe.yaml",
        "shard-00000-of-00001.safetensors",
        "base/config.json",
        "base/tokenizer.json",
    ],
}
"""A file of each kind in a checkpoint."""
PARTS: list[tuple[Method, str]] = [(method, name) for method in FILES for name in FILES[method]]
TEMPLATES: list[tuple[Method, str]] = [
    ("lora", "adapter/chat_template.jinja"),
    ("full", "chat_template.jinja"),
]
"""Any text may be one; what it says runs in a sandbox."""


def flip(file: Path) -> None:
    """A bit in the middle; not of the last digit of a number, which may say the same without it."""
    values = bytearray(file.read_bytes())
    middle = len(values) // 2
    values[next((i for i in range(middle, len(values)) if chr(values[i]).isalpha()), middle)] ^= 1
    file.write_bytes(values)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


DAMAGES = [flip, truncate, Path.unlink]


@dataclass(frozen=True)
class Stopped:
    """A run with checkpoints of steps 2 and 3 of 4, and one that nothing stopped."""

    runs: Runs
    out: Path
    whole: Path

    def copy(self, to: Path) -> Path:
        shutil.copytree(self.out, to)
        return to

    def asked(self, out: Path, resume: object = "auto") -> Recipe:
        """Recipe of a command that resumes the run."""
        pairs = [("out_dir", str(out)), ("resume", str(resume))]
        recipe = read_recipe([self.out / "recipe.yaml"], pairs)
        return dataclasses.replace(recipe, precision="32-true")


@pytest.fixture(scope="module")
def stopped(
    make_runs: MakeRuns, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Method], Stopped]:
    """By method."""
    found: dict[Method, Stopped] = {}

    def get(method: Method) -> Stopped:
        if method not in found:
            directory = tmp_path_factory.mktemp(method)
            wanted = make_runs(method, 4)
            wanted.complete(directory / "whole")
            wanted.complete(directory / "out", "--stop_after", 3)
            found[method] = Stopped(wanted, directory / "out", directory / "whole")
        return found[method]

    return get


def refusal(recipe: Recipe) -> str:
    """Message for a command that tries to resume."""
    with pytest.raises(UserError) as error:
        check(recipe)
    return str(error.value)


def check(recipe: Recipe) -> None:
    """All that is done with a checkpoint before a rank starts."""
    start = find_start(recipe)
    assert start is not None
    verify_start(start, recipe, Display(None))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("method", "name"), [*PARTS, *TEMPLATES])
def test_damage_is_reported_and_the_checkpoint_before_is_offered(
    stopped: Callable[[Method], Stopped],
    tmp_path: Path,
    method: Method,
    name: str,
    damage: Callable[..., Any],
) -> None:
    run = stopped(method)
    out = run.copy(tmp_path / "out")
    damage(store_of(out).path(3) / name)
    message = refusal(run.asked(out, 3))
    assert str(store_of(out).path(3) / name) in message
    assert message.endswith("Try the one before it: --resume 2.")
    check(run.asked(out, 2))


@pytest.mark.parametrize(
    ("method", "name", "damage"),
    [
        # Each kind of file once; what is found in it does not depend on how a run goes on.
        pytest.param(
            *part,
            damage,
            marks=pytest.mark.slow
            if at % 3 == kind and (part[0] == "lora" or "base/" in part[1])
            else pytest.mark.matrix,
        )
        for at, part in enumerate(PARTS)
        for kind, damage in enumerate(DAMAGES)
    ],
)
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(
    stopped: Callable[[Method], Stopped],
    tmp_path: Path,
    method: Method,
    name: str,
    damage: Callable[..., Any],
) -> None:
    run = stopped(method)
    out = run.copy(tmp_path / "out")
    damage(store_of(out).path(3) / name)
    run.runs.complete(out)
    assert str(store_of(out).path(3) / name) in (out / "run.log").read_text()
    assert_equal(out, run.whole, 4)
    assert (out / "set_aside/1/checkpoints/step-00000003").is_dir()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_resumes_whatever_latest_says(
    stopped: Callable[[Method], Stopped], tmp_path: Path, damage: Callable[..., Any]
) -> None:
    run = stopped("lora")
    out = run.copy(tmp_path / "out")
    damage(out / "checkpoints/latest")
    run.runs.complete(out)
    assert_equal(out, run.whole, 4)


# --- Payloads -------------------------------------------------------------------------------------


class Payload:
    """Something that creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._trace),)


def pickled(trace: Path) -> bytes:
    return pickle.dumps(Payload(trace))


def saved_by_torch(trace: Path) -> bytes:
    stream = io.BytesIO()
    torch.save(Payload(trace), stream)
    return stream.getvalue()


def tagged(trace: Path) -> bytes:
    """Equal for a reader of YAML that checks nothing."""
    return f"!!python/object/apply:os.mkdir [{trace}]".encode()


def replace(checkpoint: Path, name: str, payload: bytes, *, checksums: bool) -> None:
    """Put a payload in place of a file; as an attacker who can also compute checksums."""
    if name != "metadata.json":
        metadata = read_metadata(checkpoint)
        (checkpoint / name).write_bytes(payload)
        if checksums:
            files = metadata.files | {name: hash_file(checkpoint / name)}
            write_metadata(dataclasses.replace(metadata, files=files), checkpoint)
    else:
        (checkpoint / name).write_bytes(payload)


@pytest.mark.parametrize("make", [pickled, saved_by_torch, tagged])
def test_the_payloads_would_run(tmp_path: Path, make: Callable[..., Any]) -> None:
    payload = make(tmp_path / "trace")
    if make is pickled:
        pickle.loads(payload)  # noqa: S301
    elif make is tagged:
        yaml.unsafe_load(payload)
    else:
        torch.load(io.BytesIO(payload), weights_only=False)
    assert (tmp_path / "trace").exists()


@pytest.mark.parametrize("checksums", [False, True], ids=["", "checksums"])
@pytest.mark.parametrize("make", [pickled, saved_by_torch, tagged])
@pytest.mark.parametrize(("method", "name"), PARTS)
def test_a_payload_in_place_of_a_file_is_refused_and_does_not_run(
    stopped: Callable[[Method], Stopped],
    tmp_path: Path,
    method: Method,
    name: str,
    make: Callable[..., Any],
    checksums: bool,
) -> None:
    run = stopped(method)
    out = run.copy(tmp_path / "out")
    payload = make(tmp_path / "trace")
    replace(store_of(out).path(3), name, payload, checksums=checksums)
    message = refusal(run.asked(out, 3))
    assert str(store_of(out).path(3) / name) in message
    assert message.endswith("Try the one before it: --resume 2.")
    assert not (tmp_path / "trace").exists()


@pytest.mark.slow
def test_the_real_command_refuses_a_payload(
    ftkit: Command, stopped: Callable[[Method], Stopped], tmp_path: Path
) -> None:
    """Not forked from a process that has imported what would run it."""
    run = stopped("lora")
    out = run.copy(tmp_path / "out")
    name = "shard-00000-of-00001.safetensors"
    replace(store_of(out).path(3), name, pickled(tmp_path / "trace"), checksums=True)
    words = ("finetune", "--config", out / "recipe.yaml", "--out_dir", out)
    done = ftkit(*words, "--resume", 3, cold=True)
    assert done.returncode == 2
    assert str(store_of(out).path(3) / name) in done.stderr and "--resume 2" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "trace").exists()
    done = ftkit(*words, "--resume", 2)
    assert done.returncode == 0, done.stderr
    assert_equal(out, run.whole, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "name"), PARTS)
def test_the_command_refuses_a_payload_with_a_message(
    stopped: Callable[[Method], Stopped], tmp_path: Path, method: Method, name: str
) -> None:
    run = stopped(method)
    out = run.copy(tmp_path / "out")
    replace(store_of(out).path(3), name, pickled(tmp_path / "trace"), checksums=True)
    attempt = run.runs.run(out, "--resume", 3)
    assert attempt.code == 2
    assert str(store_of(out).path(3) / name) in attempt.output
    assert "Traceback" not in attempt.output
    assert not (tmp_path / "trace").exists()
    assert store_of(out).steps() == [2, 3]
