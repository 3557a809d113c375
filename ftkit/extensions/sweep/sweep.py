"""`ftkit sweep`: runs one after another, each in its own process and directory, then compared.

A sweep has no state of its own: the directories of its runs show what is left to do.
"""

import shlex
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from ftkit.data.sources import check_data, check_run_length
from ftkit.errors import EXIT_BY_SIGNAL, EXIT_OUT_OF_MEMORY, DoesNotFit, UserError
from ftkit.extensions.comparison.commands import CompareOptions
from ftkit.extensions.comparison.compare import compare_runs
from ftkit.extensions.comparison.plots import check_plot
from ftkit.extensions.sweep.combinations import differences, runs_of_keys
from ftkit.extensions.sweep.commands import SweepOptions
from ftkit.recipe.devices import find_devices
from ftkit.recipe.objectives import objective_rules
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe import FINETUNE
from ftkit.recipe.sweep import SweepRun, runs_of_file
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.report import ENDED_WELL
from ftkit.runs.state import AT_WORK, StateName, look
from ftkit.utils.console.terminal import fitted
from ftkit.utils.json_values import without_tokens
from ftkit.utils.process import PassingOn, start_command
from ftkit.utils.progress import is_quiet, print_notice, print_shown

Action = Literal["start", "resume", "start again", "skip"]
"""Action for a run."""
_WORDS: dict[Action, list[str]] = {
    "start": [],
    "resume": ["--resume=auto"],
    "start again": ["--overwrite"],
}
"""Options of each action."""
_DONE = ("completed", "out_of_memory")
"""Outcomes that another start would not change."""
_REFUSED = "refused"
"""State of a run that could not start, and has shown why."""


def sweep_runs(options: SweepOptions) -> int:
    """Do the runs of a sweep that are not done yet; return the exit code.

    Raises:
        UserError: see `sweep` and `ftkit.recipe.sweep`.
    """
    if "resume" in dict(options.keys):
        raise UserError(
            "--resume is not for sweeps, which resume their runs without it. Leave it out, or "
            "start again with --overwrite."
        )
    return sweep(
        _runs(options),
        only=options.only,
        overwrite=options.overwrite,
        dry_run=options.dry_run,
        plot=options.plot,
    )


def _runs(options: SweepOptions) -> list[SweepRun]:
    what = options.sweep_file
    # The first word is a command of ftkit or a file of runs.
    if what in FINETUNE:
        return runs_of_keys(what, options.config, options.sweep, options.keys, options.out_dir)
    if options.config or options.sweep:
        raise UserError(
            f"--config and --sweep go with a command, not with {what}. "
            "Try ftkit sweep finetune --config RECIPE.yaml --sweep seed=1,2."
        )
    return runs_of_file(Path(what), options.keys, options.out_dir)


def sweep(
    runs: Sequence[SweepRun],
    *,
    only: Sequence[str] = (),
    overwrite: bool = False,
    dry_run: bool = False,
    plot: Path | None = None,
) -> int:
    """Do the runs that are not done yet, and compare all; return the exit code.

    The exit code is 1 if a run failed, 3 if all ran out of memory, and the signal's after a signal.

    Args:
        runs: of the sweep; see `ftkit.recipe.sweep`.
        only: patterns of names such as `a100-*`; empty: all runs.
        overwrite: do all runs again.
        dry_run: only print what would be done.
        plot: file for a plot of the comparison.

    Raises:
        UserError: before anything has started.
    """
    runs = _chosen(runs, only)
    # Every check comes before the first run, which may take hours.
    if plot is not None:
        check_plot(plot)
    for run in runs:
        _check(run)
    # All decided before the first run starts: a refusal must not come after hours.
    actions = [_action(run, overwrite=overwrite) for run in runs]
    states: dict[str, str] = {}
    with PassingOn(*EXIT_BY_SIGNAL) as signals:
        for number, (run, (action, reason)) in enumerate(zip(runs, actions, strict=True), 1):
            what = f" ({run.varied_text})" if run.varied else ""
            why = f": {reason}" if reason else ""
            tell = print if dry_run else print_notice
            head = f"{number} of {len(runs)}: {action} {run.name}{what}{why}"
            tell(fitted(head, sys.stdout))
            words = [*run.words, *_WORDS.get(action, []), *["--quiet"] * is_quiet()]
            if dry_run:
                print_shown(f"  {shlex.join(['ftkit', *without_tokens(words)])}")
            elif action == "skip":
                states[run.name] = reason
            else:
                states[run.name] = _do(run, words, signals)
            # The signal was for the sweep, too: the run has saved, and no other one is started.
            if signals.received:
                return _interrupted(states, len(runs), signals.received[0])
    return 0 if dry_run else _conclude(runs, states, plot)


