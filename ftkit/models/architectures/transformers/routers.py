"""Routers of transformers' models: where they are, and whether their loss is one that ftkit knows.

Transformers says by class and place which results of a model are the logits of its routers
(`_can_record_outputs`, as in 5.3), and computes the auxiliary loss of these.
"""

import sys
from collections.abc import Iterator

import torch
import torch.nn as nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from ftkit.models.architectures.router_loss import RouterLoss

_TOKENS = 8
"""For which the two losses are compared; the last one is padding."""


def router_outputs(model: nn.Module) -> Iterator[tuple[str, int]]:
    """The modules whose results have the logits of routers, by name, and the place of these.

    Args:
        model: below its head, as transformers makes it.
    """
    recorders = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", [])
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        if not isinstance(recorder, OutputRecorder):
            continue
        for name, module in model.named_modules():
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                yield name, recorder.index


def find_router_loss(model: PreTrainedModel) -> RouterLoss | None:
    """The auxiliary loss of a model's routers; None: it has none, or another one.

    Args:
        model: with its head; on any device.
    """
    experts = getattr(model, "num_experts", None)
    chosen = getattr(model, "num_experts_per_tok", None)
    names = ("router_aux_loss_coef", "aux_loss_coef")
    coefficient = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if not experts or not chosen or coefficient is None:
        return None
    if not any(router_outputs(model.base_model)):
        return None
    found = RouterLoss(experts=experts, chosen=chosen, coefficient=float(coefficient))
    return found if _is_as_theirs(found, type(model)) else None


def _is_as_theirs(loss: RouterLoss, model_class: type[PreTrainedModel]) -> bool:
    """Whether transformers computes the same for some logits of two layers."""
    theirs = getattr(sys.modules[model_class.__module__], "load_balancing_loss_func", None)
    if theirs is None:
        return False
    with torch.device("cpu"):
        layers = torch.sin(torch.arange(2.0 * _TOKENS * loss.experts) ** 2)
        logits = layers.view(2, _TOKENS, loss.experts)
        is_real = torch.arange(_TOKENS) < _TOKENS - 1
        choices, probabilities = loss.routed(logits.flatten(0, 1), is_real.repeat(2))
        ours = loss.share(probabilities, choices)
        try:
            found = theirs(tuple(logits), loss.experts, loss.chosen, is_real[None].long())
        except Exception:  # of a function that takes something else
            return False
    return isinstance(found, torch.Tensor) and torch.allclose(found.double(), ours, rtol=1e-5)


def experts_of(block: nn.Module) -> Iterator[tuple[str, int]]:
    """The modules of a block that hold the matrices of all its experts: names and numbers of these.

    They are called with hidden states, the experts that each token chooses, and their weights.
    """
    for name, module in block.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "num_experts"):
            yield name, int(module.num_experts)
