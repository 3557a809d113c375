"""NEFTune: noise that belongs to a sample, wherever and beside whatever it is computed."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch import Tensor

from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import Sample
from ftkit.models.bodies.embedding_noise import EmbeddingNoise
from ftkit.models.token_numbers import TokenNumbers

WIDTH, ALPHA = 64, 5.0
LENGTHS = {3: 40, 8: 7, 11: 25}
"""Input tokens of samples, by their numbers."""


def sample_of(tokens: int) -> Sample:
    return Sample(np.ones(tokens, dtype=np.int32), np.array([[1, 2]], dtype=np.int32))


def batch_of(*numbers: int, padding_free: bool = True) -> dict[str, Any]:
    """A micro-batch of samples; -1 is a filler."""
    samples = [None if n < 0 else sample_of(LENGTHS[n] + 1) for n in numbers]
    return collate(samples, {"label_tokens": 9}, padding_free=padding_free, numbers=numbers)


def noisy(embedding: nn.Module, seed: int = 1) -> TokenNumbers:
    """Numbers of the tokens whose embeddings get noise."""
    tokens = TokenNumbers()
    EmbeddingNoise(embedding, ALPHA, tokens)
    tokens.prepare(seed, torch.device("cpu"))
    return tokens


def noise_of(*numbers: int, step: int = 4, seed: int = 1, padding_free: bool = True) -> Tensor:
    """[batch, sequence, width], what is added to embeddings that are all 0."""
    embedding = nn.Embedding(2, WIDTH)
    nn.init.zeros_(embedding.weight)
    tokens = noisy(embedding, seed)
    batch = batch_of(*numbers, padding_free=padding_free)
    with tokens.of(step, batch):
        found: Tensor = embedding(batch["input_ids"]).detach()
    assert not embedding(batch["input_ids"]).any(), "outside there is none, as in validation"
    return found


@pytest.mark.parametrize("number", LENGTHS)
def test_a_sample_has_the_same_noise_alone_in_a_row_and_padded(number: int) -> None:
    alone = noise_of(number)[0]
    row = noise_of(11, -1, 3, 8)[0].split([25, 1, 40, 7])
    assert row[{11: 0, 3: 2, 8: 3}[number]].equal(alone)
    padded = noise_of(-1, 3, 11, 8, padding_free=False)
    line = padded[{3: 1, 11: 2, 8: 3}[number]]
    assert line[: len(alone)].equal(alone)
    assert not line[len(alone) :].any() and not padded[0].any() and not row[1].any()


@pytest.mark.parametrize("number", LENGTHS)
def test_its_size_follows_from_the_tokens_of_the_sample_and_the_width(number: int) -> None:
    found = noise_of(number)
    most = ALPHA / math.sqrt(LENGTHS[number] * WIDTH)
    assert 0.9 * most < float(found.abs().max()) <= most
    # What a uniform distribution has.
    assert float(found.std()) == pytest.approx(most / math.sqrt(3), rel=0.1)
    assert float(found.mean()) == pytest.approx(0, abs=0.1 * most)


def test_each_number_is_another_and_neighbours_know_nothing_of_each_other() -> None:
    found = noise_of(3)[0] / (ALPHA / math.sqrt(40 * WIDTH))
    assert len(found.unique()) > 0.99 * found.numel()
    others = [noise_of(3, step=5), noise_of(3, seed=2)]
    pairs = [(found[1:], found[:-1]), (found[:, 1:], found[:, :-1])]
    pairs += [(found, other[0] / (ALPHA / math.sqrt(40 * WIDTH))) for other in others]
    pairs.append((found[:25], noise_of(11)[0] / (ALPHA / math.sqrt(25 * WIDTH))))
    for one, other in pairs:
        assert abs(float((one * other).mean())) < 4 / 3 / math.sqrt(one.numel()), "4 deviations"


def test_16_bit_embeddings_get_the_same_noise_rounded() -> None:
    embedding = nn.Embedding(2, WIDTH, dtype=torch.bfloat16)
    nn.init.zeros_(embedding.weight)
    tokens, batch = noisy(embedding), batch_of(3)
    with tokens.of(4, batch):
        found = embedding(batch["input_ids"])
    assert found.equal(noise_of(3).bfloat16())
