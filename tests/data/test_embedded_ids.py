"""Tokens for which a model has no embedding: refused when the data or the prompt are read."""

import json
import shutil
from pathlib import Path

import pytest
from command import Command
from messages import says
from runs import options
from tiny import make_llama
from transformers_models import make_transformers_model

from ftkit.data.dataset import load_data, load_sets
from ftkit.errors import UserError
from ftkit.models.pretrained.added_tokens import with_added_tokens
from ftkit.models.pretrained.base_model import open_base, parameter_shapes
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component

TOKEN = "<|call|>"
ROWS = 331
"""Tokens of the tiny tokenizer."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has a token more than it has embeddings."""
    directory = tmp_path_factory.mktemp("base") / "tiny"
    make_llama(directory, vocab_size=ROWS)
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"extra_special_tokens": [TOKEN]}))
    return directory


def data(directory: Path, answer: str) -> Component:
    file = directory / "records.json"
    rows = [{"instruction": f"call {n}", "output": answer} for n in range(8)]
    file.write_text(json.dumps(rows))
    return Component(class_path="JSON", init_args={"path": str(file), "val_split_fraction": 0.5})


def largest_id(component: Component, tokenizer: Tokenizer) -> int:
    """Largest id of the samples that are made of data."""
    samples = load_data(component, tokenizer, 200).train
    return max(max(samples[number].ids.tolist()) for number in range(len(samples)))


def test_data_that_hold_it_are_refused_with_a_remedy(base: Path, tmp_path: Path) -> None:
    held = data(tmp_path, f"red {TOKEN} cat")
    with pytest.raises(UserError) as error:
        load_data(held, Tokenizer(base), 200)
    assert says(str(error.value), "records.json", TOKEN, ROWS, "--data.add_tokens")
    sets = {"own": held["init_args"]["path"]}
    with pytest.raises(UserError, match="embeddings"):
        load_sets(held, sets, Tokenizer(base), 200)


def test_the_remedy_gives_it_an_embedding(base: Path, tmp_path: Path) -> None:
    grown = with_added_tokens(open_base(str(base)), [TOKEN])
    assert parameter_shapes(grown)[grown.architecture.embedding][0] == ROWS + 1
    assert largest_id(data(tmp_path, f"red {TOKEN} cat"), grown.tokenizer) == ROWS


def test_ids_without_it_and_those_of_padding_are_fine(base: Path, tmp_path: Path) -> None:
    assert largest_id(data(tmp_path, "red cat"), Tokenizer(base)) < ROWS
    padded = tmp_path / "padded"
    shutil.copytree(base, padded)
    settings = json.loads((padded / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps(settings | {"vocab_size": ROWS + 64}))
    assert largest_id(data(tmp_path, f"red {TOKEN} cat"), Tokenizer(padded)) == ROWS


@pytest.mark.parametrize("command", ["generate", "data"])
def test_commands_refuse_it_without_a_traceback(
    command: str, base: Path, tmp_path: Path, ftkit: Command
) -> None:
    found = data(tmp_path, f"red {TOKEN} cat")["init_args"]["path"]
    words = ["--prompt", f"red {TOKEN}"] if command == "generate" else []
    words = words or options(data="JSON", data__path=found, data__val_split_fraction=0.5)
    run = ftkit(command, base, *words)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert says(run.stderr, TOKEN, ROWS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("inkling_text", marks=pytest.mark.matrix),
        pytest.param("apertus1p5_text head", marks=pytest.mark.slow),
    ],
)
def test_labels_beyond_the_rows_of_a_head_are_refused(
    name: str, tmp_path: Path, ftkit: Command
) -> None:
    base = make_transformers_model(tmp_path / "base", name)
    tokenizer = Tokenizer(base)
    first = tokenizer.largest_id + 1
    file = base / "tokenizer.json"
    content = json.loads(file.read_text())
    more = [f"<|{number}|>" for number in range(first, tokenizer.rows or 0)]
    like = content["added_tokens"][0]
    content["added_tokens"] += [like | {"id": first + n, "content": t} for n, t in enumerate(more)]
    file.write_text(json.dumps(content))
    for answer, code in (("red", 0), (f"red {more[-1]}", 2)):
        given = data(tmp_path, answer)["init_args"]
        words = options(data="JSON", data__path=given["path"], data__mask_prompt=True)
        words += options(out_dir=tmp_path / answer[:5], train__max_steps=1, precision="32-true")
        ended = ftkit("finetune_full", base, *words, "--data.val_split_fraction", "0.5")
        assert ended.returncode == code, ended.stderr
    assert says(ended.stderr + ended.stdout, more[-1], "logits", "--data.train_on")
