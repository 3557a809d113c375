"""The report of where the time of the tests goes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT, command_environment
from durations import Cost, table

TESTS = """
import subprocess, sys
import pytest

@pytest.fixture(scope="module")
def model():
    ...

@pytest.fixture
def run(model, request):
    request.getfixturevalue("data")

@pytest.fixture
def data():
    ...

@pytest.mark.parametrize("n", range(2))
def test_of_a_run(run, n): ...

def test_of_a_process():
    loop = "import time\\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", loop], check=True)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests of two folders, run by two processes with a report and a file."""
    directory = tmp_path_factory.mktemp("project")
    hooks = "from durations import pytest_addoption, pytest_configure"
    (directory / "conftest.py").write_text(hooks)
    for name in ("first", "second"):
        (directory / "tests" / name).mkdir(parents=True)
    (directory / "tests/first/test_runs.py").write_text(TESTS)
    (directory / "tests/second/test_nothing.py").write_text("def test_nothing(): ...")
    words = ["--numprocesses", "2", "--dist", "loadfile", "--import-mode", "importlib"]
    words += ["--report-durations", "--durations-file", "durations.json"]
    environment = command_environment()
    environment["PYTHONPATH"] += f":{ROOT / 'tests/support'}"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--rootdir", ".", *words, "tests"],
        cwd=directory,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (directory / "printed").write_text(ended.stdout)
    return directory


def _table(directory: Path, title: str) -> list[str]:
    """Lines of the table with this title."""
    _, _, rest = (directory / "printed").read_text().partition(f" s, {title}\n")
    return rest.partition("\n\n")[0].partition("\n=")[0].splitlines()


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("by folder", ["tests/first (3 tests)", "tests/second (1 tests)"]),
        (
            "set-up by fixture",
            [
                "data (tests/first/test_runs.py), twice",
                "model (tests/first/test_runs.py), once",
            ],
        ),
        ("slowest files", ["tests/first/test_runs.py", "tests/second/test_nothing.py"]),
    ],
)
def test_each_table_has_what_took_time(directory: Path, title: str, names: list[str]) -> None:
    lines = _table(directory, title)
    assert all(any(line.endswith(f" {name}") for line in lines) for name in names)


def test_a_table_has_the_largest_costs_first() -> None:
    costs = {"b": Cost(2, 1), "c": Cost(1, 3), "a": Cost(12.25, 0)}
    assert table("by letter", costs, 2) == [
        "",
        "    wall      CPU  s, by letter",
        "    12.2      0.0  a",
        "     2.0      1.0  b",
    ]


def test_each_process_says_how_long_it_took_to_start(directory: Path) -> None:
    assert {line.split()[-1] for line in _table(directory, "by process")} == {"main", "gw0", "gw1"}


def test_the_speed_of_the_machine_is_shown_before_and_after_the_tests(directory: Path) -> None:
    printed = (directory / "printed").read_text()
    first, _, last = printed.partition("durations")
    assert "this machine: " in first
    assert "loops/s before the tests" in last


def test_the_file_has_each_phase_of_each_test(directory: Path) -> None:
    content = json.loads((directory / "durations.json").read_text())
    tests = content["tests"]
    assert len(tests) == 4
    assert all(phases.keys() == {"setup", "call", "teardown"} for phases in tests.values())
    assert {key for phases in tests.values() for cost in phases.values() for key in cost} == {
        "wall_s",
        "cpu_s",
    }


def test_time_of_child_processes_counts(directory: Path) -> None:
    content = json.loads((directory / "durations.json").read_text())
    # The child ends by its own time of a processor, which no machine's speed changes.
    assert content["tests"]["tests/first/test_runs.py::test_of_a_process"]["call"]["cpu_s"] >= 0.25
