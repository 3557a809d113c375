"""scripts/fuzz: damage is made for the format of each file, and the same seed makes the same."""

import json
import pickle
import pickletools
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import ROOT
from safetensors.torch import save_file

SEEDS = range(40)
Mutate = Callable[[Path, random.Random], str]


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Mutate:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from fuzzing.mutations import mutate as function

    return function


def write_sound_file(path: Path) -> bytes:
    values = {"a": [1, 2, {"b": "c"}], "d": 0.5}
    match path.suffix or path.name:
        case ".json" | ".yaml":
            path.write_text(json.dumps(values))
        case ".jsonl":
            path.write_text(3 * (json.dumps(values) + "\n"))
        case ".safetensors":
            save_file({"a": torch.ones(2, 3)}, path)
        case ".bin":
            torch.save({"a": torch.ones(2, 3)}, path)
        case ".metadata":
            path.write_bytes(pickle.dumps(values))
        case _:
            path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}" * 10)
    return path.read_bytes()


@pytest.mark.parametrize(
    "name", ["a.json", "a.yaml", "a.jsonl", "a.safetensors", "a.bin", ".metadata", "a.jinja"]
)
def test_the_same_seed_makes_the_same_damage(tmp_path: Path, mutate: Mutate, name: str) -> None:
    damaged = 0
    for seed in SEEDS:
        results = []
        for copy in "12":
            path = tmp_path / f"{seed}{copy}" / name
            path.parent.mkdir()
            sound = write_sound_file(path)
            what = mutate(path, random.Random(seed))
            content = path.read_bytes() if path.is_file() else None
            results.append((what, content))
        assert results[0] == results[1]
        damaged += results[0][1] != sound
    assert damaged > 0.7 * len(SEEDS)  # a value may be replaced by itself


def test_a_changed_pickle_is_still_a_pickle(tmp_path: Path, mutate: Mutate) -> None:
    """Otherwise only the first check of a reader would be tried."""
    path = tmp_path / ".metadata"
    whole = 0
    for seed in range(100):
        write_sound_file(path)
        if mutate(path, random.Random(seed)).startswith("pickle: "):
            *_, (last, _, place) = pickletools.genops(path.read_bytes())
            assert (last.name, place) == ("STOP", path.stat().st_size - 1)
            whole += 1
        path.unlink() if not path.is_dir() else path.rmdir()
    assert whole > 40


@pytest.mark.slow
def test_damaged_indexes_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "outcomes.jsonl"
    line = ("--mutations", "3", "--only", "index", "--out", str(out))
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts" / "fuzz", *line], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    outcomes = [json.loads(text) for text in out.read_text().splitlines()]
    assert {outcome["ended"] for outcome in outcomes} <= {"accepted", "refused"}
    assert f"| index | {len(outcomes)} | " in ran.stdout
