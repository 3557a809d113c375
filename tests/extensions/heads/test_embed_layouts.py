"""Promises P1 and P2 for embedding models, and that their losses are those of a plain loop."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_jobs import NO_EVALUATION, Case, Entries, Outcome, chosen, make_run, repeated
from tiny import WORDS
from torch import Tensor
from transformers import AutoModel

from ftkit.data.dataset import DataSets, load_data
from ftkit.data.samples.sampler import EpochOrder
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.objectives import objective_rules
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe import Method, Recipe
from ftkit.runs.report.metrics import read_validation

pytestmark = pytest.mark.slow
Changes = tuple[tuple[str, Any], ...]
Found = dict[tuple[str, ...], Outcome]
LAST, MEAN, LORA = "last", "mean", "lora"
KINDS: dict[str, Changes] = {
    LAST: (),
    MEAN: (("objective.pooling", "mean"), ("objective.sizes", Entries([32, 8]))),
    # Dropout and noise are those of tokens, so both passes of a step have the same.
    LORA: (("lora_head", False), ("lora_dropout", 0.1), ("train.neftune_noise_alpha", 5.0)),
}
ROWS: dict[str, Changes] = {
    "one by one": (("train.micro_batch_size", 1),),
    "two": (("train.micro_batch_size", 2),),
    "whole": (("train.micro_batch_size", 11),),
    "padded": (("train.padding_free", False),),
}
STEPS = 9
"""Of 48 queries in two epochs: the last step has 8 of them, the others 11."""


def make_queries(count: int) -> list[dict[str, str]]:
    """Queries with a document that has their words, and one that has others; some repeat."""
    rng = random.Random(1)
    rows = []
    for _ in range(count):
        one, other = rng.sample(WORDS, 2)
        rest = " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, 6)))
        rows.append({"query": f"{rest} {one}?", "positive": f"{one} {one}", "negative": other})
    return rows


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Found:
    """Runs of the selected tests, by what they are."""
    of_rows = {(p["how"], p["kind"]) for p in chosen(request, test_micro_batches_change_nothing)}
    ranks = {p["strategy"] for p in chosen(request, test_ranks_learn_as_one_does)}
    run_cases = make_run(tmp_path_factory)
    file = tmp_path_factory.mktemp("texts") / "queries.json"
    file.write_text(json.dumps(make_queries(60)))

    def case(kind: str, strategy: str, more: Changes = (), **keys: Any) -> Case:
        changes: Changes = (
            *NO_EVALUATION,
            ("objective", "embed"),
            ("objective.negatives", 1),
            ("data.json_path", str(file)),
            ("data.mask_prompt", None),
            ("optimizer.lr", 2e-3),
            ("optimizer.eps", 1e-5),  # so that Adam makes no steps of gradients that are rounding
            ("optimizer.weight_decay", 0.0),
            ("eval.interval", 2),
            ("eval.final_validation", True),
            *KINDS[kind],
            *more,
        )
        method: Method = "lora" if kind == LORA else "full"
        return Case(strategy, method, changes=changes, **keys)

    single: dict[tuple[str, ...], Case] = {(kind,): case(kind, "single") for kind in KINDS}
    single |= {key: case(key[1], "single", ROWS[key[0]]) for key in of_rows}
    single["half",] = case(LORA, "single", stop_after=4)
    alone = run_cases(1, list(single.values()))
    known = {name: alone[one] for name, one in single.items()}
    if chosen(request, test_a_resumed_run_has_the_same_bits):
        case_again = case(LORA, "single", start=known["half",].out_dir)
        known["again",] = run_cases(1, [case_again])[case_again]
    for count in (2, 3):
        several = {
            (strategy, kind): case(kind, strategy.removesuffix("3"))
            for strategy in ranks - {"resumed", "shared"}
            for kind in KINDS
            if strategy.endswith("3") == (count == 3)
        }
        if count == 2 and "resumed" in ranks:
            several["resumed", LORA] = case(LORA, "fsdp", start=known["half",].out_dir)
        if count == 2 and "shared" in ranks:
            shared: Changes = (("strategy.context", 2),)
            several |= {("shared", kind): case(kind, "ddp", shared) for kind in KINDS}
        done = run_cases(count, list(several.values()))
        known |= {name: done[one] for name, one in several.items()}
    return known


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert len(found.losses) == STEPS
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    norms = [float(row["grad_norm"] or 0) for row in expected.rows]
    assert [float(row["grad_norm"] or 0) for row in found.rows] == pytest.approx(norms, rel=1e-4)
    rows, others = (read_validation(one.out_dir / "validation.csv") for one in (found, expected))
    assert len(rows) == len(others) == 5
    for row, other in zip(rows, others, strict=True):
        assert {k: float(v) for k, v in dict(row).items() if v} == pytest.approx(
            {k: float(v) for k, v in dict(other).items() if v}, rel=2e-5
        )
    weights = found.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=1e-5)
    assert not weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["two", "padded", *repeated("one by one", "whole")])
def test_micro_batches_change_nothing(how: str, kind: str, found: Found) -> None:
    assert_same(found[how, kind], found[kind,])


@pytest.mark.parametrize(
    "strategy", ["fsdp", "resumed", "shared", *repeated("ddp", "ddp3", "fsdp3", "deepspeed")]
)
def test_ranks_learn_as_one_does(strategy: str, found: Found) -> None:
    names = [name for name in found if name[0] == strategy]
    assert names
    for name in names:
        assert_same(found[name], found[name[1],])


def test_a_resumed_run_has_the_same_bits(found: Found) -> None:
    again, expected = found["again",], found[LORA,]
    assert again.losses == expected.losses
    weights = again.weights()
    for name, tensor in expected.weights().items():
        assert torch.equal(weights[name], tensor), name


def recipe_of(outcome: Outcome) -> Recipe:
    return read_recipe([outcome.checkpoint / "recipe.yaml"], [], method="full")


def data_of(outcome: Outcome, directory: Path) -> DataSets:
    recipe = recipe_of(outcome)
    preference = objective_rules(recipe.objective).preference
    return load_data(recipe.data, Tokenizer(directory), 200, preference=preference)


def vector(model: Any, ids: Any, kind: str) -> Tensor:
    """Vector of a text by transformers, [1, width]."""
    states = model(input_ids=torch.tensor(ids[None], dtype=torch.long)).last_hidden_state
    pooled: Tensor = states.mean(1) if kind == MEAN else states[:, -1]
    return pooled


def plain_loss(samples: Sequence[Sequence[Tensor]], keys: Sequence[Sequence[tuple[int, ...]]],
               sizes: Sequence[int]) -> Tensor:  # fmt: skip
    """Mean loss of queries, in one undivided pass, as sentence-transformers writes it.

    Its scores are `cos_sim(anchors, cat(positives, negatives)) * 20`, its loss their cross-entropy
    with the labels 0, 1 and so on, and MatryoshkaLoss adds those of the beginnings of vectors.
    """
    count, total = len(samples), torch.zeros(())
    for size in sizes:
        queries, *documents = (
            torch.cat([sample[place][:, :size] for sample in samples]) for place in range(3)
        )
        scores = F.cosine_similarity(queries[:, None], torch.cat(documents)[None], dim=2) * 20
        for i in range(count):
            for j in range(2 * count):
                of, place = j % count, 1 + j // count
                repeats = keys[of][place] == keys[i][1]
                repeats |= place == 1 and keys[of][0] == keys[i][0]
                if repeats and j != i:
                    scores[i, j] = -torch.inf
        total = total + F.cross_entropy(scores, torch.arange(count))
    return total


@pytest.mark.parametrize("kind", [LAST, MEAN])
def test_the_losses_are_those_of_a_plain_loop(kind: str, found: Found) -> None:
    outcome = found[kind,]
    recipe = recipe_of(outcome)
    data = data_of(outcome, outcome.checkpoint / "base")
    model = AutoModel.from_pretrained(recipe.checkpoint_dir)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-5, weight_decay=0)
    epochs = EpochOrder([len(data.train)], [len(data.train)], recipe.seed)
    order = [*epochs.of(0).tolist(), *epochs.of(1).tolist()]
    sizes = [model.config.hidden_size, *((32, 8) if kind == MEAN else ())]
    losses = []
    for step, row in enumerate(outcome.rows):
        each = [data.train.sequences(i) for i in order[11 * step : 11 * (step + 1)]]
        keys = [[tuple(one.ids.tolist()) for one in sample] for sample in each]
        vectors = [[vector(model, one.ids, kind) for one in sample] for sample in each]
        loss = plain_loss(vectors, keys, sizes)
        loss.backward()
        losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        assert norm.item() == pytest.approx(row["grad_norm"], rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        optimizer.step()
        optimizer.zero_grad()
    assert len(each) == 8, "the last step is a short one"
    assert outcome.losses == pytest.approx(losses, rel=1e-5)
