"""Target layers of LoRA: their names, and the choice by switch, name or pattern."""

import difflib
from collections.abc import Iterable
from typing import Any

import regex
import torch.nn as nn

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import HEAD, SCORE
from ftkit.models.bodies.experts import packed_in
from ftkit.models.pretrained.base_model import (
    BaseModel,
    parameter_shapes,
    vocabulary_parameters,
)
from ftkit.recipe.adapter_types import is_adapter
from ftkit.recipe.recipe import ALL_LINEAR, PEFT_DEFAULT, Lora

TRAINED, INITIAL = "default", "initial"
"""Names of the low-rank matrices of a layer: the trained ones and, if their initial values come
from the base weight, a frozen copy of these values."""

_RENAMED_HEADS = {"GPTNeoXForCausalLM": ("embed_out", "lm_head")}
"""Names of output layers that differ between versions of transformers: since 5.24, if not earlier,
GPT-NeoX has lm_head. Recipes and adapters may use either."""
_MATCH_S = 1.0
"""Time limit for one name; a match takes microseconds."""


def our_name(name: str) -> str:
    """Name of a parameter or module without the prefix of the model around it."""
    return name.removeprefix("body.").removeprefix("head.").replace(".base_layer.", ".")


def head_names(base: BaseModel) -> tuple[str, ...]:
    """Names of the output layer in Hugging Face's model, with those of other versions."""
    naming = base.architecture.naming_in("hf") or base.naming
    head = naming.stored_in("lm_head")[0]
    return tuple(dict.fromkeys((head, *_RENAMED_HEADS.get(base.architecture.class_name or "", ()))))


def names_of(base: BaseModel, ours: str) -> tuple[str, ...]:
    """Full names by which a layer may be chosen: in Hugging Face's model, or else in its files.

    A part of a fused layer can be named by itself (the fused layer's name, then ours) and by the
    fused layer, whose name is the last one.
    """
    if ours == "lm_head":
        return head_names(base)
    naming = base.architecture.naming_in("hf") or base.naming
    theirs, fused = naming.stored_in(ours)
    return (theirs,) if fused is None else (f"{theirs}.{ours.rpartition('.')[2]}", theirs)


def adapted_layers(model: nn.Module, base: BaseModel, lora: Lora) -> list[str]:
    """Full names in the model of the layers that are adapted."""
    linear = [
        name
        for name, module in model.named_modules()
        # What is trained beside the language model is trained whole.
        if isinstance(module, nn.Linear) and not base.architecture.is_beside(our_name(name))
    ]
    return chosen_layers(linear, base, lora)


def chosen_layers(linear: list[str], base: BaseModel, lora: Lora) -> list[str]:
    """Choose the linear layers to adapt, by `lora_targets` or else by the switches.

    Args:
        linear: our names, or the names in a model.
        base: gives Hugging Face's names.
        lora: targets and switches.

    Raises:
        UserError: a name of `lora_targets` matches no layer, or none does with
            `lora_skip_missing`; or PEFT has no layers for the type of the model.
    """
    if lora.lora_targets in (None, ALL_LINEAR):
        all_linear = lora.lora_targets is not None
        # With the dot, an ending begins at a word of the name.
        endings = tuple(
            f".{ending}"
            for key, layer_endings in base.architecture.lora_layers.items()
            if (key != "lora_head" if all_linear else getattr(lora, key))
            for ending in layer_endings
        )
        return _trained([name for name in linear if name.endswith(endings)], base)
    targets = _default_targets(base) if lora.lora_targets == PEFT_DEFAULT else lora.lora_targets
    names = {name: names_of(base, our_name(name)) for name in linear}
    chosen: set[str] = set()
    unmatched = []
    for target in [targets] if isinstance(targets, str) else targets:
        # Plain names first, as users write them; an expression only if no layer is called so.
        matching = {name for name, theirs in names.items() if are_called(theirs, target)}
        # A text may be an expression, as in PEFT; a name in a list never is.
        if not matching and isinstance(targets, str):
            matching = {name for name, theirs in names.items() if _match(theirs, target)}
        if not matching:
            unmatched.append(target)
        chosen |= matching
    if unmatched and not (lora.lora_skip_missing and chosen):
        raise UserError(
            f"lora_targets names {unmatched[0]}, which is not a linear layer of {base.name}. "
            + _advice("lora_targets", unmatched[0], names.values())
        )
    trained = _trained([name for name in linear if name in chosen], base)
    if not trained and chosen:
        raise UserError(
            f"lora_targets names {our_name(min(chosen))} of {base.name}, of which the "
            f"loss has no gradient. Try --lora_targets {ALL_LINEAR}."
        )
    return trained


def _trained(layers: list[str], base: BaseModel) -> list[str]:
    """Leave out layers of which the loss has no gradient: ranks would wait for it."""
    return [name for name in layers if not base.architecture.is_untrained(our_name(name))]


