"""Pieces of a row: together they have what the whole row has, once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import Sample
from ftkit.models.bodies.embedding_noise import EmbeddingNoise
from ftkit.models.token_numbers import TokenDropout, TokenNumbers
from ftkit.recipe.mesh import WHOLE, Piece

ROWS = {"short and long": (1, 5, None, 2, 30), "a filler": (None,), "even": (8, 8), "odd": (9,)}
"""Input tokens of samples; None: a filler."""


def sample_of(tokens: int) -> Sample:
    """Of which some tokens in the middle, and the last one, are trained, with weights."""
    ids = np.arange(1, tokens + 2, dtype=np.int32)
    spans = [[max(1, tokens // 3), max(1, tokens // 2)], [tokens, tokens + 1]]
    return Sample(ids, np.array(spans, dtype=np.int32), weights=np.array([0.5, 2.0]))


def made(lengths: Sequence[int | None], piece: Piece, *, weighted: bool) -> dict[str, Any]:
    samples = [None if tokens is None else sample_of(tokens) for tokens in lengths]
    return collate(
        samples,
        {"label_tokens": 9},
        padding_free=True,
        piece=piece,
        weighted=weighted,
        numbers=[-1 if tokens is None else number for number, tokens in enumerate(lengths)],
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("row", ROWS)
def test_pieces_have_the_tokens_and_labels_of_the_row(row: str, count: int, weighted: bool) -> None:
    lengths = ROWS[row]
    whole = made(lengths, WHOLE, weighted=weighted)
    pieces = [made(lengths, Piece(index=i, count=count), weighted=weighted) for i in range(count)]
    size = whole["input_ids"].numel()
    assert len({piece["input_ids"].shape for piece in pieces}) == 1
    for key in ("input_ids", "is_real"):
        joined = torch.cat([piece[key] for piece in pieces], dim=1)
        assert joined[:, :size].equal(whole[key]) and not joined[:, size:].any()
    for key in ("labels", "label_sequences", *(["weights"] if weighted else [])):
        assert torch.cat([piece[key] for piece in pieces]).equal(whole[key])
    places = [piece["label_indices"] + piece["first"] for piece in pieces]
    assert torch.cat(places).equal(whole["label_indices"])
    for key in ("samples", "tokens", "label_tokens"):
        assert sum(piece[key] for piece in pieces) == whole[key]
    for piece in pieces:
        assert sum(piece["sequence_lengths"]) == count * piece["input_ids"].numel()
        for key in ("lengths", "numbers"):
            assert piece[key] == whole[key]
        for key in ("divisors", "is_real_sequence"):
            assert piece[key] == whole[key] if key == "divisors" else piece[key].equal(whole[key])
        assert piece["input_ids"].untyped_storage().nbytes() == 8 * piece["input_ids"].numel()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("row", ROWS)
def test_dropout_and_noise_are_those_of_the_whole_row(row: str, count: int) -> None:
    def drawn(piece: Piece) -> torch.Tensor:
        tokens, embedding = TokenNumbers(), nn.Embedding(99, 16)
        nn.init.zeros_(embedding.weight)
        dropout = TokenDropout(0.5, "layer", 16, tokens)
        EmbeddingNoise(embedding, 5.0, tokens)
        tokens.prepare(1, torch.device("cpu"))
        batch = made(ROWS[row], piece, weighted=False)
        with tokens.of(4, batch), torch.no_grad():
            noisy: torch.Tensor = embedding(batch["input_ids"])
            return torch.cat([noisy, dropout.kept(noisy)], dim=-1)

    whole = drawn(WHOLE)
    pieces = torch.cat([drawn(Piece(index=i, count=count)) for i in range(count)], dim=1)
    assert pieces[:, : whole.size(1)].equal(whole)
