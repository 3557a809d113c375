"""Files of LoRA adapters, saved and loaded as PEFT does for the Hugging Face model.

Where that model fuses several of our layers into one, so does the adapter: the matrices A of the
parts are stacked, and each part's B fills its own rows and columns of a larger B, which is zero
elsewhere. Values that were subtracted from the start (PiSSA, OLoRA) become more columns.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import HEAD, Fused, Naming
from ftkit.models.bodies.experts import PAIRS
from ftkit.models.lora.peft_layers import AdapterFiles, layers_of
from ftkit.models.lora.targets import (
    INITIAL,
    TRAINED,
    chosen_layers,
    head_names,
    names_of,
)
from ftkit.models.pretrained.base_model import BaseModel, parameter_shapes, storage_of
from ftkit.models.pretrained.save import save_beside
from ftkit.recipe.adapter_types import is_adapter
from ftkit.recipe.hubs import or_download
from ftkit.recipe.peft_names import (
    BASE_KEY,
    CONFIG,
    NOTES_KEY,
    PARTS_KEY,
    SCORE_TASK,
    SCORES_KEY,
    TOKENS_KEY,
    VECTOR_TASK,
    WEIGHTS,
)
from ftkit.recipe.recipe import RELATIVE_INITS, Lora
from ftkit.utils.files import new_directory
from ftkit.utils.safetensors_files import save_tensors

PREFIX = "base_model.model."
"""Beginning of all names in PEFT's files."""
_MAGNITUDE = "lora_magnitude_vector"


def check_adapter(base: BaseModel, lora: Lora) -> None:
    """Refuse LoRA whose result could not be written as a PEFT adapter.

    Raises:
        UserError: the names of the Hugging Face model are unknown, or PEFT has no DoRA for its
            layers.
    """
    naming = base.architecture.naming_in("hf")
    if naming is None and base.known_as is not None:
        raise UserError(
            f"checkpoint_dir {base.name}: a plan of LoRA needs its config.json, from which the "
            "names of its layers follow. LitGPT's sizes, which are known by name, lack them. "
            f"Put config.json into {base.directory}{or_download(base.known_as)}."
        )
    if naming is None:
        raise UserError(
            f"checkpoint_dir {base.name}: an adapter for this model cannot be saved, because ftkit "
            "does not know Hugging Face's names of its layers. Try ftkit finetune_full, whose "
            "result is a LitGPT directory, or --checkpoint.save false to measure LoRA only."
        )
    if lora.lora_variant == "dora" and naming.fused:
        raise UserError(
            f"lora_variant is dora, but Hugging Face's {base.architecture.class_name} has query, "
            "key and value in one layer, for which a DoRA adapter has one rank. "
            "Try --lora_variant rslora."
        )
    if lora.lora_variant == "dora":
        _check_dora(base, lora)
    layers_of(lora).check(base, _chosen(base, lora))


def check_names(base: BaseModel, layers: Iterable[str]) -> None:
    """Refuse layers of whose LoRA adapters PEFT changes the names when it reads them."""
    chosen = [names_of(base, ours)[-1] for ours in layers]
    for theirs, in_file in names_in_file(base, chosen).items():
        if in_file is None:
            raise UserError(
                f"{theirs} of {base.name} is to be adapted, but PEFT reads the name of its adapter "
                "as that of another layer. Try --lora_targets all-linear, which leaves it out."
            )


def _chosen(base: BaseModel, lora: Lora) -> list[str]:
    """Our names of the layers to adapt."""
    # The head has no weight of its own in a tied model, and can be adapted all the same.
    weights = (*parameter_shapes(base), HEAD)
    layers = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    return chosen_layers(layers, base, lora)


