"""Experts whose matrices are one parameter: each is quantised by itself, as a linear layer is."""

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from adapters import TOKENS, build, export, logits, lora_recipe, train
from conversions import assert_equal
from torch import Tensor
from transformers_models import make_transformers_model

from ftkit.errors import UserError
from ftkit.evaluation.loading import open_adapter
from ftkit.evaluation.result import find_result
from ftkit.models.architectures.transformers_architecture import is_router
from ftkit.models.bodies import experts
from ftkit.models.bodies.expert_products import packed_product, rows_of_each
from ftkit.models.bodies.experts import FusedExperts, PackedMatrices, packed_in
from ftkit.models.flops import flops_per_token, parameter_count
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.pretrained.base_model import BaseModel, open_base, weights
from ftkit.models.quantization import quantize_experts, rounded
from ftkit.recipe.recipe import Quantization

KINDS: list[Quantization] = ["bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq", "bnb.int8"]
MODELS = ["mixtral", "qwen3_moe", "gpt_oss", "olmoe"]
OTHER_KINDS = ["granitemoe", "jetmoe", "llama4_text", "aria_text"]
"""Models whose experts are not computed by transformers' functions of experts."""
TRANSPOSED = ("gpt_oss", "llama4_text", "aria_text")
BaseOf = Callable[[str], BaseModel]


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> BaseOf:
    directory = tmp_path_factory.mktemp("bases")
    known: dict[str, BaseModel] = {}

    def base(model: str) -> BaseModel:
        if model not in known:
            made = make_transformers_model(directory / model, model)
            known[model] = open_base(str(made), "transformers")
        return known[model]

    return base


def built(base: BaseModel, kind: Quantization | None, **keys: Any) -> LanguageModel:
    return build(
        base, lora_recipe(base, quantize=kind, model_implementation="transformers", **keys)
    )


def packed(model: nn.Module) -> dict[str, PackedMatrices]:
    """By the name of the parameter."""
    return {
        f"{name}.{kind}": matrices
        for name, module in model.named_modules()
        for kind, matrices in packed_in(module).items()
    }


def one_of(matrices: PackedMatrices, held: Tensor, expert: int) -> Tensor:
    """[1, out, in]."""
    return matrices.unpacked(held, slice(expert, expert + 1))


def in_numbers(model: LanguageModel) -> LanguageModel:
    """A copy whose experts have the numbers that the model computes with as their parameters."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for name, matrices in packed_in(module).items():
            held = getattr(module, name)
            whole = torch.cat([one_of(matrices, held, i) for i in range(matrices.experts)])
            whole = whole.mT.contiguous() if matrices.transposed else whole
            setattr(module, name, nn.Parameter(whole, requires_grad=False))
        if packed_in(module):
            module.packed_matrices = {}
    return plain


@pytest.mark.parametrize(
    ("model", "kind"),
    [(model, kind) for model in ("qwen3_moe", "gpt_oss") for kind in KINDS]
    + [(model, "bnb.nf4-dq") for model in OTHER_KINDS],
)
def test_each_matrix_has_the_numbers_of_a_quantised_linear_layer(
    base_of: BaseOf, model: str, kind: Quantization
) -> None:
    base = base_of(model)
    of_base = dict(weights(base))
    found = built(base, kind)
    matrices = packed(found)
    stacked = {f"body.{name}" for name, value in of_base.items() if value.ndim == 3}
    assert set(matrices) == stacked and len(stacked) >= 2
    for name, one in matrices.items():
        for expert, matrix in enumerate(of_base[name.removeprefix("body.")]):
            original = matrix.t() if model in TRANSPOSED else matrix
            expected = rounded(original, kind)
            held = found.get_parameter(name)
            assert torch.equal(one_of(one, held, expert)[0], expected)
            assert not torch.equal(expected, original)


@pytest.mark.parametrize("kind", ["bnb.nf4-dq", "bnb.int8"])
@pytest.mark.parametrize("model", [*MODELS, *OTHER_KINDS])
def test_a_step_is_that_of_experts_with_the_same_numbers(
    base_of: BaseOf, model: str, kind: Quantization
) -> None:
    keys = {"lora_targets": ["kv_proj"]} if model == "jetmoe" else {}  # its query is of experts
    found = train(built(base_of(model), kind, **keys))
    expected = in_numbers(found)
    assert not packed(expected) and packed(found)
    losses, gradients = zip(*(step(one) for one in (found, expected)), strict=True)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert_equal(logits(found), logits(expected))
    assert len(gradients[0]) > 0
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-4, atol=1e-6)


def step(model: LanguageModel) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients."""
    model.zero_grad()
    count = TOKENS.numel()
    loss = model(TOKENS, torch.arange(count), TOKENS.flatten().roll(-1)) / count
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model", MODELS)
def test_routers_biases_and_heads_stay_in_full_numbers(base_of: BaseOf, model: str) -> None:
    outlined = outline(
        base_of(model), lora_recipe(base_of(model), quantize="bnb.nf4"), torch.bfloat16
    )
    few_bits = {n for n, p in outlined.named_parameters() if not p.is_floating_point()}
    assert few_bits >= set(packed(outlined))
    whole = [n for n, _ in outlined.named_parameters() if n not in few_bits and ".lora_" not in n]
    kinds = {name.rpartition(".")[2] for name in whole}
    assert kinds <= {"weight", "bias", "sinks", "gate_up_proj_bias", "down_proj_bias"}
    assert any(is_router(name) for name in whole)
    assert "head.lm_head.weight" in whole


