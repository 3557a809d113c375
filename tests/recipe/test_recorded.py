"""What keeps steps from being recorded, as far as a plan knows it."""

import pytest

from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import Plan, make_plan
from ftkit.recipe.recipe import Method
from ftkit.recipe.recorded import why_unrecorded

GPU = Devices(accelerator="cuda", count=2, names=("H100",) * 2, float8_native=True)
CPU = Devices(accelerator="cpu", count=1)


def plan(machine: Devices = GPU, /, method: Method = "lora", **keys: object) -> Plan:
    pairs = [(key.replace("__", "."), str(value)) for key, value in keys.items()]
    recipe = read_recipe([], [("checkpoint_dir", "base"), *pairs], method=method)
    return make_plan(recipe, machine)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"devices": 2, "strategy": "fsdp"}, "fsdp"),
        ({"devices": 2, "strategy": "ddp", "strategy__context": 2}, "strategy.context"),
        ({"compile": True}, "compile"),
        ({"precision": "16-mixed"}, "16-mixed"),
        ({"memory__activation_checkpointing": True}, "activation_checkpointing"),
        (
            {"memory__activation_checkpointing": True, "memory__offload_activations": True},
            "activation_checkpointing",
        ),
        ({"train__neftune_noise_alpha": 5}, "neftune_noise_alpha"),
        ({"quantize": "bnb.nf4"}, "bnb.nf4"),
    ],
)
def test_what_cannot_be_recorded_is_named(keys: dict[str, object], word: str) -> None:
    reason = why_unrecorded(plan(**keys))
    assert reason is not None and word in reason


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"train__optimizer_in_backward": True, "train__micro_batch_size": 16}, "in_backward"),
        pytest.param({"float8": True}, "float8", marks=pytest.mark.extensions),
    ],
)
def test_of_full_fine_tuning_too(keys: dict[str, object], word: str) -> None:
    reason = why_unrecorded(plan(method="full", **keys))
    assert reason is not None and word in reason


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"devices": 2, "strategy": "deepspeed"}, "deepspeed"),
        ({"objective": "kto"}, "kto"),
        ({"objective": "distill", "teacher": "large"}, "teacher"),
    ],
)
def test_what_extensions_bring_and_cannot_be_recorded_is_named(
    keys: dict[str, object], word: str
) -> None:
    reason = why_unrecorded(plan(**keys))
    assert reason is not None and word in reason


def test_a_cpu_records_nothing_and_a_gpu_does() -> None:
    reason = why_unrecorded(plan(CPU))
    assert reason is not None and "cpu" in reason
    assert why_unrecorded(plan()) is None
    assert why_unrecorded(plan(method="full", precision="bf16-mixed")) is None
    assert why_unrecorded(plan(devices=2, strategy="ddp")) is None
