"""Models of transformers on the meta device: finding their parts, and preparing them."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils.output_capturing import OutputRecorder

from ftkit.errors import UserError
from ftkit.models.routing import RouterLoss

_MOST_BUFFER_BYTES = 2**31
"""Masks and rotary tables; GPT-J's 28 masks of 2048 x 2048 take an eighteenth of this."""

UNTRAINED = frozenset({"indexer", "embed_tokens_extend"})
"""Names of modules of which the loss on text has no gradient: those that choose tokens by number in
sparse attention (DeepSeek V3.2), and embeddings of images and audio (Phi-4 multimodal)."""

_HEARING = {"qwen2_audio": "Qwen2AudioForConditionalGeneration"}
"""Multimodal models without images, by model_type: those that have been tried."""

_TOKENS = 8
"""Tokens for which two losses of routers are compared; the last one is padding."""


def blocks_of(model: nn.Module, count: int) -> nn.ModuleList:
    """Find the blocks of a model: its outermost list of `count` modules.

    Raises:
        UserError: there is no such list.
    """
    # Outermost: experts within a block may be a list of as many modules.
    lists = [
        (name.count("."), module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise UserError(
            f"{type(model).__name__} has no list of {count} blocks. Choose another model."
        )
    return min(lists, key=lambda found: found[0])[1]


def model_name(model: PreTrainedModel) -> str:
    """Name of the model below its output layer."""
    return model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"


def head_name(model: PreTrainedModel) -> str:
    """Name of the output layer in transformers' model."""
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Return the configuration of each layer; families with equal layers have one for all."""
    if getattr(config, "is_heterogeneous", False):  # since transformers 5.20
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def image_layers(config: PretrainedConfig) -> list[int]:
    """Return the indices of blocks that attend to images alone, which text passes by (Mllama)."""
    return list(getattr(config, "cross_attention_layers", None) or ())


def set_depth(config: PretrainedConfig, layers: int) -> None:
    """Change the number of blocks, and what the settings say of each block."""
    before = config.num_hidden_layers
    settings = config.to_dict()
    for name, value in settings.items():
        if isinstance(value, list) and len(value) == before and before != layers:
            # Repeated, so that more layers than the model has also get an entry each.
            setattr(config, name, (value * layers)[:layers])
    config.num_hidden_layers = layers
    if of_images := settings.get("cross_attention_layers"):
        config.cross_attention_layers = [place for place in of_images if place < layers]
    if shared := getattr(config, "num_kv_shared_layers", 0):
        # The last blocks read keys and values of those before them, of which there are as many.
        config.num_kv_shared_layers = max(layers - (before - shared), 0)
    if own := settings.get("per_layer_config"):
        places = {int(place): changes for place, changes in own.items()}
        config.per_layer_config = {
            place: places[place % before] for place in range(layers) if place % before in places
        }
    if hasattr(config, "num_blocks"):  # xLSTM's own key
        config.num_blocks = layers


def untranspose_layers(model: nn.Module) -> None:
    """Replace layers that hold their weight transposed by linear layers."""
    # LoRA, quantisation and the FLOPs of a step only know nn.Linear.
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            model.set_submodule(name, nn.Linear(module.nx, module.nf))


@torch.no_grad()
def compute_buffers(model: PreTrainedModel) -> None:
    """Compute on the CPU the buffers that no file holds, as the model does after loading.

    Raises:
        ValueError: they would take more memory than those of any model.
    """
    needed = sum(buffer.nbytes for _, buffer in model.named_non_persistent_buffers())
    if needed > _MOST_BUFFER_BYTES:
        raise ValueError(f"tables of its positions would take {needed / 2**30:,.0f} GiB")
    # Their size is known from the shapes, so this is checked before memory is taken.
    with torch.device("cpu"):
        for name, buffer in list(model.named_non_persistent_buffers()):
            # On the meta device, a buffer has no memory that its values could be written to.
            owner, _, kind = name.rpartition(".")
            model.get_submodule(owner)._buffers[kind] = torch.empty_like(buffer, device="cpu")
        for tensor in (*model.parameters(), *_stored_buffers(model)):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # so it stays
        for module in model.modules():
            # transformers skips modules and tensors with this mark: only buffers are computed.
            module._is_hf_initialized = False  # type: ignore[assignment]
        model.initialize_weights()


def _stored_buffers(model: PreTrainedModel) -> Iterator[Tensor]:
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    return (buffer for name, buffer in model.named_buffers() if name not in computed)


def freeze_untrained(model: PreTrainedModel) -> None:
    """Freeze the modules of which the loss on text has no gradient, by their names."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in UNTRAINED:
            module.requires_grad_(False)


def freeze_stored_buffers(model: nn.Module) -> None:
    """Make buffers that files hold frozen parameters, so that they are read and written."""
    stored = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        if name in stored:
            owner, _, kind = name.rpartition(".")
            module = model.get_submodule(owner)
            # register_parameter refuses the name of a buffer.
            del module._buffers[kind]
            module.register_parameter(kind, nn.Parameter(buffer, requires_grad=False))
    for name, parameter in list(model.named_parameters()):
        if parameter.ndim == 0:  # it could not be sharded
            owner, _, kind = name.rpartition(".")
            trained = parameter.requires_grad
            value = nn.Parameter(parameter.detach()[None], requires_grad=trained)
            setattr(model.get_submodule(owner), kind, value)


class _Outputs(tuple[Tensor]):
    """Output of a model: the hidden states first, and None by any other name."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None

    def __getitem__(self, place: Any) -> Any:
        """Get an item by index or name."""
        return getattr(self, place) if isinstance(place, str) else super().__getitem__(place)

    def keys(self) -> tuple[str, ...]:
        """Names of the items."""
        return ("last_hidden_state",)


class _Given(nn.Module):
    """Stand-in for a model: it returns given hidden states, and records its arguments."""

    def __init__(self, hidden: Tensor, embedding: nn.Embedding, model: nn.Module) -> None:
        super().__init__()
        self._hidden = hidden
        self._embedding = embedding
        self._numbers = {name: v for name, v in vars(model).items() if isinstance(v, int | float)}
        self.arguments: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Numbers are those of the model; any other part is this stand-in."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self._embedding if name == "embed_tokens" else self._numbers.get(name, self)

    def get_input_embeddings(self) -> nn.Embedding:
        return self._embedding

    def get_per_layer_inputs(self, input_ids: Tensor, *_: Any) -> Tensor:
        """Stand in for the second embedding of Gemma 3n and 4: the tokens themselves."""
        return input_ids

    def forward(self, *_: Any, **arguments: Any) -> "_Outputs":
        self.arguments = arguments
        return _Outputs((self._hidden,))


class _SameProducts(nn.Identity):
    """Stand-in for a head: it returns its input."""

    weight = torch.ones((), device="cpu")
    """Some models read its dtype."""


@dataclass(frozen=True)
class Called:
    """Record of a call of a whole model on text."""

    tokens: Tensor
    """[1, tokens], its input."""
    embeddings: Tensor
    """[1, tokens, width], the embeddings of its input."""
    arguments: dict[str, Any]
    """Arguments with which it called its language model, by name."""
    logits: Tensor
    """[1, tokens, vocabulary], made of the products of its head."""


def call_apart(model: PreTrainedModel, language: str, tokens: Tensor, products: Tensor) -> Called:
    """Run a model without its language model and the products of its head.

    Args:
        model: on the meta device; it cannot be used afterwards.
        language: name of the language model in it.
        tokens: [1, tokens].
        products: [1, tokens, vocabulary], used as the products of the head.
    """
    with torch.device("cpu"), torch.no_grad():
        named: Any = model.get_submodule(language)
        # Few rows, on the CPU: only whether its output is passed on matters.
        width = named.get_input_embeddings().weight.shape[1]
        embedding = nn.Embedding(int(tokens.max()) + 1, width)
        given = _Given(products, embedding, named)
        model.set_submodule(head_name(model), _SameProducts())
        # Now the code of the whole model runs around two stand-ins, which shows what it adds.
        for module in model.modules():
            module.register_forward_pre_hook(_give_unknown_numbers, with_kwargs=True)
        model.set_submodule(language, given)
        if owner := language.rpartition(".")[0]:
            model.get_submodule(owner).register_forward_hook(_add_image_outputs)
        logits: Tensor = model.eval()(input_ids=tokens).logits
        return Called(tokens, embedding(tokens), given.arguments, logits)


def _give_unknown_numbers(
    module: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]
) -> None:
    """Let a module compute: its own parameters become NaN, which shows wherever they have effect.

    Gemma 3n, for one, embeds all tokens as those of images too, and takes none of these for text.
    """
    given = [value for value in (*args, *arguments.values()) if isinstance(value, Tensor)]
    if not given or any(tensor.is_meta for tensor in given):
        return
    for kind, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta:
            unknown = torch.full_like(parameter, math.nan, device="cpu")
            setattr(module, kind, nn.Parameter(unknown, requires_grad=False))


def _add_image_outputs(_: nn.Module, __: Any, output: Any) -> None:
    # Llama 4 of transformers 5.24 reads this attribute, which its language model does not give.
    if not hasattr(output, "image_outputs"):
        output.image_outputs = None


def finished_logits(model: PreTrainedModel, language: str, products: Tensor) -> Tensor:
    """Return the logits that a model makes of the products of its head.

    Args:
        model: it cannot be used afterwards.
        language: name of the language model in it.
        products: [vocabulary].
    """
    tokens = torch.zeros(1, 1, dtype=torch.long, device="cpu")
    return call_apart(model, language, tokens, products[None, None]).logits[0, 0]


def score_class_name(model_type: str) -> str | None:
    """Name of the class with a score for each sequence of a model type; None: there is none."""
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type)
    return None if name is None else str(name)


def base_class_name(model_type: str) -> str | None:
    """Name of the class without an output layer of a model type; None: there is none."""
    name = MODEL_MAPPING_NAMES.get(model_type)
    return name if isinstance(name, str) else None


def causal_class_name(model_type: str) -> str | None:
    """Class of the causal language model of a model type; None: there is none."""
    if name := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type):
        return str(name)
    # Transformers 5.24 has Mistral 4's among the models that see, whose text model it is.
    name = str(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type, ""))
    is_of_text = model_type in CONFIG_MAPPING and not CONFIG_MAPPING[model_type].sub_configs
    return name if is_of_text and name.endswith("ForCausalLM") else None


def whole_class_name(model_type: str) -> str | None:
    """Class of the multimodal model around a language model; None: there is none."""
    found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type) or _HEARING.get(model_type)
    if found is None:
        return None
    known = model_type in CONFIG_MAPPING
    is_composite = known and "text_config" in CONFIG_MAPPING[model_type].sub_configs
    return str(found) if is_composite else None


def language_model_name(whole: PreTrainedModel) -> str:
    """Name of the language model, without its head, in a whole model."""
    found = whole.get_decoder()
    # Some models hold their language model with its head, others without.
    if found.get_output_embeddings() is not None:  # the head is in it
        found = next(part for part in found.children() if isinstance(part, PreTrainedModel))
    return next(name for name, module in whole.named_modules() if module is found)


def router_outputs(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield modules whose results have the logits of routers: name, and index of the logits.

    Args:
        model: below its head, as transformers makes it.
    """
    # Transformers declares them by class and index, for its own auxiliary loss (seen in 5.3 and
    # 5.24).
    recorders = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", [])
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        if not isinstance(recorder, OutputRecorder):
            continue
        for name, module in model.named_modules():
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                yield name, recorder.index


def find_router_loss(model: PreTrainedModel) -> RouterLoss | None:
    """Find the auxiliary loss of a model's routers; None: it has none, or an unknown one.

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
    # Tried, not listed by family: a list would miss the next family, or a changed function.
    loss = RouterLoss(experts=experts, chosen=chosen, coefficient=float(coefficient))
    return loss if _is_as_theirs(loss, type(model)) else None


def _is_as_theirs(loss: RouterLoss, model_class: type[PreTrainedModel]) -> bool:
    """Return whether transformers computes an equal loss for some logits of two layers."""
    theirs = getattr(sys.modules[model_class.__module__], "load_balancing_loss_func", None)
    if theirs is None:
        return False
    with torch.device("cpu"):
        # Any numbers without order will do; these need no generator.
        layers = torch.sin(torch.arange(2.0 * _TOKENS * loss.experts) ** 2)
        logits = layers.view(2, _TOKENS, loss.experts)
        # With padding: implementations differ in whether they leave it out.
        is_real = torch.arange(_TOKENS) < _TOKENS - 1
        choices, probabilities = loss.routed(logits.flatten(0, 1), is_real.repeat(2))
        ours = loss.share(probabilities, choices)
        try:
            found = theirs(tuple(logits), loss.experts, loss.chosen, is_real[None].long())
        except Exception:  # a function with other arguments
            return False
    return isinstance(found, torch.Tensor) and torch.allclose(found.double(), ours, rtol=1e-5)


def experts_of(block: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield modules of a block that hold the matrices of all its experts: name, number of experts.

    They are called with hidden states, the experts that each token chooses, and their weights.
    """
    for name, module in block.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "num_experts"):
            yield name, int(module.num_experts)
