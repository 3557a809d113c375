"""The programs whose memory was published: each builds its own model and trains it on fake tensors.

What lives how long is as in their sources: LitGPT's loop, for example, holds the logits in the
backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from litgpt.utils import chunked_cross_entropy
from torch import Tensor, nn

from published_memory.models import causal_lm, mixture_of_linear_layers
from published_memory.parts import (
    BitsandbytesAdamW,
    Offloaded,
    make_state,
    pack,
    peak_bytes,
    place,
    simulated,
    trained_parameters,
)
from published_memory.rows import Row

Program = Callable[..., int]


def simulate(row: Row) -> int:
    """Peak bytes of the program of a row."""
    return PROGRAMS[row.program](row, **row.settings)


def litgpt_lora(
    row: Row,
    *,
    rank: int,
    dropout: float,
    micro_batches: int,
    layers: str = "attention",
    quantize: str | None = None,
    longest_is_first: bool = False,
) -> int:
    """litgpt/finetune/lora.py: logits in chunks.

    In versions up to 2023 the longest sequence is in the first micro-batch of the run, when the
    optimizer has no state yet.

    Quantised by bitsandbytes 0.41 or 0.42, which keeps the inputs of its layers, with the paged
    optimizer.
    """
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

    every = layers == "all"
    config = Config.from_name(
        row.model,
        lora_r=rank,
        lora_alpha=16,
        lora_dropout=dropout,
        lora_query=True,
        lora_value=True,
        lora_key=every,
        lora_projection=every,
        lora_mlp=every,
        lora_head=every,
    )
    with simulated(torch.bfloat16):
        model = GPT(config)
        if quantize:
            pack(model, nested=quantize == "nf4-dq", keeps_input=True)
        mark_only_lora_as_trainable(model)
        model.max_seq_length = row.tokens
        trained = trained_parameters(model)
        optimizer = (
            BitsandbytesAdamW(trained, bits=32, paged=True)
            if quantize
            else torch.optim.AdamW(trained, foreach=True)
        )
        return _litgpt_loop(
            row, model, optimizer, micro_batches, chunk=128, longest_is_first=longest_is_first
        )


def litgpt_full(row: Row, *, micro_batches: int) -> int:
    """litgpt/finetune/full.py: the logits are not in chunks."""
    from litgpt.model import GPT, Config

    with simulated(torch.bfloat16):
        model = GPT(Config.from_name(row.model))
        model.max_seq_length = row.tokens
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        return _litgpt_loop(row, model, optimizer, micro_batches, chunk=0)


def _litgpt_loop(
    row: Row,
    model: Any,
    optimizer: Any,
    micro_batches: int,
    *,
    chunk: int,
    longest_is_first: bool = False,
) -> int:
    model.train()
    trained = trained_parameters(model)

    def run(begin: Callable[[], None]) -> None:
        if not longest_is_first:
            make_state(optimizer, trained)
        begin()
        if not longest_is_first and micro_batches > 1:
            # Of the micro-batches before the longest. Their logits and losses, which are held
            # until it has its own, are left out: these batches are shorter.
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
        ids = torch.zeros(row.sequences, row.tokens, dtype=torch.long)
        if chunk:
            logits = model(ids, lm_head_chunk_size=chunk)
            logits[-1] = logits[-1][..., :-1, :]
            loss = chunked_cross_entropy(logits, ids[..., 1:])
        else:
            logits = model(ids)
            loss = chunked_cross_entropy(logits[..., :-1, :], ids[..., 1:])
        (loss / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return peak_bytes(model, run)


def lightning(row: Row) -> int:
    """A LightningModule: full logits; gradients are freed after the next forward pass."""
    from litgpt.model import GPT, Config

    with simulated(torch.bfloat16):
        model = GPT(Config.from_name(row.model)).train()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def run(begin: Callable[[], None]) -> None:
            for _ in range(2):
                begin()
                ids = torch.zeros(row.sequences, row.tokens, dtype=torch.long)
                loss = chunked_cross_entropy(model(ids)[..., :-1, :], ids[..., 1:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return peak_bytes(model, run)


def transformers_trainer(row: Row, *, mode: str) -> int:
    """Trainer of transformers 4.48: bf16, checkpointed activations, PEFT's LoRA of rank 16.

    Args:
        row: the figure.
        mode: "full"; "lora"; "qlora", with autocast; "qlora-float32", where PEFT has made all
            parameters that are not quantised float32.
    """
    from peft import LoraConfig, get_peft_model

    quantised = mode.startswith("qlora")
    with torch.device("meta"):
        model = causal_lm(row.model)
        mixture_of_linear_layers(model)
        if quantised:
            pack(model, nested=True, keeps_input=False, but=("lm_head",))
            model.is_loaded_in_4bit = True
        if mode == "qlora-float32":
            _in_float32(model)
        if mode != "full":
            model.requires_grad_(False)
            model.enable_input_require_grads()
            names = ["q_proj", "k_proj", "v_proj", "o_proj"]
            config = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=names)
            model = get_peft_model(model, config)
        _checkpoint_activations(model)
    with simulated(torch.float32):
        place(model)
        model.train()
        trained = trained_parameters(model)
        optimizer = torch.optim.AdamW(trained, foreach=True)

        def loss_of(ids: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=quantised):
                logits = model(input_ids=ids, use_cache=False).logits
                loss = _loss_of_transformers_4(logits, ids)
            # Of accelerate, which makes all outputs of mixed precision float32.
            outputs = logits.float() if quantised else logits
            del outputs
            return loss

        def run(begin: Callable[[], None]) -> None:
            make_state(optimizer, trained)
            begin()
            ids = torch.zeros(row.sequences, row.tokens, dtype=torch.long)
            loss = loss_of(ids)
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()

        return peak_bytes(model, run)


def _loss_of_transformers_4(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of transformers 4.48, which copies the logits where it shifts them."""
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    return nn.functional.cross_entropy(shifted.flatten(0, 1), labels[..., 1:].flatten())


