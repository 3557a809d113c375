"""A type of adapter that another package adds, here MiSS of PEFT (https://arxiv.org/abs/2409.15371)."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from adapters import TOKENS, build, export, logits, lora_recipe, train
from messages import says

from ftkit.errors import UserError
from ftkit.extensions.peft_types.layers import TypeOfPeft
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.recipe.adapter_types import ADAPTER_TYPES, AdapterType, is_adapter, peft_options
from ftkit.utils.registry import Installed


@dataclass(frozen=True, kw_only=True)
class MissOptions:
    """Options of `peft: miss`."""

    r: int = 8
    """Rows of the block that each layer repeats."""


class Miss(TypeOfPeft):
    """MiSS."""

    constants: ClassVar = {".miss_block.": 0.0}


ROW = AdapterType(
    name="miss",
    title="MiSS",
    summary="a block that is repeated over the inputs of each layer",
    class_path="their_types.Miss",
    options=MissOptions,
    parameters=("miss_",),
    sizes={"r": 1},
    changing={"init_weights": (True,), "mini_r": (1,)},
    neutral=("miss_dropout",),
)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "their_types", SimpleNamespace(Miss=Miss, ROW=ROW))
    one = Installed("adapter_types", "miss", "their_types:ROW", "their-types", "1.0", "MiSS.")
    monkeypatch.setattr(ADAPTER_TYPES, "installed", [one])
    monkeypatch.setattr(ADAPTER_TYPES, "opened", {})


def test_it_trains_and_loads_in_peft_and_here(llama: BaseModel, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    recipe = lora_recipe(llama, lora_targets="all-linear", peft="miss", peft__r=4)
    model = build(llama, recipe)
    plain = logits(build(llama, lora_recipe(llama)))
    torch.testing.assert_close(logits(model), plain, rtol=0, atol=1e-6)
    adapter = export(train(model), llama, recipe, tmp_path / "adapter")
    expected = logits(model)
    assert (expected - plain).abs().max() > 1e-3
    theirs = AutoModelForCausalLM.from_pretrained(llama.directory, dtype=torch.float32)
    with torch.no_grad():
        found = PeftModel.from_pretrained(theirs, adapter).eval()(TOKENS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    again = build(llama, lora_recipe(llama, adapter=adapter))
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-5)


def test_its_parameters_are_known_once_it_is_used() -> None:
    name = "layer.miss_block.default"
    assert not is_adapter(name)
    assert peft_options({"class_path": "miss", "init_args": {"r": 2}}).r == 2
    assert is_adapter(name)


def test_its_options_are_checked() -> None:
    with pytest.raises(UserError) as caught:
        peft_options({"class_path": "miss", "init_args": {"r": 0}})
    assert says(str(caught.value), "peft.r is 0", "at least 1")
