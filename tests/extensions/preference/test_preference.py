"""Losses of preference tuning: by their formulas, and the same however a step is split."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ftkit.extensions.preference.preference import Dpo, Orpo, Paired, SimPo

TOKENS = ((3, 2), (1, 4), (5, 5))
"""Label tokens of the chosen and the rejected answer of three pairs."""


def pair_batch(pairs: range, *, filler: bool = False) -> tuple[Tensor, dict[str, Any]]:
    """Log-probabilities of some pairs' tokens, and what a micro-batch says of them."""
    generator = torch.Generator().manual_seed(0)
    values = [[torch.rand(n, generator=generator) - 2 for n in pair] for pair in TOKENS]
    references = torch.rand(len(TOKENS), 2, generator=generator).double() - 3
    sequences = [one for pair in pairs for one in values[pair]]
    real = [True] * len(sequences)
    if filler:
        sequences, real = [*sequences, torch.empty(0), torch.empty(0)], [*real, False, False]
    numbers = [torch.full((len(one),), number) for number, one in enumerate(sequences)]
    reference = references[list(pairs)].flatten()
    return torch.cat(sequences).requires_grad_(), {
        "lengths": tuple(map(len, sequences)),
        "label_sequences": torch.cat(numbers),
        "is_real_sequence": torch.tensor(real),
        "reference": torch.cat([reference, torch.zeros(len(real) - len(reference))]),
    }


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def dpo(of_difference: Callable[[float], float]) -> Callable[..., float]:
    return lambda c, r, n, m, p, q: of_difference((c - p) - (r - q))


def log_odds(mean: float) -> float:
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


# Each: objective, and its pair loss by log-probabilities, tokens and references of both answers.
CASES: dict[str, tuple[Paired, Callable[..., float]]] = {
    "sigmoid": (Dpo(beta=0.5), dpo(lambda d: -math.log(sigma(0.5 * d)))),
    "hinge": (Dpo(beta=0.5, loss="hinge"), dpo(lambda d: max(0.0, 1 - 0.5 * d))),
    "ipo": (
        Dpo(beta=0.5, loss="ipo"),
        lambda c, r, n, m, p, q: ((c - p) / n - (r - q) / m - 1) ** 2,
    ),
    "conservative": (
        Dpo(beta=0.5, loss="conservative", label_noise=0.2),
        dpo(lambda d: -0.8 * math.log(sigma(0.5 * d)) - 0.2 * math.log(sigma(-0.5 * d))),
    ),
    "robust": (
        Dpo(beta=0.5, loss="robust", label_noise=0.2),
        dpo(lambda d: (-0.8 * math.log(sigma(0.5 * d)) + 0.2 * math.log(sigma(-0.5 * d))) / 0.6),
    ),
    "simpo": (
        SimPo(beta=2.0, margin=0.5),
        lambda c, r, n, m, p, q: -math.log(sigma(2 * (c / n - r / m) - 1)),
    ),
    "orpo": (
        Orpo(weight=0.1),
        lambda c, r, n, m, p, q: -math.log(sigma(log_odds(c / n) - log_odds(r / m))),
    ),
}


def terms_of(objective: Paired, batch: tuple[Tensor, dict[str, Any]]) -> dict[str, float]:
    sums = objective.sums(*batch)
    names = (term.name for term in objective.terms)
    return {name: float(value.detach()) for name, value in zip(names, sums, strict=True)}


def numbers_of(pair: int) -> tuple[float, ...]:
    values, batch = pair_batch(range(pair, pair + 1))
    chosen, rejected = TOKENS[pair]
    both = values[:chosen].sum().item(), values[chosen:].sum().item()
    return (*both, chosen, rejected, *batch["reference"].tolist())


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_a_pair_is_its_formula(name: str) -> None:
    objective, formula = CASES[name]
    found = terms_of(objective, pair_batch(range(3)))
    expected = sum(formula(*numbers_of(pair)) for pair in range(3))
    loss = found["odds_ratio_loss"] if name == "orpo" else found["loss"]
    assert loss == pytest.approx(expected, rel=1e-6)
    if name == "orpo":  # the cross-entropy of the chosen answers
        chosen = sum(numbers_of(pair)[0] for pair in range(3))
        assert found["sft_loss"] == pytest.approx(-chosen, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_sums_and_gradients_do_not_depend_on_micro_batches(name: str) -> None:
    objective, _ = CASES[name]
    whole = pair_batch(range(3))
    parts = [pair_batch(range(1), filler=True), pair_batch(range(1, 3))]
    sums = [objective.sums(*batch) for batch in (whole, *parts)]
    for of_whole, *of_parts in zip(*sums, strict=True):
        torch.testing.assert_close(of_whole, torch.stack(of_parts).sum())
    for one in sums:
        one[0].backward()
    gradients = [batch[0].grad for batch in (whole, *parts)]
    torch.testing.assert_close(gradients[0], torch.cat([g for g in gradients[1:] if g is not None]))


def test_chosen_answers_can_be_learned_beside_a_preference() -> None:
    plain, both = Dpo(beta=0.5), Dpo(beta=0.5, sft_weight=0.3)
    found, alone = terms_of(both, pair_batch(range(3))), terms_of(plain, pair_batch(range(3)))
    chosen = sum(numbers_of(pair)[0] for pair in range(3))
    assert found["sft_loss"] == pytest.approx(-chosen, rel=1e-6)
    assert found["preference_loss"] == alone.pop("loss")
    assert {name: found[name] for name in alone} == alone
    (term,) = (term for term in both.terms if term.name == "sft_loss")
    assert (term.divisor, term.coefficient) == ("chosen_tokens", 0.3)


def test_accuracy_counts_pairs_whose_chosen_answer_has_the_higher_reward() -> None:
    objective = Dpo(beta=0.5)
    found = terms_of(objective, pair_batch(range(3)))
    ratios = [(c - p, r - q) for c, r, _, _, p, q in map(numbers_of, range(3))]
    assert found["accuracy"] == sum(better > worse for better, worse in ratios)
    rewards = 0.5 * sum(better for better, _ in ratios)
    assert found["chosen_reward"] == pytest.approx(rewards, rel=1e-6)
    assert found["margin"] == pytest.approx(found["chosen_reward"] - found["rejected_reward"])


def test_a_model_that_equals_its_reference_has_an_accuracy_of_one_half() -> None:
    values, batch = pair_batch(range(3))
    numbers = batch["label_sequences"]
    batch["reference"] = torch.zeros(6).double().index_add(0, numbers, values.detach().double())
    found = terms_of(Dpo(), (values, batch))
    assert (found["accuracy"], found["margin"]) == (1.5, 0)
    assert found["loss"] == pytest.approx(3 * math.log(2))
