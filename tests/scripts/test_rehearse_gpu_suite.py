"""scripts/rehearse_gpu_suite: what travels to a GPU and back, and when a rehearsal is over."""

import io
import json
import re
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from command import ROOT
from messages import says

sys.path.insert(0, str(ROOT / "scripts"))

from gpu_parts import travel

MIB = 2**20
SCRIPT = ROOT / "scripts" / "rehearse_gpu_suite"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = spec_from_loader("rehearse_gpu_suite", SourceFileLoader(SCRIPT.name, str(SCRIPT)))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("wheels", "tree", "archive", "whole", "over"),
    [
        ([40, 5], [12, 1], [], "58.00", None),
        ([40, 5], [12, 1], [6], "64.00", None),
        ([40, 5], [12, 2], [6], "65.00", "1.00 MiB more"),
        ([], [70], [], "70.00", "6.00 MiB more"),
    ],
)
def test_what_travels_is_summed_up_and_must_stay_below_the_bound(
    wheels: list[int], tree: list[int], archive: list[int], whole: str, over: str | None
) -> None:
    kinds = {
        kind: {f"{kind}-{size}": size * MIB for size in mib}
        for kind, mib in {"wheels": wheels, "tree": tree, "archive": archive}.items()
    }
    text, wrong = travel.travels(kinds, 64 * MIB)
    assert f"| all | {len(wheels + tree + archive)} | {whole} of 64 MiB |" in text
    assert f"| wheels | {len(wheels)} | {sum(wheels):.2f} MiB |" in text
    if over is None:
        assert wrong is None
        return
    assert wrong is not None
    assert says(wrong, f"{whole} MiB", over, f"tree-{max(tree)} ({max(tree)}.00 MiB")


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({"gpu_suite.tar.gz": 16 * MIB, "a/b/deep.json": 1}, []),
        ({"large.tar": 16 * MIB + 1}, ["large.tar ... 16 come back"]),
        ({"a/b/c/deeper.json": 1}, ["a/b/c/deeper.json ... 2 folders"]),
        ({f"{number}.json": 1 for number in range(8)}, []),
        ({f"{number}.json": 1 for number in range(9)}, ["9 files ... 8 come back"]),
    ],
    ids=["fits", "large", "deep", "eight", "nine"],
)
def test_what_returns_has_few_files_none_of_them_large_or_deep(
    tmp_path: Path, files: dict[str, int], wrong: list[str]
) -> None:
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    found = travel.wrong_with_returned(tmp_path)
    assert len(found) == len(wrong)
    assert all(says(one, phrase) for one, phrase in zip(found, wrong, strict=True))


def names(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^\w.-]", one)[0].lower().replace("_", "-") for one in requirements}


def test_machine_and_wheels_have_what_the_package_needs_and_each_wheel_has_a_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = names([*travel.INSTALLED, *travel.CARRIED])
    assert names(project["dependencies"]) <= there
    pins = travel.requirements()
    assert names(pins) == names(travel.CARRIED)
    assert all("==" in pin for pin in pins)


@pytest.mark.extensions
def test_the_tree_that_travels_has_what_git_knows_and_no_environment() -> None:
    files = travel.tree_files()
    assert Path("scripts/gpu_suite") in files
    assert not any(file.parts[0] in (".venv", ".git", "out") for file in files)


def pack(archive: Path, done: list[str], left: list[str]) -> None:
    """Write the archive of a run of the suite that did these parts."""
    content = json.dumps({"parts": {part: {} for part in done}, "left": left}).encode()
    with tarfile.open(archive, "w:gz") as packed:
        entry = tarfile.TarInfo("results.json")
        entry.size = len(content)
        packed.addfile(entry, io.BytesIO(content))


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([("a", "bc"), ("ab", "c"), ("abc", "")], None),
        ([("abc", "")], "--budget"),  # it would not show that another machine goes on
        ([("a", "abc")], "--budget"),
        ([("ab", "bc"), ("ab", "bc")], "['b', 'c']"),
    ],
    ids=["all done", "nothing left at once", "nothing done", "wrong again"],
)
def test_a_rehearsal_goes_on_until_nothing_is_left(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs: list[tuple[str, str]],
    said: str | None,
) -> None:
    copies: list[Path] = []

    def run_in(copy: Path, python: Path, wheels: Path, archive: Path, budget: float) -> None:
        assert list(copy.iterdir()) == []
        assert archive.exists() == bool(copies)
        done, left = runs[len(copies)]
        copies.append(copy)
        pack(archive, list(done), list(left))

    monkeypatch.setattr(script, "run_in", run_in)
    arguments: list[Any] = [Path("python"), tmp_path, None, tmp_path / "returned", 64, 240]
    if said is None:
        script.rehearse(*arguments)
    else:
        with pytest.raises(SystemExit) as error:
            script.rehearse(*arguments)
        assert says(str(error.value), said)
    assert len(copies) == len(set(copies)) == len(runs)


@pytest.mark.extensions
def test_a_rehearsal_goes_on_from_the_results_of_an_earlier_one(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "returned" / script.ARCHIVE
    begun.parent.mkdir()
    pack(begun, ["a"], ["b"])

    def run_in(copy: Path, python: Path, wheels: Path, archive: Path, budget: float) -> None:
        assert script.what_is_left(archive) == (["b"], {"a"})
        pack(archive, ["a", "b"], [])

    monkeypatch.setattr(script, "run_in", run_in)
    script.rehearse(Path("python"), tmp_path, begun, begun.parent, 64, 240)
    assert script.what_is_left(begun)[0] == []


@pytest.mark.parametrize(
    ("option", "value"), [("--wheels", "empty"), ("--archive", "empty/absent.tar.gz")]
)
def test_an_option_that_names_nothing_is_refused_at_once(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    value: str,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sys, "argv", ["rehearse_gpu_suite", option, str(tmp_path / value)])
    with pytest.raises(SystemExit) as error:
        script.main()
    assert says(str(error.value), tmp_path / value, option)
