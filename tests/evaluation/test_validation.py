"""Evaluation of a model in training: what answers are worth, and what they cost."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_llama

from ftkit.data.rendering import Example, Rendered
from ftkit.data.samples.layout import RankLayout
from ftkit.data.samples.loader import validation_loader
from ftkit.data.samples.sample_set import SampleSet
from ftkit.evaluation import validation as evaluation
from ftkit.evaluation.loading import Loaded, load_result
from ftkit.evaluation.result import find_result
from ftkit.evaluation.scoring import Scoring, rouge_l
from ftkit.evaluation.validation import answer_scores, validation_loss
from ftkit.models import generation
from ftkit.models.load_weights import Whole
from ftkit.recipe.own_metric import own_metrics
from ftkit.recipe.recipe import METRICS

PROMPT = [0, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    base = make_llama(tmp_path_factory.mktemp("base") / "tiny", initializer_range=0.5)
    found = find_result(str(base))
    return load_result(found, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the answers that are made."""
    found: list[int] = []

    def noted(*arguments: Any, **options: Any) -> list[torch.Tensor]:
        answers = generation.answer_greedily(*arguments, **options)
        found.extend(len(answer) for answer in answers)
        return answers

    monkeypatch.setattr(evaluation, "answer_greedily", noted)
    return found


def answer_of(loaded: Loaded, most: int) -> tuple[torch.Tensor, int]:
    """Answer of the model, and a token late in it, which may end the answer."""
    (tokens,) = generation.answer_greedily(
        loaded.model, [torch.tensor(PROMPT)], stop_ids=[-1], max_new_tokens=most
    )
    stop = int(tokens[5])
    return tokens[: tokens.tolist().index(stop)], stop


def means(
    loaded: Loaded,
    expected: Sequence[list[int]],
    stop: int,
    *,
    is_whole: bool = True,
    batch_size: int = 2,
    own: Sequence[str] = (),
    max_new_tokens: int = 4,
    **records: int,
) -> dict[str, float]:
    """The scores of answers to one prompt, of which so many things are expected."""
    decode = loaded.base.tokenizer.processor.decode
    built_in = dict.fromkeys(METRICS, 0) | records
    scores = answer_scores(
        loaded.model,
        loaded.base.tokenizer,
        [
            Example(PROMPT, ids, frozenset({stop}), {"expected": decode(ids)}, "", "", is_whole)
            for ids in expected
        ],
        Scoring(built_in, own=own_metrics(own), max_new_tokens=max_new_tokens),
        batch_size=batch_size,
        context=nullcontext,
        progress=lambda *_: None,
    )
    assert scores is not None
    return {score.metric.name: score.mean for score in scores}


def test_an_answer_ends_where_it_can_no_longer_be_right(loaded: Loaded, lengths: list[int]) -> None:
    tokens, stop = answer_of(loaded, 9)
    right, (other,) = tokens.tolist(), loaded.base.tokenizer.encode_all(["~"], bos=False)[0]
    assert len(right) > 3
    wanted = (right, [*right[:-1], other], [other, *right])
    lengths.clear()
    shares = [means(loaded, [ids], stop, exact_match=1)["exact_match"] for ids in wanted]
    assert shares == [1, 0, 0]
    whole, late, early = lengths
    assert late <= whole == len(tokens)
    assert early == 1


