"""LoftQ: LoRA begins with what quantisation has changed in the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL, CPU, build, export, logits, lora_recipe
from messages import says
from tiny import make_llama
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.lora.layers import lora_layers
from ftkit.models.lora.targets import TRAINED, our_name
from ftkit.models.pretrained.base_model import BaseModel, open_base, weight_reader
from ftkit.recipe.devices import Devices
from ftkit.recipe.plan import make_plan

LOFTQ: dict[str, Any] = {"lora_init": "loftq", "quantize": "bnb.nf4", "lora_r": 8, "lora_alpha": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return open_base(str(make_llama(tmp_path_factory.mktemp("base") / "llama")))


def test_the_matrices_are_those_of_peft(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes.nn.modules import Params4bit
    from peft.utils.loftq_utils import loftq_init

    model = build(base, lora_recipe(base, lora_mlp=True, **LOFTQ))
    read = weight_reader(base)
    # PEFT moves tensors to a GPU without asking whether there is one.
    for kind in (Tensor, Params4bit):
        usual = kind.to

        def to_host(self: Any, *args: Any, usual: Any = usual, **keys: Any) -> Any:
            keys = {key: CPU if value == "cuda" else value for key, value in keys.items()}
            return usual(self, *(CPU if value == "cuda" else value for value in args), **keys)

        monkeypatch.setattr(kind, "to", to_host)
    compared = 0
    for name, layer in lora_layers(model):
        if layer.in_features % 64:  # bitsandbytes misreads rows that end within a block, on CPUs
            continue
        compared += 1
        _, a, b = loftq_init(read(f"{our_name(name)}.weight"), num_bits=4, reduced_rank=8)
        found = layer.lora_B[TRAINED].weight @ layer.lora_A[TRAINED].weight
        torch.testing.assert_close(found, b @ a, rtol=0, atol=1e-6)
        assert found.abs().max() > 1e-4
    assert compared == 8


@pytest.mark.parametrize("keys", [{}, {"lora_variant": "rslora"}, {"lora_alpha": 32}])
@pytest.mark.parametrize("quantize", ["bnb.nf4", "bnb.nf4-dq", "bnb.fp4"])
def test_training_begins_nearer_to_the_model_that_is_not_quantised(
    base: BaseModel, quantize: str, keys: dict[str, Any]
) -> None:
    start = LOFTQ | keys | {"quantize": quantize, "lora_targets": "all-linear", "lora_r": 32}
    whole = logits(build(base, lora_recipe(base)))
    packed = logits(build(base, lora_recipe(base, quantize=quantize)))
    found = logits(build(base, lora_recipe(base, **start)))
    assert (found - whole).norm() < 0.7 * (packed - whole).norm()


def test_layers_that_are_not_quantised_begin_as_usual(base: BaseModel) -> None:
    """The head has no error: both of its matrices would be zero, and learn nothing."""
    usual = build(base, lora_recipe(base, **ALL, **LOFTQ | {"lora_init": "default"}))
    model = build(base, lora_recipe(base, **ALL, **LOFTQ))
    for matrix in ("lora_A", "lora_B"):
        name = f"head.lm_head.{matrix}.{TRAINED}.weight"
        assert torch.equal(model.get_parameter(name), usual.get_parameter(name))


def test_the_adapter_begins_where_it_ended(base: BaseModel, tmp_path: Path) -> None:
    recipe = lora_recipe(base, **ALL, **LOFTQ)
    model = build(base, recipe)
    adapter = export(model, base, recipe, tmp_path / "adapter")
    again = build(base, lora_recipe(base, adapter=adapter, quantize="bnb.nf4"))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantize": None}, ("lora_init is loftq", "quantize", "bnb.nf4")),
        ({"lora_variant": "dora"}, ("lora_init is loftq", "dora")),
        ({"objective": "dpo"}, ("lora_init is loftq", "objective is dpo")),
    ],
)
def test_settings_without_such_a_start_are_refused(
    base: BaseModel, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    recipe = lora_recipe(base, **LOFTQ | changes)
    with pytest.raises(UserError) as caught:
        make_plan(recipe, Devices(accelerator="cpu", count=1))
    assert says(str(caught.value), *words)
