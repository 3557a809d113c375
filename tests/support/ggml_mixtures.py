"""Models for which llama-quantize's rule has chosen number formats, as lists of their tensors."""

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

LETTERS: Mapping[str, str] = {
    "F32": "F",
    "F16": "H",
    "Q4_K": "4",
    "Q5_K": "5",
    "Q6_K": "6",
    "Q8_0": "8",
    "Q5_0": "a",
    "Q5_1": "b",
}
"""A letter for each format, so that a model is a short text."""
SIZES = {"few": (4, 0), "usual": (26, 0), "70b": (80, 0), "mixtral": (9, 8), "experts": (12, 32)}
"""Layers, and experts."""


class MixedModel(NamedTuple):
    """A model by what the rule looks at."""

    size: str
    tied: bool
    fused: bool
    """True if queries, keys and values are one matrix."""
    width: int

    @property
    def name(self) -> str:
        """Its key in mixtures.json."""
        return f"{self.size}{', tied' * self.tied}{', fused' * self.fused}, {self.width}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors with shapes as torch has them, in the order in which llama-quantize goes."""
        layers, experts = SIZES[self.size]
        width, inner = self.width, 2 * self.width
        head = {} if self.tied else {"output.weight": (1000, width)}
        found = {**head, "output_norm.weight": (width,), "token_embd.weight": (1000, width)}
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (width,),
            "attn_output.weight": (width, width),
            "attn_output.bias": (width,),
        }
        if self.fused:
            block["attn_qkv.weight"] = (3 * width, width)
        else:
            block |= {f"attn_{part}.weight": (width, width) for part in "kqv"}
        if experts:
            block |= {
                "ffn_gate_inp.weight": (experts, width),
                "ffn_down_exps.weight": (experts, width, inner),
                "ffn_down_exps.bias": (experts, width),
                "ffn_gate_exps.weight": (experts, inner, width),
                "ffn_up_exps.weight": (experts, inner, width),
            }
        else:
            block |= {"ffn_down.weight": (width, inner), "ffn_up.weight": (inner, width)}
        for layer in range(layers):
            found |= {f"blk.{layer}.{name}": block[name] for name in sorted(block)}
        return found


MIXED_MODELS = tuple(
    MixedModel(size, tied, fused, width)
    for size, (tied, fused, width) in product(
        SIZES, ((True, False, 256), (False, True, 256), (False, False, 96), (False, False, 80))
    )
)
"""Widths: whole blocks of 256 numbers, whole ones of 32, and neither."""
