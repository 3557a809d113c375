"""The language model: a body with the loss as its head."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import Architecture
from ftkit.models.bodies.attention import AttentionKernel, FixedRow
from ftkit.models.bodies.body import Body
from ftkit.models.lora.layers import add_adapter
from ftkit.models.lora.peft_layers import layers_of
from ftkit.models.loss import Head, HeadOutput, OutputLayer
from ftkit.models.meta_device import on_meta_device
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.routing import RouterLoss, Routing
from ftkit.recipe.recipe import Lora, LoraRecipe, Quantization, Recipe
from ftkit.recipe.recipe_sections import rounding_section
from ftkit.utils.registry import imported

if TYPE_CHECKING:
    from ftkit.models.offloading import Offloading


class LanguageModel(nn.Module):
    """A body whose head computes the loss.

    Parameter names have a prefix before ours: `body....` and `head.lm_head...`; `our_name` strips
    it.
    """

    def __init__(self, architecture: Architecture, *, tied: bool) -> None:
        super().__init__()
        self.architecture = architecture
        self.body = _body_of(architecture)
        layer = self.body.take_head()
        if architecture.scores:
            # Of vectors, nothing is computed of them: the layer is that of tied models.
            count = len(architecture.scores.names) or layer.out_features
            self.head = Head(nn.Linear(layer.in_features, count, bias=False), None)
        else:
            softcap, scale = architecture.logit_softcap, architecture.logit_scale
            self.head = Head(layer, softcap, scale, architecture.logit_count)
        self.head.tokens = self.body.tokens
        self.kernel: AttentionKernel = "sdpa"
        """Kernel that computes attention."""
        self.tied = tied
        self.lora: Lora | None = None
        """Settings of the adapter; None: there is none."""
        self.quantized: Quantization | None = None
        """Quantisation of the weights in the blocks; None: they are not quantised."""
        self.trains_part = False
        """Whether parameters were chosen to be trained by their names: the rest is the base's."""
        self.offloading: Offloading | None = None
        """Where the inputs of checkpointed blocks are kept; None: where they are computed."""
        self.routing = Routing((), 0, None)
        """Counts of the experts that routers choose in training."""
        # On the meta device too, so that parameters are counted and adapted once.
        self.tie()

    def tie(self) -> None:
        """Make embedding and head one parameter, if they are tied in this model."""
        if self.tied:
            head = self.head.lm_head
            head = getattr(head, "base_layer", head)  # below an adapter
            head.weight = self.body.embedding.weight

    def forward(
        self,
        input_ids: Tensor,
        label_indices: Tensor,
        labels: Tensor | None = None,
        output: HeadOutput | None = None,
        *,
        sequence_lengths: Sequence[int] | FixedRow | None = None,
        positions: Tensor | None = None,
        media: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Summed loss of a micro-batch, or another output of the head at some positions.

        Args:
            input_ids: [batch, sequence], padded on the right; or [1, tokens], sequences in a row.
            label_indices: [n], indices into the flattened input_ids.
            labels: [n] or None, see `Head.forward`.
            output: see `Head.forward`.
            sequence_lengths: tokens of each sequence in a row; None: one sequence in each line.
            positions: [batch, sequence], of the tokens in their sequences; with them, the
                key-value cache of `body.start_cache` is read and extended.
            media: of the sequences, see `Body.hidden`; None: they have none.
        """
        if positions is not None:
            hidden = self.body.hidden_cached(input_ids, positions, media)
        else:
            hidden = self.body.hidden(input_ids, sequence_lengths, self.kernel, media)
        on_cpu = self.kernel == "cpu"
        result: Tensor = self.head(hidden, label_indices, labels, output, on_cpu=on_cpu)
        return result


def output_of(
    model: Callable[..., Any], batch: Mapping[str, Any], output: HeadOutput | None = None
) -> Tensor:
    """Compute an output of the head at the labels of a micro-batch.

    Args:
        model: a language model, or what a strategy has wrapped around it.
        batch: as `ftkit.data.samples.loader.collate` makes it, on its device.
        output: see `Head.forward`.
    """
    result: Tensor = model(
        batch["input_ids"],
        batch["label_indices"],
        batch["labels"],
        output,
        sequence_lengths=batch["sequence_lengths"],
        media=batch.get("media"),
    )
    return result


def outline(
    base: BaseModel,
    recipe: Recipe,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
) -> LanguageModel:
    """Build the model on the meta device, adapted and frozen by the recipe.

    Sizes can be counted and layers sharded before any memory is taken; `fill` loads the weights.

    Args:
        base: the model whose architecture it has.
        recipe: LoRA and quantisation, rounding, kernels, compilation and activation checkpointing.
        dtype: of the parameters that are not quantised.
        compute_dtype: of the arithmetic of quantised layers. Default: dtype.
    """
    tie_embeddings = recipe.train.tie_embeddings
    model = outline_plain(
        base,
        dtype,
        compute_dtype,
        tied=base.tied if tie_embeddings is None else tie_embeddings,
        kind=recipe.quantize if isinstance(recipe, LoraRecipe) else None,
    )
    round_layers(model.body, base, recipe, trains=True)
    if isinstance(recipe, LoraRecipe):
        with on_meta_device():
            add_adapter(model, base, recipe)
        model.lora = recipe
    elif recipe.train.trains_part:
        from ftkit.models.trained_part import freeze_rest

        freeze_rest(model, base, recipe.train)
        model.trains_part = True
    model.head.label_smoothing = recipe.train.label_smoothing
    if recipe.kernels == "liger":
        from ftkit.models.liger import apply_liger

        apply_liger(model, model.body.gated_mlps())
    if recipe.compile:
        compile_blocks(model.body, model.head.lm_head)
    if every := int(recipe.memory.activation_checkpointing):
        if recipe.memory.offload_activations:
            from ftkit.models.offloading import Offloading

            model.offloading = Offloading()
        # `forward` is replaced, not the block: names of parameters stay, and hooks of FSDP and
        # DeepSpeed run outside.
        for block in list(model.body.blocks)[::every]:
            block.forward = partial(_keep_only_the_input, block.forward, model.offloading)
    model.to(dtype)
    if model.lora is not None:
        layers_of(model.lora).cast(model, compute_dtype or dtype)
    return model


def round_layers(body: Body, base: BaseModel, recipe: Recipe, *, trains: bool) -> None:
    """Replace layers by those that compute from rounded numbers, if a section of the recipe says.

    Args:
        body: of a model on the meta device.
        base: the model that it computes.
        recipe: of a run.
        trains: False: its result is used.

    Raises:
        UserError: the section cannot round these layers.
    """
    if (section := rounding_section(recipe, trains=trains)) is not None:
        with on_meta_device():
            imported(section.layers)(body, base, recipe, trains)


def trained_router_loss(
    architecture: Architecture, coefficient: float | Literal["model"] | None
) -> RouterLoss | None:
    """Return the auxiliary loss of routers for training; None: there is none.

    Args:
        architecture: of the model.
        coefficient: of the loss; 0: train without it. model: that of the model's settings. None: as
            these say.

    Raises:
        UserError: the loss is required, but not known.
    """
    if coefficient == 0 or (coefficient is None and not architecture.asks_for_router_loss):
        return None
    known = architecture.router_loss
    if known is None:
        name = architecture.class_name or architecture.name
        has = "no routers"
        if architecture.expert_share < 1:
            has = "routers with another auxiliary loss, or with none"
        setting = f"router_aux_loss_coef is {coefficient}"
        if coefficient is None:
            setting = "output_router_logits of config.json is true"
        raise UserError(f"{setting}, but {name} has {has}. Try --router_aux_loss_coef 0.")
    if coefficient is None or coefficient == "model":
        return known
    return dataclasses.replace(known, coefficient=coefficient)


def _keep_only_the_input(
    forward: Callable[..., Any],
    offloading: "Offloading | None",
    hidden: Tensor,
    *rest: Any,
    **options: Any,
) -> Any:
    """Run a block and keep only its input: the backward pass computes the rest again."""
    if not torch.is_grad_enabled():
        return forward(hidden, *rest, **options)
    with nullcontext() if offloading is None else offloading.saving(hidden):
        # ZeRO-3 has freed the parameters that the check would look at.
        return checkpoint(
            lambda hidden: forward(hidden, *rest, **options),  # the same for all blocks
            hidden,
            use_reentrant=False,
            determinism_check="none",
        )


def outline_plain(
    base: BaseModel,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
    *,
    tied: bool,
    kind: Quantization | None = None,
) -> LanguageModel:
    """Build the model on the meta device, without an adapter.

    Args:
        base: the model whose architecture it has.
        dtype: of the parameters that are not quantised.
        compute_dtype: of the arithmetic of quantised layers. Default: dtype.
        tied: whether embedding and head are one.
        kind: quantisation of the weights in the blocks; None: none.

    Raises:
        UserError: they are not stored in a form that can be kept.
    """
    with on_meta_device():
        model = LanguageModel(base.architecture, tied=tied)
        body, computing = model.body, compute_dtype or dtype
        model.quantized = kind
        if kind == "stored":
            from ftkit.models.kept_weights import keep_stored

            keep_stored(body, base, computing)
        elif kind is not None:
            from ftkit.models.quantization import quantize, quantize_experts

            # The blocks only: embedding and head keep their precision, as in QLoRA.
            quantize(body.blocks, kind, computing, body.kept_in_full)
            for experts in body.fused_experts():
                quantize_experts(experts, kind, computing)
    return model.to(dtype)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that an optimizer updates."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _body_of(architecture: Architecture) -> Body:
    """Build the modules of an architecture, with its head, on torch's default device."""
    # Imported here: transformers takes as long as all other imports, others may be absent.
    made: Body = imported(architecture.body)(architecture)
    return made


COMPILE_BACKEND = "inductor"


def compile_blocks(body: Body, output_layer: nn.Module) -> None:
    """Compile blocks and loss by torch.compile at their first use, once for all lengths.

    A block has a graph for each of a few kinds of call: one line or several, one token or more.
    Attention depends on the lengths of the sequences in a micro-batch, which differ in each step,
    and experts on the tokens that choose them: both stay outside, between two graphs. Evaluation
    and answers are not compiled, because they would need more graphs.

    Args:
        body: the blocks are its own; hooks of a strategy stay outside of the graphs.
        output_layer: not compiled if an adapter has replaced it.
    """
    import torch._dynamo.config as dynamo

    dynamo.optimize_ddp = False  # it splits whole models at DDP's buckets, and these are blocks
    body.exclude_from_compile()
    # Blocks, not the model: 5 to 9 graphs in all instead of one for each length.
    for block in body.blocks:
        plain = block.forward
        # dynamic=True from the start: otherwise the first length gets a graph of its own.
        compiled = torch.compile(plain, dynamic=True, backend=COMPILE_BACKEND)
        block.forward = partial(_forward, compiled, plain)
    if isinstance(output_layer, OutputLayer):
        compute = torch.compile(output_layer.loss_and_grad, dynamic=True, backend=COMPILE_BACKEND)
        output_layer.loss_and_grad = compute


def _forward(
    compiled: Callable[..., Any], plain: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    # Evaluation would need further graphs, and takes a small part of the time.
    return (compiled if torch.is_grad_enabled() else plain)(*inputs, **options)


def compiled_graphs() -> int:
    """Number of graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
