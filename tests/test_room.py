"""Runs that certainly do not fit are refused before anything starts; the micro-batch is chosen."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ftkit import room
from ftkit.errors import DoesNotFit
from ftkit.memory.gpus import HOST, Gpu
from ftkit.parsing import read_recipe, to_yaml
from ftkit.plan_check import check
from ftkit.planning import Devices
from ftkit.recipe import Recipe
from ftkit.report.machine import Gpu as GpuHere
from ftkit.report.machine import Hardware, processes_killed_for_memory

CUDA = Devices(accelerator="cuda", count=1, names=("NVIDIA Some GPU",))
COMMAND = ["ftkit", "finetune_full", "--config", "mine.yaml"]
ANSWER: dict[str, Any] = {
    "fits": False,
    "micro_batch_size": 4,
    "low_bytes": 40 * 2**30,
    "changes": [
        {"title": "LoRA", "method": "lora", "overrides": [["lora_r", "8"]]},
        {"title": "8-bit", "method": "full", "overrides": [["optimizer", "bitsandbytes.optim.A"]]},
    ],
}


def recipe(**keys: str) -> Recipe:
    values = {"checkpoint_dir": "random:pythia-14m", "train.max_seq_length": "64"}
    values |= {key.replace("__", "."): value for key, value in keys.items()}
    return read_recipe([], list(values.items()))


class Gpu24GiB:
    """A machine with one GPU, its plans always found to be the same."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = dict(ANSWER)
        self.plans = 0
        """How many were made."""

    def ask(self, *_: object) -> dict[str, Any]:
        self.plans += 1
        return self.answer


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu24GiB:
    machine = Gpu24GiB()
    here = Hardware(gpus=[GpuHere(name="NVIDIA Some GPU", memory_bytes=24 * 2**30)])
    monkeypatch.setattr(room, "hardware", lambda: here)
    monkeypatch.setattr(room, "_ask", machine.ask)
    return machine


def test_a_run_that_cannot_fit_is_refused_with_commands_that_would(gpu: Gpu24GiB) -> None:
    with pytest.raises(DoesNotFit) as refused:
        room.require_room(recipe(), CUDA, COMMAND)
    assert refused.value.exit_code == 3
    text = str(refused.value)
    assert "at least 40.0 GiB on each GPU, which has 24.0 GiB" in text and "--force" in text
    assert "LoRA: ftkit finetune --config mine.yaml --lora_r 8" in text
    assert "8-bit: ftkit finetune_full --config mine.yaml --optimizer bitsandbytes" in text


@pytest.mark.parametrize("fits", [True, None])
def test_what_fits_or_may_fit_is_not_refused(gpu: Gpu24GiB, fits: bool | None) -> None:
    gpu.answer["fits"] = fits
    room.require_room(recipe(), CUDA, COMMAND)
    assert gpu.plans == 1


def test_a_small_model_that_is_here_starts_without_a_plan(gpu: Gpu24GiB, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"small")
    room.require_room(recipe(checkpoint_dir=str(tmp_path)), CUDA, COMMAND)
    assert gpu.plans == 0


def test_on_cpus_nothing_is_refused(gpu: Gpu24GiB) -> None:
    room.require_room(recipe(), Devices(accelerator="cpu", count=2), COMMAND)
    assert gpu.plans == 0


def test_auto_takes_the_micro_batch_that_was_found(gpu: Gpu24GiB) -> None:
    gpu.answer["fits"] = True
    asked = recipe(train__micro_batch_size="auto", accelerator="cpu")
    found = room.with_micro_batch(asked, Devices(accelerator="cpu", count=2))
    assert found.train.micro_batch_size == 4
    given = dataclasses.replace(asked, train=dataclasses.replace(asked.train, micro_batch_size=2))
    assert room.with_micro_batch(given, CUDA) == given


def test_auto_is_refused_where_not_even_one_sequence_fits(gpu: Gpu24GiB) -> None:
    asked = recipe(train__micro_batch_size="auto", accelerator="cpu")
    with pytest.raises(DoesNotFit, match=r"one sequence needs 40\.0 GiB"):
        room.with_micro_batch(asked, Devices(accelerator="cpu", count=2))


def test_more_ranks_and_offload_are_no_advice_where_all_is_host_memory(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(to_yaml(recipe(accelerator="cpu", precision="32-true")))
    found: Any = check(str(file), Gpu(name=HOST, memory_bytes=2**40), failed=True)
    assert found["changes"] and all(change["fits"] for change in found["changes"])
    assert not any("strategy" in dict(change["overrides"]) for change in found["changes"])


def test_the_kernels_count_of_processes_killed_for_memory_is_read(tmp_path: Path) -> None:
    file = tmp_path / "vmstat"
    file.write_text("pgfault 12\noom_kill 3\n")
    assert processes_killed_for_memory(file) == 3
    assert processes_killed_for_memory(tmp_path / "none") is None


def test_the_check_finds_the_largest_micro_batch_for_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(to_yaml(recipe(train__micro_batch_size="auto", accelerator="cpu")))
    plenty = check(str(file), Gpu(name=HOST, memory_bytes=2**40))
    assert plenty["fits"] is True and plenty["micro_batch_size"] == 16
    scarce = check(str(file), Gpu(name=HOST, memory_bytes=int(plenty["low_bytes"]) - 2**20))  # type: ignore[call-overload]
    assert scarce["fits"] is True and scarce["micro_batch_size"] == 8
