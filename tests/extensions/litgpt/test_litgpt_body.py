"""LitGPT's experts compute what LitGPT's own code does, each called once, on fake tensors too."""

from typing import Any

import litgpt
import pytest
import torch
from litgpt.model import LLaMAMoE
from torch._subclasses.fake_tensor import FakeTensorMode

from ftkit.extensions.litgpt.body import Experts
from ftkit.models.token_numbers import TokenDropout, TokenNumbers

SETTINGS: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B-v0.1": {"n_expert": 4, "n_expert_per_token": 2},
    "Qwen3-30B-A3B": {"n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 24},
    "DeepSeek-V3": {
        "n_expert": 4,
        "n_expert_per_token": 2,
        "n_expert_groups": 2,
        "n_topk_groups": 1,
        "n_topk_scores_per_group": 2,
        "n_shared_expert": 1,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 24,
    },
}


def both(name: str) -> tuple[LLaMAMoE, Experts]:
    known = "Mixtral-8x7B-v0.1" if name == "DeepSeek-V3" else name
    sizes = {"n_embd": 32, "intermediate_size": 48, "bias": False, "norm_topk_prob": True}
    config = litgpt.Config.from_name(known, **sizes | SETTINGS[name])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = LLaMAMoE(config)
        if name == "DeepSeek-V3":
            torch.nn.init.normal_(theirs.gate.weight)
    ours = Experts(config, TokenNumbers())
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("name", SETTINGS)
def test_results_and_gradients_are_litgpts(name: str) -> None:
    theirs, ours = both(name)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    found, expected = ours(inputs[0]), theirs(inputs[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-5)
    gradients = dict(theirs.named_parameters())
    for parameter_name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        expected_gradient = gradients[parameter_name].grad
        torch.testing.assert_close(parameter.grad, expected_gradient, rtol=1e-4, atol=1e-5)


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    _, ours = both("Mixtral-8x7B-v0.1")
    ours(torch.randn(1, 1, 32)).sum().backward()
    largest = [float(expert.proj.weight.grad.abs().max()) for expert in ours.experts]
    assert sorted(value > 0 for value in largest) == [False, False, True, True]


def test_dropout_in_an_expert_is_that_of_the_tokens_which_choose_it() -> None:
    _, ours = both("Mixtral-8x7B-v0.1")
    tokens = ours._numbers
    for index, expert in enumerate(ours.experts):
        dropout = TokenDropout(0.5, f"expert {index}", expert.proj.in_features, tokens)
        expert.proj = torch.nn.Sequential(dropout, expert.proj)
    tokens.prepare(1, torch.device("cpu"))

    def computed(x: torch.Tensor, *numbers: int) -> torch.Tensor:
        batch = {
            "input_ids": torch.zeros(x.shape[:2]),
            "lengths": (x.shape[1],) * len(x),
            "sequence_lengths": None,
            "numbers": numbers,
            "first": 0,
        }
        with tokens.of(0, batch):
            result: torch.Tensor = ours(x)
        return result

    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    found = computed(x, 4, 9)
    torch.testing.assert_close(found[:1], computed(x[:1], 4))
    torch.testing.assert_close(found[1:], computed(x[1:], 9))
    assert not torch.allclose(found[:1], computed(x[:1], 5))


def test_fake_tensors_pass_all_experts() -> None:
    with FakeTensorMode():
        _, ours = both("Mixtral-8x7B-v0.1")
        result = ours(torch.randn(2, 5, 32))
        result.sum().backward()
    assert result.shape == (2, 5, 32)
    assert all(parameter.grad is not None for parameter in ours.parameters())
