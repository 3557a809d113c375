"""Linear layers that PEFT takes for the experts of a model, because these once had their names.

PEFT 0.21 reads targets called as experts were before transformers stacked them (gate_proj, up_proj,
down_proj) as targets of the stacked parameters: short names, full names and patterns. But
`target_parameters` may name the weight of a linear layer, which has the same matrices under the
same names then, and neither dropout nor DoRA.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from ftkit.models.pretrained.base_model import BaseModel


def taken_for_experts(base: BaseModel, layers: Iterable[str]) -> set[str]:
    """Those of some linear layers that PEFT would not adapt as target modules.

    Args:
        base: that is adapted.
        layers: Hugging Face's names.
    """
    if base.architecture.implementation != "transformers":
        return set()  # its experts are layers, which PEFT stacks while it reads them
    of_kind: dict[str, set[str]] = {}
    for name in layers:
        of_kind.setdefault(name.rpartition(".")[2], set()).add(name)
    model = SimpleNamespace(config=SimpleNamespace(model_type=base.architecture.name))
    return {name for kind, names in of_kind.items() if _is_taken(kind, model) for name in names}


def _is_taken(kind: str, model: Any) -> bool:
    """Whether PEFT makes another target of the last word of a name."""
    from peft.tuners.lora import LoraConfig

    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # older versions leave targets as they are
        return False
    config = LoraConfig(target_modules=[kind])
    try:
        conversion.convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # without the others that are stacked with it
        return True
    return kind not in (config.target_modules or ())
