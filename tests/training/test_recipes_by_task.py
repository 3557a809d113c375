"""Recipes for what people do: each fits the card that it names, and learns from its made data."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from command import ROOT, Command
from huggingface_hub import constants
from rank_jobs import layouts
from transformers_models import make_transformers_model

from ftkit.models.pretrained import places
from ftkit.planning.gpus import find_gpu
from ftkit.planning.predict import plan_files
from ftkit.runs.report.metrics import read_metrics, read_validation
from ftkit.utils import embedded

TEMPLATE = ROOT / "ftkit/models/chat_templates/named/qwen.jinja"
CARD = re.compile(r"--gpu (\S+)\): needs ([\d.]+) to ([\d.]+) GiB")
MAX_DATA_BYTES = 200_000
STEPS = 6


@dataclass(frozen=True)
class Task:
    """How a recipe runs on a tiny model."""

    family: str = "qwen3"
    command: str = "finetune"
    column: str = "loss"
    """Of metrics.csv, which only this task has."""
    tokens: int | None = None
    """Of the samples that it is planned for; None: of the made ones."""


TASKS = {
    "chats": Task(),
    "tool-calls": Task(),
    "reasoning": Task(),
    "documents": Task(command="finetune_full"),
    "documents-stream": Task(command="finetune_full"),
    "experts": Task(family="qwen3_moe", column="router_aux_loss"),
    "pairs": Task(column="accuracy"),
    "qlora-16gb": Task(),
    "long-context": Task(tokens=65536),
}
OFTEN = [("tool-calls",), ("documents",), ("experts",), ("pairs",), ("qlora-16gb",)]
"""Outside the matrix: the others are chats as well."""


def recipe_of(name: str) -> Path:
    return ROOT / f"recipes/{name}.yaml"


def tiny_model(directory: Path, family: str) -> Path:
    """A random model of a family, with room for the records and a template for all of them."""
    made = make_transformers_model(directory, family, max_position_embeddings=4096)
    # The template of Qwen3-8B can close a thought, and reads this variable for it.
    asks = "{%- if enable_thinking %}{%- endif %}"
    (made / "chat_template.jinja").write_text(TEMPLATE.read_text() + asks)
    return made


def test_the_made_data_are_small() -> None:
    names = ("chats", "tools", "reasoning", "documents")
    files = [file for name in names for file in (embedded.path(name) / "data").iterdir()]
    assert len(files) == len(names)
    assert sum(file.stat().st_size for file in files) < MAX_DATA_BYTES


def test_the_table_of_recipes_has_each_of_them() -> None:
    table = (ROOT / "recipes/README.md").read_text()
    assert all(f"[`{name}.yaml`]({name}.yaml)" in table for name in (*TASKS, "preference"))


@pytest.mark.slow
@pytest.mark.parametrize("name", layouts([(name,) for name in TASKS], OFTEN))
def test_a_recipe_fits_the_card_that_it_names_as_it_says(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a network: the sizes of its base model come with LitGPT."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    places.fetch_settings.cache_clear()
    found = CARD.search(recipe_of(name).read_text())
    assert found is not None
    card, least, most = found[1], float(found[2]), float(found[3])
    keys = []
    if (tokens := TASKS[name].tokens) is not None:
        # Without its tokenizer, text may have as many tokens as bytes.
        turns = [("user", "Why?"), ("assistant", "a" * tokens)]
        messages = [{"role": role, "content": content} for role, content in turns]
        Path("long.jsonl").write_text(2 * (json.dumps({"messages": messages}) + "\n"))
        keys = [("data.path", "long.jsonl"), ("data.val_split_fraction", "0.5")]
    planned = plan_files([recipe_of(name)], keys, command=TASKS[name].command, gpu=find_gpu(card))
    assert planned.fits and planned.known_as is not None
    assert planned.least_bytes / 2**30 == pytest.approx(least, rel=0.02)
    assert planned.high_bytes / 2**30 == pytest.approx(most, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", layouts([(name,) for name in TASKS], OFTEN))
def test_a_recipe_learns_from_its_made_data(name: str, ftkit: Command, tmp_path: Path) -> None:
    task = TASKS[name]
    base, out = tiny_model(tmp_path / "tiny", task.family), tmp_path / "out"
    ended = ftkit(
        *(task.command, recipe_of(name), "--checkpoint_dir", base, "--out_dir", out),
        *("--precision", "32-true", "--train.max_steps", STEPS, "--train.epochs", STEPS),
        *("--optimizer.lr", 0.01),
        *("--eval.interval", STEPS, "--eval.max_iters", 2, "--eval.max_new_tokens", 2),
        *(() if task.tokens is None else ("--train.max_seq_length", 1024)),
    )
    assert ended.returncode == 0, ended.stderr
    rows = read_metrics(out / "metrics.csv")
    assert all(math.isfinite(row["loss"]) and row[task.column] is not None for row in rows)
    first, *_, last = read_validation(out / "validation.csv")
    assert (first["step"], last["step"]) == (0, STEPS)
    before, after = first["val_loss"], last["val_loss"]
    assert before is not None and after is not None and after < before
    assert "not used" not in ended.stdout and "refused" not in ended.stdout
