"""scripts/gpu_suite: its parts, what is run again, and that all of it runs."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from command import ROOT

SUITE = ROOT / "scripts" / "gpu_suite"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(SUITE.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = spec_from_loader("gpu_suite", SourceFileLoader("gpu_suite", str(SUITE)))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in list(sys.modules):
        if name.partition(".")[0] in ("benchmarking", "gpu_parts"):
            del sys.modules[name]


@pytest.fixture
def arguments(tmp_path: Path) -> Namespace:
    return Namespace(out=tmp_path, dry_run=True, wheels=None)


def result(outcome: str, *passed: bool | None) -> dict[str, Any]:
    checks = [{"name": f"check {n}", "passed": p, "said": "so"} for n, p in enumerate(passed)]
    return {"outcome": outcome, "checks": checks, "figures": {}, "seconds": 3}


def test_every_part_has_ten_minutes_at_most_and_a_name_of_its_own(suite: ModuleType) -> None:
    names = [part.name for part in suite.PARTS]
    assert len(set(names)) == len(names)
    assert all(part.limit_s <= 600 for part in suite.PARTS)
    assert [part.name for part in suite.PARTS if part.needs_wheels] == names[-len(suite.PEERS) :]


def test_the_document_on_performance_names_every_part(suite: ModuleType) -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    rows = text.partition("| Part | Shows |")[2].partition("\n\n")[0].splitlines()[1:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    between = [f"peers_{number}" for number in range(2, len(suite.PEERS))]
    assert sorted([*named, *between]) == sorted(part.name for part in suite.PARTS)


def test_the_recipes_of_the_calibration_are_all_in_one_part(suite: ModuleType) -> None:
    source = (ROOT / "scripts" / "calibrate_memory").read_text()
    recipes = source.partition("RECIPES")[2].partition("\n]\n")[0].count('\n    ("')
    assert [number for part in suite.CALIBRATION for number in part] == list(range(recipes))


def test_a_part_that_is_done_is_not_run_again_and_one_that_cannot_run_is_named(
    suite: ModuleType, arguments: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(suite.subprocess, "Popen", lambda *words, **_: started.append(words))
    tests, *_, peers = suite.PARTS
    suite.write_result(arguments.out, tests.name, result("done", True))
    suite.run_part(tests, arguments, gpus=1)
    suite.run_part(peers, arguments, gpus=1)
    two = next(part for part in suite.PARTS if part.gpus == 2)
    suite.run_part(two, arguments, gpus=1)
    assert started == []
    assert suite.read_result(arguments.out, peers.name)["outcome"] == "needs --wheels"
    assert suite.read_result(arguments.out, two.name)["outcome"] == "needs 2 GPUs"


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("raise SystemExit(3)", "failed, see tests.log"),
        ("import time; time.sleep(600)", "not done after 1 s"),
    ],
)
def test_a_part_that_fails_or_hangs_keeps_its_results(
    suite: ModuleType,
    arguments: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    outcome: str,
) -> None:
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    def begin(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        suite.write_result(arguments.out, "tests", result("under way", True, None))
        return start([sys.executable, "-c", program], **more)

    monkeypatch.setattr(suite.subprocess, "Popen", begin)
    part = suite.dataclasses.replace(suite.PARTS[0], limit_s=1)
    if "SystemExit" in program:
        part = suite.PARTS[0]
    suite.run_part(part, arguments, gpus=1)
    found = suite.read_result(arguments.out, "tests")
    assert found["outcome"] == outcome
    assert [check["passed"] for check in found["checks"]] == [True, None]
    assert suite.is_wrong(found)


def test_problems_are_listed_below_the_table(suite: ModuleType) -> None:
    text = suite.summary(
        {"tests": result("done", True, None), "saves": result("done", True, False)}
    )
    assert "| tests | done | 3 s | 1 right, 0 wrong |" in text
    assert text.endswith("- saves: check 1: so")
    assert not suite.is_wrong(result("needs 2 GPUs"))


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(["saves", "peers_1"], marks=pytest.mark.slow),
        pytest.param([], marks=pytest.mark.matrix),
    ],
    ids=["some", "all"],
)
def test_parts_run_through_on_a_cpu(tmp_path: Path, parts: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(SUITE), "--dry_run", "--out", str(tmp_path)]
    words += ["--parts", *parts] if parts else []
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    cannot = {"strategies", "dead_rank", "peers_1", "peers_2", "peers_3"}
    ran = {name for name, part in found.items() if part["outcome"] == "done"}
    assert found.keys() - ran == cannot & found.keys()
    assert not parts or sorted(found) == sorted(parts)
    assert (tmp_path / "results.md").read_text().strip() in done.stdout
