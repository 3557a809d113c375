"""`ftkit data` shows what a run is trained on; it needs neither weights nor a GPU."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from command import Command
from looks import look, make_settings, questions, write_records
from messages import key_words, says
from runs import options

from ftkit.cli.app import run
from ftkit.data.dataset import DataSets, load_data
from ftkit.errors import UserError
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.parsing import read_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_settings(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def words(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command line without its form."""
    records = [*questions(40), *questions(20)]
    data = write_records(tmp_path_factory.mktemp("data") / "records.jsonl", records)
    return ["data", str(model), *options(data="JSON", data__path=data, data__mask_prompt=True)]


@pytest.mark.slow
def test_text_goes_to_standard_output_and_nothing_is_written(
    words: list[str], ftkit: Command, tmp_path: Path
) -> None:
    ended = ftkit(*words, "--show", 1, cold=True)
    assert ended.returncode == 0
    # On a slow machine the phase is shown.
    assert all(line.startswith("reading data") for line in ended.stderr.splitlines())
    assert "data for " in ended.stdout and "·</s>⟧" in ended.stdout
    assert "--data.drop_equal true" in ended.stdout and "duplicates" in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 80
    assert list(tmp_path.iterdir()) == []


def test_json_has_the_ids_and_masks_that_a_run_is_trained_on(
    words: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--show", "5", "--format", "json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    keys = list(zip([word[2:] for word in words[2::2]], words[3::2], strict=True))
    recipe = read_recipe([], [("checkpoint_dir", str(model)), *keys])
    tokenizer = Tokenizer(model)
    data = load_data(recipe.data, tokenizer, 256)
    assert len(seen["samples"]) == 5
    for shown in seen["samples"]:
        sample = data.train[shown["number"]]
        assert shown["ids"] == sample.ids.tolist()
        places = {i for first, end in sample.trained for i in range(first, end)} - {0}
        assert {i for i, trained in enumerate(shown["trained"]) if trained} == places
        assert "".join(shown["texts"]) == tokenizer.processor.decode(
            shown["ids"], skip_special_tokens=False
        )
    source = seen["sources"][0]
    assert source["train"]["tokens"] == data.train.lengths.sum()
    assert source["train"]["trained_tokens"] == data.train.label_counts.sum()
    assert source["train"]["lengths"]["longest"] == data.train.lengths.max() + 1


@pytest.mark.extensions
def test_a_pair_is_shown_with_both_answers(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"instruction": f"Red {i}?", "chosen": f"It is {i}.", "rejected": f"It is {i + 1}!"}
        for i in range(30)
    ]
    data = write_records(tmp_path / "pairs.jsonl", rows)
    words = ["data", str(model), *options(data="JSON", data__path=data, objective="orpo")]
    assert run([*words, "--show", "2", "--format", "json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    samples = seen["samples"]
    assert [sample["answer"] for sample in samples] == ["chosen", "rejected"] * 2
    assert seen["sources"][0]["train"]["samples"] == seen["sources"][0]["train"]["used"]
    for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
        shared = rejected["shared"]
        assert chosen["shared"] == 0 < shared
        assert chosen["ids"][:shared] == rejected["ids"][:shared]
        assert not any(chosen["trained"][:shared] + rejected["trained"][:shared])
        for sample, ending in ((chosen, "."), (rejected, "!")):
            columns = zip(sample["texts"], sample["trained"], strict=True)
            said = "".join(text for text, trained in columns if trained)
            assert said.startswith("It is") and said.endswith(f"{ending}</s>")
    assert run([*words, "--show", "1"]) == 0
    text = capsys.readouterr().out
    assert "preference pairs" in text and "as above" in text


def test_a_second_look_reads_what_the_first_has_tokenised(model: Path, tmp_path: Path) -> None:
    data = write_records(
        tmp_path / "data.jsonl", [*questions(30), {"instruction": "", "output": ""}]
    )
    assert look(model, data, show=2) == look(model, data, show=2)


def test_bad_records_are_listed_beside_what_would_be_trained_without_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: list[Any] = [
        {"instruction": "red?"},
        {"instruction": "red?", "output": 1},
        {"instruction": "sun"},
    ]
    data = write_records(tmp_path / "data.jsonl", [*questions(30), *bad])
    words = ["data", str(model), *options(data="JSON", data__path=data), "--format", "json"]
    with pytest.raises(UserError) as error:
        run(words)
    listed = str(error.value)
    assert says(listed, "3 of 33", "data.jsonl, line 31, 33", "--data.skip_bad_records true")
    seen = json.loads(capsys.readouterr().out)
    assert seen["findings"][0]["kind"] == "bad_records"
    (first, second) = seen["sources"][0]["train"]["left_out"]
    assert (first["records"], second["records"]) == (2, 1)
    assert says(first["example"], "line 31, 33", '{"instruction": "red?"}')
    assert seen["sources"][0]["train"]["used"] + seen["sources"][0]["val"]["used"] == 30
    assert run([*words, "--data.skip_bad_records", "true"]) == 0
    left = json.loads(capsys.readouterr().out)
    assert left["refusal"] is None
    assert left["sources"] == seen["sources"] and left["samples"] == seen["samples"]


def test_keys_that_are_not_used_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [row | {"id": i, "source": "web"} for i, row in enumerate(questions(30))]
    data = write_records(tmp_path / "data.jsonl", records)
    words = ["data", str(model), *options(data="JSON", data__path=data), "--show", "0"]
    outputs = {}
    for form in ("json", "text", "html"):
        assert run([*words, "--format", form]) == 0
        outputs[form] = capsys.readouterr().out
    assert json.loads(outputs["json"])["sources"][0]["unused"] == {
        "names": ["id", "source"],
        "more": 0,
    }
    assert re.search(r"not used +id, source", outputs["text"])
    assert "not used" in outputs["html"] and "id, source" in outputs["html"]


def test_html_goes_to_a_file(words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "data.html"
    assert run([*words, "--format", "html", "--out", str(file)]) == 0
    assert file.read_text().startswith("<!doctype html>")


def test_a_recipe_is_looked_at_as_it_is_or_with_other_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for more, limit in (([], 256), (["--train.max_seq_length", "60"], 60)):
        recipe = str(Path(__file__).parents[3] / "recipes/quickstart.yaml")
        assert run(["data", recipe, *more, "--format", "json", "--show", "0"]) == 0
        seen = json.loads(capsys.readouterr().out)
        assert (seen["max_seq_length"], seen["samples"]) == (limit, [])
        assert seen["sources"][0]["where"] == "embedded:quickstart"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--show", "-1"], "--show is '-1' ... at least 0"),
        (["--train.max_seq_length", "4096"], "Try --train.max_seq_length 256"),
        (["--data.pth", "x"], "Try --data.path"),
        (["--data.prompt_style", "alpacca"], "Try --data.prompt_style alpaca"),
        (["--out", "nowhere/data.html"], "--out nowhere/data.html cannot be written"),
        (["other"], "'other' ... one base model"),
    ],
)
def test_bad_input_is_refused_with_what_works(
    more: list[str], message: str, words: list[str]
) -> None:
    with pytest.raises(UserError, match=key_words(message)):
        run([*words, *more])


@pytest.mark.parametrize("before", [None, "of the environment"])
def test_the_access_token_of_the_recipe_reaches_the_hub_and_is_not_left_behind(
    before: str | None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = []

    def load(*arguments: Any, **more: Any) -> DataSets:
        tokens.append(os.environ.get("HF_TOKEN"))
        return load_data(*arguments, **more)

    monkeypatch.delenv("HF_TOKEN", raising=False)
    if before is not None:
        monkeypatch.setenv("HF_TOKEN", before)
    monkeypatch.setattr("ftkit.data.inspection.command.load_data", load)
    data = write_records(tmp_path / "data.jsonl", questions(30))
    seen = look(model, data, show=1, access_token="hf_secret")
    look(model, data)
    assert tokens == ["hf_secret", before]
    assert os.environ.get("HF_TOKEN") == before
    assert "hf_secret" not in repr(seen)


def test_a_model_without_a_local_tokenizer_is_refused(
    words: list[str], model: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(UserError, match=key_words("tokenizer ... not on this machine")):
        run(["data", str(bare), *words[2:]])
