"""Promise P3 and what P2 means for a person: stop a run at any time, go on, and nothing is lost.

The command itself, as processes. Each chain of sessions is one run that is stopped again and again
and compared with a run that nothing stopped.
"""

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from command import command_environment, command_line, start_up_of_ranks
from messages import says
from rank_jobs import needs_deepspeed
from runs import DEFAULT_SIGNALS, Run, command_of, content, options, rows, wait_for, watched
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from tiny import make_data, make_llama, make_records

from ftkit.checkpoint.store import Store
from ftkit.models.pretrained.model_files import CARD
from ftkit.runs.report.report import Report, read_report

LAST = 80
"""Optimizer steps of the run."""
KEYS: dict[str, object] = {
    "train__max_steps": LAST,
    "train__micro_batch_size": 1,
    "eval__interval": 10,
    "lora_dropout": 0.2,
}
LEARNED = ["step", "samples", "loss", "lr", "grad_norm", "tokens"]
"""Columns of metrics.csv that are no measurement of time."""
CTRL_C, SIGTERM, SIGHUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
CODES = {CTRL_C: 130, SIGTERM: 143, SIGHUP: 129}


def wrapped(where: str, statements: str) -> str:
    """Statements for the ranks that run others before each call of a function of ftkit.

    Args:
        where: `module:function` or `module:Class.method`.
        statements: to run; `arguments` and `before` (calls so far) are known.
    """
    module, _, function = where.partition(":")
    body = "\n".join(f"        {line}" for line in statements.strip().splitlines())
    return f"""
import importlib, pathlib, time
def wrap():
    def run(arguments, before):
{body}
    owner = importlib.import_module("{module}")
    *path, name = "{function}".split(".")
    for part in path:
        owner = getattr(owner, part)
    real, before = getattr(owner, name), 0
    def wrapper(*arguments, **keys):
        nonlocal before
        run(arguments, before)
        before += 1
        return real(*arguments, **keys)
    setattr(owner, name, wrapper)
wrap()
"""


SLOW = wrapped("ftkit.training.step:TrainStep.micro_step", "time.sleep(0.02)")
"""A step is two micro-steps."""


class Moment:
    """A moment inside a rank, which lasts long enough to do something in it."""

    def __init__(self, file: Path, where: str, *, when: str = "True", seconds: float = 1.0) -> None:
        self._file = file.with_name(f"{file.name}0")
        self.statements = wrapped(
            where,
            f"""
file = pathlib.Path({str(file)!r} + os.environ["RANK"])
if {when} and not file.exists():
    file.touch()
    time.sleep({seconds})
""",
        )

    def reached(self) -> bool:
        return self._file.exists()


@dataclass
class Session:
    """End of one session, and the files there were then."""

    code: int
    out: str
    err: str
    report: Report
    steps: int
    """Rows of metrics.csv."""
    saved: list[int]
    """Steps of the checkpoints."""
    outputs: set[str]
    """Names in out_dir."""
    names: set[str]
    """Names in the directory of the checkpoints."""
    files: dict[str, bytes] = field(repr=False)
    """Of the checkpoints."""

    @property
    def continuation(self) -> list[str]:
        """The words of the command that it says would go on."""
        (command,) = re.findall(r"^continue with: ftkit (.*)$", self.out, re.MULTILINE)
        return shlex.split(command)


