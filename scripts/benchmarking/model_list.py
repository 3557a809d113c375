"""Which causal language models of transformers ftkit trains: each is tried on fake tensors."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ftkit.architectures.transformers_architecture import read_transformers_architecture
from ftkit.errors import UserError
from ftkit.model.language_model import LanguageModel

DOCUMENT = "docs/models.md"
START, END = "<!-- made by scripts/list_models -->", "<!-- end -->"
LAYERS = 2
MOST_SHOWN = 80
"""Characters of what an error says."""
LENGTHS = (5, 3)
"""Tokens of the two sequences that are computed."""


@dataclass(frozen=True)
class Tried:
    """A kind of model, and what came of it."""

    model_type: str
    class_name: str
    outcome: str
    """works, or what keeps it from that."""
    in_rows: bool = False
    """Whether it is trained without padding."""

    @property
    def line(self) -> str:
        """Its row of the table."""
        rows = "yes" if self.in_rows else ""
        return f"| `{self.model_type}` | {self.class_name} | {self.outcome} | {rows} |"


def types() -> list[str]:
    """The model types of all causal language models."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tried(model_type: str) -> Tried:
    """Train a step of one on fake tensors."""
    class_name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    try:
        architecture = read_transformers_architecture({"model_type": model_type}, model_type)
        small = architecture.with_layers(LAYERS)
        with torch.device("meta"):
            model = LanguageModel(small, tied=False).to(torch.bfloat16)
        in_rows = small.takes_rows
        _train(model, in_rows=in_rows)
    except UserError as refusal:
        return Tried(model_type, class_name, f"refused: {_short(refusal)}")
    except Exception as error:  # of any family's code
        return Tried(model_type, class_name, f"fails: {type(error).__name__}: {_short(error)}")
    return Tried(model_type, class_name, "works", in_rows)


def _short(error: Exception) -> str:
    """The beginning of what an error says, as a cell of a table."""
    first = str(error).strip().partition("\n")[0]
    cause = re.search(r" makes no \w+ \((.*)", first)
    words = (cause[1] if cause else first).replace("|", " ")
    return words if len(words) <= MOST_SHOWN else f"{words[:MOST_SHOWN].rstrip()} ..."


def listed(found: Iterable[Tried]) -> str:
    """All as a table."""
    head = "| model_type | class | | without padding |\n|---|---|---|---|"
    return "\n".join([head, *(one.line for one in found)])


def _train(model: LanguageModel, *, in_rows: bool) -> None:
    """Forward and backward; every parameter that is trained has a gradient."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.body.place_rotary_tables(torch.device("cpu"), max(LENGTHS))
        model.kernel = "cpu"
        shape = (1, sum(LENGTHS)) if in_rows else (2, max(LENGTHS))
        tokens = torch.zeros(shape, dtype=torch.long, device="cpu")
        labels = torch.zeros(tokens.numel(), dtype=torch.long, device="cpu")
        places = torch.arange(tokens.numel(), device="cpu")
        lengths = LENGTHS if in_rows else None
        loss = model(tokens, places, labels, sequence_lengths=lengths)
        assert loss.shape == ()
        loss.backward()
    assert any(parameter.grad is not None for parameter in model.body.blocks.parameters())