def test_white_space_and_special_tokens_count_in_an_exact_match(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = loaded.base.tokenizer
    special, word, line = (
        tokenizer.encode_all([text], bos=False)[0] for text in ("<s>", "a", "\n")
    )
    given: list[int] = []
    monkeypatch.setattr(
        evaluation, "answer_greedily", lambda *_, **__: [torch.tensor(given, dtype=torch.long)]
    )
    for expected, answer, is_right in [
        (word, word, True),
        (word, [*line, *word], False),
        (word, [*line * 17, *word], False),
        ([*line, *word], [*line, *word], True),
        ([*special, *word], [*special, *word], True),
        ([*special, *word], word, False),
        (word, [*special, *word], False),
    ]:
        given[:] = answer
        assert means(loaded, [expected], 9999, exact_match=1) == {"exact_match": is_right}
    # Of a text that goes on, as many tokens are compared as are expected.
    given[:] = [*word, *line]
    for is_whole in (True, False):
        found = means(loaded, [word], 9999, is_whole=is_whole, exact_match=1)
        assert found == {"exact_match": not is_whole}


def test_for_other_metrics_an_answer_is_made_to_its_end(loaded: Loaded, lengths: list[int]) -> None:
    tokens, stop = answer_of(loaded, 9)
    lengths.clear()
    for most in (2, len(tokens), 30):
        found = means(loaded, [[0]], stop, exact_match=1, rouge_l=1, max_new_tokens=most)
        assert found["exact_match"] == 0
    assert lengths == [2, len(tokens), len(tokens)]


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_each_metric_has_the_value_that_it_has_alone(
    loaded: Loaded, tmp_path: Path, batch_size: int
) -> None:
    tokens, stop = answer_of(loaded, 9)
    decode, right = loaded.base.tokenizer.decode, tokens.tolist()
    begun, more = (
        decode(tokens[:2]).strip(),
        loaded.base.tokenizer.encode_all([" more words"], bos=False)[0],
    )
    expected = [[*right[:2], *more], right, [*right, *more], more]
    file = tmp_path / "mine.py"
    file.write_text(
        "def length(answer, expected, record):\n"
        "    assert record['expected'].strip() == expected\n"
        "    return len(answer)\n"
    )
    options: dict[str, Any] = {"batch_size": batch_size, "max_new_tokens": 2}
    exact = means(loaded, expected, stop, **options, exact_match=3)
    rouge = means(loaded, expected[:2], stop, **options, rouge_l=2)
    length = means(loaded, expected, stop, **options, own=[f"{file}:length"])
    assert exact == {"exact_match": 1 / 3}
    assert rouge == {
        "rouge_l": sum(rouge_l(begun, decode(torch.tensor(ids))) for ids in expected[:2]) / 2
    }
    assert length == {"length": len(begun)}
    together = means(
        loaded, expected, stop, **options, exact_match=3, rouge_l=2, own=[f"{file}:length"]
    )
    assert together == exact | rouge | length


def test_a_prompt_longer_than_the_samples_is_not_cut(loaded: Loaded) -> None:
    body, context_length = loaded.model.body, loaded.base.architecture.context_length
    prompts = [PROMPT * 4, PROMPT * (context_length // len(PROMPT) + 1), PROMPT]
    questions = [Example(prompt, [], frozenset({9999}), {}, "") for prompt in prompts]

    def answers() -> list[list[int]]:
        found = evaluation.answer_records(
            loaded.model,
            loaded.base.tokenizer,
            questions,
            max_new_tokens=6,
            context=nullcontext,
            goes_on=lambda row, ids: len(ids) < (6, 0, 3)[row],
        )
        return [answer.tolist() for answer in found]

    usual = body.max_length
    whole = answers()
    assert [len(answer) for answer in whole] == [6, 0, 3], "the second is longer than the context"
    body.build_rope_cache(body.device, 8)
    tables = list(body.buffers())
    try:
        assert answers() == whole
        assert body.max_length == 8, "as trained again"
        pairs = zip(body.buffers(), tables, strict=True)
        assert tables and all(now is before for now, before in pairs), "recorded steps read these"
    finally:
        body.build_rope_cache(body.device, usual)


def test_spaces_and_half_characters_that_may_still_change_decide_nothing() -> None:
    wanted = evaluation._letters("Hello, world \u00e9!")
    for beginning in ("", "He", " Hello ,", "Hello, world", "Hello, world \ufffd", "Hello, w o"):
        assert wanted.startswith(evaluation._letters(beginning))
    for beginning in ("hello", "Hello world", "Hello, world \u00e8", "Hello, world \u00e9! And"):
        assert not wanted.startswith(evaluation._letters(beginning))


@pytest.mark.extensions
def test_a_term_of_which_the_samples_have_nothing_is_absent(loaded: Loaded) -> None:
    from ftkit.extensions.other_models.reference import FrozenReference
    from ftkit.extensions.preference.kto import Kto

    objective, layout = Kto(), RankLayout(micro_batch_size=2, padding_free=True)
    samples = SampleSet.of(Rendered([5 + i, 6, 7, 8], ((2, 4),), target=(1,)) for i in range(4))
    amounts = objective.amounts(samples)
    batches = validation_loader(samples, amounts, 4, layout, joined=objective.joined)
    found = validation_loss(
        loaded.model,
        objective,
        batches,
        torch.device("cpu"),
        sources=1,
        context=nullcontext,
        companion=FrozenReference(loaded.model, Whole(), nullcontext),
        progress=lambda *_: None,
    )
    assert found is not None and "rejected_reward" not in found.terms
    assert found.terms["chosen_reward"] == 0 and found.loss == pytest.approx(0.5)