def _default_targets(base: BaseModel) -> list[str] | str:
    """The layers that PEFT adapts of this type of models where a configuration names none."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    kind = base.architecture.model_type
    if kind not in DEFAULTS:
        raise UserError(
            f"lora_targets is {PEFT_DEFAULT}, but PEFT has no default layers for {base.name}, "
            f"whose model_type is {kind or 'unknown'}. Try --lora_targets {ALL_LINEAR}."
        )
    targets = DEFAULTS[kind]
    return targets if isinstance(targets, str) else list(targets)


def unadapted_experts(model: Any, base: BaseModel, lora: Lora) -> str | None:
    """Return a notice if all-linear leaves out the experts of a model; None: it does not.

    Args:
        model: outlined and adapted.
        base: that it was outlined from.
        lora: targets and switches.
    """
    if lora.lora_targets != ALL_LINEAR or lora.lora_experts or base.architecture.expert_share == 1:
        return None
    adapted = (name.split(".") for name, _ in model.named_parameters() if is_adapter(name))
    if any("experts" in name for name in adapted):
        return None
    advice = ""
    if any(experts.takes_pairs for experts in model.body.fused_experts()):
        advice = " Try --lora_experts true, which adapts them too."
    return f"lora_targets {ALL_LINEAR} does not adapt the experts of {base.name}.{advice}"


def skipped_targets(model: nn.Module, base: BaseModel, lora: Lora) -> str | None:
    """Return a notice if a model lacks some of the layers to adapt; None: it has all of them.

    Args:
        model: outlined and adapted.
        base: that it was outlined from.
        lora: targets, and whether some may be missing.
    """
    targets = lora.lora_targets
    if not lora.lora_skip_missing or isinstance(targets, str) or targets is None:
        return None
    parameters = (our_name(name) for name, _ in model.named_parameters() if is_adapter(name))
    adapted = {names_of(base, name.rpartition(".lora_")[0]) for name in parameters}
    missing = [target for target in targets if not any(are_called(a, target) for a in adapted)]
    if not missing:
        return None
    kept = ", ".join(target for target in targets if target not in missing)
    advice = " Try --lora_targets all-linear to adapt all layers." * (lora.adapter is None)
    return (
        f"{base.name} has no {' and no '.join(missing)}, which lora_targets names: only {kept} "
        f"will be adapted, as PEFT does it.{advice}"
    )


def whole_layers(model: nn.Module, base: BaseModel, lora: Lora) -> list[nn.Module]:
    """Layers that are trained whole.

    They are those of `lora_modules_to_save`, what gives a score, what has rows of added tokens, and
    what is trained beside the language model.
    """
    beside = base.architecture.beside
    scores = base.architecture.scores
    targets = [*(lora.lora_modules_to_save or []), *([SCORE] if scores and scores.names else [])]
    targets += [*_layers_of_tokens(base), *beside]
    if not targets:
        return []
    modules = {our_name(name): module for name, module in model.named_modules()}
    # Modules of the parameters; a tied model lists no head, which may be trained all the same.
    names = dict.fromkeys(name.rpartition(".")[0] for name in parameter_shapes(base))
    head, embedding = (
        weight.removesuffix(".weight") for weight in (HEAD, base.architecture.embedding)
    )
    names |= dict.fromkeys((head, *beside))
    # A part of a fused layer goes by the name of the whole, because PEFT trains that module.
    known = {ours: names_of(base, ours)[-1:] for ours in names} | {head: head_names(base)}
    adapted = {our_name(name) for name in adapted_layers(model, base, lora)}
    chosen = []
    for target in targets:
        matching = [ours for ours, theirs in known.items() if are_called(theirs, target)]
        if not matching:
            raise UserError(
                f"lora_modules_to_save names {target}, which is not a layer of {base.name}. "
                + _advice("lora_modules_to_save", target, known.values())
            )
        for ours in matching:
            # In a tied model, embedding and adapted head have one weight.
            shared = getattr(model, "tied", False) and ours in (head, embedding)
            if ours in adapted or (shared and head in adapted):
                raise UserError(
                    f"lora_modules_to_save names {target}, which is adapted by LoRA too (its "
                    "weight may be shared with the head). Remove it from one of the two."
                )
            module = modules[ours]
            if hasattr(module, "unpacked") or packed_in(module):
                raise UserError(
                    f"lora_modules_to_save names {target}, but quantize {lora.quantize} keeps "
                    "it in a few bits, which cannot be trained. Try --lora_targets instead."
                )
            chosen.append(module)
    return chosen


def _layers_of_tokens(base: BaseModel) -> list[str]:
    """Names of the layers that have rows of added tokens, which an adapter does not train."""
    if not base.added_tokens:
        return []
    # The head of a tied model too: training may untie it.
    modules = dict.fromkeys(name.rpartition(".")[0] for name in vocabulary_parameters(base))
    return [names_of(base, ours)[-1] for ours in modules]


def are_called(names: tuple[str, ...], target: str) -> bool:
    """Return whether one of the names is the target, or ends with it."""
    return any(name == target or name.endswith(f".{target}") for name in names)


def _match(names: tuple[str, ...], pattern: str) -> bool:
    """Return whether a regular expression matches one of the names as a whole."""
    try:
        # The expression of a foreign adapter may take forever; `re` has no time limit.
        return any(regex.fullmatch(pattern, name, timeout=_MATCH_S) for name in names)
    except TimeoutError:
        raise UserError(
            f"lora_targets is {pattern!r}, which takes too long to match against the name of a "
            "layer. Try --lora_targets '.*(q_proj|v_proj)'."
        ) from None
    except regex.error as error:
        raise UserError(
            f"lora_targets is {pattern!r}, which is not a regular expression ({error}). Try "
            "--lora_targets '.*(q_proj|v_proj)'."
        ) from None


def _advice(key: str, target: str, names: Iterable[tuple[str, ...]]) -> str:
    short = list(dict.fromkeys(name.rpartition(".")[2] for many in names for name in many))
    close = difflib.get_close_matches(target.rpartition(".")[2], short, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"It has {', '.join(short)}. Try --{key} '[{short[0]}]'."
