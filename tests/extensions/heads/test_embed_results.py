"""Embedding models apart from a run: what their files say, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from computed import filled
from messages import message_of, says
from rank_jobs import repeated
from tiny import make_llama
from transformers import AutoModel
from transformers_models import MODELS, make_transformers_model

from ftkit.cli.app import run
from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import Sample
from ftkit.evaluation.result import find_result
from ftkit.extensions.heads.embed import pooled, pooled_sample
from ftkit.models.language_model import outline, output_of
from ftkit.models.loss import Hidden
from ftkit.models.pretrained.base_model import open_base, weights
from ftkit.models.pretrained.save import save_hf
from ftkit.models.pretrained.scored_model import as_scored
from ftkit.recipe.objectives import ScoreLabels
from ftkit.recipe.recipe import Recipe

VECTORS = ScoreLabels(names=(), pooling="mean")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding model without a run, of a base whose output layer is its own."""
    directory = tmp_path_factory.mktemp("embedding")
    base = as_scored(open_base(str(make_llama(directory / "base"))), VECTORS)
    save_hf(base, weights(base), directory / "model")
    return directory / "model"


@pytest.fixture(scope="module")
def queries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "queries.json"
    rows = [{"query": f"cat {n}", "positive": f"a cat {n}"} for n in range(8)]
    file.write_text(json.dumps([row | {"negatives": ["dog", "sun"]} for row in rows]))
    return file


def test_its_files_say_what_it_is(model: Path) -> None:
    assert find_result(str(model)).scores == VECTORS
    settings = json.loads((model / "config.json").read_text())
    assert settings["architectures"] == ["LlamaModel"]
    base = open_base(str(model))
    assert base.tied and base.architecture.scores == VECTORS
    assert not any("lm_head" in name for name, _ in weights(base))


def test_an_embedding_model_without_a_run_is_used(
    model: Path, queries: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", str(model), "--data", "JSON", "--data.path", str(queries)]) == 0
    shown = capsys.readouterr().out
    assert says(shown, "8 records", "loss", "recall at 1", "recall at 10", "mrr")
    assert "perplexity" not in shown and "exact match" not in shown
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red cat\nthe sun\n")
    command = ["generate", str(model), "--prompts", str(prompts)]
    assert run([*command, "--out", str(tmp_path / "out.jsonl")]) == 0
    assert run([*command, "--out", str(tmp_path / "out.npy")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["instruction"] for row in rows] == ["a red cat", "the sun"]
    found = np.load(tmp_path / "out.npy")
    np.testing.assert_array_equal(np.array([row["vector"] for row in rows], np.float32), found)
    capsys.readouterr()
    assert run(["generate", str(model), "--prompt", "a red cat", "--format", "json"]) == 0
    one = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(one["vector"], found[0], atol=1e-6)
    assert run(command) == 0
    assert says(capsys.readouterr().out, "> a red cat", "(64 numbers)", "> the sun")


FINETUNE = ["plan", "BASE", "--data", "JSON", "--data.path", "FILE", "--objective", "embed"]
FINETUNE += ["--data.val_split_fraction", "0.5"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["chat", "MODEL"], ["embedding model", "ftkit chat"]),
        (["evaluate", "MODEL", "--tasks", "arc_easy"], ["embedding model", "--tasks"]),
        (["export", "MODEL", "--format", "gguf", "--out", "OUT"], ["embedding model", "gguf"]),
        (["generate", "MODEL", "--prompt", "a", "--temperature", "1"], ["--temperature"]),
        (["generate", "MODEL", "--prompt", "a", "--input", "b"], ["--input"]),
        (["generate", "MODEL", "--prompt", "a", "--system", "b"], ["--system"]),
        (["plan", "MODEL", "--data", "JSON", "--data.path", "FILE"], ["--objective embed"]),
        ([*FINETUNE, "--objective.temperature", "0"], ["objective.temperature", "above 0"]),
        ([*FINETUNE, "--objective.pooling", "max"], ["objective.pooling", "last, mean"]),
        ([*FINETUNE, "--objective.sizes", "[8, 8]"], ["objective.sizes", "[256, 64]"]),
        ([*FINETUNE, "--objective.sizes", "[64]"], ["objective.sizes", "64 numbers", "[32]"]),
        ([*FINETUNE, "--objective.negatives", "3"], ["negatives", "objective.negatives 2"]),
        ([*FINETUNE, "--lora_head", "true"], ["lora_head", "embed"]),
        ([*FINETUNE, "--train.global_batch_size", "1"], ["global_batch_size", "compares"]),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(
    words: list[str], named: list[str], model: Path, queries: Path, tmp_path: Path
) -> None:
    places = {"MODEL": str(model), "BASE": str(model.with_name("base")), "FILE": str(queries)}
    places |= {"OUT": str(tmp_path / "out")}
    assert says(message_of(run, [places.get(word, word) for word in words]), *named)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("modules.json", {}, ["modules.json"]),
        ("modules.json", [{"type": "x.Transformer"}], ["modules.json", "Transformer", "Pooling"]),
        ("modules.json", [{"type": "x.Pooling"}, {"type": "x.Dense"}], ["Dense"]),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, ["another pooling", "modules.json"]),
        ("1_Pooling/config.json", [], ["1_Pooling"]),
    ],
)
def test_other_vectors_are_refused(
    file: str, content: Any, named: list[str], model: Path, tmp_path: Path
) -> None:
    changed = shutil.copytree(model, tmp_path / "model")
    (changed / file).write_text(json.dumps(content))
    assert says(message_of(run, ["generate", str(changed), "--prompt", "a"]), *named)


@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
def test_files_of_new_versions_of_sentence_transformers_are_read(
    mode: str, model: Path, tmp_path: Path
) -> None:
    changed = shutil.copytree(model, tmp_path / "model")
    settings = {"embedding_dimension": 64, "pooling_mode": mode, "include_prompt": True}
    (changed / "1_Pooling/config.json").write_text(json.dumps(settings))
    scores = find_result(str(changed)).scores
    assert scores is not None and scores.pooling == mode.removesuffix("token")


USUAL = ("qwen3", "gemma2", "cohere", "gpt_neox")
"""Norms of heads, softcaps and scales of logits, which are no part of vectors, and other names."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*USUAL, *repeated(*(one for one in MODELS if one not in USUAL))])
@torch.no_grad()
def test_vectors_are_those_of_transformers_base_model(kind: str, tmp_path: Path) -> None:
    scores = ScoreLabels(names=(), pooling="last")
    base = as_scored(open_base(str(make_transformers_model(tmp_path / "base", kind))), scores)
    save_hf(base, weights(base), tmp_path / "out")
    plain, loading = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    again = open_base(str(tmp_path / "out"))
    model = filled(outline(again, Recipe(checkpoint_dir=again.name), torch.float32), again).eval()
    model.kernel = "cpu"
    texts = [np.arange(5, 5 + length, dtype=np.int32) for length in (9, 4)]
    nothing = np.empty((0, 2), dtype=np.int32)
    batch = collate([pooled_sample(Sample(ids, nothing), "last") for ids in texts], {})
    found = pooled(output_of(model, batch, Hidden()), batch, "last")
    for ids, vector in zip(texts, found, strict=True):
        states = plain(input_ids=torch.tensor(ids[None], dtype=torch.long)).last_hidden_state
        torch.testing.assert_close(vector, states[0, -1], rtol=1e-5, atol=1e-5)
