"""Logits layer by layer, of a model that is never in memory as a whole."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.models.bodies.experts import packed_in
from ftkit.models.language_model import LanguageModel
from ftkit.models.lora.names import our_name
from ftkit.utils.progress import OnProgress

Values = Callable[[str], Tensor]
"""Gives any parameter by our name."""
_CPU = torch.device("cpu")


@torch.no_grad()
def logits_of(
    model: LanguageModel,
    values: Values,
    sequences: Sequence[Sequence[int]],
    progress: OnProgress = lambda *_: None,
) -> Tensor:
    """[tokens of all sequences, vocabulary] float32, computed on the _CPU.

    Args:
        model: outlined in float32, without numbers; it has none afterwards.
        values: its parameters; those of quantised layers as numbers.
        sequences: token ids.
        progress: called with (parts done, parts in all).
    """
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
    is_real = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        is_real[row, : len(sequence)] = True
    model.eval().body.place_rotary_tables(_CPU, longest)
    with _filled_when_needed(model, values, progress):
        result: Tensor = model(tokens, is_real.flatten().nonzero().squeeze(1))
    return result


@contextmanager
def _filled_when_needed(
    model: LanguageModel, values: Values, progress: OnProgress
) -> Iterator[None]:
    """Each part of the model has its numbers while it computes; the first has them before it.

    Some models ask for the embedding's device when they begin.
    """
    body = model.body
    parts: list[nn.Module] = [body.embedding, *body.blocks, *body.others, model.head]
    outlined: list[tuple[nn.Module, str, nn.Parameter]] = []
    done = 0

    def fill(part: nn.Module, *_: object) -> None:
        for module_name, module in part.named_modules(prefix=names[part]):
            for kind, parameter in list(module.named_parameters(recurse=False)):
                value = values(our_name(f"{module_name}.{kind}"))
                if kind == "weight" and hasattr(module, "pack"):
                    value = module.pack(value)
                elif kind in packed_in(module):
                    value = packed_in(module)[kind].pack(value)
                else:
                    value = value.float()
                outlined.append((module, kind, parameter))
                setattr(module, kind, nn.Parameter(value, requires_grad=False))

    def drop(*_: object) -> None:
        nonlocal done
        while outlined:
            module, kind, parameter = outlined.pop()
            setattr(module, kind, parameter)
        done += 1
        progress(done, len(parts))

    names = {module: name for name, module in model.named_modules()}
    hooks = [part.register_forward_pre_hook(fill) for part in parts[1:]]
    hooks += [part.register_forward_hook(drop) for part in parts]
    try:
        fill(parts[0])
        yield
    finally:
        for hook in hooks:
            hook.remove()
