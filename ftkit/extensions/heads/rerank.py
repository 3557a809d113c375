"""Rerankers: a score of a query with a document, the higher the better the document answers it."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ftkit.data.samples.sample_set import Samples, ScoredSamples
from ftkit.models.loss import HeadOutput, Scores
from ftkit.objectives.objective import LOSS, Amounts, Batch, Objective, Term, sequence_sums

RerankLoss = Literal["lists", "pairs", "points"]
QUERIES, DOCUMENTS = "queries", "documents"
_BEST = 10
"""Ranks that count for the discounted gain."""


class Rerank(Objective):
    """A head that gives a query with a document a score at the last token.

    A query has documents, of which the first answers it. Its loss is one of:

    - lists: the cross-entropy of the softmax of all scores, as of the first document. Cao et al.
      2007 (ListNet), https://doi.org/10.1145/1273496.1273513, with one relevant document.
    - pairs: the mean of -log s(score of the first - score of another) over the others. Burges et
      al. 2005 (RankNet), https://doi.org/10.1145/1102351.1102363.
    - points: the binary cross-entropy of each score, with the label 1 for the first document and 0
      for others, or that of its record.

    The loss of a step is the mean over its queries, of points over its documents.
    """

    shares_sequences = True
    of_sequences = True

    def __init__(self, *, loss: RerankLoss = "lists", negatives: int | None = None) -> None:
        """Choose the loss.

        Args:
            loss: its kind.
            negatives: documents of a query that do not answer it; 0: one document with a label.
        """
        assert negatives is not None, "see ftkit.data.sources.settled"
        self._loss, self._documents = loss, 1 + negatives
        self.terms = (Term(name=LOSS, divisor=DOCUMENTS if loss == "points" else QUERIES),)
        names = ("accuracy", "mrr", f"ndcg_at_{_BEST}") if negatives else ("accuracy",)
        self.terms += tuple(
            Term(name=name, divisor=QUERIES, coefficient=None, is_share=name == "accuracy")
            for name in names
        )

    def view(self, samples: Samples) -> Samples:
        return ScoredSamples(samples)

    def amounts(self, samples: Samples) -> Amounts:
        queries = np.ones(len(samples), dtype=np.int64)
        return {QUERIES: queries, DOCUMENTS: queries * self._documents}

    def output(self, batch: Batch) -> HeadOutput:
        return Scores()

    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        # A sequence has one label, at its last token. Fillers have none, so their scores are 0.
        scores = sequence_sums(output, batch).view(-1, self._documents)
        real = batch["is_real_sequence"].view(-1, self._documents)
        is_query = real[:, 0]
        if self._documents == 1:
            targets = batch["targets"].to(scores.dtype)
            losses = F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
            right = (scores.detach() > 0) == (targets > 0.5)
            return (losses * real).sum(), (right * real).sum().to(scores.dtype)
        ranks = ranks_of_first(scores.detach())
        # A tie is half right: what a coin would get, not what a broken model would.
        right = (ranks == 1).to(scores.dtype) + 0.5 * (ranks == 1.5)
        measures = (right, 1 / ranks, gain_of(ranks))
        first, others = scores[:, :1], scores[:, 1:]
        if self._loss == "points":
            targets = torch.zeros_like(scores)
            targets[:, 0] = 1
            losses = F.binary_cross_entropy_with_logits(scores, targets, reduction="none").sum(1)
        elif self._loss == "pairs":
            losses = -F.logsigmoid(first - others).mean(1)
        else:
            losses = -scores.log_softmax(1)[:, 0]
        return tuple((values * is_query).sum() for values in (losses, *measures))


def ranks_of_first(scores: Tensor) -> Tensor:
    """Rank of the first document of each query among all, from 1.

    Ties count as half: what is as high as the first is before it in half of all orders.

    Args:
        scores: [queries, documents].

    Returns:
        [queries], in the dtype of the scores.
    """
    first, others = scores[:, :1], scores[:, 1:]
    higher = (others > first).sum(1) + 0.5 * (others == first).sum(1)
    return (1 + higher).to(scores.dtype)


def gain_of(ranks: Tensor) -> Tensor:
    """Normalised discounted gain of each query, of one document that answers it.

    Järvelin and Kekäläinen 2002, https://doi.org/10.1145/582415.582418, with base 2.

    Args:
        ranks: [queries], from 1.
    """
    return (ranks <= _BEST) / torch.log2(1 + ranks)
