"""Logits of ftkit and of transformers for one model on three sequences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers_models import VOCABULARY

from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.load_weights import Whole, fill
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.recipe.recipe import Recipe

LENGTHS = (9, 14, 3)
CPU = torch.device("cpu")


def filled(
    model: LanguageModel, base: BaseModel, *, rope_length: int = 64, seed: int = 0, **keys: Any
) -> LanguageModel:
    """An outlined model with its numbers, whole and on the CPU; keys go to `fill`."""
    fill(
        model,
        base,
        sharding=Whole(),
        device=CPU,
        rope_length=rope_length,
        seed=seed,
        progress=lambda *_: None,
        **keys,
    )
    return model


def opened(directory: Path) -> tuple[BaseModel, LanguageModel]:
    """A model of transformers, as ftkit computes it."""
    base = open_base(str(directory), "transformers")
    model = outline(base, Recipe(checkpoint_dir=str(directory)), torch.float32)
    return base, filled(model, base).eval()


def sequences() -> list[Tensor]:
    """Random sequences of LENGTHS."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def logits_by(model: PreTrainedModel, of: Sequence[Tensor]) -> Tensor:
    """[all tokens, vocabulary], of a model of transformers, each sequence by itself."""
    with torch.no_grad():
        return torch.cat([model(input_ids=sequence[None]).logits[0] for sequence in of]).float()


def padded_logits(model: LanguageModel, of: Sequence[Tensor]) -> Tensor:
    """Logits of ftkit's model, all sequences in one padded batch."""
    tokens = pad_sequence(list(of), batch_first=True)
    real = pad_sequence([torch.ones_like(sequence) for sequence in of], batch_first=True)
    with torch.no_grad():
        logits: Tensor = model(tokens, real.flatten().nonzero()[:, 0])
    return logits


def row_logits(model: LanguageModel, of: Sequence[Tensor]) -> Tensor:
    """Logits of ftkit's model, all sequences in a row without padding."""
    row = torch.cat(list(of))[None]
    places = torch.arange(row.size(1))
    with torch.no_grad():
        logits: Tensor = model(row, places, sequence_lengths=[len(s) for s in of])
    return logits


def cached_logits(model: LanguageModel, of: Sequence[Tensor]) -> list[Tensor]:
    """[sequences, vocabulary] of the last three tokens, two of them one by one from the cache."""
    model.body.start_cache(len(of), max(map(len, of)))
    prompts = pad_sequence([sequence[:-2] for sequence in of], batch_first=True)
    ends = torch.tensor([len(sequence) - 3 for sequence in of])
    rows = torch.arange(len(of))
    with torch.no_grad():
        places = torch.arange(prompts.size(1)).expand_as(prompts)
        found = [model(prompts, ends + rows * prompts.size(1), positions=places)]
        for back in (2, 1):
            newest = torch.stack([sequence[-back] for sequence in of])[:, None]
            found.append(model(newest, rows, positions=(ends + 3 - back)[:, None]))
    model.body.end_cache()
    return found


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