class Sessions:
    """One run in out_dir, session after session."""

    def __init__(
        self, directory: Path, common: list[str], out_dir: str = "out", **keys: object
    ) -> None:
        self.out_dir = directory / out_dir
        self.directory, self._common, self._keys = directory, common, KEYS | keys
        self.done: list[Session] = []
        self.store = Store(self.out_dir / "checkpoints")

    def moment(self, where: str, **how: Any) -> Moment:
        file = self.directory / f"{self.out_dir.name}-moment-{len(self.done)}"
        return Moment(file, where, **how)

    def first_words(self, *words: str, **keys: object) -> list[str]:
        """The command that starts the run."""
        return command_of(self.out_dir, self._common, *words, **self._keys | keys)

    @contextmanager
    def session(self, words: list[str], in_ranks: str = "", launcher: Any = None) -> Iterator[Run]:
        """A session under way; it is in `done` after the block."""
        environment = command_environment() | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        if in_ranks:
            start_up = self.directory / f"{self.out_dir.name}-start-up-{len(self.done)}"
            start_up.mkdir()
            environment["PYTHONPATH"] += f":{start_up_of_ranks(start_up, in_ranks)}"
        command = launcher(words) if launcher else command_line(*words, before=DEFAULT_SIGNALS)
        with watched(self.out_dir, command, self.directory, environment) as run:
            yield run
            code, out, err = run.end()
        there = self.store.directory
        self.done.append(
            Session(
                code=code,
                out=out,
                err=err,
                report=read_report(self.out_dir),
                steps=len(rows(self.out_dir)),
                saved=self.store.steps(),
                outputs={path.name for path in self.out_dir.iterdir()},
                names={path.name for path in there.iterdir()} if there.is_dir() else set(),
                files=content(there),
            )
        )

    def run(self, words: list[str], **how: Any) -> Session:
        """A session from its beginning to its end."""
        with self.session(words, **how):
            pass
        return self.done[-1]

    def stopped_in_training(self, words: list[str], number: int, group: bool = False) -> Session:
        """A session that a signal ends some steps after its beginning."""
        before = len(rows(self.out_dir))
        with self.session(words, SLOW) as run:
            run.wait_for_steps(before + 3)
            os.killpg(run.process.pid, number) if group else run.process.send_signal(number)
        return self.done[-1]

    def stopped_at(self, words: list[str], moment: Moment, number: int) -> Session:
        with self.session(words, moment.statements) as run:
            run.wait_for(moment.reached)
            run.process.send_signal(number)
        return self.done[-1]

    def go_on(self) -> list[str]:
        """The words that the last session has printed."""
        return self.done[-1].continuation


def learned(out_dir: Path) -> list[list[str]]:
    return [[row[key] for key in LEARNED] for row in rows(out_dir)]


def result(out_dir: Path) -> dict[str, bytes]:
    """The files of a result but for its card, which says how long its run took."""
    found = content(out_dir / "final")
    assert found.pop(CARD)
    return found


def assert_same_curve(out_dir: Path, whole: Path) -> None:
    """Every step once, and each as in the run that nothing stopped: the same text."""
    assert [row["step"] for row in rows(out_dir)] == [str(s + 1) for s in range(len(rows(whole)))]
    assert learned(out_dir) == learned(whole)
    assert (out_dir / "validation.csv").read_text() == (whole / "validation.csv").read_text()
    assert result(out_dir) == result(whole)


def assert_saved(session: Session, number: int, store: Store) -> None:
    """It ended gracefully after its last step, which is saved."""
    assert session.code == CODES[signal.Signals(number)]
    assert (session.report.outcome, session.report.exit_code) == ("interrupted", session.code)
    assert session.saved[-1] == session.steps
    path = store.path(session.steps)
    assert says(session.out, f"step {session.steps} ... {path}")
    assert not {name for name in session.names if name.startswith(".")}
    assert "Traceback" not in session.out + session.err


# --- What is run, two chains at a time -----------------------------------------------------------


Chain = Callable[[Path, list[str]], Sessions]


def uninterrupted(directory: Path, common: list[str]) -> Sessions:
    """The run that nothing stops; it also shows what is kept."""
    run = Sessions(directory, common)
    kept = {"keep_last": 2, "keep_every": 25, "keep_best": 1}
    words = run.first_words(
        train__save_interval=3, **{f"checkpoint__{key}": value for key, value in kept.items()}
    )
    run.run(words)
    return run


def by_signals(directory: Path, common: list[str]) -> Sessions:
    """Four times stopped in training, each time continued by the printed command."""
    run = Sessions(directory, common)
    with run.session(run.first_words(checkpoint__save_every="1s"), SLOW) as first:
        first.wait_for(lambda: bool(run.store.steps()))  # by time
        first.process.send_signal(CTRL_C)
    run.stopped_in_training(run.go_on(), SIGTERM)
    run.stopped_in_training(run.go_on(), SIGHUP)
    run.stopped_in_training(run.go_on(), CTRL_C, group=True)
    run.run(run.go_on())
    return run


