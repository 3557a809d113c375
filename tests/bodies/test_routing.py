"""The oracle is transformers: the auxiliary loss of its routers, and what its experts are asked."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import transformers
from tiny import make_tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers_models import SIZES, VOCABULARY, transformers_model

from ftkit.architectures.transformers_architecture import TransformersArchitecture
from ftkit.config.recipe import Recipe
from ftkit.lora.names import our_name
from ftkit.model.language_model import LanguageModel, outline, trained_router_loss
from ftkit.model.load_weights import fill
from ftkit.model.sharding import Whole
from ftkit.pretrained.base_model import open_base

LENGTHS = (9, 14, 3)
FACTOR = 0.3
"""Of the auxiliary loss: so much that gradients show it."""
_FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_FOUR_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": _FOUR_LOCAL | {"sliding_window": None},
    "qwen2_moe": _FOUR | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": _FOUR | {"head_dim": 8},
    "qwen3_moe with a dense layer": _FOUR | {"head_dim": 8, "mlp_only_layers": [0]},
    "olmoe": _FOUR,
    "flex_olmo": _FOUR,
    "gpt_oss": _FOUR_LOCAL | {"head_dim": 8},
    "minimax": _FOUR_LOCAL,
    "minimax_m2": _FOUR_LOCAL | {"head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "head_dim": 8, "moe_layer_start_index": 1},
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "jetmoe": _FOUR_LOCAL,
}
"""Those whose auxiliary loss is the one that ftkit knows, by model_type and what is special."""
OTHERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "granitemoe": _FOUR_LOCAL,  # its forward pass finds no logits of routers
    "deepseek_v3": {"n_routed_experts": 4, "n_shared_experts": 1},
    "doge": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2},
}


def settings(model: str) -> dict[str, Any]:
    return SIZES | (MODELS | OTHERS)[model]


def make(directory: Path, model: str) -> Path:
    config = transformers.AutoConfig.for_model(model.split()[0], **settings(model))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in made.parameters():
                noise = torch.randn_like(parameter) * 0.1
                parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    made.save_pretrained(directory)
    make_tokenizer(directory)
    return directory


def opened(directory: Path, **changes: Any) -> LanguageModel:
    recipe = Recipe(checkpoint_dir=str(directory), router_aux_loss_coef=FACTOR, **changes)
    base = open_base(str(directory), "transformers")
    model = outline(base, recipe, torch.float32)
    model.routing = model.body.watch_routing(trained_router_loss(base.architecture, recipe))
    fill(
        model,
        base,
        sharding=Whole(),
        device=torch.device("cpu"),
        rope_length=64,
        seed=0,
        progress=lambda *_: None,
    )
    return model


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def padded() -> tuple[Tensor, Tensor]:
    """Tokens, and which are real."""
    tokens = pad_sequence(sequences(), batch_first=True)
    return tokens, pad_sequence([torch.ones(n, dtype=torch.bool) for n in LENGTHS], True)


def in_a_row() -> tuple[Tensor, Tensor]:
    row = torch.cat(sequences())[None]
    return row, torch.ones_like(row, dtype=torch.bool)


def loss_of(
    model: LanguageModel, tokens: Tensor, is_real: Tensor, *, lengths: tuple[int, ...] | None
) -> Tensor:
    """That of a step of one micro-batch, whose labels are the tokens themselves; and backward."""
    routing = model.routing
    places = is_real.flatten().nonzero()[:, 0]
    with routing.of(is_real):
        total = model(tokens, places, tokens.flatten()[places], sequence_lengths=lengths)
        routed = routing.take()
        assert routed is not None and routing.loss is not None
        added = routing.loss.share(routed.probabilities, routed.choices)
        loss = total / len(places) + routing.loss.coefficient * added
        loss.backward()
    return loss.detach()


def their_loss(directory: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """What transformers computes of the same batch, and its gradients."""
    model = transformers_model(directory)
    tokens, is_real = padded()
    found = model(tokens, attention_mask=is_real.long(), output_router_logits=True)
    of_tokens = nn.functional.cross_entropy(found.logits[is_real], tokens[is_real])
    loss = of_tokens + FACTOR * found.aux_loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_gradients(model: LanguageModel, expected: dict[str, Tensor]) -> None:
    found = {our_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_with_that_of_routers_and_its_gradients_are_those_of_transformers(
    tmp_path: Path, model: str
) -> None:
    directory = make(tmp_path, model)
    expected, gradients = their_loss(directory)
    ours = opened(directory)
    assert isinstance(ours.architecture, TransformersArchitecture)
    found = loss_of(ours, *padded(), lengths=None)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert_gradients(ours, gradients)
    if ours.architecture.takes_rows:
        ours.zero_grad()
        found = loss_of(ours, *in_a_row(), lengths=LENGTHS)
        assert float(found) == pytest.approx(float(expected), rel=1e-5)
        assert_gradients(ours, gradients)