def transformers_peft(row: Row, *, method: str | None, config: dict[str, Any]) -> int:
    """method_comparison/MetaMathQA/run.py: padded batches, no checkpointing, outputs held."""
    import peft

    with torch.device("meta"):
        model = causal_lm(row.model)
        if method:
            made = getattr(peft, method)(**config, task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, made)
    with simulated(torch.float32):
        place(model)
        model.train()
        trained = trained_parameters(model)
        optimizer = torch.optim.AdamW(trained, foreach=True)

        def run(begin: Callable[[], None]) -> None:
            make_state(optimizer, trained)
            begin()
            for _ in range(2):
                ids = torch.zeros(row.sequences, row.tokens, dtype=torch.long)
                # The mask of padding and of the future; with it, transformers repeats the heads
                # of keys and values.
                mask = torch.ones(row.sequences, 1, row.tokens, row.tokens, dtype=torch.bool)
                optimizer.zero_grad()
                outputs = model(
                    input_ids=ids, attention_mask=mask, labels=ids, num_items_in_batch=ids.numel()
                )
                loss = outputs.loss
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

        return peak_bytes(model, run)


def torchtune(
    row: Row,
    *,
    optimizer: str = "AdamW",
    rank: int = 0,
    quantize: bool = False,
    in_backward: bool = False,
    checkpointing: bool = True,
    chunked: bool = True,
    offload: bool = False,
) -> int:
    """Recipes of torchtune for one GPU, with transformers' Llama in place of its own.

    LoRA's layers are q_proj, v_proj, o_proj and those of the MLP; all of it is bf16.
    """
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model = causal_lm(row.model)
        if quantize:
            pack(model, nested=True, keeps_input=False, but=("lm_head",))
            model.is_loaded_in_4bit = True
        if rank:
            names = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
            model = get_peft_model(model, config, autocast_adapter_dtype=False)
            for parameter in trained_parameters(model):
                parameter.data = parameter.data.to(torch.bfloat16)
            model = model.get_base_model()
        if checkpointing:
            _checkpoint_activations(model)
    with simulated(torch.float32):
        place(model)
        model.train()
        trained = trained_parameters(model)
        made: dict[Any, Any] = {
            one: _torchtune_optimizer(optimizer, one)
            for one in ([(p,) for p in trained] if in_backward else [tuple(trained)])
        }

        def update(parameter: nn.Parameter) -> None:
            made[parameter,].step()
            made[parameter,].zero_grad()

        def run(begin: Callable[[], None]) -> None:
            for parameters, one in made.items():
                make_state(one, parameters)
            if in_backward:
                for parameter in trained:
                    parameter.register_post_accumulate_grad_hook(update)
            begin()
            ids = torch.zeros(row.sequences, row.tokens, dtype=torch.long)
            if offload:
                with Offloaded(kept=5):
                    hidden = model.model(input_ids=ids, use_cache=False)[0]
            else:
                hidden = model.model(input_ids=ids, use_cache=False)[0]
            if chunked:
                # All chunks of logits come first, and then their losses.
                chunks = [model.lm_head(part) for part in hidden.tensor_split(8, dim=1)]
                del hidden
                labels = ids.tensor_split(8, dim=1)
                parts = [
                    _CompiledLoss.apply(logits.flatten(0, 1), part.flatten())
                    for logits, part in zip(chunks, labels, strict=True)
                ]
                loss = torch.stack(parts).sum()
                del chunks, parts
            else:
                logits = model.lm_head(hidden).flatten(0, 1)
                del hidden
                loss = nn.functional.cross_entropy(logits.float(), ids.flatten())
                del logits
            loss.backward()
            if not in_backward:
                made[tuple(trained)].step()

        return peak_bytes(model, run)


def _torchtune_optimizer(name: str, parameters: tuple[nn.Parameter, ...]) -> Any:
    if name == "AdamW":
        return torch.optim.AdamW(parameters, fused=True)
    return BitsandbytesAdamW(parameters, bits=8, paged=name.startswith("Paged"))


class _CompiledLoss(torch.autograd.Function):
    """Sum of cross-entropies as one kernel: float32 in registers; keeps logits and a row's sum."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels, logits.new_empty(len(logits), dtype=torch.float32))
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), None


def _checkpoint_activations(model: Any) -> None:
    model.gradient_checkpointing_enable(
        # Fake tensors have no random state.
        gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
    )


def _in_float32(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


PROGRAMS: dict[str, Program] = {
    "litgpt-lora": litgpt_lora,
    "litgpt-full": litgpt_full,
    "lightning": lightning,
    "transformers-trainer": transformers_trainer,
    "transformers-peft": transformers_peft,
    "torchtune": torchtune,
}
