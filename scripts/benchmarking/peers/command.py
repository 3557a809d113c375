"""``scripts/benchmark peers``: ftkit beside LitGPT and TRL, in turns, round by round."""

import argparse
import dataclasses
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from benchmarking.command import Figures, begun, keep, not_counted
from benchmarking.figures import (
    WARM_UP_STEPS,
    Measured,
    by_program,
    largest_difference,
    median_of,
    paired_ratio,
)
from benchmarking.ftkit_run import is_gpu_here
from benchmarking.peers.cases import (
    BARS,
    CPU_CASES,
    DEFAULT_PROGRAMS,
    GPU_CASES,
    OTHER_BATCHES,
    PREFERENCE_PROGRAMS,
    PROGRAMS,
    TINY_CASES,
    TRL_SETTINGS,
    Case,
)
from benchmarking.tables import draw_bars, gib, in_a_cell, number, table
from ftkit.utils.hardware import hardware
from ftkit.utils.json_values import from_json

ENVIRONMENTS = Path(".venv") / "benchmarks"
COLUMNS = (
    "program", "tokens/s", "x LitGPT", "step", "padding", "peak memory", "x LitGPT",
    "time to first step", "first loss", "last loss", "loss difference from ftkit, first / last",
)  # fmt: skip
EQUAL = 1e-5
"""Largest relative difference of losses that have the same definition, in 32-true."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--rounds", type=int, default=3, help="each with every program in turn")
    parser.add_argument(
        "--cases", nargs="+", default=[""], metavar="TEXT",
        help="those with one of these texts in their names",
    )  # fmt: skip
    parser.add_argument(
        "--programs", nargs="+", choices=PROGRAMS, default=DEFAULT_PROGRAMS, metavar="NAME",
        help=f"{', '.join(PROGRAMS)}; default: {', '.join(DEFAULT_PROGRAMS)}",
    )  # fmt: skip
    parser.add_argument(
        "--environments", type=Path, default=ENVIRONMENTS,
        help=f"where the other programs are installed; default: {ENVIRONMENTS}",
    )  # fmt: skip
    parser.add_argument(
        "--installed", action="store_true",
        help="take the other programs from where ftkit's libraries are, instead of --environments",
    )  # fmt: skip


def chosen(options: argparse.Namespace, *, is_gpu: bool) -> list[Case]:
    """Cases that the options select."""
    cases = TINY_CASES if options.tiny else GPU_CASES if is_gpu else CPU_CASES
    found = [one for one in cases if any(text in one.name for text in options.cases)]
    return [dataclasses.replace(one, steps=options.steps or one.steps) for one in found]


def is_able(program: str, case: Case) -> bool:
    """Whether a program has the loss of a case."""
    if case.kind != "answers":
        return program in PREFERENCE_PROGRAMS
    return program != "litgpt" or case.objective == "sft"


def exit_code(figures: Figures) -> int:
    """Return 1 if ftkit failed in a case, or has other losses than TRL by the same definition."""
    own = [row for row in figures["runs"] if row["program"] == "ftkit"]
    if any(row["measured"]["failure"] for row in own):
        return 1
    for name, settings in figures["cases"].items():
        case = from_json(Case, settings)
        if case.objective == "sft" or case.differs:
            continue
        apart = difference_from_trl(runs_of(figures, name))
        if apart is not None and apart > EQUAL:
            return 1
    return 0


def measure(options: argparse.Namespace) -> Figures:
    """Measure all runs, in turns; the file is written after each."""
    from benchmarking.peers.environments import versions_of
    from benchmarking.peers.programs import Workspace, environments, run_program

    is_gpu = not options.tiny and is_gpu_here()
    cases = chosen(options, is_gpu=is_gpu)
    figures = begun(options, {"runs": [], "cases": {}, "versions": {}})
    done = {(row["round"], row["case"], row["program"]) for row in figures["runs"]}
    directory = None if options.installed else options.environments.absolute()
    pythons = environments(options.programs, directory)
    figures |= {
        "cases": figures["cases"] | {case.name: dataclasses.asdict(case) for case in cases},
        "warm_up_steps": WARM_UP_STEPS,
        "hardware": dataclasses.asdict(hardware()),
        "versions": figures["versions"] | {n: versions_of(p) for n, p in pythons.items()},
    }
    with tempfile.TemporaryDirectory() as name:
        models = (options.models or Path(name) / "models").absolute()
        place = Workspace(Path(name), models, pythons, options.limit_s, is_gpu)
        # On a GPU, memory is that of the GPU.
        imports = {name: None if is_gpu else place.imports_bytes(name) for name in pythons}
        for number_ in range(options.rounds):
            for case in cases:
                for program in options.programs:
                    if (number_, case.name, program) in done or not is_able(program, case):
                        continue
                    scratch = place.directory / "run"
                    scratch.mkdir()
                    measured = dataclasses.replace(
                        run_program(program, case, place, scratch),
                        imports_bytes=imports[program.partition(" ")[0]],
                    )
                    shutil.rmtree(scratch)
                    figures["runs"].append(
                        {
                            "round": number_,
                            "case": case.name,
                            "program": program,
                            "load_average": os.getloadavg()[0],
                            "measured": dataclasses.asdict(measured),
                        }
                    )
                    print(f"{case.name}: {program}: {_line(measured)}", flush=True)
                    keep(figures, options)
    return figures


def runs_of(figures: Figures, case: str) -> dict[str, list[Measured]]:
    """The runs of a case by program, round by round."""
    return by_program(row for row in figures["runs"] if row["case"] == case)


def markdown(figures: Figures) -> str:
    """All figures as tables: one for each case of supervised fine-tuning, one for objectives."""
    parts, objectives = [], {}
    for case, settings in figures["cases"].items():
        runs = runs_of(figures, case)
        if from_json(Case, settings).objective != "sft":
            objectives[case] = runs
            continue
        rows = [cells(program, runs) for program in runs]
        parts.append(f"**{case}, {settings['steps']} steps**\n\n{table(COLUMNS, rows)}")
        parts += bars_of(settings, runs)
    if objectives:
        parts.append(table_of_objectives(figures, objectives))
    versions = figures["versions"].items()
    listed = [f"{name}: " + ", ".join(f"{k} {v}" for k, v in of.items()) for name, of in versions]
    counts = Counter((row["case"], row["program"]) for row in figures["runs"]).values()
    fewest, most = min(counts, default=0), max(counts, default=0)
    rounds = str(most) if fewest == most else f"{fewest} to {most}"
    machine = figures["hardware"]
    said = (
        f"Medians of {rounds} rounds; tokens without padding; "
        f"{not_counted(figures)} are not counted. Memory: allocated on the GPU, or of "
        "the largest process less what its imports hold. "
        f"{machine['cpu']}, {machine['physical_cores']} cores. " + "; ".join(listed) + "."
    )
    return "\n\n".join([*parts, said])


def table_of_objectives(figures: Figures, objectives: dict[str, dict[str, list[Measured]]]) -> str:
    """A row for each case: speed and memory relative to TRL, and how far the losses are apart."""
    of_trl = [
        program for program in TRL_SETTINGS if any(program in runs for runs in objectives.values())
    ]
    titles = ["case", "tokens/s", *(f"x {program}" for program in of_trl), "peak memory"]
    titles += [f"x {program}" for program in of_trl]
    titles += ["padding of trl", "largest loss difference", "definitions"]
    rows = []
    for name, runs in objectives.items():
        case = from_json(Case, figures["cases"][name])
        own = runs.get("ftkit", [])
        if failures := [
            f"{program}: {measured.failure}"
            for program, of_program in runs.items()
            for measured in of_program
            if measured.failure
        ]:
            rows.append([name, in_a_cell(failures[0]), *[""] * (len(titles) - 2)])
            continue
        speeds, sizes = (
            [number(paired_ratio(own, runs.get(program, []), of), ".2f") for program in of_trl]
            for of in ("tokens_per_s", "peak_bytes")
        )
        rows.append(
            [
                f"{name}, {case.steps} steps",
                number(median_of(own, "tokens_per_s"), ",.0f"),
                *speeds,
                gib(median_of(own, "peak_bytes")) + " GiB",
                *sizes,
                number(median_of(runs.get("trl", []), "padding_fraction"), ".0%"),
                number(difference_from_trl(runs), ".0e"),
                case.differs or "equal",
            ]
        )
    return table(titles, rows)


def difference_from_trl(runs: dict[str, list[Measured]]) -> float | None:
    """Largest relative difference of ftkit's losses from TRL's, over all steps; None: unknown."""
    own = next((run for run in runs.get("ftkit", []) if run.is_whole), None)
    others = [
        run
        for program, of_program in runs.items()
        if program in TRL_SETTINGS and program not in OTHER_BATCHES
        for run in of_program
        if run.is_whole
    ]
    if own is None or not others:
        return None
    return max(largest_difference(other.steps, own.steps) for other in others)


def cells(program: str, runs: dict[str, list[Measured]]) -> list[str]:
    """A row of the table."""
    own = runs[program]
    whole = [run for run in own if run.is_whole]
    if not whole:
        return [program, in_a_cell(own[-1].failure), *[""] * (len(COLUMNS) - 2)]
    beside = runs.get("litgpt", [])
    apart = ""
    reference = next((run for run in runs.get("ftkit", []) if run.is_whole), None)
    if reference and program != "ftkit":
        first = largest_difference(whole[0].steps[:1], reference.steps[:1])
        last = largest_difference(whole[0].steps[-1:], reference.steps[-1:])
        apart = f"{first:.0e} / {last:.0e}"
    return [
        program,
        number(median_of(own, "tokens_per_s"), ",.0f"),
        number(paired_ratio(own, beside, "tokens_per_s"), ".2f"),
        number(median_of(own, "step_s"), ".2f") + " s",
        number(median_of(own, "padding_fraction"), ".1%"),
        gib(median_of(own, "peak_bytes")) + " GiB",
        number(paired_ratio(own, beside, "peak_bytes"), ".2f"),
        number(median_of(own, "first_step_s"), ".1f") + " s",
        f"{whole[0].steps[0].loss:.4f}",
        f"{whole[0].steps[-1].loss:.4f}",
        apart,
    ]


def bars_of(settings: Figures, runs: dict[str, list[Measured]]) -> list[str]:
    """Goals of ftkit in a case, and whether it reached them; empty for cases without goals."""
    batch = settings["micro_batch_size"], settings["global_batch_size"]
    own, beside = runs.get("ftkit", []), runs.get("litgpt", [])
    if settings["model"] != "llama-34m" or batch != (8, 8):
        return []
    speed, memory = (paired_ratio(own, beside, name) for name in ("tokens_per_s", "peak_bytes"))
    if speed is None or memory is None:
        return []
    wanted, most = BARS[settings["precision"]]
    said = [
        f"{'reached' if speed >= wanted else 'missed'}: {wanted} x LitGPT's tokens/s ({speed:.2f})",
        f"{'reached' if memory <= most else 'missed'}: {most} x its memory ({memory:.2f})",
    ]
    of_trl = {
        program: speed
        for program, measured in runs.items()
        if program.startswith("trl") and (speed := median_of(measured, "tokens_per_s")) is not None
    }
    if of_trl:
        best = max(of_trl, key=lambda program: of_trl[program])
        is_faster = (median_of(own, "tokens_per_s") or 0) > of_trl[best]
        said.append(f"{'reached' if is_faster else 'missed'}: faster than TRL's best ({best})")
    return ["; ".join(said)]


def draw(figures: Figures, picture: Path) -> None:
    """Draw the speed of all programs, a panel for each case."""
    groups = {}
    for case in figures["cases"]:
        speeds = {
            program: median_of(own, "tokens_per_s")
            for program, own in runs_of(figures, case).items()
        }
        known = {program: speed for program, speed in speeds.items() if speed is not None}
        if known:
            groups[case] = known
    if groups:
        draw_bars(groups, "tokens per second, padding not counted", "Fine-tuning", picture)


def _line(measured: Measured) -> str:
    if not measured.is_whole:
        return in_a_cell(measured.failure)
    speed, padding = measured.tokens_per_s, measured.padding_fraction or 0
    return f"{speed:,.0f} tokens/s, padding {padding:.1%}, {gib(measured.peak_bytes)} GiB"