def at_moments(directory: Path, common: list[str]) -> Sessions:
    """Stopped at other moments than in a step."""
    run = Sessions(directory, common)
    first = run.first_words(resume="auto", checkpoint__keep_last=100)
    run.stopped_at(first, run.moment("ftkit.models.load_weights:fill"), CTRL_C)
    run.stopped_at(first, run.moment("ftkit.evaluation.validation:validation_loss"), CTRL_C)
    run.stopped_at(run.go_on(), run.moment("ftkit.models.load_weights:fill"), SIGTERM)
    saving = run.moment("ftkit.checkpoint.shards:write_shard")
    run.stopped_at([*run.go_on(), "--train.save_interval", "15"], saving, CTRL_C)
    endless = run.moment("ftkit.checkpoint.shards:write_shard_in_portions", seconds=600)
    before = run.done[-1].steps
    with run.session(run.go_on(), SLOW + endless.statements) as twice:
        twice.wait_for_steps(before + 3)
        twice.process.send_signal(CTRL_C)
        twice.wait_for(endless.reached)
        twice.process.send_signal(CTRL_C)
    at_last = f"arguments[1] == {LAST}"
    validation = run.moment("ftkit.training.evaluator:Evaluator._validate", when=at_last)
    run.stopped_at(run.go_on(), validation, SIGTERM)
    result = run.moment("peft:LoraConfig.save_pretrained", when="'final' in arguments[1]")
    run.stopped_at(run.go_on(), result, SIGHUP)
    run.run(run.go_on())
    return run


def in_sessions(directory: Path, common: list[str]) -> Sessions:
    """As a job scheduler does it: the same command until the run is complete, and once more."""
    run = Sessions(directory, common, logger_name="tensorboard")
    words = run.first_words("--stop_after", "30", resume="auto")
    while not run.done or run.done[-1].report.outcome != "completed":
        assert run.run(words).code == 0 and len(run.done) <= 3
    run.run(words)
    # Steps are slow, so that no machine makes all of them in a second.
    grown = run.first_words("--stop_after", "1s", resume="auto", train__max_steps=2 * LAST)
    run.run(grown, in_ranks=SLOW)
    return run


Chains = dict[str, Future[Sessions]]


def run_chains(
    chains: list[Chain], common: list[str], factory: pytest.TempPathFactory, at_once: int = 2
) -> Chains:
    with ThreadPoolExecutor(at_once) as pool:
        return {
            chain.__name__: pool.submit(chain, factory.mktemp(chain.__name__), common)
            for chain in chains
        }


@pytest.fixture(scope="module")
def chains(common: list[str], tmp_path_factory: pytest.TempPathFactory) -> Chains:
    found = [at_moments, by_signals, in_sessions, uninterrupted]
    return run_chains(found, common, tmp_path_factory)


@pytest.fixture(scope="module")
def whole(chains: Chains) -> Path:
    run = chains["uninterrupted"].result()
    assert run.done[0].code == 0, run.done[0]
    return run.out_dir


# --- Signals in training --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("session", "number"), list(enumerate([CTRL_C, SIGTERM, SIGHUP, CTRL_C])))
def test_a_signal_lets_the_step_finish_and_saves_it(
    chains: Chains, session: int, number: int
) -> None:
    run = chains["by_signals"].result()
    found = run.done[session]
    assert_saved(found, number, run.store)
    assert "ftkit: stopping after the current step" in found.err
    assert found.steps > (run.done[session - 1].steps if session else 0)


@pytest.mark.slow
def test_checkpoints_saved_by_signals_are_sound(chains: Chains) -> None:
    run = chains["by_signals"].result()
    assert run.store.steps() and not [p for s in run.store.steps() for p in run.store.verify(s)]


@pytest.mark.slow
def test_the_printed_command_completes_the_run(chains: Chains, whole: Path) -> None:
    run = chains["by_signals"].result()
    assert run.done[-1].code == 0
    assert run.done[-1].report.outcome == "completed"
    assert_same_curve(run.out_dir, whole)


@pytest.mark.slow
def test_checkpoints_are_saved_by_time(chains: Chains) -> None:
    first = chains["by_signals"].result().done[0]
    assert len(first.saved) >= 2, "by time, and by the signal"
    assert first.report.checkpoints and first.report.checkpoints.saved == len(first.saved)


# --- Signals at other moments ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_before_the_first_step_saves_nothing_and_shows_it(chains: Chains) -> None:
    found = chains["at_moments"].result().done[0]
    assert (found.code, found.steps, found.saved) == (130, 0, [])
    assert says(found.out, "before the first step ... nothing was saved")
    assert "continue with" not in found.out


