"""Sets to validate on beside the data: eval.sets."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import key_words
from tiny import make_records, make_tokenizer

from ftkit.data.dataset import load_data, load_held_out, load_sets
from ftkit.data.sources import check_data
from ftkit.errors import UserError
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return Tokenizer(directory)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    """Records of the run, and of two sets."""
    paths = [tmp_path / name for name in ("data.json", "code.json", "french.json")]
    for seed, (path, count) in enumerate(zip(paths, (40, 12, 5), strict=True)):
        path.write_text(json.dumps(make_records(count, seed=seed)))
    first, second, third = map(str, paths)
    return first, second, third


def data_of(path: str, **options: Any) -> Component:
    return Component(class_path="JSON", init_args={"path": path, **options})


def tokens(samples: Any) -> list[tuple[list[int], list[list[int]]]]:
    found = (samples[i] for i in range(len(samples)))
    return [(sample.ids.tolist(), sample.trained.tolist()) for sample in found]


@pytest.mark.extensions
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask_prompt": True, "prompt_style": "Q: {instruction}\nA: "},
        {"chat_template": "chatml", "train_on": "last"},
    ],
    ids=["alpaca", "masked", "chatml"],
)
def test_all_records_of_a_set_are_rendered_as_the_data_are(
    tokenizer: Tokenizer, files: tuple[str, str, str], options: dict[str, Any]
) -> None:
    data = data_of(files[0], **options)
    sets = load_sets(data, {"code": files[1], "french": {"path": files[2]}}, tokenizer, 200)
    assert sets.names == ("code", "french")
    for part, path in zip(sets.parts, files[1:], strict=True):
        alone = load_held_out(data_of(path, **options), tokenizer, 200, given={"path"})
        assert part.splits["val"].counts.records == {files[1]: 12, files[2]: 5}[path]
        assert tokens(part.splits["val"].samples) == tokens(alone.samples)
    assert load_data(data, tokenizer, 200).counts["val"].records == 2, "of the data as ever"


def test_keys_of_records_are_those_of_the_data_or_its_own(
    tokenizer: Tokenizer, files: tuple[str, str, str], tmp_path: Path
) -> None:
    renamed = tmp_path / "renamed.jsonl"
    rows = [{"q": one["instruction"], "a": one["output"]} for one in make_records(3)]
    renamed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"instruction": "q", "output": "a"}
    own = load_sets(
        data_of(files[0]), {"some": {"path": str(renamed), "columns": columns}}, tokenizer, 200
    )
    of_data = data_of(str(renamed), columns=columns)
    same = load_sets(of_data, {"some": str(renamed)}, tokenizer, 200)
    assert tokens(own.samples(9)) == tokens(same.samples(9)) and len(own.samples(9)) == 3


@pytest.mark.extensions
def test_sets_of_a_module_of_litgpt_are_rendered_as_its_records(
    tokenizer: Tokenizer, files: tuple[str, str, str]
) -> None:
    """Which are not looked for."""
    module = Component(class_path="litgpt.data.FLAN", init_args={"mask_prompt": True})
    found = load_sets(module, {"code": files[1]}, tokenizer, 200)
    held_out = data_of(files[1], prompt_style="flan", mask_prompt=True)
    alone = load_held_out(held_out, tokenizer, 200, given={"path"})
    assert tokens(found.samples(99)) == tokens(alone.samples)


def test_the_first_of_each_set_are_taken(tokenizer: Tokenizer, files: tuple[str, str, str]) -> None:
    data = data_of(files[0])
    sets = load_sets(data, {"code": files[1], "french": files[2]}, tokenizer, 200)
    assert sets.samples(8).sources.tolist() == [0] * 8 + [1] * 5
    whole = sets.samples(100)
    assert len(whole) == 17
    assert tokens(sets.samples(8)) == [*tokens(whole)[:8], *tokens(whole)[12:]]
    lengths = [len(sample) for sample, _ in tokens(sets.samples(8))]
    assert np.array_equal(sets.samples(8).lengths + 1, lengths)


def test_without_sets_nothing_is_loaded(tokenizer: Tokenizer, files: tuple[str, str, str]) -> None:
    for empty in (None, {}, {"code": None}):
        assert load_sets(data_of(files[0]), empty, tokenizer, 200).parts == ()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"path": "FILE"}, "path ... --eval.sets.NAME.path FILE"),
        ({"a b": "FILE"}, "'a b' ... letters ... a_b"),
        ({7: "FILE"}, "7 ... texts ... set_7"),
        ({"code": 5}, "code is 5 ... path ... --eval.sets.code"),
        ({"code": {}}, "code is {} ... path"),
        ({"code": {"pth": "FILE"}}, "code ... pth ... path ... Write path"),
        ({"code": "none.json"}, "eval.sets.code.path is none.json"),
        ({"code": {"path": "FILE", "colums": {}}}, "eval.sets.code ... colums ... Write columns"),
        (
            {"code": {"path": "FILE", "train_on": "all"}},
            "code.train_on is 'all' ... Remove eval.sets.code",
        ),
        ({"code": {"path": "FILE", "weight": 2}}, r"eval.sets.code has no key weight"),
        (
            {"code": {"path": "FILE", "split": "test"}},
            "code.split is test ... --eval.sets.code.split null",
        ),
        (
            {"code": {"path": "FILE", "columns": {"asked": "q"}}},
            "eval.sets.code.columns.asked is q",
        ),
    ],
)
def test_a_mistake_is_reported_before_anything_starts(
    files: tuple[str, str, str], sets: dict[Any, Any], message: str
) -> None:
    text = json.dumps(list(sets.items())).replace("FILE", files[1])
    given = dict(json.loads(text))
    with pytest.raises(UserError, match=key_words(message.replace("FILE", files[1]))):
        check_data(data_of(files[0]), given)


def test_a_set_is_not_called_as_a_source_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "all.json").write_text(json.dumps(make_records(9)))
    (tmp_path / "others.json").write_text(json.dumps(make_records(9)))
    sources = [{"path": str(tmp_path / name)} for name in ("code", "others.json")]
    data = Component(class_path="JSON", init_args={"sources": sources})
    sets = {"code": str(tmp_path / "others.json")}
    with pytest.raises(UserError, match=key_words("code of data ... Name it code_set")):
        check_data(data, sets)
    check_data(data, {"code_set": sets["code"]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty ... Set eval.sets.code.path"),
        ('[{"instruction": ', r"is not valid JSON"),
        ('[{"q": "a", "a": "b"}]', r"--eval.sets.code.columns.instruction KEY"),
        ('[{"instruction": "a", "output": ""}]', "eval.sets.code ... nothing to validate on"),
    ],
)
def test_records_that_cannot_be_used_are_named_by_their_set(
    tokenizer: Tokenizer, files: tuple[str, str, str], tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(UserError, match=key_words(message)):
        load_sets(data_of(files[0]), {"code": str(file)}, tokenizer, 200)