def _check_dora(base: BaseModel, lora: Lora) -> None:
    """Refuse DoRA for layers whose weights PEFT adapts as parameters."""
    chosen = [names_of(base, ours)[0] for ours in _chosen(base, lora)]
    if taken := taken_for_experts(base, chosen):
        raise UserError(
            f"lora_variant is dora, but PEFT adapts {min(taken)} of {base.name} as a parameter, "
            "because experts of such models once had this name, and knows no DoRA there. Try "
            "--lora_variant rslora."
        )


def huggingface_naming(base: BaseModel) -> Naming:
    """Names in the Hugging Face model of an adapter's base."""
    naming = base.architecture.naming_in("hf")
    assert naming is not None, "check_adapter refuses other models"
    if len(head_names(base)) == 1:
        return naming
    # PEFT finds a layer by its name in the installed transformers; files of weights keep the old.
    import transformers

    tied = getattr(transformers, str(base.architecture.class_name))._tied_weights_keys
    head = next(iter(tied)).removesuffix(".weight")
    return dataclasses.replace(naming, modules={**naming.modules, "lm_head": head})


@dataclass
class _Layer:
    """Low-rank matrices of one of our layers."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None


def save_adapter(
    parameters: Iterable[tuple[str, Tensor]],
    base: BaseModel,
    lora: Lora,
    out: Path,
    *,
    tie_embeddings: bool | None,
    base_fingerprint: str | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Write trained weights as a PEFT adapter of the Hugging Face model, with its tokenizer.

    The directory appears complete or not at all.

    Args:
        parameters: our names and values of all parameters of the adapter, and of layers that are
            trained whole.
        base: the adapted model.
        lora: the adapter's settings.
        out: a directory that does not exist yet.
        tie_embeddings: whether embedding and head were one in training; None: as in the base model.
        base_fingerprint: of the base model, noted so that other models are refused.
        beside: further files, by name; they replace those of the base model.
    """
    given = {name: tensor.detach().cpu() for name, tensor in parameters}
    adapter = {name: tensor for name, tensor in given.items() if is_adapter(name)}
    tensors, notes, config = layers_of(lora).files(adapter, base)
    # Layers that were trained whole lie beside the matrices, under their names in the model.
    whole = _whole_layers(
        {name: tensor for name, tensor in given.items() if name not in adapter},
        base,
        tied=base.tied if tie_embeddings is None else tie_embeddings,
    )
    tensors |= {f"{PREFIX}{name}": tensor for name, tensor in whole.items()}
    owners = {name.rpartition(".")[0] for name in whole}
    # A module within another one is named by that.
    outermost = (n for n in owners if not any(n.startswith(f"{other}.") for other in owners))
    config.modules_to_save = sorted(outermost) or None
    scores = base.architecture.scores
    config.task_type = "CAUSAL_LM"
    if scores is not None:
        config.task_type = SCORE_TASK if scores.names else VECTOR_TASK
    config.base_model_name_or_path = base.name if base.directory is None else str(base.directory)
    # As PEFT's own save_pretrained writes it; loading it for training resets it.
    config.inference_mode = True
    if base_fingerprint is not None:
        notes[BASE_KEY] = base_fingerprint
    if base.added_tokens:
        notes[TOKENS_KEY] = json.dumps(base.added_tokens)
    if scores is not None and not scores.is_reward:
        notes[SCORES_KEY] = json.dumps(dataclasses.asdict(scores))
    with new_directory(out) as partial:
        save_tensors(tensors, partial / WEIGHTS, notes)
        config.save_pretrained(str(partial))
        _sort_targets(partial / CONFIG)
        save_beside(base, beside, partial)


def of_layer(name: str) -> tuple[str, str]:
    """Split the name of an adapter's parameter into that of its layer and its own in the layer."""
    words = name.split(".")
    start = next(i for i, word in enumerate(words) if i and is_adapter(f".{word}"))
    return ".".join(words[:start]), ".".join(words[start:])


