"""LitGPT's architecture: its `Config`, read from the settings files of models."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, get_type_hints

import torch
from litgpt.config import Config, configs
from litgpt.model import GPT
from torch import Tensor

from ftkit.errors import UserError
from ftkit.extensions.litgpt import families
from ftkit.extensions.litgpt.families import AttentionBiasConfig, Family
from ftkit.models.architectures.architecture import (
    HEAD,
    SCORE,
    Architecture,
    AttentionTraits,
    Fused,
    Initial,
    ModelLayout,
    Naming,
    seed_of,
)
from ftkit.models.architectures.checks import implausible, require_plausible, shown_setting
from ftkit.models.architectures.implementation import Settings
from ftkit.models.meta_device import on_meta_device
from ftkit.recipe.objectives import ScoreLabels
from ftkit.utils.damaged_files import reading
from ftkit.utils.json_values import from_json
from ftkit.utils.yaml_files import load_yaml

_LORA_LAYERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "lora_query": ("q_proj",),
        "lora_key": ("k_proj",),
        "lora_value": ("v_proj",),
        "lora_projection": ("attn.proj",),
        "lora_mlp": ("mlp.fc", "mlp.fc_1", "mlp.fc_2", "mlp.proj"),
        "lora_head": ("lm_head",),
    }
)
SETTINGS, WEIGHTS = "model_config.yaml", "lit_model.pth"
"""Files of a directory in LitGPT's layout."""
_NO_PART = ("name", "hf_config", "block_size", "vocab_size", "padding_multiple")
"""Fields of `Config` that change no number for a given sequence."""
_LAYOUT_DEPENDENT = ("padded_vocab_size", "sliding_window_size", "sliding_window_indices")
"""Fields that depend on the layout: the vocabulary is in the shapes; a window is computed in
LitGPT's layout and limits the positions in Hugging Face's."""

_NUMBERS = frozenset(("rope_base", "attention_scores_scalar", "rope_condense_ratio"))
"""Fields of LitGPT's configuration that are annotated as int and may be float."""
_MOST_EXPERTS_OF_ALL_LAYERS = 2**16
"""LitGPT's code builds modules for each; the largest published models have a third of this."""


