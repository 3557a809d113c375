"""Names and order of parameters in other programs, beside those of the model's own files.

The state of torch's optimizers has no names: it counts parameters through, group by group, in the
order of `named_parameters`. So the same model is made on the meta device, and counted.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftkit.errors import UserError
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.recipe.peft_adapter import peft_arguments
from ftkit.utils.confinement import without_limits

_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names that transformers' Trainer leaves out of weight decay, in lower case."""
_OF_ADAPTER = ".default"
"""Name of an adapter in PEFT's memory, which its files leave out."""
# transformers 5.24 calls GPT-NeoX's head lm_head in memory, and still embed_out in files.
_OF_FILES = {("gpt_neox", "lm_head.weight"): "embed_out.weight"}


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter of transformers' or PEFT's model that is trained."""

    name: str
    """Name in files."""
    shape: torch.Size
    is_decayed: bool
    """Whether transformers' Trainer applies weight decay."""


def trained_parameters(base: BaseModel, adapter: Path | None) -> tuple[TrainedParameter, ...]:
    """Trained parameters of a model, in the order of its modules.

    Args:
        base: in Hugging Face's layout.
        adapter: directory of PEFT's settings; None: all of the model is trained.

    Raises:
        UserError: transformers does not know the model, or PEFT the adapter.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not base.settings:
        raise UserError(
            f"checkpoint_dir {base.name} has no config.json, which is needed to match the "
            "parameters of the checkpoint. Give the base model in Hugging Face's layout."
        )
    settings = dict(base.settings)
    family = settings.pop("model_type")
    config = AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        with without_limits():  # those are for the checkpoint, and this is as large as its base
            model: Any = AutoModelForCausalLM.from_config(config)
        if adapter is not None:
            from peft import LoraConfig, get_peft_model

            found = LoraConfig(task_type="CAUSAL_LM", **peft_arguments(adapter))
            model = get_peft_model(model, found)
    norms = tuple(
        f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)
    )
    return tuple(
        TrainedParameter(
            _OF_FILES.get((family, name)) or _in_files(name),
            parameter.shape,
            not (name.startswith(norms) or _UNDECAYED.search(name.lower())),
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def _in_files(name: str) -> str:
    """PEFT's name of a parameter in memory as it is in files; others stay as they are."""
    name = name.replace(".modules_to_save.default.", ".")
    head, found, tail = name.rpartition(_OF_ADAPTER)
    return f"{head}{tail}" if found and ".lora_" in head and tail in ("", ".weight") else name


def plain_names(given: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """The names that a program gives parameters, with those in the model's own files.

    Programs wrap models, which puts a word before every name: `module.`, `model.`.

    Args:
        given: the program's.
        known: in files.

    Returns:
        For each of the program's names the one in files; names of other tensors without the prefix.
    """
    names = {name: _in_files(name) for name in given}
    wanted = max(known, key=len)
    prefixes = {
        found.removesuffix(wanted) for found in names.values() if f".{found}".endswith(f".{wanted}")
    }
    prefix = min(prefixes, key=len, default="")
    return {name: found.removeprefix(prefix) for name, found in names.items()}
