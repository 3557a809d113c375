"""Embedding models: vectors of queries and documents, learned by telling the right document."""

import copy
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ftkit.data.samples.layout import IntArray
from ftkit.data.samples.sample_set import Sample, Samples, ScoredSamples
from ftkit.errors import UserError
from ftkit.models.loss import HeadOutput, Hidden
from ftkit.objectives.objective import (
    EXCHANGE,
    LOSS,
    OF_STEP,
    Amounts,
    Batch,
    Objective,
    Term,
)
from ftkit.recipe.objectives import Pooling, ScoreLabels

QUERIES = "queries"
KEY_SIZE = 4
"""Numbers of the key of a sequence, each of 16 bits, which float32 holds exactly."""
_PRODUCTS_AT_ONCE = 2**24
"""Products of vectors held at once (64 MiB in float32), and as many of each kind made of them."""


class OfStep(NamedTuple):
    """What is known of a whole step before its first backward pass."""

    values: Tensor
    """[queries + 1, terms] float32; the last row, of fillers, is 0."""
    gradients: Tensor | None
    """[sequences + 1, width] float32, of the summed loss by each vector; None: not needed."""


class Embed(Objective):
    """Vectors of texts, of which those of a query and its document are to be alike.

    The loss of a query is the cross-entropy of its document among all documents of the step, with
    the cosines of their vectors over the temperature as logits (InfoNCE, van den Oord et al. 2018,
    https://arxiv.org/abs/1807.03748; `MultipleNegativesRankingLoss` of sentence-transformers). That
    of a step is the mean over its queries. Documents that repeat the query's own, or answer an
    equal query, are left out.
    """

    scores = ScoreLabels(names=(), pooling="last")
    observes = "own"
    shares_sequences = True
    of_sequences = True
    target_size = KEY_SIZE
    terms = (
        Term(name=LOSS, divisor=QUERIES),
        Term(name="recall_at_1", divisor=QUERIES, coefficient=None, is_share=True),
        Term(name="recall_at_10", divisor=QUERIES, coefficient=None, is_share=True),
        Term(name="mrr", divisor=QUERIES, coefficient=None),
    )

    def __init__(
        self,
        *,
        negatives: int,
        temperature: float = 0.05,
        pooling: Pooling = "last",
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Choose the shape of samples, and what vectors are.

        Args:
            negatives: documents of each sample that do not answer its query.
            temperature: that cosines are divided by.
            pooling: whether the hidden state of the last token is the vector, or the mean over all.
            sizes: of the beginnings of vectors whose losses are added to that of the whole ones.
        """
        self._sequences, self._temperature = 2 + negatives, temperature
        self._pooling, self._sizes = pooling, tuple(sizes or ())
        self._trains = True

    @property
    def validated(self) -> Self:
        made = copy.copy(self)
        made._trains = False
        return made

    def view(self, samples: Samples) -> Samples:
        return PooledSamples(samples, self._pooling)

    def amounts(self, samples: Samples) -> Amounts:
        return {QUERIES: np.ones(len(samples), dtype=np.int64)}

    def output(self, batch: Batch) -> HeadOutput:
        return Hidden()

    def observed(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the vector and the key of each sequence."""
        vectors = pooled(output, batch, self._pooling)
        width = vectors.shape[1]
        if self._sizes and max(self._sizes) >= width:
            raise UserError(
                f"objective.sizes has {max(self._sizes)}, but vectors of the model have {width:,} "
                f"numbers, of which sizes are beginnings. Try --objective.sizes '[{width // 2}]'."
            )
        return torch.cat([vectors, batch["targets"].to(vectors.dtype)], dim=1)

    @torch.no_grad()
    def of_step(self, observed: Tensor) -> OfStep:
        vectors, digits = observed.split([observed.shape[1] - KEY_SIZE, KEY_SIZE], dim=1)
        factors = torch.tensor([1 << 16 * n for n in range(KEY_SIZE)], device=observed.device)
        keys = (digits.long() * factors).sum(1).view(-1, self._sequences)
        vectors = vectors.view(-1, self._sequences, vectors.shape[1])
        if self._trains:
            vectors = vectors.clone().requires_grad_()
        ranks: Tensor | None = None
        losses = vectors.new_zeros(len(vectors))
        for size in (vectors.shape[2], *self._sizes):
            added, found = self._compared(vectors, keys, size, ranks=ranks is None)
            losses += added
            ranks = found if ranks is None else ranks
        assert ranks is not None
        values = torch.stack([losses, ranks <= 1, ranks <= 10, 1 / ranks], dim=1)
        gradients = vectors.grad
        if gradients is not None:
            gradients = F.pad(gradients.flatten(0, 1), (0, 0, 0, 1))
        return OfStep(F.pad(values.detach(), (0, 0, 0, 1)), gradients)

    def _compared(
        self, vectors: Tensor, keys: Tensor, size: int, *, ranks: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Losses of queries by the beginnings of vectors, whose gradients are added up.

        Args:
            vectors: [samples, sequences, width] float32.
            keys: [samples, sequences] int64.
            size: of the beginnings.
            ranks: whether ranks are computed, too.

        Returns:
            [samples] float32, and [samples] float32: the rank of the right document of each.
        """
        count = len(vectors)
        with torch.set_grad_enabled(self._trains):
            unit = F.normalize(vectors[..., :size], dim=-1)
            # The documents that answer come first, in the order of their queries.
            sides = unit[:, 0], unit[:, 1:].transpose(0, 1).flatten(0, 1)
            queries, documents = (one.detach().requires_grad_(self._trains) for one in sides)
            of_documents = keys[:, 1:].t().flatten()
            losses, places = [], []
            at_once = max(1, _PRODUCTS_AT_ONCE // len(documents))
            for some in torch.arange(count, device=keys.device).split(at_once):
                cosines = queries[some] @ documents.t()
                with torch.no_grad():
                    repeats = keys[some, 1:2] == of_documents
                    repeats[:, :count] |= keys[some, :1] == keys[:, 0]
                    repeats[torch.arange(len(some), device=some.device), some] = False
                logits = (cosines / self._temperature).masked_fill(repeats, -torch.inf)
                loss = F.cross_entropy(logits, some, reduction="none")
                if self._trains:
                    loss.sum().backward()
                losses.append(loss.detach())
                if ranks:
                    own = logits.gather(1, some[:, None])
                    places.append((logits >= own).sum(1).float())
        if self._trains:
            torch.autograd.backward(sides, [queries.grad, documents.grad])
        return torch.cat(losses), torch.cat(places) if places else None

    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        of_step: OfStep = batch[OF_STEP]
        places = torch.tensor(batch["places"], device=output.device)
        queries = torch.div(places[:: self._sequences], self._sequences, rounding_mode="floor")
        loss, *others = of_step.values[queries].sum(0)
        if of_step.gradients is not None:
            # It has the gradients of the loss with respect to the vectors, and the value 0.
            products = (pooled(output, batch, self._pooling) * of_step.gradients[places]).sum()
            loss = loss + (products - products.detach())
        return loss, *others


def pooled(output: Tensor, batch: Batch, pooling: Pooling) -> Tensor:
    """Vector of each sequence: the sum or mean of the hidden states at its labels.

    Args:
        output: [labels, width], of `Hidden`.
        batch: the micro-batch.
        pooling: what samples of `PooledSamples` have labels for.

    Returns:
        [sequences, width] float32.
    """
    count = len(batch["lengths"])
    # One more: labels that only pad the micro-batch are of no sequence.
    sums = output.new_zeros(count + 1, output.shape[1], dtype=torch.float32)
    sums = sums.index_add(0, batch["label_sequences"], output.float())[:count]
    if (exchange := batch.get(EXCHANGE)) is not None:
        sums = exchange.summed(sums)
    if pooling != "mean":
        return sums
    return sums / torch.tensor(batch["lengths"], device=sums.device)[:, None]


class PooledSamples(ScoredSamples):
    """Samples of which the model is given whole sequences, with labels where they are pooled.

    The target of a sequence is its key: equal sequences have equal ones.
    """

    def __init__(self, samples: Samples, pooling: Pooling) -> None:
        """Wrap samples without copying them."""
        super().__init__(samples)
        self._pooling = pooling

    def sequences(self, index: int) -> tuple[Sample, ...]:
        return tuple(pooled_sample(one, self._pooling) for one in self._samples.sequences(index))

    @cached_property
    def label_counts_by_sequence(self) -> IntArray:
        if self._pooling == "mean":
            return self.lengths_by_sequence
        return super().label_counts_by_sequence

    @cached_property
    def targets(self) -> npt.NDArray[np.float32]:
        """[samples, numbers], the keys of the queries."""
        made = np.empty((len(self), KEY_SIZE), dtype=np.float32)
        for index, row in enumerate(made):
            row[:] = key_of(self._samples[index].ids)
        return made


def pooled_sample(sample: Sample, pooling: Pooling) -> Sample:
    """Return a whole sequence, with labels where it is pooled, and a token that is never read."""
    length = len(sample.ids)
    ids = np.append(sample.ids, sample.ids[-1:])
    trained = np.array([[1 if pooling == "mean" else length, length + 1]], dtype=np.int32)
    return Sample(ids, trained, target=key_of(sample.ids))


def key_of(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return the key of a sequence, by its tokens alone: [KEY_SIZE], each a number of 16 bits."""
    content = np.ascontiguousarray(ids, dtype="<i4").data
    digest = hashlib.blake2b(content, digest_size=2 * KEY_SIZE).digest()
    return np.frombuffer(digest, dtype="<u2").astype(np.float32)
