"""The recipes of recipes/multi_gpu run as they are, but for the model, the data and the length."""

import importlib.util
import json
import time
from pathlib import Path

import pytest
from conftest import ROOT
from runs import run_ranks

from ftkit.job import Job
from ftkit.parsing import read_recipe
from ftkit.planning import Devices
from ftkit.ranks import STATE, rank_directory
from ftkit.report.report import Report, read_report

RECIPES = {path.stem: path for path in sorted((ROOT / "recipes" / "multi_gpu").glob("*.yaml"))}
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
BATCHES = {"train.global_batch_size": 4, "train.micro_batch_size": 1}
"""Smaller ones, so that the step takes no time."""


def write_job(name: str, out_dir: Path, base: Path, data: Path) -> tuple[int, Path]:
    """The job's number of ranks, 2 for 4, and its file."""
    changes = BATCHES | {
        "checkpoint_dir": str(base),
        "out_dir": str(out_dir),
        "accelerator": "cpu",
        "data": "JSON",
        "data.json_path": str(data),
        "data.num_workers": 0,
        "train.max_steps": 2,
        "train.max_seq_length": 128,
    }
    asked = read_recipe([RECIPES[name]], [], method="full")
    ranks = 1 if asked.devices == 1 else 2
    overrides = [(key, json.dumps(value)) for key, value in (changes | {"devices": ranks}).items()]
    recipe = read_recipe([RECIPES[name]], overrides, method="full")
    assert (recipe.precision, recipe.strategy, recipe.optimizer) == (
        asked.precision,
        asked.strategy,
        asked.optimizer,
    )
    job = Job(
        recipe=recipe,
        devices=Devices(accelerator="cpu", count=2),
        base=str(base),
        command=(),
        started_at_s=time.time(),
    )
    state = out_dir / STATE
    state.mkdir()
    job.write(state / "job.json")
    return ranks, state / "job.json"


@pytest.fixture(scope="module")
def reports(
    tiny_base: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Report]:
    """Of every recipe that can run here, by its name: all of one number of ranks in one go."""
    jobs: dict[str, tuple[int, Path]] = {}
    for name in RECIPES:
        if "deepspeed" not in name or HAS_DEEPSPEED:
            jobs[name] = write_job(name, tmp_path_factory.mktemp(name), tiny_base, tiny_data)
    for world_size in (1, 2):
        run_ranks(world_size, [file for ranks, file in jobs.values() if ranks == world_size])
    return {name: read_report(rank_directory(file.parent, 0)) for name, (_, file) in jobs.items()}


def test_there_are_ten_recipes() -> None:
    assert len(RECIPES) == 10


@pytest.mark.parametrize("name", RECIPES)
def test_a_multi_gpu_recipe_runs(reports: dict[str, Report], name: str) -> None:
    if name not in reports:
        pytest.skip("deepspeed is not installed: scripts/setup_env")
    report = reports[name]
    assert (report.outcome, report.exit_reason) == ("completed", "train.max_steps of 2 reached")
    assert report.resolved
    words = name.split("-")
    expected = next((s for s in ("ddp", "fsdp", "deepspeed") if s in name), "single")
    assert report.resolved.strategy == expected
    assert report.resolved.world_size == (1 if "1device" in words else 2)
    assert report.resolved.precision == "bf16-true"
    assert report.loss and report.loss.last and 5 < report.loss.last < 7