@pytest.mark.slow
def test_a_signal_in_a_validation_saves_the_step_before_it(chains: Chains) -> None:
    run = chains["at_moments"].result()
    assert run.done[1].steps == 10
    assert_saved(run.done[1], CTRL_C, run.store)
    assert run.store.metadata(10).validation_loss is not None, "measured when the run went on"


@pytest.mark.slow
def test_a_signal_in_the_set_up_of_a_continued_run_changes_nothing(chains: Chains) -> None:
    run = chains["at_moments"].result()
    before, found = run.done[1:3]
    assert (found.code, found.steps) == (143, 10)
    assert found.files == before.files
    assert says(found.out, f"step 10 ... {run.store.path(10)}")
    assert found.continuation == before.continuation


@pytest.mark.slow
def test_a_signal_while_a_checkpoint_is_written_lets_it_be_completed(chains: Chains) -> None:
    run = chains["at_moments"].result()
    assert 15 in run.done[3].saved
    assert_saved(run.done[3], CTRL_C, run.store)


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_and_the_last_complete_checkpoint_counts(
    chains: Chains,
) -> None:
    run = chains["at_moments"].result()
    before, found, after = run.done[3:6]
    assert found.code == 130
    assert found.saved == before.saved
    unfinished = {name for name in found.names if name.endswith(".partial")}
    assert unfinished == {f".step-{found.steps:08}.partial"}
    assert says(found.out, f"newest checkpoint ... step {before.steps}")
    assert f"continuing from step {before.steps}: " in after.out
    assert not {name for name in after.names if name.startswith(".")}


@pytest.mark.slow
def test_a_signal_in_the_final_validation_costs_no_step(chains: Chains) -> None:
    run = chains["at_moments"].result()
    assert_saved(run.done[5], SIGTERM, run.store)
    assert run.done[5].steps == LAST


@pytest.mark.slow
def test_a_signal_while_the_result_is_written_leaves_no_half_of_it(chains: Chains) -> None:
    run = chains["at_moments"].result()
    assert_saved(run.done[6], SIGHUP, run.store)
    assert run.done[6].report.files and run.done[6].report.files.final is None
    assert run.done[7].code == 0
    assert run.done[6].outputs == run.done[5].outputs


@pytest.mark.slow
def test_nothing_is_lost_at_any_moment(chains: Chains, whole: Path) -> None:
    run = chains["at_moments"].result()
    assert run.done[-1].report.outcome == "completed"
    assert_same_curve(run.out_dir, whole)


# --- Sessions -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_in_three_sessions_is_the_run_in_one(chains: Chains, whole: Path) -> None:
    run = chains["in_sessions"].result()
    ends = [(s.code, s.report.outcome, s.report.exit_reason, s.steps) for s in run.done[:3]]
    assert ends == [
        (0, "stopped", "--stop_after 30 reached", 30),
        (0, "stopped", "--stop_after 30 reached", 60),
        (0, "completed", "train.max_steps of 80 reached", LAST),
    ]
    assert learned(run.out_dir)[:LAST] == learned(whole)


@pytest.mark.slow
def test_buffers_for_checkpoints_are_not_counted_in_the_memory_of_a_step(
    chains: Chains,
) -> None:
    for session in chains["in_sessions"].result().done[:3]:
        assert session.report.step_memory is not None
        (rank,) = session.report.step_memory.ranks
        assert rank.peak_breakdown_bytes.unattributed < 0.01 * rank.peak_bytes


@pytest.mark.slow
def test_the_same_command_on_a_complete_run_reports_it(chains: Chains) -> None:
    before, found = chains["in_sessions"].result().done[2:4]
    assert (found.code, found.err) == (0, "")
    assert says(found.out, "complete at step 80")
    assert "--resume auto --train.max_steps 160" in found.out
    assert found.files == before.files


@pytest.mark.slow
def test_a_prolonged_run_continues_and_a_time_limit_ends_its_session_after_a_step(
    chains: Chains,
) -> None:
    run = chains["in_sessions"].result()
    found = run.done[-1]
    assert (found.code, found.report.outcome) == (0, "stopped")
    assert found.report.exit_reason == "--stop_after 1s reached"
    assert LAST < found.steps < 2 * LAST
    assert found.saved[-1] == found.steps
    assert run.store.metadata(found.steps).changes == ["train.max_steps 80 -> 160"]
    assert "changed: train.max_steps 80 -> 160" in found.out


