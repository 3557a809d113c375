"""The loss of embedding models: by its formula, its gradients, and the same in any pieces."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import make_llama
from torch import Tensor

from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import Sample
from ftkit.extensions.heads import embed
from ftkit.extensions.heads.embed import KEY_SIZE, Embed, OfStep, key_of, pooled, pooled_sample
from ftkit.models.language_model import LanguageModel, outline, output_of, trainable
from ftkit.models.load_weights import Whole, fill
from ftkit.models.loss import Hidden
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.models.pretrained.recipe_model import base_for
from ftkit.objectives.objective import OF_STEP
from ftkit.objectives.step_loss import StepLoss, zeros_for
from ftkit.recipe.parsing import read_recipe

CPU = torch.device("cpu")
WIDTH = 12


def observed_of(vectors: Tensor, keys: Any) -> Tensor:
    """What `Embed.observed` returns for vectors and texts that a number stands for."""
    digits = [key_of(np.array([key], dtype=np.int32)) for key in np.ravel(keys)]
    return torch.cat([vectors.flatten(0, 1), torch.tensor(np.stack(digits))], dim=1)


def written_out(vectors: Tensor, *, scale: float = 20.0, sizes: tuple[int, ...] = (WIDTH,),
                left_out: tuple[tuple[int, int], ...] = ()) -> Tensor:  # fmt: skip
    """Losses as `MultipleNegativesRankingLoss` of sentence-transformers writes them.

    With `MatryoshkaLoss` for several sizes; the products `left_out` are (query, document).
    """
    total = torch.zeros(len(vectors))
    for size in sizes:
        unit = F.normalize(vectors[..., :size], dim=2)
        anchors, *documents = unit.unbind(1)
        scores = anchors @ torch.cat(documents).T * scale
        for place in left_out:
            scores[place] = -torch.inf
        total = total + F.cross_entropy(scores, torch.arange(len(anchors)), reduction="none")
    return total


def random_vectors(queries: int, negatives: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(queries, 2 + negatives, WIDTH, generator=generator, requires_grad=True)


@pytest.mark.parametrize("at_once", [1, 30, 2**24])
@pytest.mark.parametrize(
    ("negatives", "options", "formula"),
    [
        (0, {}, {}),
        (1, {}, {}),
        (3, {"temperature": 0.2}, {"scale": 5.0}),
        (1, {"sizes": [8, 3]}, {"sizes": (WIDTH, 8, 3)}),
    ],
)
def test_losses_and_gradients_are_those_of_the_formula(
    negatives: int,
    options: dict[str, Any],
    formula: dict[str, Any],
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embed, "_PRODUCTS_AT_ONCE", at_once)
    vectors = random_vectors(7, negatives)
    objective = Embed(negatives=negatives, **options)
    keys = np.arange(7 * (2 + negatives))
    found = objective.of_step(observed_of(vectors.detach(), keys))
    expected = written_out(vectors, **formula)
    expected.sum().backward()
    assert vectors.grad is not None and found.gradients is not None
    torch.testing.assert_close(found.values[:-1, 0], expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.gradients[:-1], vectors.grad.flatten(0, 1))
    assert not found.values[-1].any() and not found.gradients[-1].any(), "of fillers"
    validated = objective.validated.of_step(observed_of(vectors.detach(), keys))
    assert validated.gradients is None and torch.equal(validated.values, found.values)


@pytest.mark.parametrize(
    ("keys", "left_out"),
    [
        # query, document, negative of three samples
        ([[1, 10, 20], [2, 11, 21], [3, 12, 22]], ()),
        ([[1, 10, 20], [2, 10, 21], [3, 12, 22]], ((0, 1), (1, 0))),
        ([[1, 10, 20], [2, 11, 10], [3, 12, 22]], ((0, 4),)),
        ([[1, 10, 20], [2, 11, 21], [1, 12, 22]], ((0, 2), (2, 0))),
        ([[1, 10, 20], [2, 11, 21], [1, 10, 20]], ((0, 2), (2, 0))),
        ([[1, 10, 20], [2, 11, 1], [3, 2, 20]], ()),
    ],
    ids=["none", "document", "as negative", "query", "sample", "other roles"],
)
def test_documents_that_answer_too_are_left_out(
    keys: list[list[int]], left_out: tuple[tuple[int, int], ...]
) -> None:
    vectors = random_vectors(3, 1).detach()
    found = Embed(negatives=1).of_step(observed_of(vectors, keys))
    expected = written_out(vectors, left_out=left_out)
    torch.testing.assert_close(found.values[:-1, 0], expected)


def test_measures_are_of_the_rank_of_the_right_document() -> None:
    # The cosines of query 0 with documents 0 to 11 fall; the right one is the second best.
    angles = torch.linspace(0.1, 1.2, 12)
    documents = torch.stack([angles.cos(), angles.sin()], dim=1)
    queries = torch.tensor([[1.0, 0.0]]).repeat(12, 1)
    vectors = torch.stack([queries, documents], dim=1)
    vectors[5] = vectors[5, 1]  # an exact match
    vectors[7, 1] = vectors[6, 1]  # equally near as the right one, which does not count as found
    values = Embed(negatives=0).of_step(observed_of(vectors, np.arange(24))).values
    ranks = torch.tensor([1.0, 2, 3, 4, 5, 1, 8, 8, 9, 10, 11, 12])
    torch.testing.assert_close(values[:-1, 3], 1 / ranks)
    assert values[:-1, 1].tolist() == (ranks == 1).tolist()
    assert values[:-1, 2].tolist() == (ranks <= 10).tolist()


def batch_of(texts: list[np.ndarray[Any, Any] | None], pooling: Any, padding_free: bool) -> Any:
    nothing = np.empty((0, 2), dtype=np.int32)
    samples = [None if ids is None else pooled_sample(Sample(ids, nothing), pooling)
               for ids in texts]  # fmt: skip
    return collate(samples, {}, padding_free=padding_free, target_size=KEY_SIZE)


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_pooled_of_whole_texts(pooling: str, padding_free: bool) -> None:
    texts = [np.arange(1, n, dtype=np.int32) for n in (4, 2, 7)]
    batch = batch_of([*texts, None], pooling, padding_free)
    table = torch.randn(10, WIDTH)
    states = table[batch["input_ids"].flatten()]
    found = pooled(states[batch["label_indices"]], batch, pooling)
    for ids, vector in zip(texts, found, strict=False):
        of_tokens = table[torch.tensor(ids)]
        expected = of_tokens[-1] if pooling == "last" else of_tokens.mean(0)
        torch.testing.assert_close(vector, expected)
    assert not found[3].any(), "a filler"
    for ids, target in zip(texts, batch["targets"], strict=False):
        assert target.tolist() == key_of(ids).tolist() and len({*target.tolist()}) > 1


def test_a_micro_batch_has_the_losses_of_its_queries_and_the_gradients_of_its_texts() -> None:
    objective = Embed(negatives=1)
    texts = [np.array([number, 7], dtype=np.int32) for number in range(9)]
    keys = np.arange(9).reshape(3, 3)
    vectors = random_vectors(3, 1)
    of_step = objective.of_step(observed_of(vectors.detach(), keys))
    assert isinstance(of_step, OfStep)
    losses = []
    # The last sample first, then a filler and the two others.
    for places in ((6, 7, 8), (9, 9, 9, 0, 1, 2, 3, 4, 5)):
        batch = batch_of([None if p == 9 else texts[p] for p in places], "last", True)
        batch |= {"places": places, OF_STEP: of_step}
        output = vectors.flatten(0, 1)[[p for p in places if p < 9]]
        loss, *_ = objective.sums(output, batch)
        loss.backward()
        losses.append(loss.item())
    found = vectors.grad
    plain = vectors.detach().clone().requires_grad_()
    expected = written_out(plain)
    expected.sum().backward()
    assert losses == pytest.approx([expected[2].item(), expected[:2].sum().item()], rel=1e-6)
    torch.testing.assert_close(found, plain.grad)


def texts_of(count: int) -> list[np.ndarray[Any, Any]]:
    """Texts of different lengths: queries, documents and negatives in turn."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 9, size=count).tolist()
    return [rng.integers(3, 300, size=length, dtype=np.int32) for length in lengths]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return open_base(str(make_llama(tmp_path_factory.mktemp("base"))))