class OutlineOfGpt(GPT):  # type: ignore[misc]  # litgpt declares no types
    """LitGPT's model, without angles of positions on the meta device.

    There they have no values, and torch imports SymPy to make them.
    """

    def rope_cache(self, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if (device or torch.get_default_device()).type == "meta":
            return torch.empty(0, device="meta"), torch.empty(0, device="meta")
        angles: tuple[torch.Tensor, torch.Tensor] = super().rope_cache(device)
        return angles


@dataclass(frozen=True)
class LitgptArchitecture(Architecture):
    """Architecture of LitGPT's GPT.

    Our names are those of `litgpt.GPT`, with the fused ``attn.qkv`` split into
    ``attn.qkv.q_proj``, ``k_proj`` and ``v_proj``, each with its rows in the order of the heads.
    """

    config: Config
    family: Family | None = None
    """Hugging Face's family; None: ftkit cannot write it for Hugging Face."""
    window: int | None = None
    scores: ScoreLabels | None = None

    implementation = "litgpt"
    body = "ftkit.extensions.litgpt.body:LitgptBody"
    is_one_network = True
    experts_are_layers = True

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def model_type(self) -> str | None:
        return None if self.family is None else self.family.model_type

    @property
    def class_name(self) -> str | None:
        if self.family is None:
            return None
        if self.scores:
            # Imported here: transformers takes as long as all other imports.
            from ftkit.models.architectures.transformers_outline import (
                base_class_name,
                score_class_name,
            )

            find = score_class_name if self.scores.names else base_class_name
            return find(self.family.model_type)
        return self.family.class_name

    @property
    def context_length(self) -> int:
        return self.config.block_size

    @property
    def layers(self) -> int:
        return self.config.n_layer

    @property
    def has_equal_layers(self) -> bool:
        # Some models have a window, or another rotary table, in some layers only.
        return self.config.sliding_window_indices is None and self.config.rope_indices is None

    @property
    def attention(self) -> AttentionTraits:
        return AttentionTraits(
            heads=self.config.n_head,
            common_heads=self.config.n_head,
            head_size=self.config.head_size,
            width=self.config.n_head * self.config.head_size * self.config.n_layer,
            is_plain=self.config.attention_logit_softcapping is None,
            # LitGPT's latent attention takes no masks but its own.
            takes_rows=not self.config.latent_attention,
            shares_rows=not self.config.latent_attention,
        )

    @property
    def logit_softcap(self) -> float | None:
        return self.config.final_logit_softcapping

    @property
    def logit_scale(self) -> float:
        return 1.0

    @property
    def expert_share(self) -> float:
        config = self.config
        return config.n_expert_per_token / config.n_expert if config.n_expert else 1.0

    @property
    def router_loss(self) -> None:
        """None: LitGPT has no such loss."""

    @property
    def asks_for_router_loss(self) -> bool:
        return False

    @property
    def embedding(self) -> str:
        return "transformer.wte.weight"

    @property
    def is_usually_tied(self) -> bool:
        return self.family is not None and self.family.tied

    @property
    def lora_layers(self) -> Mapping[str, tuple[str, ...]]:
        return _LORA_LAYERS

    @cached_property
    def untied_shapes(self) -> dict[str, torch.Size]:
        config = self.config
        # Shapes from LitGPT's own code, so that no rule is written twice.
        with on_meta_device():
            model = OutlineOfGpt(config)
        # Our attention splits LitGPT's fused layer, so its rows are those of three parameters.
        key_rows = config.n_query_groups * config.head_size
        qkv_rows = {"q": config.n_head * config.head_size, "k": key_rows, "v": key_rows}
        shapes: dict[str, torch.Size] = {}
        for name, parameter in model.named_parameters():
            module, _, kind = name.rpartition(".")
            if module.endswith(".attn.qkv"):
                for part, rows in qkv_rows.items():
                    shape = torch.Size((rows, *parameter.shape[1:]))
                    shapes[f"{module}.{part}_proj.{kind}"] = shape
            else:
                shapes[name] = parameter.shape
        return shapes

    def seed_name(self, ours: str) -> str:
        # The head is ours in every architecture; parts of fused layers are in no other.
        if self.family is None or ours.startswith("lm_head"):
            return ours
        return self.family.naming.theirs(ours) or ours

    def initial(self, name: str, shape: torch.Size) -> Initial:
        if len(shape) > 1:
            return "normal"
        if name.endswith(".bias") or "Gemma" in self.config.name:  # its norms add one
            return "zeros"
        return "ones"

    def drawn(self, settings: Mapping[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
        if self.family is not None and (known := settings or self.settings_in("hf")):
            yield from self._drawn_by_transformers(known, seed)
            return
        # What transformers' models have without that setting.
        std = float(settings.get("initializer_range", 0.02))
        for name, shape in self.untied_shapes.items():
            initial = self.initial(name, shape)
            values = torch.full(shape, float(initial == "ones"), device="cpu")
            if initial == "normal":
                generator = torch.Generator(device="cpu").manual_seed(seed_of(name, seed))
                values.normal_(std=std, generator=generator)
            yield name, values

    def _drawn_by_transformers(
        self, settings: Mapping[str, Any], seed: int
    ) -> Iterator[tuple[str, Tensor]]:
        # Imported here: transformers takes as long as all other imports.
        from ftkit.models.architectures.transformers_reading import read_transformers_architecture

        assert self.family is not None
        naming, held = self.family.naming, dict[str, list[tuple[str, Fused | None]]]()
        for ours in self.untied_shapes:
            theirs, fused = naming.stored_in(ours)
            # In transformers' architecture, the head has our name.
            held.setdefault(HEAD if ours == HEAD else theirs, []).append((ours, fused))
        for theirs, values in read_transformers_architecture(settings, self.name).drawn(
            settings, seed
        ):
            for ours, fused in held[theirs]:
                yield ours, values if fused is None else self.part_of(values, fused, ours)

    def with_layers(self, layers: int) -> Self:
        return dataclasses.replace(self, config=dataclasses.replace(self.config, n_layer=layers))

    def with_vocabulary(self, size: int) -> Self:
        config = dataclasses.replace(self.config, vocab_size=size, padded_vocab_size=size)
        return dataclasses.replace(self, config=config)

    def with_scores(self, scores: ScoreLabels) -> Self:
        return dataclasses.replace(self, scores=scores)

    def identity(self) -> dict[str, Any]:
        config = self.config
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        for name in (*_NO_PART, *_LAYOUT_DEPENDENT):
            del fields[name]
        fields["unit_offset"] = "Gemma" in config.name  # LitGPT decides by the name, too
        # LitGPT divides by the head size where there is no scalar, so both spellings are one model.
        fields["attention_scores_scalar"] = config.attention_scores_scalar or config.head_size
        # Other MLPs do not read it, so it must not tell models apart.
        if config.mlp_class_name not in ("GptNeoxMLP", "GemmaMLP"):
            del fields["gelu_approximate"]
        rope = fields.pop("rope_adjustments") or {}
        if rope.keys() == {"factor"}:  # linear scaling, which LitGPT also has as condensing
            fields["rope_condense_ratio"] *= rope["factor"]
        elif rope:
            fields["rope_adjustments"] = rope
        return fields

    def naming_in(self, layout: ModelLayout) -> Naming | None:
        if layout == "litgpt":
            return None if self.scores else families.LITGPT_NAMES
        if self.family is None:
            return None
        naming = self.family.naming
        if not self.scores:
            return naming
        if not self.scores.names:
            return _without_head(naming, self.family.class_name)
        return dataclasses.replace(naming, modules={**naming.modules, "lm_head": SCORE})

    def settings_in(self, layout: ModelLayout) -> dict[str, Any] | None:
        if layout == "litgpt":
            return dataclasses.asdict(self.config)
        if self.family is None:
            return None
        return families.huggingface_settings(self.config, self.family)

    def obstacle_to(self, layout: ModelLayout) -> str | None:
        if layout == "hf" and self.family is None:
            return (
                "has an architecture that ftkit cannot write for Hugging Face; it can write "
                f"{', '.join(families.FAMILIES)}. LitGPT's layout holds it: try ftkit export with "
                "--format litgpt."
            )
        if layout == "litgpt" and self.scores:
            return "is a reward model, which LitGPT's layout does not hold. Try --format hf."
        if layout == "litgpt" and isinstance(self.config, AttentionBiasConfig):
            return (
                "has biases on all attention layers and none in the MLP, which LitGPT has no "
                "setting for. Try --format hf."
            )
        return None


def read_litgpt_architecture(
    directory: Path, settings: Settings, name: str, layout: ModelLayout
) -> LitgptArchitecture:
    """Read the architecture of the model in a directory.

    Args:
        directory: with the settings files of its layout.
        settings: the content of its config.json; empty if there is none.
        name: of the model; chooses LitGPT's prompt style.
        layout: of the directory.

    Raises:
        UserError: ftkit cannot run this model exactly, or a settings file is damaged.
    """
    config, family = _described(directory, settings, name, layout)
    # Types are checked in the fields, which files of both layouts become.
    require_sound(config, directory / (SETTINGS if layout == "litgpt" else "config.json"))
    return LitgptArchitecture(config, family, families.window_of(config, settings))


def named_architecture(name: str) -> LitgptArchitecture:
    """Return the architecture that LitGPT knows by a name.

    Raises:
        ValueError: LitGPT does not know the name.
    """
    known = Config.from_name(name)
    assert known is not None, "Config.from_name finds or raises"
    config = families.within_window(known)
    family = families.family_of_config(config)
    return LitgptArchitecture(config, family, families.window_of(config, {}))


def find_by_hub_name(name: str) -> tuple[str, LitgptArchitecture] | None:
    """Find a model that LitGPT knows: ORG/NAME on the hub and its architecture, or None.

    Args:
        name: ORG/NAME or LitGPT's own name, in upper or lower case.
    """
    for known in configs:
        hub_name = f"{known['hf_config']['org']}/{known['hf_config']['name']}"
        if name.lower() in (hub_name.lower(), known["name"].lower()):
            return hub_name, named_architecture(known["name"])
    return None


def _described(
    directory: Path, settings: Settings, name: str, layout: ModelLayout
) -> tuple[Config, Family | None]:
    """Configuration and family that the settings files of a directory describe."""
    family = families.family_of_settings(settings)
    if layout == "hf":
        # Also for an unknown family, which litgpt_config refuses with the families that it knows.
        return families.litgpt_config(settings, name), family
    config = _config_in(directory)
    if family is None:
        return config, families.family_of_config(config)
    # A directory in LitGPT's layout often keeps the config.json of the model it was converted from.
    _require_same(families.litgpt_config(settings, name), config, directory)
    return config, family


def _config_in(directory: Path) -> Config:
    file = directory / SETTINGS
    expected = "a model configuration of this LitGPT version"
    advice = (
        "Give the original model, or write this directory anew from it: ftkit export ORIGINAL "
        "--format litgpt --out DIR."
    )
    with reading(file, expected, advice=advice):
        fields = load_yaml(file)
        require_plausible(fields, file)
        return families.within_window(Config(**fields))


def _require_same(theirs: Config, ours: Config, directory: Path) -> None:
    """Refuse a directory whose config.json and model_config.yaml differ in size."""
    # Other fields may differ between the layouts: see `_LAYOUT_DEPENDENT`.
    sizes = ("n_layer", "n_embd", "n_head", "n_query_groups", "head_size", "intermediate_size")
    for size in sizes:
        if getattr(theirs, size) != getattr(ours, size):
            raise UserError(
                f"{directory} holds two models: {size} is {getattr(ours, size)} in "
                f"{SETTINGS} and {getattr(theirs, size)} in config.json. Remove the one "
                "that does not belong there."
            )


def require_sound(config: Config, file: Path | str) -> None:
    """Refuse a configuration of LitGPT with a field of the wrong type.

    Args:
        config: made of plausible settings.
        file: the file that they were read from, for messages.

    Raises:
        UserError: names the field, its value and its type.
    """
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        # LitGPT does not check its annotations, and some of its own models break them.
        if name in _NUMBERS:
            kind = float | None
        try:
            from_json(kind, value)
        except TypeError:
            wanted = getattr(kind, "__name__", str(kind))
            raise implausible(
                file, f"what LitGPT calls {name} is {shown_setting(value)}, but has to be {wanted}"
            ) from None
    if config.n_layer * config.n_expert > _MOST_EXPERTS_OF_ALL_LAYERS:
        raise implausible(file, f"it has {config.n_layer} layers of {config.n_expert} experts")


def _without_head(naming: Naming, class_name: str) -> Naming:
    """Names in files of transformers' class without an output layer, which lack a beginning."""
    import transformers

    prefix = f"{getattr(transformers, class_name).base_model_prefix}."
    return Naming(
        {ours: theirs.removeprefix(prefix) for ours, theirs in naming.modules.items()},
        {theirs.removeprefix(prefix): fused for theirs, fused in naming.fused.items()},
    )
