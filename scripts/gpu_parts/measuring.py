"""Parts that measure: memory against its prediction, levers, scaling, other programs."""

import json
import sys
from collections.abc import Callable
from typing import Any

from gpu_parts.part import ROOT, Found, Scene, call, exit_summary

TOTAL_S = 420
"""Latest start of a pair of runs within a part of ten minutes."""
RUN_S = 170


def calibration(recipes: range) -> Callable[[Scene, Found], None]:
    """Compare predicted and measured memory of these recipes of scripts/calibrate_memory."""

    def run(scene: Scene, found: Found) -> None:
        file = scene.results / f"memory-{recipes.start}.json"
        words: list[object] = [sys.executable, ROOT / "scripts/calibrate_memory", "--output", file]
        words += ["--cpu", "--numbers", 0] if scene.dry else ["--numbers", *recipes]
        done = call(words, scene)
        figures = json.loads(file.read_text()) if file.exists() else {"recipes": []}
        for row in figures["recipes"]:
            name = f"{row['model']} {' '.join(map(str, row['settings'].values()))}"
            found.check(name, None if row["failure"] else True, row["failure"] or "")
        found.check("all close enough", passed=done.returncode == 0, said=exit_summary(done, 1))
        found.figure("constants", figures.get("constants"))

    return run


def levers(method: str) -> Callable[[Scene, Found], None]:
    """Measure each lever of a method, off and on."""

    def run(scene: Scene, found: Found) -> None:
        options: list[object] = ["--methods", method, "--pairs", 1]
        if scene.dry:
            options += ["--tiny", "--only", "padding_free", "--steps", 3]
        else:
            options += ["--total_s", TOTAL_S, "--limit_s", RUN_S, "--go_on"]
        figures = _benchmark(scene, found, "levers", f"levers-{method}", options)
        for row in figures.get("pairs", []):
            failed = row.get("refused") or row["on"]["failure"] or row["off"]["failure"]
            found.check(row["lever"], None if failed else True, failed or "")

    return run


def scaling(scene: Scene, found: Found) -> None:
    """Measure cost against length, size and ranks."""
    options: list[object] = ["--rounds", 1, "--limit_s", RUN_S]
    if scene.dry:
        options += ["--tiny", "--axes", "length"]
    figures = _benchmark(scene, found, "scaling", "scaling", options)
    for row in figures.get("runs", []):
        failure = row["measured"]["failure"]
        found.check(f"{row['axis']}: {row['name']}", failure is None, failure or "")


def peers(case: str) -> Callable[[Scene, Found], None]:
    """Measure other programs beside ftkit, installed from a folder."""

    def run(scene: Scene, found: Found) -> None:
        options: list[object] = ["--rounds", 1, "--cases", case, "--limit_s", RUN_S, "--go_on"]
        options += ["--environments", scene.results / "environments", "--wheels", scene.wheels]
        figures = _benchmark(scene, found, "peers", f"peers-{case.replace(', ', '-')}", options)
        for row in figures.get("runs", []):
            failure = row["measured"]["failure"]
            found.check(row["program"], None if failure else True, failure or "")

    return run


def _benchmark(
    scene: Scene, found: Found, command: str, name: str, options: list[object]
) -> dict[str, Any]:
    """Run scripts/benchmark; return its figures, whose file is beside those of the parts."""
    file = scene.results / f"{name}-figures.json"
    words: list[object] = [sys.executable, ROOT / "scripts/benchmark", command, "--out", file]
    done = call([*words, *options], scene)
    found.check(f"benchmark {command}", done.returncode == 0, exit_summary(done, 1))
    figures: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return figures