def adapted(base: BaseModel, dropout: float) -> LanguageModel:
    """A model with an adapter that drops some of its inputs, and has learned something."""
    keys = {
        "checkpoint_dir": base.name,
        "lora_dropout": str(dropout),
        "lora_mlp": "true",
        "objective": "embed",
        "objective.negatives": "1",
    }
    recipe = read_recipe([], list(keys.items()), method="lora")
    scored = base_for(base, recipe)
    model = outline(scored, recipe, torch.float32)
    model.kernel = "cpu"
    model.routing = model.body.watch_routing(None)
    fill(model, scored, sharding=Whole(), device=CPU, rope_length=16, seed=0, progress=nothing)
    torch.manual_seed(1)
    for parameter in trainable(model):
        parameter.data.normal_(std=0.1)
    model.body.tokens.prepare(0, CPU)
    return model.train()


def nothing(*_: object) -> None:
    """Nobody watches."""


@pytest.mark.parametrize(
    ("dropout", "pooling", "padding_free"),
    [(0.0, "last", True), (0.1, "mean", True), (0.1, "last", False)],
)
def test_gradients_are_those_of_one_undivided_pass(
    dropout: float, pooling: Any, padding_free: bool, base: BaseModel
) -> None:
    model, objective, step = adapted(base, dropout), Embed(negatives=1, pooling=pooling), 4
    texts = texts_of(15)

    def batch_with(samples: tuple[int, ...]) -> dict[str, Any]:
        numbers = [3 * sample + place for sample in samples for place in range(3)]
        batch = batch_of([texts[number] for number in numbers], pooling, padding_free)
        divisors = {"queries": torch.tensor(5.0, dtype=torch.float64)}
        places = {"places": tuple(numbers), "numbers": tuple(numbers), "sequences_of_step": 15}
        return {**batch, **places, "divisors": divisors}

    whole = batch_with((0, 1, 2, 3, 4))
    with model.body.tokens.of(step, whole):
        vectors = pooled(output_of(model, whole, Hidden()), whole, pooling)
        expected = written_out(vectors.view(5, 3, -1), sizes=(vectors.shape[1],)).mean()
        expected.backward()
    gradients = [parameter.grad for parameter in trainable(model)]
    # In any order of any pieces, as other ranks and micro-batches have them.
    for pieces in ([(0, 1, 2, 3, 4)], [(4, 0), (3, 1), (2,)], [(2,), (4,), (0,), (1,), (3,)]):
        model.zero_grad()
        step_loss = StepLoss(objective, model)
        shares = zeros_for(step_loss, CPU)
        assert step_loss.needs_pass(len(pieces))
        step_loss.begin()
        for samples in pieces:
            step_loss.observe(batch_with(samples), step, nullcontext)
        step_loss.finish_observing()
        for samples in pieces:
            batch = batch_with(samples)
            step_loss.refer(batch)
            with step_loss.watching(batch), model.body.tokens.of(step, batch):
                step_loss.of_micro_batch(partial(output_of, model), batch, shares).backward()
        assert shares[0].item() == pytest.approx(expected.item(), rel=1e-6)
        for found, parameter in zip(gradients, trainable(model), strict=True):
            assert found is not None and parameter.grad is not None
            assert (parameter.grad - found).norm() <= 1e-5 * found.norm()
    if dropout:  # so that the test could fail: another step has other masks
        with model.body.tokens.of(step + 1, whole):
            others = pooled(output_of(model, whole, Hidden()), whole, pooling)
        assert not torch.allclose(others, vectors)