@pytest.mark.parametrize("kind", KINDS)
def test_counts_do_not_depend_on_how_matrices_are_stored(
    base_of: BaseOf, kind: Quantization
) -> None:
    base = base_of("qwen3_moe")
    plain, quantised = (
        outline(base, lora_recipe(base, quantize=one), torch.float32) for one in (None, kind)
    )
    assert parameter_count(plain) == sum(p.numel() for p in plain.parameters())
    assert parameter_count(quantised) == parameter_count(plain)
    counted = {"attention_length": 10, "label_fraction": 0.5}
    assert flops_per_token(quantised, **counted) == flops_per_token(plain, **counted)


class Experts(nn.Module):
    """Four of them, without a model around."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.empty(4, 256, 256, device="meta"))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("kind", "bytes_per_weight"),
    [
        ("bnb.nf4", 0.5 + 4 / 64),
        ("bnb.fp4", 0.5 + 4 / 64),
        ("bnb.nf4-dq", 0.5 + 1 / 64 + 4 / (64 * 256)),
        ("bnb.fp4-dq", 0.5 + 1 / 64 + 4 / (64 * 256)),
        ("bnb.int8", 1 + 4 / 256),
    ],
)
def test_packed_matrices_take_what_their_bits_take(
    kind: Quantization, bytes_per_weight: float, transposed: bool
) -> None:
    module = Experts()
    quantize_experts(FusedExperts(module, ("down_proj",), transposed), kind, torch.bfloat16)
    matrices = packed_in(module)["down_proj"]
    held = matrices.pack(torch.randn(4, 256, 256))
    assert held.shape == module.down_proj.shape and held.dtype == module.down_proj.dtype
    beside = [value for value in vars(matrices).values() if isinstance(value, Tensor)]
    found = sum(t.untyped_storage().nbytes() for t in (held, *beside))
    if kind.endswith("-dq"):
        found -= 256 * 4 + 4 * 4  # a table of values for scales, and an offset for each expert
    assert found == 4 * 256 * 256 * bytes_per_weight
    assert one_of(matrices, held, 3).dtype == torch.bfloat16


EACH = (5, 2, 3, 1, 4, 7, 1, 2)
"""Rows of each of eight experts."""
SOME = (0, 5, 3, 0, 0, 7, 1, 0)


@pytest.mark.parametrize("kind", ["bnb.nf4", "bnb.nf4-dq", "bnb.int8"])
@pytest.mark.parametrize(
    ("rows", "size", "at_once", "groups"),
    [
        (EACH, (256, 64), 1, 8),
        (EACH, (256, 64), 3, 3),
        (EACH, (256, 64), 8, 1),
        (SOME, (256, 64), 1, 4),
        (SOME, (256, 64), 8, 2),  # experts without rows are not unpacked
        ((0,) * 8, (256, 64), 8, 0),
        (EACH, (96, 64), 3, 3),  # part of a block of scales
        (EACH, (12, 20), 1, 8),  # part of a block of weights
    ],
)
def test_a_product_is_that_of_each_matrix_however_many_are_unpacked_at_once(
    monkeypatch: pytest.MonkeyPatch,
    kind: Quantization,
    rows: tuple[int, ...],
    size: tuple[int, int],
    at_once: int,
    groups: int,
) -> None:
    torch.manual_seed(0)
    matrices, held = packed_experts(torch.randn(len(rows), *size), kind)
    given = torch.randn(sum(rows), size[1])
    factors = torch.randn(sum(rows), size[0])
    of_each = zip(given.split(rows), factors.split(rows), strict=True)
    expected: list[tuple[Tensor, Tensor]] = []
    for expert, (x, factor) in enumerate(of_each):
        matrix = one_of(matrices, held, expert)[0]
        expected.append((x @ matrix.T, factor @ matrix))
    calls = watch_unpacked(monkeypatch, matrices, at_once)
    x, ends = given.requires_grad_(), torch.tensor(rows).cumsum(0, dtype=torch.int32)
    product = packed_product(x, held, matrices, ends, rows_of_each(ends, len(x)))
    assert len(calls) == groups
    product.backward(factors)
    assert len(calls) == 2 * groups
    results, gradients = zip(*expected, strict=True)
    torch.testing.assert_close(product, torch.cat(results))
    torch.testing.assert_close(x.grad, torch.cat(gradients))


def test_matrices_with_part_of_a_block_are_unpacked_one_by_one() -> None:
    """Bytes of the next matrix would be taken for the rest of the block."""
    four, _ = packed_experts(torch.randn(8, 12, 20), "bnb.nf4")
    eight, _ = packed_experts(torch.randn(8, 12, 20), "bnb.int8")
    assert four.at_once("cuda") == 1 and eight.at_once("cuda") > 8
    assert eight.at_once("cpu") == 1  # of any size: there are no launches to save


def packed_experts(weight: Tensor, kind: Quantization) -> tuple[PackedMatrices, Tensor]:
    """Matrices of a module that has no model around, and the packed parameter."""
    module = nn.Module()
    module.down_proj = nn.Parameter(weight.to("meta"))
    quantize_experts(FusedExperts(module, ("down_proj",), False), kind, weight.dtype)
    matrices = packed_in(module)["down_proj"]
    return matrices, matrices.pack(weight)


def watch_unpacked(
    monkeypatch: pytest.MonkeyPatch, matrices: PackedMatrices, at_once: int
) -> list[slice]:
    """Let a number of matrices be unpacked at once; list the experts of each time."""
    bytes_of_one = matrices.rows * matrices.columns * matrices.compute_dtype.itemsize
    monkeypatch.setattr(experts, "BYTES_AT_ONCE", (at_once + 1) * bytes_of_one - 1)
    matrices.device_kind = "cuda"
    found: list[slice] = []
    unpacked = matrices.unpacked

    def watched(packed: Tensor, experts: slice) -> Tensor:
        found.append(experts)
        return unpacked(packed, experts)

    monkeypatch.setattr(matrices, "unpacked", watched)
    return found


@pytest.mark.parametrize("model", ["qwen3_moe", *OTHER_KINDS])
def test_a_step_does_not_depend_on_how_many_matrices_are_unpacked_at_once(
    base_of: BaseOf, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    keys = {"lora_targets": ["kv_proj"]} if model == "jetmoe" else {}
    trained = train(built(base_of(model), "bnb.nf4-dq", **keys))
    expected = step(trained)
    largest = max(m.numbers // m.experts for m in packed(trained).values())
    for matrices in packed(trained).values():
        matrices.device_kind = "cuda"
    for at_once in (1, 3, 100):
        monkeypatch.setattr(experts, "BYTES_AT_ONCE", at_once * largest * 4)
        assert {m.at_once("cuda") for m in packed(trained).values()} >= {at_once}
        loss, gradients = step(trained)
        assert loss == expected[0]
        assert_equal(gradients, expected[1])


@pytest.mark.parametrize("at_once", [1, 4])
def test_one_group_is_in_numbers_at_a_time(
    base_of: BaseOf, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    model = built(base_of("qwen3_moe"), "bnb.nf4")
    made: list[Any] = []

    def watched(unpacked: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            assert all(group() is None for group in made)
            found = unpacked(*arguments)
            made.append(weakref.ref(found))
            return found

        return call

    for matrices in packed(model).values():
        matrices.device_kind = "cpu" if at_once == 1 else "cuda"
        monkeypatch.setattr(matrices, "unpacked", watched(matrices.unpacked))
    count = TOKENS.numel()
    loss = model(TOKENS, torch.arange(count), TOKENS.flatten().roll(-1))
    # Two matrices of each expert in two layers; every expert has tokens.
    assert len(made) == 2 * 2 * (4 // at_once)
    assert all(group() is None for group in made)
    loss.backward()
    assert len(made) == 2 * 2 * 2 * (4 // at_once)


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss", "granitemoe", "llama4_text"])
def test_a_merged_qlora_result_has_the_numbers_that_training_saw(
    base_of: BaseOf, model: str, tmp_path: Path
) -> None:
    base = base_of(model)
    recipe = lora_recipe(base, quantize="bnb.nf4")
    adapter = export(train(build(base, recipe)), base, recipe, tmp_path / "adapter")
    result = find_result(str(adapter))
    opened = open_adapter(result, dtype=torch.float32, quantize="bnb.nf4")
    merge = pytest.importorskip("ftkit.extensions.publish.merge")
    merged, original = (merge.Merged(opened, kind, None) for kind in ("bnb.nf4", None))
    trained_on = in_numbers(built(base, "bnb.nf4"))
    for name in packed(opened.model):
        ours = name.removeprefix("body.")
        assert torch.equal(merged(ours), trained_on.get_parameter(name))
        assert not torch.equal(merged(ours), original(ours))


def test_experts_in_a_few_bits_cannot_be_trained_whole(base_of: BaseOf) -> None:
    base = base_of("qwen3_moe")
    recipe = lora_recipe(base, quantize="bnb.nf4", lora_modules_to_save=["experts"])
    with pytest.raises(UserError, match=r"names experts, but quantize bnb\.nf4 keeps it in a few"):
        outline(base, recipe, torch.float32)