def lora_files(adapter: Mapping[str, Tensor], base: BaseModel, lora: Lora) -> AdapterFiles:
    """Return the files of a LoRA adapter: matrices of linear layers, and pairs of experts."""
    from peft.tuners.lora import LoraConfig

    layers = _joined_layers(adapter)
    pairs = {name.removesuffix(PAIRS): layers.pop(name) for name in _of_experts(layers)}
    tensors: dict[str, Tensor] = {}
    if pairs:
        from ftkit.models.lora.experts import in_peft

        of_experts = in_peft({name: (pair.a, pair.b) for name, pair in pairs.items()}, base)
        tensors |= {f"{PREFIX}{name}": tensor for name, tensor in of_experts.items()}
    ranks: dict[str, int] = {}
    parts: dict[str, list[str]] = {}
    held = _their_layers(base, layers)
    in_file = names_in_file(base, [theirs for theirs, _, _ in held])
    for theirs, ours, fused in held:
        start = f"{PREFIX}{in_file[theirs] or theirs}"
        found = {name: layers[name] for name in ours if name in layers}
        if fused is None:
            (layer,) = found.values()
            a, b = layer.a, layer.b
            if layer.magnitude is not None:
                tensors[f"{start}.{_MAGNITUDE}"] = layer.magnitude
        else:  # a plain PEFT adapter with equal logits; its notes list the parts, for reading
            a = torch.cat([layer.a for layer in found.values()])
            b = _block_diagonal(found, ours, fused, base)
            parts[theirs] = list(found)
        # Contiguous, as safetensors requires.
        tensors[f"{start}.lora_A.weight"] = a.contiguous()
        tensors[f"{start}.lora_B.weight"] = b.contiguous()
        ranks[theirs] = a.shape[0]
    notes = {NOTES_KEY: json.dumps(_notes(lora, base, parts, layers))} if parts else {}
    # The rank of the layers that are not fused; rank_pattern lists the others.
    rank = next((r for theirs, r in ranks.items() if theirs not in parts), lora.lora_r)
    others = by_short_name({theirs: r for theirs, r in ranks.items() if r != rank}, base)
    # Some linear layers reach PEFT only as parameters.
    as_parameters = taken_for_experts(base, ranks)
    targets = by_short_name({theirs: theirs in as_parameters for theirs in ranks}, base)
    config = LoraConfig(
        r=rank,
        lora_alpha=_alpha(lora, rank),  # type: ignore[arg-type]
        # PEFT refuses dropout together with target_parameters.
        lora_dropout=0 if as_parameters else lora.lora_dropout,
        use_dora=lora.lora_variant == "dora",
        use_rslora=lora.lora_variant == "rslora",
        rank_pattern=others,
        alpha_pattern={name: _alpha(lora, other) for name, other in others.items()},
        target_modules=[name for name, is_parameter in targets.items() if not is_parameter],
        target_parameters=sorted(
            {".".join(name.split(".")[-2:]) for name in pairs}
            | {f"{name}.weight" for name, is_parameter in targets.items() if is_parameter}
        )
        or None,
    )
    return tensors, notes, config


