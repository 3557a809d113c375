"""Promises P1 and P2 for embedding models, and that their losses are those of a plain loop."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from outcomes import data_of, recipe_of
from peft import AutoPeftModelForFeatureExtraction
from rank_jobs import NO_EVALUATION, Case, Entries, Outcome, chosen, make_run, repeated
from tiny import WORDS
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from ftkit.cli.app import run
from ftkit.data.dataset import DataSets
from ftkit.data.samples.sampler import EpochOrder
from ftkit.recipe.recipe import Method
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
    """Queries with a document that has their words, and one that has others; documents repeat."""
    rng = random.Random(1)
    rows = []
    for number in range(count):
        one, two, other = rng.sample(WORDS, 3)
        asked = f"{number}{' what' * rng.randint(0, 6)} {one} {two}"
        rows.append({"query": asked, "positive": f"{one} {two}", "negative": f"{other} {one}"})
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


def check_validation(outcome: Outcome, model: Any, data: DataSets, kind: str) -> None:
    """The last validation of a run is that of the vectors of another program, all at once."""
    each = [data.val.sequences(i) for i in range(len(data.val))]
    keys = [[tuple(one.ids.tolist()) for one in sample] for sample in each]
    with torch.no_grad():
        vectors = [[vector(model, one.ids, kind) for one in sample] for sample in each]
    sizes = [vectors[0][0].shape[1], *((32, 8) if kind == MEAN else ())]
    expected = plain_loss(vectors, keys, sizes).item()
    assert outcome.validation_losses[-1] == pytest.approx(expected, rel=1e-5)


def by_files(directory: Path, texts: Sequence[str]) -> Tensor:
    """Vectors as the files of sentence-transformers say, by itself if it is there."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        names = [one["type"].split(".")[-1] for one in read_json(directory / "modules.json")]
        assert names == ["Transformer", "Pooling", "Normalize"]
        settings = read_json(directory / "1_Pooling/config.json")
        (mode,) = (key for key, value in settings.items() if value is True and "mode" in key)
        model = AutoModel.from_pretrained(directory)
        assert settings["word_embedding_dimension"] == model.config.hidden_size
        tokenizer = AutoTokenizer.from_pretrained(directory)
        kind = {"pooling_mode_lasttoken": LAST, "pooling_mode_mean_tokens": MEAN}[mode]
        ids = [np.array(tokenizer(text)["input_ids"]) for text in texts]
        with torch.no_grad():
            return torch.cat([F.normalize(vector(model, one, kind)) for one in ids])
    encoder = SentenceTransformer(str(directory), device="cpu")
    return torch.from_numpy(encoder.encode([*texts]))


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


TEXTS = [f"{'red ' * (number % 5)}cat" for number in range(20)]


def made_by_ftkit(result: Path, directory: Path) -> Tensor:
    prompts, out = directory / "prompts.txt", directory / "vectors.npy"
    prompts.write_text("\n".join(TEXTS) + "\n")
    assert run(["generate", str(result), "--prompts", str(prompts), "--out", str(out)]) == 0
    found = np.load(out)
    assert found.dtype == np.float32 and found.shape == (len(TEXTS), 64)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    return torch.from_numpy(found)


@pytest.mark.parametrize("kind", [LAST, MEAN])
def test_other_programs_give_the_vectors_of_the_run(
    kind: str, found: Found, tmp_path: Path
) -> None:
    outcome = found[kind,]
    final = outcome.out_dir / "final"
    model, loading = AutoModel.from_pretrained(final, output_loading_info=True)
    assert not any(loading.values()), loading
    check_validation(outcome, model, data_of(outcome, final), kind)
    outcome.complete()
    of_run = made_by_ftkit(outcome.out_dir, tmp_path)
    torch.testing.assert_close(by_files(final, TEXTS), of_run, rtol=0, atol=1e-5)
    # Apart from the run, the files say where vectors are.
    alone = shutil.copytree(final, tmp_path / "alone")
    (tmp_path / "again").mkdir()
    again = made_by_ftkit(alone, tmp_path / "again")
    torch.testing.assert_close(again, of_run, rtol=0, atol=1e-5)


def test_peft_gives_the_vectors_of_the_run(found: Found, tmp_path: Path) -> None:
    outcome = found[LORA,]
    adapter = outcome.out_dir / "final"
    model = AutoPeftModelForFeatureExtraction.from_pretrained(adapter)
    assert model.peft_config["default"].task_type == "FEATURE_EXTRACTION"
    check_validation(outcome, model, data_of(outcome, adapter), LAST)
    outcome.complete()
    merged = tmp_path / "merged"
    assert run(["merge", str(outcome.out_dir), "--out", str(merged)]) == 0
    of_run = made_by_ftkit(outcome.out_dir, tmp_path)
    torch.testing.assert_close(by_files(merged, TEXTS), of_run, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [MEAN, LORA, "checkpoint"])
def test_results_are_evaluated_as_in_their_run(
    kind: str, found: Found, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = found[LAST if kind == "checkpoint" else kind,]
    outcome.complete()
    named = outcome.checkpoint if kind == "checkpoint" else outcome.out_dir
    capsys.readouterr()
    assert run(["evaluate", str(named), "--format", "json"]) == 0
    values = json.loads(capsys.readouterr().out)
    terms = {name: term.validation_last for name, term in outcome.report.terms.items()}
    assert {*terms} == {"recall_at_1", "recall_at_10", "mrr"}
    assert values["loss"] == pytest.approx(outcome.validation_losses[-1], rel=1e-6)
    assert values["terms"] == pytest.approx(terms, rel=1e-5)
    assert values["perplexity"] is None and values["exact_match"] is None


def test_vectors_are_learned(found: Found) -> None:
    losses = found[LAST,].validation_losses
    assert losses[-1] < 0.7 * losses[0]
