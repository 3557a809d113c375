"""What an objective of one's own may leave out: each mistake is named before a step is lost."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from messages import message_of, says
from torch import Tensor

from ftkit.data.rendering import Rendered
from ftkit.data.samples.sample_set import Samples, SampleSet
from ftkit.models.loss import HeadOutput, LogProbabilities
from ftkit.objectives.objective import (
    Amounts,
    Batch,
    Objective,
    Term,
    check_observing,
    check_terms,
    checked_amounts,
    checked_observed,
    checked_sums,
)

SAMPLES = SampleSet.of([Rendered([1, 2, 3], ((1, 3),))] * 4)
LOSS = Term(name="loss", divisor="label_tokens")
OTHER = Term(name="other", divisor="label_tokens", coefficient=None)


class Own(Objective):
    """Terms, amounts and sums as they are given."""

    def __init__(self, terms: Any = (LOSS,), amounts: Any = None, sums: Any = None) -> None:
        self.terms, self._amounts, self._sums = terms, amounts, sums

    def amounts(self, samples: Samples) -> Amounts:
        counts: Amounts = {"label_tokens": samples.label_counts}
        return counts if self._amounts is None else self._amounts

    def output(self, batch: Batch) -> HeadOutput:
        return LogProbabilities()

    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        found: Sequence[Tensor] = (output.sum(),) if self._sums is None else self._sums
        return found


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ((), ("Own.terms is ()", "ftkit.Term(")),
        (("loss",), ("Own.terms", "'loss'", "ftkit.Term(")),
        ((LOSS, LOSS), ("Own.terms", "loss, loss", "Rename")),
        ((OTHER,), ("Own.terms", "coefficient=None")),
    ],
)
def test_terms_make_a_loss(terms: Any, words: tuple[str, ...]) -> None:
    assert says(message_of(check_terms, Own(terms)), *words)
    check_terms(Own((LOSS, OTHER)))


class Observer(Own):
    """Observes the sequences of a step."""

    def observed(self, output: Tensor, batch: Batch) -> Tensor:
        return output

    def of_step(self, observed: Tensor) -> Tensor:
        return observed.mean()


@pytest.mark.parametrize(
    ("kind", "observes", "words"),
    [
        (Own, "own", ("Own.observes is own", "has no observed")),
        (Observer, "joined", ("Observer.observes is joined", "has no joined")),
        (Observer, "all", ("Observer.observes is 'all'", "own, joined or None")),
    ],
)
def test_who_observes_steps_says_what(
    kind: type[Own], observes: Any, words: tuple[str, ...]
) -> None:
    objective = kind()
    check_observing(objective)
    objective.observes = observes
    assert says(message_of(check_observing, objective), *words)
    well = Observer()
    well.observes = "own"
    check_observing(well)


@pytest.mark.parametrize("rows", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(()), [1.0, 2, 3]])
def test_each_sequence_has_a_row_of_what_is_observed(rows: Any) -> None:
    batch: Batch = {"lengths": (1, 1, 1)}
    message = message_of(checked_observed, Observer(), rows, batch)
    assert says(message, "Observer.observed", "3 rows")
    assert checked_observed(Observer(), torch.zeros(3, 2), batch).shape == (3, 2)


@pytest.mark.parametrize(
    ("amounts", "words"),
    [
        ({}, ("Own.amounts", "label_tokens", "missing", "nothing")),
        ({"tokens": np.ones(4)}, ("Own.amounts", "label_tokens", "missing", "tokens")),
        ({"label_tokens": 8}, ("Own.amounts", "label_tokens", "()", "4 numbers")),
        ({"label_tokens": np.ones((4, 2))}, ("Own.amounts", "(4, 2)", "4 numbers")),
    ],
)
def test_every_divisor_is_a_number_of_each_sample(amounts: Any, words: tuple[str, ...]) -> None:
    assert says(message_of(checked_amounts, Own(amounts=amounts), SAMPLES), *words)
    assert checked_amounts(Own(), SAMPLES)["label_tokens"].tolist() == [2] * 4


@pytest.mark.parametrize(
    ("sums", "words"),
    [
        (torch.tensor(1.0), ("Own.sums", "no tuple", "terms are: loss")),
        ((torch.tensor(1.0),) * 2, ("Own.sums returns 2", "terms are: loss")),
        ((1.0,), ("Own.sums", "loss", "float", "without .item()")),
        ((torch.ones(3),), ("Own.sums", "loss", "[3]")),
    ],
)
def test_there_is_one_sum_for_each_term(sums: Any, words: tuple[str, ...]) -> None:
    assert says(message_of(checked_sums, Own(sums=sums), torch.ones(3), {}), *words)
    assert checked_sums(Own(), torch.ones(3), {})[0] == 3
