"""The auxiliary loss of routers equals that of transformers; choices of experts are counted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import transformers
from computed import filled
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers_models import SIZES, VOCABULARY, save_random, transformers_model

from ftkit.errors import UserError
from ftkit.models import language_model, routing
from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.language_model import LanguageModel, outline, trained_router_loss
from ftkit.models.lora.targets import our_name
from ftkit.models.pretrained.base_model import open_base
from ftkit.models.routing import RouterLoss
from ftkit.recipe.recipe import Memory, Recipe

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
"""Models with the auxiliary loss that ftkit knows, by model_type and what is special."""
QUICK = ("gpt_oss", "qwen3_moe with a dense layer")
OTHERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "doge": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2},
}


def settings(model: str) -> dict[str, Any]:
    return SIZES | (MODELS | OTHERS)[model]


def make(directory: Path, model: str) -> Path:
    config = transformers.AutoConfig.for_model(model.split()[0], **settings(model))
    return save_random(directory, transformers.AutoModelForCausalLM, config)


def opened(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    routers: Callable[[], nn.Module] | None = None,
    **changes: Any,
) -> LanguageModel:
    """A model whose routers are recorded.

    Args:
        directory: of the model.
        dtype: of its parameters.
        routers: makes routers that replace its own.
        changes: of the recipe.
    """
    recipe = Recipe(**{"checkpoint_dir": str(directory), "router_aux_loss_coef": FACTOR, **changes})
    base = open_base(str(directory), "transformers")
    model = outline(base, recipe, dtype)
    for block in model.body.blocks if routers is not None else ():
        block.mlp.gate = routers()  # type: ignore[misc]
    model.routing = model.body.watch_routing(
        trained_router_loss(base.architecture, recipe.router_aux_loss_coef)
    )
    return filled(model, base)


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


@pytest.mark.parametrize(
    "model", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in MODELS]
)
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


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_compiled_blocks_have_the_same_loss_gradients_and_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    """In bfloat16: torch compiles products of experts in no other format."""
    monkeypatch.setattr(language_model, "COMPILE_BACKEND", "aot_eager")
    directory, memory = make(tmp_path, "gpt_oss"), Memory(activation_checkpointing=checkpointing)
    found = []
    for compile_ in (False, True):
        model = opened(directory, dtype=torch.bfloat16, compile=compile_, memory=memory)
        loss = loss_of(model, *padded(), lengths=None)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss, gradients, model.routing.load))
    (loss, gradients, load), (loss_of_graphs, gradients_of_graphs, load_of_graphs) = found
    torch.testing.assert_close(loss_of_graphs, loss)
    torch.testing.assert_close(gradients_of_graphs, gradients)
    assert load_of_graphs == load and sum(map(sum, load)) == 2 * 2 * sum(LENGTHS)


def architecture_of(model: str, **changes: Any) -> TransformersArchitecture:
    return TransformersArchitecture({"model_type": model} | settings(model) | changes)


@pytest.mark.parametrize("model", OTHERS)
def test_a_loss_that_a_model_does_not_have_is_refused_by_name(model: str) -> None:
    architecture = architecture_of(model)
    assert trained_router_loss(architecture, None) is None
    assert trained_router_loss(architecture, 0) is None
    has = "no routers" if model == "llama" else "routers with another auxiliary loss, or with none"
    words = rf"coef is 0\.01, .*{architecture.class_name} has {has}.*--router_aux_loss_coef 0"
    with pytest.raises(UserError, match=words):
        trained_router_loss(architecture, 0.01)


def test_a_model_that_needs_an_unknown_loss_is_refused() -> None:
    with pytest.raises(UserError, match=r"config\.json is true, but Deepseek"):
        trained_router_loss(architecture_of("deepseek_v3", output_router_logits=True), None)


def test_config_json_decides_if_a_recipe_has_no_coefficient() -> None:
    plain = architecture_of("mixtral", router_aux_loss_coef=0.02)
    requiring = architecture_of("mixtral", router_aux_loss_coef=0.02, output_router_logits=True)
    assert trained_router_loss(plain, None) is None
    asked_for = trained_router_loss(plain, "model")
    assert asked_for is not None and asked_for.coefficient == 0.02
    by_model = trained_router_loss(requiring, None)
    assert by_model is not None and by_model.coefficient == 0.02
    by_recipe = trained_router_loss(requiring, 0.5)
    assert by_recipe is not None and by_recipe.coefficient == 0.5
    assert trained_router_loss(requiring, 0.0) is None


class InTurns(nn.Module):
    """A router whose tokens choose two experts by their place in the micro-batch."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        places = torch.arange(len(hidden))
        chosen = torch.stack([places % 3, torch.full_like(places, 3)], 1)
        return hidden.new_full((len(hidden), 4), 0.25), hidden.new_full(chosen.shape, 0.5), chosen


@pytest.mark.parametrize("checkpointing", [False, True])
def test_choices_of_real_tokens_are_counted_once(tmp_path: Path, checkpointing: bool) -> None:
    model = opened(
        make(tmp_path, "qwen3_moe"),
        routers=InTurns,
        router_aux_loss_coef=None,
        memory=Memory(activation_checkpointing=checkpointing),
    )
    assert model.routing.load == []
    tokens, is_real = padded()
    for _ in range(2):
        with model.routing.of(is_real):
            total = model(tokens, torch.tensor([0]), tokens[0, :1])
            assert model.routing.take() is None
            total.backward()
    with torch.no_grad():  # neither an evaluation nor a look at choices alone
        model(tokens, torch.tensor([0]))
        with model.routing.of(is_real):
            model(tokens, torch.tensor([0]))
    places = [place for place, real in enumerate(is_real.flatten().tolist()) if real]
    expected = [2 * sum(place % 3 == expert for place in places) for expert in range(3)]
    assert model.routing.layers == [0, 1]
    assert model.routing.load == [[*expected, 2 * sum(LENGTHS)]] * 2


def test_fillers_are_not_counted(tmp_path: Path) -> None:
    model = opened(make(tmp_path, "qwen3_moe"), routers=InTurns, router_aux_loss_coef=None)
    with model.routing.of(torch.zeros(1, 1, dtype=torch.bool)):
        model(torch.zeros(1, 1, dtype=torch.long), torch.empty(0, dtype=torch.long))
        model.routing.take()
    assert model.routing.load == [[0] * 4] * 2


def test_a_model_without_experts_has_no_load(tmp_path: Path) -> None:
    model = opened(make(tmp_path, "llama"), router_aux_loss_coef=None)
    with model.routing.of(torch.ones(1, 3, dtype=torch.bool)):
        model(torch.zeros(1, 3, dtype=torch.long), torch.tensor([0]))
    assert model.routing.layers == [] and model.routing.load == []


def test_choices_are_summed_where_a_device_has_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, is_real = torch.tensor([[3.0, 1.0], [1.0, 3.0], [1.0, 3.0]]), torch.tensor([1, 1, 0])
    loss = RouterLoss(experts=2, chosen=1, coefficient=1.0)
    for dtype in (torch.float64, torch.float32):
        monkeypatch.setattr(routing, "sum_dtype", lambda device, dtype=dtype: dtype)
        choices = loss.routed(logits, is_real.bool()).choices
        assert choices.dtype == dtype and choices.tolist() == [1.0, 1.0]
