"""Dropout whose masks belong to tokens: the same wherever, and as good as drawn."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import MAKERS, TOKENS, build, lora_recipe, train
from torch import Tensor
from transformers_models import MODELS, MORE_MODELS, NEWEST, make_transformers_model

from ftkit.models import token_numbers
from ftkit.models.pretrained.base_model import open_base
from ftkit.models.token_numbers import TokenDropout, TokenNumbers, hashes

CPU = torch.device("cpu")
WIDTH = 333
"""Not a multiple of the numbers that a CPU multiplies at once."""
LENGTHS = {3: 40, 8: 700, 11: 25}
"""Tokens of samples, by their numbers."""


def batch_of(*numbers: int, padding_free: bool = True) -> dict[str, Any]:
    """What is read of a micro-batch of samples; -1 is a filler."""
    lengths = tuple(LENGTHS.get(number, 1) for number in numbers)
    shape = (1, sum(lengths)) if padding_free else (len(lengths), max(lengths))
    return {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "lengths": lengths,
        "first": 0,
        "sequence_lengths": lengths if padding_free else None,
        "numbers": numbers,
    }


def mask_of(
    *numbers: int,
    p: float = 0.5,
    name: str = "layer",
    seed: int = 1,
    step: int = 4,
    padding_free: bool = True,
) -> Tensor:
    """[batch, sequence, WIDTH], which numbers of an input stay."""
    tokens = TokenNumbers()
    dropout = TokenDropout(p, name, WIDTH, tokens)
    tokens.prepare(seed, CPU)
    batch = batch_of(*numbers, padding_free=padding_free)
    with tokens.of(step, batch):
        return dropout.kept(torch.empty(*batch["input_ids"].shape, WIDTH))


@pytest.mark.parametrize("number", LENGTHS)
def test_a_sample_has_the_same_mask_alone_in_a_row_and_padded(number: int) -> None:
    alone = mask_of(number)[0]
    row = mask_of(11, -1, 3, 8)[0].split([25, 1, 40, 700])
    assert row[{11: 0, 3: 2, 8: 3}[number]].equal(alone)
    padded = mask_of(-1, 3, 11, 8, padding_free=False)
    assert padded[{3: 1, 11: 2, 8: 3}[number], : len(alone)].equal(alone)


def test_a_mask_is_the_high_bits_of_products_of_32_bits_in_pieces_or_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every device, since integers know no rounding."""
    channels = hashes("1 dropout layer", WIDTH) | 1
    products = hashes("1 4 8", 700)[:, None].astype(np.uint64) * channels.astype(np.uint64)
    signed = (products & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    expected = torch.from_numpy(signed >= int(0.1 * 2**32) - 2**31)
    found = mask_of(8, p=0.1)[0]
    assert found.equal(expected)
    monkeypatch.setattr(token_numbers, "_AT_ONCE_ON_HOST", 1000)
    assert mask_of(8, p=0.1)[0].equal(expected)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5])
def test_masks_are_as_good_as_drawn(p: float) -> None:
    keys: list[dict[str, Any]] = [{}, {"name": "another"}, {"step": 5}, {"seed": 2}]
    # Of mean 0 and variance 1, each independent of the others.
    parts = [(mask_of(8, p=p, **k)[0].double() - (1 - p)) / math.sqrt(p * (1 - p)) for k in keys]
    rows, columns = parts[0].shape
    for one in parts:
        assert abs(float(one.sum())) < 4 * math.sqrt(one.numel())
        for sums in (one.sum(1) / math.sqrt(columns), one.sum(0) / math.sqrt(rows)):
            assert float(sums.std()) == pytest.approx(1, rel=0.15)
        for pairs, count in ((one @ one.t(), columns), (one.t() @ one, rows)):
            scaled = pairs / math.sqrt(count)
            apart = scaled[~torch.eye(len(scaled), dtype=torch.bool)]
            assert float(apart.std()) == pytest.approx(1, rel=0.03)
            assert float(apart.abs().max()) < 9
    for one, other in itertools.combinations(parts, 2):
        product = one * other
        assert abs(float(product.sum())) < 4 * math.sqrt(product.numel())
        for sums in (product.sum(1) / math.sqrt(columns), product.sum(0) / math.sqrt(rows)):
            assert float(sums.std()) == pytest.approx(1, rel=0.15)


def test_rows_that_are_chosen_keep_their_masks_and_unknown_ones_are_drawn() -> None:
    tokens = TokenNumbers()
    dropout = TokenDropout(0.5, "layer", WIDTH, tokens)
    tokens.prepare(1, CPU)
    x = torch.ones(65, WIDTH)
    chosen = torch.tensor([40, 3, 3, 64])
    with tokens.of(4, batch_of(3, 11)):
        whole = dropout(x)
        with tokens.within(tokens.at(chosen)):
            assert dropout(x[chosen]).equal(whole[chosen])
        assert dropout(x).equal(whole)
        assert sorted(set(whole.flatten().tolist())) == [0.0, 2.0]
        unknown = dropout(x[:7])
    assert 0.4 < float((unknown == 0).double().mean()) < 0.6
    assert not dropout(x).equal(whole), "outside of a micro-batch"
    dropout.eval()
    assert dropout(x) is x


FAMILIES = [
    *(("litgpt", name) for name in MAKERS),
    *(("transformers", name) for name in (*MODELS, *NEWEST, *MORE_MODELS)),
]
OFTEN = [("litgpt", "phi-3"), ("transformers", "qwen2_moe")]


@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        pytest.param(*one, marks=pytest.mark.slow if one in OFTEN else pytest.mark.matrix)
        for one in FAMILIES
    ],
)
def test_every_adapted_layer_of_a_family_knows_the_tokens_of_its_input(
    implementation: Any, name: str, tmp_path: Path
) -> None:
    place = tmp_path / "model"
    if implementation == "litgpt":
        made = MAKERS[name](place)
    else:
        made = make_transformers_model(place, name)
    base = open_base(str(made), implementation)
    recipe = lora_recipe(base, lora_dropout=0.3, lora_targets="all-linear")
    model = train(build(base, recipe)).train()
    model.body.tokens.prepare(1, CPU)

    def loss_of(numbers: dict[int, Tensor]) -> float:
        batch = {
            "input_ids": torch.stack(list(numbers.values())),
            "lengths": (12,) * len(numbers),
            "first": 0,
            "sequence_lengths": None,
            "numbers": tuple(numbers),
        }
        labels = torch.arange(12 * len(numbers))
        with model.body.tokens.of(1, batch), torch.no_grad():
            return float(model(batch["input_ids"], labels, labels % 12 + 2))

    one, other = TOKENS % 90 + 2
    both = loss_of({4: one, 9: other})
    assert both == pytest.approx(loss_of({4: one}) + loss_of({9: other}), rel=1e-5)
    assert both != pytest.approx(loss_of({5: one, 9: other}), rel=1e-6)