@pytest.mark.slow
def test_tensorboard_has_every_step_once(chains: Chains) -> None:
    run = chains["in_sessions"].result()
    events = EventAccumulator(str(run.out_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    expected = [(int(row["step"]), pytest.approx(float(row["loss"]))) for row in rows(run.out_dir)]
    assert found == expected


# --- What is kept ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_newest_the_best_and_every_nth_checkpoint_are_kept(whole: Path) -> None:
    store = Store(whole / "checkpoints")
    lines = (whole / "validation.csv").read_text().splitlines()[1:]
    losses = {int(line.split(",")[0]): float(line.split(",")[2]) for line in lines}
    best = min(losses, key=losses.__getitem__)
    assert set(store.steps()) == {78, LAST, best, 25, 50, 75}
    assert (store.directory / "latest").read_text() == f"step-{LAST:08}\n"
    assert store.metadata(best).validation_loss == losses[best]
    assert not [problem for step in store.steps() for problem in store.verify(step)]


# --- Several ranks --------------------------------------------------------------------------------


def layout(strategy: str) -> dict[str, object]:
    return {"strategy": strategy, "devices": 2}


def both_ways(
    directory: Path, common: list[str], strategy: str, steps: int = LAST
) -> tuple[Sessions, Path]:
    """A run on two ranks, and one under way that is to become the same."""
    keys = layout(strategy) | {"train__max_steps": steps}
    whole = Sessions(directory, common, "whole", **keys)
    assert whole.run(whole.first_words()).code == 0
    return Sessions(directory, common, **keys), whole.out_dir


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        pytest.param("ddp", CTRL_C, marks=pytest.mark.slow),
        pytest.param("fsdp", SIGTERM, marks=pytest.mark.matrix),
        pytest.param("deepspeed", SIGHUP, marks=[needs_deepspeed, pytest.mark.matrix]),
    ],
)
def test_ranks_that_a_signal_ended_continue_exactly(
    common: list[str], tmp_path: Path, strategy: str, number: int
) -> None:
    run, whole = both_ways(tmp_path, common, strategy, steps=20)
    assert_saved(run.stopped_in_training(run.first_words(), number, group=True), number, run.store)
    assert not [problem for s in run.store.steps() for problem in run.store.verify(s)]
    if strategy == "fsdp":
        validation = run.moment("ftkit.evaluation.validation:validation_loss")
        assert_saved(run.stopped_at(run.go_on(), validation, CTRL_C), CTRL_C, run.store)
    assert run.run(run.go_on()).report.outcome == "completed"
    assert_same_curve(run.out_dir, whole)


def torchrun(words: list[str]) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc_per_node", "2", "-m", "ftkit", *words]


@pytest.mark.matrix
def test_a_run_goes_from_torchrun_to_torchrun_to_the_plain_command(
    common: list[str], tmp_path: Path
) -> None:
    run, whole = both_ways(tmp_path, common, "ddp")
    words = run.first_words("--stop_after", "30", resume="auto")
    for steps in (30, 60):
        found = run.run(words, launcher=torchrun)
        assert (found.code, found.report.outcome, found.steps) == (0, "stopped", steps)
        assert found.out.count("stopped after step") == 1
    assert run.run(run.go_on()).report.outcome == "completed"
    assert_same_curve(run.out_dir, whole)
    again = run.run(words, launcher=torchrun)
    assert again.code == 0 and again.out.count("is complete at step 80") == 1


# --- Branches, copies, steps ----------------------------------------------------------------------


FULL: dict[str, object] = {"command": "finetune_full", "train__save_interval": 20}


