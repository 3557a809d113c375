"""The losses and measures of rerankers: by their definitions, however a step is split."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import message_of, says
from tiny import make_labelled_queries, make_llama, make_queries
from torch import Tensor

from ftkit.cli.app import run
from ftkit.data.sources import settled
from ftkit.extensions.heads.rerank import Rerank, RerankLoss, gain_of, ranks_of_first
from ftkit.planning.simulate import largest_micro_batch
from ftkit.recipe.objectives import ScoreLabels, objective_rules
from ftkit.recipe.parsing import read_recipe

SCORES = [[0.5, -1.0, 2.0], [1.5, 0.2, -0.3], [0.1, 0.4, 0.2], [-2.0, -2.0, -3.0]]
"""Of 4 queries with 3 documents each."""
LABELS = [1.0, 0.0, 0.25, 1.0]
"""Of the first document of each, where it is the only one."""
LOSSES: tuple[RerankLoss, ...] = ("lists", "pairs", "points")
KINDS: list[tuple[RerankLoss, int]] = [*((loss, 2) for loss in LOSSES), ("points", 0)]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def expected_loss(loss: RerankLoss, negatives: int) -> float:
    """Sum of the losses of all queries."""
    if negatives == 0:
        each = zip(SCORES, LABELS, strict=True)
        return sum(y * softplus(-row[0]) + (1 - y) * softplus(row[0]) for row, y in each)
    total = 0.0
    for first, *others in SCORES:
        if loss == "lists":
            total += math.log(sum(math.exp(one - first) for one in (first, *others)))
        elif loss == "pairs":
            total += sum(softplus(one - first) for one in others) / 2
        else:
            total += softplus(-first) + sum(map(softplus, others))
    return total


def made(negatives: int, queries: range, *, filler: bool = False) -> tuple[Tensor, dict[str, Any]]:
    """Scores of some queries, and what a micro-batch says of them."""
    count = 1 + negatives
    scores = torch.tensor([SCORES[query][:count] for query in queries]).flatten()
    real = [True] * len(scores) + [False] * (count * filler)
    batch = {
        "lengths": (3,) * len(real),
        "label_sequences": torch.arange(len(scores)),
        "is_real_sequence": torch.tensor(real),
    }
    if negatives == 0:
        labels = [[LABELS[query]] for query in queries] + [[0.0]] * filler
        batch["targets"] = torch.tensor(labels)
    return scores.requires_grad_(), batch


@pytest.mark.parametrize(("loss", "negatives"), KINDS)
def test_losses_are_their_definitions(loss: RerankLoss, negatives: int) -> None:
    one, (scores, batch) = Rerank(loss=loss, negatives=negatives), made(negatives, range(4))
    values = [value.item() for value in one.sums(scores, batch)]
    found = dict(zip((term.name for term in one.terms), values, strict=True))
    assert found.pop("loss") == pytest.approx(expected_loss(loss, negatives), rel=1e-6)
    if negatives == 0:
        assert found == {"accuracy": 1}  # the second and the third are found to answer
        return
    # Ranks are 2, 1, 3 and, with a tie, 1.5.
    gain = sum(1 / math.log2(1 + rank) for rank in (2, 1, 3, 1.5))
    assert found == pytest.approx(
        {"accuracy": 1.5, "mrr": 1 / 2 + 1 + 1 / 3 + 1 / 1.5, "ndcg_at_10": gain}
    )


@pytest.mark.parametrize(("loss", "negatives"), KINDS)
def test_sums_and_gradients_do_not_depend_on_micro_batches(
    loss: RerankLoss, negatives: int
) -> None:
    one, whole = Rerank(loss=loss, negatives=negatives), made(negatives, range(4))
    parts = [made(negatives, range(1), filler=True), made(negatives, range(1, 4))]
    for of_whole, *of_parts in zip(*(one.sums(*batch) for batch in (whole, *parts)), strict=True):
        torch.testing.assert_close(of_whole, torch.stack(of_parts).sum())
    for batch in (whole, *parts):
        one.sums(*batch)[0].backward()
    gradients = [batch[0].grad for batch in (whole, *parts)]
    torch.testing.assert_close(gradients[0], torch.cat([g for g in gradients[1:] if g is not None]))


def test_ranks_count_what_is_higher_and_half_of_what_is_as_high() -> None:
    scores = torch.tensor([[1.0, 0.0, 2.0, 1.0], [3.0, 0.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert ranks_of_first(scores).tolist() == [2.5, 1, 2.5]


def test_only_the_first_ten_ranks_gain() -> None:
    ranks = torch.tensor([1.0, 2.0, 10.0, 10.5, 11.0])
    assert gain_of(ranks).tolist() == pytest.approx([1, 1 / math.log2(3), 1 / math.log2(11), 0, 0])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base"))


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text(json.dumps(rows))
    return str(file)


FEW = [*make_queries(3, 2), *make_queries(2, 4)]
LABELLED = make_labelled_queries(4)


@pytest.mark.parametrize(
    ("rows", "given", "negatives", "notice"),
    [
        (FEW, [], 2, "2 of 5 have more"),
        (FEW, [("objective.negatives", "1")], 1, ""),
        (make_queries(3, 2), [("objective.loss", "points")], 2, ""),
        (LABELLED, [("objective.loss", "points")], 0, ""),
        ([*FEW, {"query": "a", "positive": "b"}], [("data.skip_bad_records", "true")], 2, "2 of 5"),
    ],
)
def test_data_decide_how_many_negatives_a_query_has(
    rows: list[dict[str, Any]],
    given: list[tuple[str, str]],
    negatives: int,
    notice: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / "data.json", rows)
    data = [("data", "JSON"), ("data.path", path), ("objective", "rerank")]
    recipe = settled(read_recipe([], [("checkpoint_dir", "any"), *data, *given], method="full"))
    assert recipe.objective["init_args"]["negatives"] == negatives
    said = capsys.readouterr().err
    assert notice in said and bool(notice) == bool(said)
    rules = objective_rules(recipe.objective)
    assert rules.sequences == 1 + negatives and rules.target_size == (negatives == 0)
    assert rules.scores is not None and rules.scores.is_relevance
    assert settled(recipe) == recipe


@pytest.mark.parametrize(
    ("rows", "words", "named"),
    [
        (
            [*FEW, {"query": "a", "positive": "b"}],
            [],
            ["record 6", "no negatives", "skip_bad_records"],
        ),
        (FEW, ["--objective.negatives", "3"], ["record 1", "2 negatives", "--objective.negatives"]),
        (FEW, ["--objective.negatives", "0"], ["objective.negatives", "lists", "points"]),
        (FEW, ["--objective.negatives", "1.5"], ["objective.negatives", "whole number"]),
        (FEW, ["--objective.loss", "list"], ["objective.loss", "lists"]),
        (LABELLED, [], ["record 1", "label", "objective.loss"]),
        ([*LABELLED, *FEW], ["--objective.loss", "points"], ["record 5", "no label"]),
        (
            [LABELLED[0] | {"label": 3}],
            ["--objective.loss", "points"],
            ["record 1", "label is 3", "0 to 1"],
        ),
        (FEW, ["--data", "Alpaca"], ["Alpaca", "queries"]),
        (FEW, ["--eval.exact_match", "3"], ["eval.exact_match", "0"]),
    ],
)
def test_options_and_data_that_do_not_fit_are_refused(
    rows: list[dict[str, Any]], words: list[str], named: list[str], base: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "data.json", rows)
    data = [] if "Alpaca" in words else ["--data", "JSON", "--data.path", path]
    message = message_of(run, ["plan", str(base), "--objective", "rerank", *data, *words])
    assert says(message, *named)


def test_the_name_of_its_score_says_that_a_model_is_a_reranker() -> None:
    for scores, objective in (
        (ScoreLabels(names=("relevance",)), "rerank"),
        (ScoreLabels(), "reward"),
        (ScoreLabels(problem_type="regression"), "classify"),
    ):
        assert scores.objective["class_path"] == objective


def test_a_query_with_all_of_its_documents_is_planned_in_rows_of_few_tokens(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "data.json", make_queries(12, 2))
    words = ["--objective", "rerank", "--data", "JSON", "--data.path", path]
    words += ["--data.val_split_fraction", "0.25"]
    words += ["--train.micro_batch_tokens", "50", "--train.global_batch_size", "4"]
    assert run(["plan", str(base), *words]) == 0
    assert says(capsys.readouterr().out, "4 samples of 3 sequences each")


@pytest.mark.parametrize("tokens", [200, 301, 500, 777])
def test_rows_of_limited_tokens_hold_whole_samples(tokens: int) -> None:
    for each in (2, 3, 5):
        size = largest_micro_batch(
            10 * each, 80, padding_free=True, most_tokens=tokens, scores=ScoreLabels(), each=each
        )
        assert size.sequences % each == 0
        assert size.tokens == min(10 * each * 80, max(tokens, each * 80))
