"""Data of a plugin: items as records of every form or as token ids, their split, and mistakes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import message_of, says
from plugins import documented, plugin_of

from ftkit.data.dataset import DataSets, load_data, load_held_out
from ftkit.data.sources import data_source
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.plugin import using
from ftkit.recipe.recipe import Component

CLASS = """
import numpy as np, torch
class Mine:
    def __init__(self, size: int = 20{arguments}):
        self.size = size
        {body}
    def __len__(self): return self.size
    def __getitem__(self, i):
        return {item}
"""
TOKENS = '{"input_ids": [0, 5 + i, 6, 7, 1], %s}'


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> Tokenizer:
    return Tokenizer(tiny_base)


@pytest.fixture
def load(tmp_path: Path, tokenizer: Tokenizer) -> Any:
    def load_(item: str, arguments: str = "", body: str = "", **options: Any) -> DataSets:
        plugin = plugin_of(tmp_path, CLASS.format(item=item, arguments=arguments, body=body))
        data = Component(class_path="plugin.Mine", init_args=options)
        with using(plugin):
            return load_data(data, tokenizer, 100)

    return load_


def test_items_are_records_of_any_form(load: Any, tokenizer: Tokenizer) -> None:
    data = load('{"prompt": f"{i}?", "completion": f"{i}!"}', size=20, val_split_fraction=0.1)
    assert (len(data.train), len(data.val)) == (18, 2)
    assert data.names == ("Mine",)
    answers = {tokenizer.processor.decode(question.expected) for question in data.questions}
    assert answers and answers <= {f"{i}!" for i in range(20)}
    assert tokenizer.decode(torch.tensor(data.train[0].ids)).count("?") == 1
    chats = load(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        chat_template="chatml",
    )
    assert len(chats.train) == 19


@pytest.mark.parametrize(
    ("others", "spans", "weights"),
    [
        ('"weights": [1, 0, 1, 1, 1]', [[0, 1], [2, 5]], None),
        ('"weights": [0, 0, 0.5, 0.5, 2]', [[2, 4], [4, 5]], [0.5, 2.0]),
        ('"labels": [-100, -100, 6, 7, 1]', [[2, 5]], None),
        (
            '"labels": torch.tensor([-100, -100, 6, 7, 1]), "weights": np.full(5, 0.5)',
            [[2, 5]],
            [0.5],
        ),
        ('"labels": None', [[0, 5]], None),
    ],
)
def test_token_ids_carry_loss_as_weights_and_labels_say(
    others: str, spans: list[list[int]], weights: list[float] | None, load: Any
) -> None:
    data = load(TOKENS % others)
    for index in range(len(data.train)):
        sample = data.train[index]
        assert sample.ids.tolist()[2:] == [6, 7, 1]
        assert sample.trained.tolist() == [span for span in spans if span[1] > 1]
        assert sample.weights is None if weights is None else sample.weights.tolist() == weights


def test_a_class_with_an_argument_split_is_made_for_both(load: Any) -> None:
    arguments, body = ', split: str = "train"', "self.split = split"
    item = '{"text": f"{self.split} {i}"}'
    data = load(item, arguments, body, size=3)
    assert (len(data.train), len(data.val)) == (3, 3)
    assert data.questions[0].record["text"] == "val 0"
    one = load(item, arguments, body, split="train")
    assert (len(one.train), len(one.val)) == (19, 1)


def test_data_named_for_an_evaluation_are_held_out_as_a_whole(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    plugin = plugin_of(tmp_path, CLASS.format(item='{"text": str(i)}', arguments="", body=""))
    data = Component(class_path="plugin.Mine", init_args={"size": 30})
    with using(plugin):
        assert len(load_held_out(data, tokenizer, 100, given=("size",)).samples) == 30
        assert len(load_held_out(data, tokenizer, 100, given=("data",)).samples) == 1


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (
            '{"text": str(1 / (i - 3))}',
            "--plugin my.py: Mine[3] fails ... ZeroDivisionError ... line 9 ... Correct",
        ),
        ("i", "Mine[0] is a number"),
        ('{"what": 1}', "Mine[0] ... what"),
        (TOKENS % '"weights": [1]', "Mine[0]: weights ... 5 tokens"),
        (TOKENS % '"weights": [1, 1, -1, 1, 1]', "weight is -1 ... 0, or a number from"),
        (TOKENS % '"labels": [6, 7, 1, -100, -100]', "label 0 ... not shifted"),
        ('{"input_ids": ["a"]}', "input_ids ... token ids"),
        (TOKENS % '"weights": [1, 0, 0, 0, 0]', "no token carries loss ... weight above 0"),
        ('{"input_ids": [0, 5, 999999]}', "token id ... tokenizer of checkpoint_dir"),
    ],
)
def test_a_mistake_in_an_item_names_it(item: str, words: str, load: Any) -> None:
    assert says(message_of(load, item), words)


def test_a_data_set_without_items_is_named(load: Any) -> None:
    assert says(message_of(load, '{"text": str(i)}', size=0), "Mine has no items ... __len__")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sise": 3}, "data.sise ... data.size"),
        ({"size": "x"}, "data.size is 'x' ... whole number"),
        ({"path": "a.json"}, "data.path is not an option of Mine"),
        ({"val_split_fraction": 2}, "data.val_split_fraction is 2"),
    ],
)
def test_options_are_checked_before_the_class_is_made(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    body = "raise SystemExit"
    plugin = plugin_of(tmp_path, CLASS.format(item="i", arguments="", body=body))
    data = Component(class_path="plugin.Mine", init_args=options)
    with using(plugin):
        assert says(message_of(data_source, data), words)
        assert data_source(data | {"init_args": {}}).files() == ()


def test_the_documented_data_set_is_loaded(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plugin = plugin_of(tmp_path, documented()["A data set"])
    with using(plugin):
        component = Component(class_path="plugin.Sums", init_args={"most": 5})
        data = load_data(component, tokenizer, 100)
    assert len(data.train) + len(data.val) == 25
    answers = {tokenizer.processor.decode(question.expected) for question in data.questions}
    assert answers and answers <= {f" {n}" for n in range(9)}