def _joined_layers(parameters: Mapping[str, Tensor]) -> dict[str, _Layer]:
    """Collect matrices by our layer; initial values to subtract become more ranks."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in parameters.items():
        # What follows is A, B or magnitude_vector, and the name of the adapter.
        layer, _, rest = name.partition(".lora_")
        found.setdefault(layer, {})[rest.removesuffix(".weight")] = tensor
    layers = {}
    for layer, matrices in found.items():
        a, b = matrices[f"A.{TRAINED}"], matrices[f"B.{TRAINED}"]
        if f"A.{INITIAL}" in matrices:
            a = torch.cat([a, matrices[f"A.{INITIAL}"]])
            # PiSSA and OLoRA: A B - A0 B0 is one product of twice the rank, an adapter of the
            # original model.
            b = torch.cat([b, -matrices[f"B.{INITIAL}"]], dim=1)
        layers[layer] = _Layer(a, b, matrices.get(f"magnitude_vector.{TRAINED}"))
    return layers


def _of_experts(layers: Iterable[str]) -> list[str]:
    """Names of the layers that adapt the matrices of experts."""
    return [name for name in layers if name.endswith(PAIRS)]


def _their_layers(
    base: BaseModel, layers: Iterable[str]
) -> list[tuple[str, list[str], Fused | None]]:
    """Layers of Hugging Face that hold ours: name, all layers in it, and how they are fused."""
    naming = huggingface_naming(base)
    found: dict[str, tuple[str, list[str], Fused | None]] = {}
    for ours in layers:
        theirs, fused = naming.stored_in(ours)
        names = [ours] if fused is None else fused.modules_beside(ours)
        found.setdefault(theirs, (theirs, names, fused))
    return list(found.values())


def _block_diagonal(
    found: Mapping[str, _Layer], ours: list[str], fused: Fused, base: BaseModel
) -> Tensor:
    """Matrix B of a fused layer: each part in its own rows and columns."""
    shapes = parameter_shapes(base)
    columns = sum(layer.b.shape[1] for layer in found.values())
    like = next(iter(found.values())).b
    blocks = []
    start = 0
    for name in ours:
        # Rows of a part that is not adapted stay zero.
        block = like.new_zeros(shapes[f"{name}.weight"][0], columns)
        if name in found:
            b = found[name].b
            block[:, start : start + b.shape[1]] = b
            start += b.shape[1]
        blocks.append(block)
    return base.architecture.fuse(blocks, fused)


def _whole_layers(
    parameters: Mapping[str, Tensor], base: BaseModel, *, tied: bool
) -> dict[str, Tensor]:
    """Parameters of layers that are trained whole, by Hugging Face's names."""
    naming = huggingface_naming(base)
    found: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        theirs, fused = naming.stored_in(name)
        if fused is not None:
            # The parts of a fused layer are only trained whole together.
            parts = [parameters[part] for part in fused.parameters_beside(name)]
            tensor = base.architecture.fuse(parts, fused)
        found[theirs] = tensor
    embedding, head = (naming.stored_in(n)[0] for n in (base.architecture.embedding, HEAD))
    if tied and embedding in found:  # PEFT trains a copy of each
        found[head] = found[embedding].clone()
    return found


def _alpha(lora: Lora, rank: int) -> int | float:
    """Return the alpha with which matrices of another rank have the same scale."""
    # PEFT divides alpha by the rank, which stacked parts multiply.
    factor = rank / lora.lora_r
    alpha = lora.lora_alpha * (math.sqrt(factor) if lora.lora_variant == "rslora" else factor)
    return int(alpha) if float(alpha).is_integer() else alpha


def by_short_name(values: Mapping[str, Any], base: BaseModel) -> dict[str, Any]:
    """Sort values by the last word of names if all such layers are equal, else by full name."""
    naming = huggingface_naming(base)
    everywhere: dict[str, set[str]] = {}
    theirs_of_all = [naming.stored_in(name)[0] for name in parameter_shapes(base)]
    # Also of layers beside the language model: a short name in the settings would adapt them, too.
    for name in (*theirs_of_all, *base.architecture.rest_shapes):
        theirs = name.rpartition(".")[0]
        # And of modules around them: Gemma 4's encoders have a linear layer in each q_proj.
        while theirs:
            everywhere.setdefault(theirs.rpartition(".")[2], set()).add(theirs)
            theirs = theirs.rpartition(".")[0]
    found = {}
    for theirs, value in values.items():
        short = theirs.rpartition(".")[2]
        same = all(values.get(name) == value for name in everywhere.get(short, {theirs}))
        found[short if same else theirs] = value
    return dict(sorted(found.items()))


def _notes(
    lora: Lora, base: BaseModel, parts: Mapping[str, list[str]], layers: Iterable[str]
) -> dict[str, Any]:
    """Settings of the trained layers that an adapter of fused layers does not show."""
    # Initial values that are subtracted double the rank in the file.
    rank = lora.lora_r * (2 if lora.lora_init in RELATIVE_INITS else 1)
    return {
        "lora_r": rank,
        "lora_alpha": _alpha(lora, rank),
        "lora_targets": sorted({names_of(base, ours)[0] for ours in layers}),
        PARTS_KEY: parts,
    }