def _chosen(runs: Sequence[SweepRun], only: Sequence[str]) -> list[SweepRun]:
    """The runs whose names match a pattern; duplicate names are refused."""
    for name, times in Counter(run.name for run in runs).items():
        if times > 1:
            raise UserError(f"{times} runs have the name {name}. Give each a name of its own.")
    for pattern in only:
        if not any(fnmatchcase(run.name, pattern) for run in runs):
            names = ", ".join(run.name for run in runs)
            raise UserError(f"--only is {pattern!r}, but no run is called so. There are: {names}.")
    return [run for run in runs if not only or any(fnmatchcase(run.name, p) for p in only)]


def _check(run: SweepRun) -> None:
    """Raise a UserError with the name of a run that cannot start on these devices."""
    recipe = run.recipe()
    try:
        preference = objective_rules(recipe.objective).preference
        check_data(recipe.data, recipe.eval.sets, preference=preference)
        check_run_length(recipe)
        # An automatic micro-batch takes a prediction of seconds, which each run makes itself.
        if recipe.train.auto_key is None:
            make_plan(recipe, find_devices(recipe.accelerator, recipe.devices))
    except UserError as error:
        raise UserError(f"{run.name}: {error}") from None


def _action(run: SweepRun, *, overwrite: bool) -> tuple[Action, str]:
    """The action for a run, and the reason."""
    out_dir = run.out_dir.expanduser()
    if not out_dir.exists() or not any(out_dir.iterdir()):
        return "start", ""
    directory = RunDirectory(out_dir)
    if not directory.is_run():
        raise UserError(
            f"{out_dir} is where {run.name} belongs, but holds something else. "
            "Try another --out_dir."
        )
    # What is left to do follows from the directory alone: a sweep keeps no record.
    state = _state(out_dir)
    if state in AT_WORK:
        return "skip", "running"
    if overwrite:
        return "start again", f"{_word(state)} before"
    if state in _DONE:
        # Compared only if it is skipped: a run that resumes compares the recipes itself.
        if different := differences(run, run.recipe(), directory.recipe):
            raise UserError(
                f"{out_dir} holds this run with other settings: {'; '.join(different)}. "
                "Try another --out_dir, or --overwrite."
            )
        return "skip", _word(state)
    newest = directory.store.newest()
    if newest is None:
        return "start again", f"{_word(state)} before, nothing was saved"
    return "resume", f"{_word(state)} before, from step {newest:,}"


def _do(run: SweepRun, words: Sequence[str], signals: PassingOn) -> str:
    """Do one run in its own process; return its state afterwards."""
    # A process for each run: none inherits memory or settings of the one before.
    child = start_command(words)
    signals.to(child)
    code = child.wait()
    if code == UserError.exit_code or not _has_begun(run):
        # The run has shown why. Too little memory is found before it creates a directory.
        return "out of memory" if code == DoesNotFit.exit_code else _REFUSED
    return _word(_state(run.out_dir.expanduser()))


def _has_begun(run: SweepRun) -> bool:
    return RunDirectory(run.out_dir.expanduser()).is_run()


def _state(out_dir: Path) -> StateName:
    """State of a run; without a report, which could not be written then, it has failed."""
    try:
        return look(out_dir).state
    except UserError:
        return "failed"


def _word(state: StateName) -> str:
    return state.replace("_", " ")


def _interrupted(states: dict[str, str], count: int, number: signal.Signals) -> int:
    code, word = EXIT_BY_SIGNAL[number]
    done = sum(state in ("completed", "out of memory") for state in states.values())
    print_shown(
        f"stopped by {word}: {done} of {count} runs are done; the same command continues the sweep"
    )
    return code


def _conclude(runs: Sequence[SweepRun], states: dict[str, str], plot: Path | None) -> int:
    """Compare the runs; return the exit code."""
    there = [run.out_dir for run in runs if _has_begun(run)]
    if there:
        print_shown()
        compare_runs(CompareOptions(runs=tuple(str(path) for path in there), plot=plot))
    for name, state in states.items():
        if state == _REFUSED:
            print_shown(f"{name}: not started; the error is above")
    ended = set(states.values())
    if ended == {"out of memory"}:
        return EXIT_OUT_OF_MEMORY
    # That a variation needs too much memory is a result of a sweep, not a failure.
    well = {*ENDED_WELL, "out of memory", "running"}
    return 0 if ended <= well else 1
