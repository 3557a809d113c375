"""Evaluation of a model in training: which answers count as right, and what they cost."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny import make_llama

from ftkit.inference.loading import Loaded, load_result
from ftkit.inference.result import find_result
from ftkit.model import generation
from ftkit.rendering.renderer import Example
from ftkit.training import evaluation
from ftkit.training.evaluation import exact_matches


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    base = make_llama(tmp_path_factory.mktemp("base") / "tiny", initializer_range=0.5)
    found = find_result(str(base))
    return load_result(found, device=torch.device("cpu"), dtype=torch.float32)


def test_an_answer_ends_where_it_can_no_longer_be_right(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded.model, loaded.base.tokenizer
    prompt = [0, 20, 30, 40, 50]
    (tokens,) = generation.answer_greedily(
        model, [torch.tensor(prompt)], stop_ids=[-1], max_new_tokens=9
    )
    stop = int(tokens[5])
    right = tokenizer.decode(tokens[: tokens.tolist().index(stop)]).strip()
    assert len(right) > 3

    def share(expected: str) -> float | None:
        question = Example(prompt, expected, frozenset({stop}), "")
        return exact_matches(
            model,
            tokenizer,
            [question],
            batch_size=2,
            context=nullcontext,
            progress=lambda *_: None,
        )

    lengths: list[int] = []

    def noted(*arguments: Any, **options: Any) -> list[torch.Tensor]:
        found = generation.answer_greedily(*arguments, **options)
        lengths.extend(len(answer) for answer in found)
        return found

    monkeypatch.setattr(evaluation, "answer_greedily", noted)
    assert [share(text) for text in (right, right[:-1] + "~", "~" + right)] == [1, 0, 0]
    whole, late, early = lengths
    assert late <= whole == tokens.tolist().index(stop)
    assert early == 1


def test_spaces_and_half_characters_that_may_still_change_decide_nothing() -> None:
    wanted = evaluation._letters("Hello, world \u00e9!")
    for beginning in ("", "He", " Hello ,", "Hello, world", "Hello, world \ufffd", "Hello, w o"):
        assert wanted.startswith(evaluation._letters(beginning))
    for beginning in ("hello", "Hello world", "Hello, world \u00e8", "Hello, world \u00e9! And"):
        assert not wanted.startswith(evaluation._letters(beginning))