def _sort_targets(path: Path) -> None:
    # PEFT writes sets, in an order that changes from process to process.
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings |= {key: sorted(one) for key, one in settings.items() if isinstance(one, list)}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")


def taken_for_experts(base: BaseModel, layers: Iterable[str]) -> set[str]:
    """Return the names of the linear layers that PEFT would not adapt as target modules.

    PEFT 0.21 reads targets called as experts were before transformers stacked them (gate_proj,
    up_proj, down_proj) as targets of the stacked parameters: short names, full names and patterns.
    But `target_parameters` may name the weight of a linear layer, which then has the same matrices
    under the same names, and neither dropout nor DoRA.

    Args:
        base: the adapted model.
        layers: Hugging Face's names.
    """
    if base.architecture.implementation != "transformers":
        return set()  # its experts are layers, which PEFT stacks when it reads them
    of_kind: dict[str, set[str]] = {}
    for name in layers:
        # PEFT decides by the last word of a name.
        of_kind.setdefault(name.rpartition(".")[2], set()).add(name)
    model = SimpleNamespace(config=SimpleNamespace(model_type=base.architecture.name))
    return {name for kind, names in of_kind.items() if _is_taken(kind, model) for name in names}


def _is_taken(kind: str, model: Any) -> bool:
    """Return whether PEFT would turn the last word of a name into another target."""
    from peft.tuners.lora import LoraConfig

    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # older versions leave targets as they are
        return False
    # Tried on PEFT's own conversion, so that its rules are not repeated here.
    config = LoraConfig(target_modules=[kind])
    try:
        conversion.convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # the others that are stacked with it are missing
        return True
    return kind not in (config.target_modules or ())


def names_in_file(base: BaseModel, layers: Iterable[str]) -> dict[str, str | None]:
    """Names of which PEFT makes those of layers when it reads an adapter, or None if none is known.

    PEFT 0.21 renames the tensors of a LoRA adapter by the rules of transformers for the files of a
    model, and such a rule may also change a current name (the shared experts of Laguna).

    Args:
        base: the adapted model.
        layers: Hugging Face's names.
    """
    names: dict[str, str | None] = {theirs: theirs for theirs in layers}
    if base.architecture.implementation != "transformers":
        return names
    read = _read_by_peft(base, names)
    storage = storage_of(base.architecture, "hf")
    for theirs in names:
        if read[theirs] != theirs:
            old = storage.written_name(f"{theirs}.weight").removesuffix(".weight")
            names[theirs] = old if _read_by_peft(base, [old])[old] == theirs else None
    return names


def _read_by_peft(base: BaseModel, layers: Iterable[str]) -> dict[str, str]:
    """Names of layers that PEFT makes of names in an adapter's file, by the latter."""
    from peft.tuners.lora import LoraConfig

    from ftkit.models.architectures.transformers_architecture import TransformersArchitecture

    assert isinstance(base.architecture, TransformersArchitecture)
    try:
        from peft.utils import transformers_weight_conversion as conversion

        convert = conversion.convert_peft_adapter_state_dict_for_transformers
    except (ImportError, AttributeError):  # older versions leave names as they are
        return {name: name for name in layers}
    start, end = PREFIX, ".lora_A.weight"
    # Numbers instead of tensors, which tell the results apart.
    given = {
        f"{start}{name}{end}": torch.tensor([i], device="cpu") for i, name in enumerate(layers)
    }
    found = convert(base.architecture.outline, LoraConfig(), given)
    names = {int(one): name for name, one in found.items() if one.numel() == 1}
    return {
        name: names.get(i, "").removeprefix(start).removesuffix(end)
        for i, name in enumerate(layers)
    }
