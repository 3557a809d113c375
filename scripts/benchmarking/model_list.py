"""List of the causal language models that ftkit trains: each is tried on fake tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ftkit.errors import UserError
from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.architectures.transformers_reading import read_transformers_architecture
from ftkit.models.dry_run import try_architecture

DOCUMENT = "docs/models.md"
START, END = "<!-- made by scripts/list_models -->", "<!-- end -->"
LAYERS = 2
"""Fewest layers; more are built where a family has layers of several kinds."""
MOST_SHOWN = 120
"""Most characters of an error message."""
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
COMPLETED: Mapping[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 5e5}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<image>": 151646, "<|extra_200|>": 151846}},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
"""Settings that default configurations lack or have too large, with values as in checkpoints."""


@dataclass(frozen=True)
class Tried:
    """A kind of model, and whether ftkit trains it."""

    model_type: str
    class_name: str
    outcome: str
    """works, or why it does not."""
    in_rows: bool = False
    """True if it is trained without padding."""

    @property
    def line(self) -> str:
        """Row of the table."""
        rows = "yes" if self.in_rows else ""
        return f"| `{self.model_type}` | {self.class_name} | {self.outcome} | {rows} |"


def types() -> list[str]:
    """The model types of all causal language models."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tried(model_type: str) -> Tried:
    """Train one step of a model on fake tensors."""
    class_name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    completed = COMPLETED.get(model_type, {})
    try:
        architecture = read_transformers_architecture({"model_type": model_type, **completed}, "It")
        small = _small(architecture)
        try_architecture(small)
    except UserError as refusal:
        return Tried(model_type, class_name, f"refused: {_short(refusal)}")
    except Exception as error:  # of any family's code
        return Tried(model_type, class_name, f"fails: {type(error).__name__}: {_short(error)}")
    given = f" (with {', '.join(completed)})" if completed else ""
    return Tried(model_type, class_name, f"works{given}", small.takes_rows)


def _small(architecture: TransformersArchitecture) -> TransformersArchitecture:
    if "num_hidden_layers" in COMPLETED.get(architecture.name, ()):
        return architecture
    return architecture.with_layers(max(LAYERS, architecture.depth_of_all_kinds))


def _short(error: Exception) -> str:
    """The beginning of an error message, as a cell of a table."""
    words = str(error).strip().partition("\n")[0].replace("|", " ").removeprefix("It ")
    words = words.partition("; ftkit trains")[0]
    return words if len(words) <= MOST_SHOWN else f"{words[:MOST_SHOWN].rstrip()} ..."


def counted(rows: Sequence[str]) -> str:
    """Count the rows of the table by their outcome."""

    def having(*words: str) -> int:
        return sum(any(word in row for word in words) for row in rows)

    works, fails, encoders = (
        having("| works"),
        having("| fails"),
        having("| refused: is an encoder"),
    )
    others = having("| refused: needs", "| refused: combines")
    rest = len(rows) - works - fails - encoders - others
    failing = f", {fails} fail with the defaults of their settings" * bool(fails)
    return (
        f"Of {len(rows)} model types, {works} work{failing}, {encoders} are encoders or "
        f"encoder-decoder models, {others} need images or audio, and {rest} are refused for the "
        "reasons in their rows."
    )


def listed(found: Sequence[Tried]) -> str:
    """Format all results as a table."""
    head = "| model_type | class | | without padding |\n|---|---|---|---|"
    rows = [one.line for one in found]
    return "\n".join([f"{counted(rows)}\n", head, *rows])
