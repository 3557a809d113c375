"""The loss of answers with labels: by its formula, and the same however a step is split."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ftkit.data.rendering import Rendered
from ftkit.data.samples.layout import RankLayout
from ftkit.data.samples.loader import train_batches, validation_loader
from ftkit.data.samples.sample_set import Sample, SampleSet
from ftkit.data.samples.sampler import ElasticOrder, EpochOrder, Position
from ftkit.extensions.preference.kto import Kto, mismatched
from ftkit.objectives.objective import OF_STEP

RATIOS = (1.5, -0.5, 0.25, 2.0)
"""Log-probability of each answer, relative to the reference."""
LABELS = (True, False, True, False)


def example_batch(examples: range, point: float, *, filler: bool = False) -> tuple[Tensor, Any]:
    """Log-probabilities of some answers of two tokens, and what a micro-batch says of them."""
    values = torch.tensor([RATIOS[i] - 3 for i in examples]).repeat_interleave(2) / 2
    real = [True] * len(examples) + [False] * filler
    return values.requires_grad_(), {
        "lengths": (4,) * len(real),
        "label_sequences": torch.arange(len(examples)).repeat_interleave(2),
        "is_real_sequence": torch.tensor(real),
        "targets": torch.tensor([[float(LABELS[i])] for i in examples] + [[0.0]] * filler),
        "reference": torch.tensor([-3.0] * len(examples) + [0.0] * filler, dtype=torch.float64),
        OF_STEP: torch.tensor(point, dtype=torch.float64).clamp(min=0),
    }


def values(objective: Kto, batch: tuple[Tensor, Any]) -> dict[str, float]:
    names = (term.name for term in objective.terms)
    return {n: value.item() for n, value in zip(names, objective.sums(*batch), strict=True)}


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("point", [0.4, -0.7, 0.0])
def test_the_loss_of_an_example_is_its_formula(point: float) -> None:
    objective = Kto(beta=0.5, desirable_weight=2.0, undesirable_weight=0.5)
    found = values(objective, example_batch(range(4), point))
    z = max(point, 0)  # the divergence of two models is never below 0
    of_desirable = (2 * (1 - sigma(0.5 * (r - z))) for r in (1.5, 0.25))
    of_others = (0.5 * (1 - sigma(0.5 * (z - r))) for r in (-0.5, 2.0))
    assert found["loss"] == pytest.approx(sum(of_desirable) + sum(of_others), rel=1e-6)
    assert found["chosen_reward"] == pytest.approx(0.5 * (1.5 + 0.25), rel=1e-6)
    assert found["rejected_reward"] == pytest.approx(0.5 * (-0.5 + 2.0), rel=1e-6)
    assert found["reference_point"] == pytest.approx(4 * z)
    on_their_side = [z < 1.5, z > -0.5, z < 0.25, z > 2.0]
    assert found["accuracy"] == sum(on_their_side)


def test_sums_and_gradients_do_not_depend_on_micro_batches() -> None:
    objective = Kto(beta=0.5, desirable_weight=1.3)
    whole = example_batch(range(4), 0.4)
    parts = [example_batch(range(1), 0.4, filler=True), example_batch(range(1, 4), 0.4)]
    sums = [objective.sums(*batch) for batch in (whole, *parts)]
    for of_whole, *of_parts in zip(*sums, strict=True):
        torch.testing.assert_close(of_whole, torch.stack(of_parts).sum())
    for one in sums:
        one[0].backward()
    gradients = [batch[0].grad for batch in (whole, *parts)]
    torch.testing.assert_close(gradients[0], torch.cat([g for g in gradients[1:] if g is not None]))


def test_the_reference_point_is_the_mean_over_mismatched_sequences() -> None:
    objective = Kto()
    batches = [example_batch(range(1), 0, filler=True), example_batch(range(1, 4), 0)]
    found = torch.cat([objective.observed(values, batch) for values, batch in batches])
    is_real = torch.cat([batch["is_real_sequence"] for _, batch in batches])
    assert found[is_real, 0].tolist() == pytest.approx(RATIOS)
    assert objective.of_step(found[is_real]).item() == pytest.approx(sum(RATIOS) / 4)
    assert objective.of_step(-found[is_real]).item() == 0


def test_a_mismatched_sequence_has_the_prompt_of_one_and_the_answer_of_another() -> None:
    one = Sample(np.arange(6, dtype=np.int32), np.array([[4, 6]], dtype=np.int32))
    other = Sample(np.arange(10, 19, dtype=np.int32), np.array([[2, 4], [6, 9]], dtype=np.int32))
    found = mismatched(one, other, 20)
    assert found.ids.tolist() == [0, 1, 2, 3, *range(12, 19)]
    assert found.trained.tolist() == [[4, 6], [8, 11]]
    cut = mismatched(one, other, 9)
    assert cut.ids.tolist() == [0, 1, 2, 3, *range(12, 17)]
    assert cut.trained.tolist() == [[4, 6], [8, 9]]
    assert mismatched(other, one, 2).trained.tolist() == [], "no room for an answer"


def samples_with_labels(count: int) -> SampleSet:
    """Their prompts and answers are of different lengths and name the sample."""
    return SampleSet.of(
        Rendered([i] * (2 + i % 3) + [100 + i] * (1 + i % 4), ((2 + i % 3, 3 + i % 3 + i % 4),),
                 target=(i % 2 == 0,))
        for i in range(count)
    )  # fmt: skip


def shifted(batch: dict[str, Any]) -> list[tuple[int, int]]:
    """Samples whose prompt, and whose answer, a micro-batch of rows has beside each other."""
    found: list[Any] = []
    batch = batch["joined"]
    for ids in batch["input_ids"].flatten().split(list(batch["lengths"])):
        if batch["is_real_sequence"][len(found)]:
            found.append(int(ids[0]))
    answers: dict[int, int] = {}
    for sequence, label in zip(
        batch["label_sequences"].tolist(), batch["labels"].tolist(), strict=True
    ):
        answers[sequence] = label - 100
    return [(prompt, answers[i]) for i, prompt in enumerate(found)]


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (1, 2), (1, 5), (2, 3), (4, 1)])
def test_answers_are_shifted_by_one_in_the_order_of_the_step(
    ranks: int, size: int, padding_free: bool
) -> None:
    samples, objective = samples_with_labels(13), Kto()
    expected: list[Counter[tuple[int, int]]] = []
    found: list[Counter[tuple[int, int]]] = []
    for rank in range(ranks):
        order = ElasticOrder(
            samples.widths(padding_free=padding_free),
            objective.amounts(samples),
            epochs=EpochOrder([13], [13], 7),
            global_batch_size=5,
            total_samples=26,
            layout=RankLayout(
                micro_batch_size=size, padding_free=padding_free, rank=rank, world_size=ranks
            ),
            start=Position(),
        )
        step = 0
        for batch in train_batches(samples, order, 0, order.total_steps, joined=mismatched):
            if step == len(found):
                found.append(Counter())
                of_step = order.samples(step).tolist()
                expected.append(Counter(zip(of_step, [of_step[-1], *of_step[:-1]], strict=True)))
            if padding_free:
                found[step].update(shifted(batch))
            else:
                real = batch["joined"]["is_real_sequence"].sum()
                found[step].update([(-1, -1)] * int(real))
            step += batch["is_last_of_step"]
    if padding_free:
        assert found == expected
    else:
        assert [one.total() for one in found] == [one.total() for one in expected]


def test_answers_of_validation_are_shifted_by_one_in_its_order() -> None:
    samples, found = samples_with_labels(7), []
    layout = RankLayout(micro_batch_size=2, padding_free=True)
    amounts = Kto().amounts(samples)
    for batch in validation_loader(samples, amounts, 6, layout, joined=mismatched):
        found += shifted(batch)
    assert sorted(found) == [(i, (i - 1) % 6) for i in range(6)]


def test_amounts_count_the_examples_of_each_label() -> None:
    amounts = Kto().amounts(samples_with_labels(5))
    assert {name: one.tolist() for name, one in amounts.items()} == {
        "examples": [1, 1, 1, 1, 1],
        "desirable": [1, 0, 1, 0, 1],
        "undesirable": [0, 1, 0, 1, 0],
    }