@pytest.fixture(scope="module")
def full(common: list[str], tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    """A full fine-tune that is complete and whose base model is gone."""
    directory = tmp_path_factory.mktemp("full")
    base = make_llama(directory / "base")
    run = Sessions(directory, common, checkpoint_dir=base, **FULL)
    del run._keys["lora_dropout"]
    assert run.run(run.first_words()).code == 0
    shutil.rmtree(base)
    return run


def from_config(run: Path, **keys: object) -> list[str]:
    """The command that goes on with the recipe of a run."""
    return ["finetune_full", "--config", str(run / "recipe.yaml"), *options(**keys)]


@pytest.mark.slow
def test_a_copied_full_fine_tune_continues_from_a_step_and_sets_the_rest_aside(
    full: Sessions, common: list[str], tmp_path: Path
) -> None:
    shutil.copytree(full.out_dir, tmp_path / "copy")
    copy = Sessions(tmp_path, common, "copy")
    found = copy.run(from_config(copy.out_dir, resume=40))  # out_dir in it is the old one
    assert (found.code, found.report.outcome) == (0, "completed")
    assert_same_curve(copy.out_dir, full.out_dir)
    backup = copy.out_dir / "set_aside" / "1"
    assert Store(backup / "checkpoints").steps() == [60, LAST]
    assert learned(backup) == learned(full.out_dir)[40:]
    assert content(backup / "final") == content(full.out_dir / "final")
    assert content(backup / "checkpoints") == {
        name: value
        for name, value in content(full.store.directory).items()
        if name.startswith((f"step-{60:08}", f"step-{LAST:08}"))
    }


@pytest.mark.slow
def test_a_branch_on_other_hardware_has_the_whole_curve_and_leaves_its_origin_alone(
    full: Sessions, common: list[str], tmp_path: Path
) -> None:
    before = content(full.out_dir)
    branch = Sessions(tmp_path, common, "branch")
    origin = full.store.path(40)
    found = branch.run(
        from_config(
            full.out_dir,
            resume=origin,
            out_dir=branch.out_dir,
            train__micro_batch_size=2,
            **layout("fsdp"),
        )
    )
    assert (found.code, found.report.outcome) == (0, "completed")
    assert found.report.resumed and found.report.resumed.strategy == "single"
    expected = [[float(value) for value in row] for row in learned(full.out_dir)]
    assert [[float(v) for v in row] for row in learned(branch.out_dir)] == [
        pytest.approx(row, rel=1e-5) for row in expected
    ]
    assert content(full.out_dir) == before


@pytest.mark.slow
def test_a_full_fine_tune_continues_with_no_other_base_model(
    full: Sessions, common: list[str], tmp_path: Path
) -> None:
    other = other_model(make_llama(tmp_path / "other"))
    words = from_config(
        full.out_dir, resume=full.out_dir, out_dir=tmp_path / "branch", checkpoint_dir=other
    )
    branch = Sessions(tmp_path, common, "branch")
    with refused(branch, words) as err:
        assert says(err, f"checkpoint_dir {other} ... not the model")
    with refused(branch, [*words, "--checkpoint_dir", "random:pythia-14m"]) as err:
        assert says(err, "checkpoint_dir is random:pythia-14m")
    assert not branch.out_dir.exists()


# --- What may change and what may not -------------------------------------------------------------


def other_model(directory: Path) -> Path:
    """Another model of the same shapes, in its place."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(directory)
    return directory


@contextmanager
def refused(run: Sessions, words: list[str]) -> Iterator[str]:
    """Yield the message of a refusal that changes nothing."""
    before = content(run.out_dir) if run.out_dir.exists() else None
    command = command_line(*words, before=DEFAULT_SIGNALS)
    with watched(run.out_dir, command, run.directory, command_environment()) as process:
        code, out, err = process.end()
    assert code == 2 and "Traceback" not in err + out
    assert before == (content(run.out_dir) if run.out_dir.exists() else None)
    yield err


@pytest.mark.slow
def test_only_settings_that_do_not_change_what_is_trained_may_change(
    common: list[str], tmp_path: Path
) -> None:
    base, data = make_llama(tmp_path / "base"), make_data(tmp_path / "data.json")
    run = Sessions(tmp_path, common, checkpoint_dir=base, data__json_path=data)
    run.run(run.first_words("--stop_after", "5"))
    words = run.go_on()
    with refused(run, [*words, "--lora_r", "4"]) as err:
        assert "lora_r" in err and "4" in err and "16" in err

    text = data.read_text()
    data.write_text(text.replace(make_records(1)[0]["output"], "something else"))
    with refused(run, words) as err:
        assert says(err, "not the training samples ... step 5")
    data.rename(tmp_path / "elsewhere.json").write_text(text)

    shutil.copytree(base, tmp_path / "moved")
    other_model(base)
    with refused(run, [*words, *options(data__json_path=tmp_path / "elsewhere.json")]) as err:
        assert says(err, f"checkpoint_dir {base} ... not the model ... step 5")
    shutil.rmtree(base)
    moved_data = options(data__json_path=tmp_path / "elsewhere.json")
    with refused(run, [*words, *moved_data]) as err:
        assert f"checkpoint_dir {base} does not exist" in err
        assert says(err, "--checkpoint_dir PATH")

    elsewhere = options(
        checkpoint_dir=tmp_path / "moved",
        data__json_path=tmp_path / "elsewhere.json",
        optimizer__lr=0.0005,
        stop_after=3,
    )
    found = run.run([*words, *elsewhere])
    assert (found.code, found.steps, found.saved) == (0, 8, [5, 8])
    assert run.store.metadata(8).changes == ["optimizer.lr not set -> 0.0005"]
    assert "changed: optimizer.lr not set -> 0.0005" in found.out
    assert found.report.resumed
    assert found.report.resumed.changes == run.store.metadata(8).changes


def test_checkpoints_that_will_not_fit_on_the_disk_are_refused_before_weights_load(
    common: list[str], tmp_path: Path
) -> None:
    run = Sessions(tmp_path, common)
    words = run.first_words(
        checkpoint__keep_last=10**12, train__max_steps=10**13, train__epochs="null"
    )
    with refused(run, words) as err:
        assert re.match(r"ftkit: The checkpoints need [0-9,.]+ GiB \(1000000000001 x", err)
        assert "Try --checkpoint.keep_last 1" in err
    assert list(tmp_path.iterdir()) == []


# --- Before the ranks, and without a terminal -----------------------------------------------------


SLOW_DOWNLOAD = """
import pathlib, time
import ftkit.launch.supervisor
def find(*_, **__):
    pathlib.Path("looking").touch()
    time.sleep(600)
ftkit.launch.supervisor.find_or_download = find
"""


def test_a_signal_while_the_run_is_prepared_ends_it_and_leaves_nothing(
    common: list[str], tmp_path: Path
) -> None:
    run = Sessions(tmp_path, common)
    command = command_line(*run.first_words(), before=DEFAULT_SIGNALS + SLOW_DOWNLOAD)
    with watched(run.out_dir, command, tmp_path, command_environment()) as process:
        process.wait_for((tmp_path / "looking").exists)
        os.killpg(process.process.pid, SIGTERM)
        code, out, err = process.end()
    assert (code, out) == (143, "")
    assert says(err, "SIGTERM ... nothing has changed")
    assert not run.out_dir.exists()


@pytest.mark.slow
def test_a_terminal_that_goes_away_ends_the_run_with_its_state_saved(
    common: list[str], tmp_path: Path
) -> None:
    run = Sessions(tmp_path, common)
    words = command_line(*run.first_words(), before=DEFAULT_SIGNALS)
    start_up = start_up_of_ranks(tmp_path, SLOW)
    environment = command_environment()
    environment["PYTHONPATH"] += f":{start_up}"
    child, terminal = os.forkpty()
    if child == 0:
        os.chdir(tmp_path)
        os.execvpe(words[0], words, environment)
    try:
        wait_for(lambda: len(rows(run.out_dir)) >= 3)
    finally:
        os.close(terminal)  # the system sends SIGHUP, and writing fails from now on
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert run.store.steps() == [len(rows(run.out_dir))]
    assert read_report(run.out_dir).outcome == "interrupted"


# --- W&B ------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_wandb_continues_its_run_and_has_every_step_once(common: list[str], tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = Sessions(tmp_path, common, logger_name="wandb")
    run.run(run.first_words("--stop_after", "3"))
    run.run([*run.go_on(), "--stop_after", "3"])
    assert [session.steps for session in run.done] == [3, 6]
    ids = {run.store.metadata(step).loggers["wandb"] for step in (3, 6)}
    files = sorted((run.out_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{ids.pop()}.wandb"} and not ids
    assert [step for file in files for step in wandb_steps(file)] == [1, 2, 3, 4, 5, 6]


def wandb_steps(file: Path) -> list[int]:
    """The steps with a loss in what W&B would upload."""
    from wandb.proto import wandb_internal_pb2

    steps = []
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        values = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
        if "loss" in values:
            steps.append(int(values["trainer/global_step"]))
    return steps


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of its file: a log of LevelDB, in blocks of 32 KiB, after 7 bytes of its own."""
    position, record = 7, b""
    while position < len(content):
        if (left := -position % 2**15) and left < 7:
            position += left
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        record += content[position + 7 : position + 7 + size]
        if content[position + 6] in (1, 4):  # whole, or the last part
            yield record
            record = b""
        position += 7 + size
