"""Parameter names of LoRA adapters, ours beside those of PEFT."""

from ftkit.models.pretrained.base_model import BaseModel

TRAINED, INITIAL = "default", "initial"
"""Names of the low-rank matrices of a layer: those that are trained, and, where their first values
are taken from the base weight, a frozen copy of these."""


def our_name(name: str) -> str:
    """The name of a parameter or module without the wrapper's prefix."""
    return name.removeprefix("body.").removeprefix("head.").replace(".base_layer.", ".")


def names_of(base: BaseModel, ours: str) -> tuple[str, ...]:
    """Hugging Face's full name of a layer of ours; where it has none, that in the model's files.

    Where that is a part of theirs, there are two: theirs followed by ours, and theirs.
    """
    naming = base.architecture.naming_in("hf") or base.naming
    theirs, fused = naming.stored_in(ours)
    return (theirs,) if fused is None else (f"{theirs}.{ours.rpartition('.')[2]}", theirs)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to the adapter."""
    return ".lora_" in name
