"""RMSNorm is LitGPT's and transformers', and keeps less for its backward pass."""

import litgpt
import pytest
import torch
from litgpt_models import litgpt_architecture
from torch import Tensor
from transformers_models import model_type, settings_of

from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.bodies.norm import RMSNorm, replace_norms
from ftkit.models.language_model import LanguageModel
from ftkit.models.lora.targets import our_name

SIZE, EPS = 96, 1e-5
DTYPES = [torch.float32, torch.bfloat16]


def norms(offset: bool, dtype: torch.dtype) -> tuple[RMSNorm, litgpt.model.RMSNorm]:
    """Ours and LitGPT's, with the same weight."""
    ours = RMSNorm(SIZE, EPS, add_unit_offset=offset)
    theirs = litgpt.model.RMSNorm(SIZE, eps=EPS, add_unit_offset=offset)
    weight = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
        norm.to(dtype)
    return ours, theirs


def passes(norm: torch.nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Result, gradient of the input, gradient of the weight; rows of sizes from 1e-3 to 1e3."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-3, 3, 21).view(3, 7, 1)
    x = (torch.randn(3, 7, SIZE, generator=generator) * sizes).to(dtype).requires_grad_()
    gradient = torch.randn(3, 7, SIZE, generator=generator).to(dtype)
    result = norm(x)
    result.backward(gradient)
    (weight,) = norm.parameters()
    assert x.grad is not None and weight.grad is not None
    assert result.dtype == x.grad.dtype == weight.grad.dtype == dtype
    return result.detach(), x.grad, weight.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [False, True], ids=["plain", "as in Gemma"])
def test_the_numbers_are_those_of_litgpt(offset: bool, dtype: torch.dtype) -> None:
    ours, theirs = norms(offset, dtype)
    within = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    for found, expected in zip(passes(ours, dtype), passes(theirs, dtype), strict=True):
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert error < within
        torch.testing.assert_close(found, expected, rtol=4 * within, atol=4 * within)


@pytest.mark.parametrize("offset", [False, True], ids=["plain", "as in Gemma"])
def test_the_numbers_are_those_of_transformers(offset: bool) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, _ = norms(offset, torch.float32)
    theirs = (Gemma2RMSNorm if offset else LlamaRMSNorm)(SIZE, EPS)
    theirs.weight.data.copy_(ours.weight.data)
    for found, expected in zip(
        passes(ours, torch.float32), passes(theirs, torch.float32), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_the_input_is_the_only_thing_of_its_size_that_is_kept(
    dtype: torch.dtype, trained: bool
) -> None:
    ours, _ = norms(False, dtype)
    ours.requires_grad_(trained)
    x = torch.randn(64, SIZE, dtype=dtype, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours(x)
    assert {t.data_ptr() for t in kept if t.numel() >= x.numel()} == {x.data_ptr()}


@pytest.mark.parametrize("name", ["tiny-llama-1.1b", "Gemma-3-1b-it", "Qwen3-0.6B"])
def test_every_rms_norm_of_a_model_is_replaced_under_its_name(name: str) -> None:
    config = litgpt.Config.from_name(name, n_layer=2)
    with torch.device("meta"):
        model, theirs = LanguageModel(litgpt_architecture(config), tied=False), litgpt.GPT(config)
    expected = {n for n, m in theirs.named_modules() if isinstance(m, litgpt.model.RMSNorm)}
    found = {n.removeprefix("body."): m for n, m in model.named_modules() if type(m) is RMSNorm}
    assert found.keys() == expected and len(expected) >= 5
    assert {m.add_unit_offset for m in found.values()} == {"Gemma" in name}
    assert {m.eps for m in found.values()} == {config.norm_eps}
    assert not any(isinstance(m, litgpt.model.RMSNorm) for m in model.modules())


@pytest.mark.parametrize(
    ("name", "adds_one", "count"),
    [
        ("llama", False, 5),
        ("qwen3", False, 9),
        ("gemma3_text", True, 13),
        ("olmo2", False, 9),
        ("deepseek_v3", False, 7),
        ("gpt_neox", False, 0),
    ],
)
def test_rms_norms_of_transformers_are_replaced_under_their_names(
    name: str, adds_one: bool, count: int
) -> None:
    settings = settings_of(name) | {"model_type": model_type(name)}
    architecture = TransformersArchitecture(settings)
    with torch.device("meta"):
        model = LanguageModel(architecture, tied=False)
    found = {our_name(n): m for n, m in model.named_modules() if type(m) is RMSNorm}
    theirs = architecture.outline.named_modules()
    assert found.keys() == {n for n, m in theirs if type(m).__name__.endswith("RMSNorm")}
    assert len(found) == count
    assert all(m.add_unit_offset == adds_one and m.weight.is_meta for m in found.values())


def test_a_norm_that_computes_something_else_stays() -> None:
    class HalfRMSNorm(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    class GatedRMSNorm(RMSNorm):
        def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
            return super().forward(x)

    kinds = (HalfRMSNorm, GatedRMSNorm)
    model = torch.nn.Sequential(*(kind(SIZE, EPS, add_unit_offset=False) for kind in kinds))
    replace_norms(model)
    assert tuple(type(module) for module in model) == kinds
