"""Promises P1 and P2 for classifiers and rerankers, and what other programs make of the results."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import message_of, says
from outcomes import data_of, recipe_of
from peft import AutoPeftModelForSequenceClassification
from rank_jobs import NO_EVALUATION, Case, Entries, Outcome, chosen, make_run, repeated
from safetensors.torch import load_file, save_file
from tiny import make_classified, make_labelled_queries, make_queries
from transformers import AutoModelForSequenceClassification

from ftkit.cli.app import run
from ftkit.data.dataset import DataSets
from ftkit.data.samples.sampler import EpochOrder
from ftkit.evaluation.result import find_result
from ftkit.extensions.heads.classify import f1_macro
from ftkit.extensions.publish.model_card import CardKind, card_text, with_name
from ftkit.models.load_weights import initial_score
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Method
from ftkit.runs.report.metrics import read_validation

pytestmark = pytest.mark.slow
Changes = tuple[tuple[str, Any], ...]
Found = dict[tuple[str, ...], Outcome]
ADAPTED: Changes = (("lora_head", False), ("lora_dropout", 0.05))
ONE, SEVERAL, VALUE = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)
CLASSES: dict[str, list[str] | None] = {
    ONE: ["animal", "colour", "sky"],
    SEVERAL: ["animal", "colour", "long", "sky"],
    VALUE: None,
}
LISTS, LABELLED = "lists", "labelled"
RANKED: dict[str, tuple[str, int]] = {LISTS: ("lists", 3), LABELLED: ("points", 0)}
"""Loss and number of negatives of rerankers."""
KINDS = (*CLASSES, *RANKED)
ROWS: dict[str, Changes] = {
    "one by one": (("train.micro_batch_size", 1),),
    "two": (("train.micro_batch_size", 2),),
    "five": (("train.micro_batch_size", 5),),
    "padded": (("train.padding_free", False),),
}
STEPS = 9
"""Of 48 texts or queries in two epochs: the last step has 8 of them, the others 11."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("texts")
    made = {kind: directory / f"{kind}.json" for kind in KINDS}
    for problem in CLASSES:
        made[problem].write_text(json.dumps(make_classified(60, problem)))
    made[LISTS].write_text(json.dumps(make_queries(60, 3)))
    made[LABELLED].write_text(json.dumps(make_labelled_queries(60)))
    return made


def objective_of(kind: str) -> Changes:
    if kind in RANKED:
        loss, negatives = RANKED[kind]
        return (
            ("objective", "rerank"),
            ("objective.loss", loss),
            ("objective.negatives", negatives),
        )
    classes = CLASSES[kind]
    return (
        ("objective", "classify"),
        ("objective.problem_type", kind),
        ("objective.classes", None if classes is None else Entries(classes)),
    )


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
    files: dict[str, Path],
    request: pytest.FixtureRequest,
) -> Found:
    """Runs of the selected tests, by what they are."""
    rows = {
        (params["kind"], params["how"])
        for params in chosen(request, test_micro_batches_change_nothing)
    }
    ranks = {params["strategy"] for params in chosen(request, test_two_ranks_learn_as_one_does)}
    run_cases = make_run(tmp_path_factory)

    def case(kind: str, strategy: str, method: Method, more: Changes = (), **keys: Any) -> Case:
        changes: Changes = (
            *NO_EVALUATION,
            *objective_of(kind),
            ("data.json_path", str(files[kind])),
            ("data.mask_prompt", None),
            ("optimizer.lr", 2e-3),
            ("optimizer.eps", 1e-5),  # so that Adam makes no steps of gradients that are rounding
            ("optimizer.weight_decay", 0.0),
            ("eval.interval", 2),
            ("eval.final_validation", True),
            *more,
        )
        # The embedding of the base model is its head too, which a classifier does not have.
        return Case(strategy, method, changes=changes, tied=True, **keys)

    single: dict[tuple[str, ...], Case] = {
        **{(kind,): case(kind, "single", "full") for kind in KINDS},
        ("lora",): case(ONE, "single", "lora", ADAPTED),
        ("lists lora",): case(LISTS, "single", "lora", ADAPTED),
        **{("half", kind): case(kind, "single", "full", stop_after=4) for kind in (SEVERAL, LISTS)},
        **{(kind, how): case(kind, "single", "full", ROWS[how]) for kind, how in rows},
    }
    alone = run_cases(1, list(single.values()))
    known = {name: alone[one] for name, one in single.items()}
    double: dict[tuple[str, ...], Case] = {}
    for strategy in ranks - {"resumed", "shared"}:
        double |= {(strategy, kind): case(kind, strategy, "full") for kind in KINDS}
    if "fsdp" in ranks:
        double["fsdp", "lora"] = case(ONE, "fsdp", "lora", ADAPTED)
        double["fsdp", "lists lora"] = case(LISTS, "fsdp", "lora", ADAPTED)
    if "resumed" in ranks:
        for kind in (SEVERAL, LISTS):
            start = known["half", kind].out_dir
            double["resumed", kind] = case(kind, "fsdp", "full", start=start)
    if "shared" in ranks:
        shared: Changes = (("strategy.context", 2),)
        double |= {("shared", kind): case(kind, "ddp", "full", shared) for kind in KINDS}
    in_two = run_cases(2, list(double.values()))
    return known | {name: in_two[one] for name, one in double.items()}


def metrics_of(outcome: Outcome) -> list[dict[str, Any]]:
    """Each validation, with what is measured in it."""
    return [dict(row) for row in read_validation(outcome.out_dir / "validation.csv")]


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert len(found.losses) == STEPS
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.report.terms.keys() == expected.report.terms.keys() != set()
    rows, others = metrics_of(found), metrics_of(expected)
    assert len(rows) == 5
    for row, other in zip(rows, others, strict=True):
        assert {k: float(v) for k, v in row.items() if v} == pytest.approx(
            {k: float(v) for k, v in other.items() if v}, rel=2e-5
        )
    weights = found.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=1e-5)
    assert not weights


@pytest.mark.parametrize("kind", [ONE, LISTS])
@pytest.mark.parametrize("how", ["two", "padded", *repeated("one by one", "five")])
def test_micro_batches_change_nothing(how: str, kind: str, found: Found) -> None:
    assert_same(found[kind, how], found[kind,])


@pytest.mark.parametrize("strategy", ["fsdp", "resumed", "shared", *repeated("ddp", "deepspeed")])
def test_two_ranks_learn_as_one_does(strategy: str, found: Found) -> None:
    names = [name for name in found if name[0] == strategy and len(name) == 2]
    assert names
    for name in names:
        assert_same(found[name], found[name[1],])


def labels_of(target: Any, problem: str) -> torch.Tensor:
    """A target as transformers takes it."""
    values = torch.tensor(np.array(target))[None]
    return values if problem == SEVERAL else values[:, 0].to(
        torch.long if problem == ONE else torch.float32
    )  # fmt: skip


@pytest.mark.parametrize("problem", CLASSES)
def test_the_losses_are_those_of_a_plain_loop(problem: str, found: Found) -> None:
    outcome = found[problem,]
    recipe, classes = recipe_of(outcome), CLASSES[problem] or ["value"]
    data = data_of(outcome, outcome.checkpoint / "base")
    model = AutoModelForSequenceClassification.from_pretrained(
        recipe.checkpoint_dir, num_labels=len(classes), problem_type=problem
    )
    with torch.no_grad():
        model.score.weight.copy_(initial_score(model.score.weight.shape, recipe.seed))
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-5, weight_decay=0)
    epochs = EpochOrder([len(data.train)], [len(data.train)], recipe.seed)
    order = [*epochs.of(0).tolist(), *epochs.of(1).tolist()]
    losses = []
    for step, row in enumerate(outcome.rows[:6]):
        of_step = order[11 * step : 11 * (step + 1)]
        total = 0.0
        for index in of_step:
            sample = data.train[index]
            ids = torch.tensor(sample.ids[None], dtype=torch.long)
            loss = model(input_ids=ids, labels=labels_of(sample.target, problem)).loss / 11
            loss.backward()
            total += loss.item()
        losses.append(total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        assert norm.item() == pytest.approx(row["grad_norm"], rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        optimizer.step()
        optimizer.zero_grad()
    assert outcome.losses[:6] == pytest.approx(losses, rel=1e-5)


def test_the_losses_of_lists_are_those_of_a_plain_loop(
    found: Found, files: dict[str, Path]
) -> None:
    outcome, rows = found[LISTS,], json.loads(files[LISTS].read_text())
    recipe = recipe_of(outcome)
    data = data_of(outcome, outcome.checkpoint / "base")
    tokenizer = Tokenizer(outcome.checkpoint / "base")
    known = {
        tuple(tokenizer.encode(f"{row['query']}\n{text}").tolist())
        for row in rows
        for text in (row["positive"], *row["negative"])
    }
    model = AutoModelForSequenceClassification.from_pretrained(recipe.checkpoint_dir, num_labels=1)
    with torch.no_grad():
        model.score.weight.copy_(initial_score(model.score.weight.shape, recipe.seed))
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-5, weight_decay=0)
    epochs = EpochOrder([len(data.train)], [len(data.train)], recipe.seed)
    order = [*epochs.of(0).tolist(), *epochs.of(1).tolist()]
    losses = []
    for step, row in enumerate(outcome.rows[:6]):
        total = 0.0
        for index in order[11 * step : 11 * (step + 1)]:
            sequences = data.train.sequences(index)
            assert len(sequences) == 4 and {tuple(one.ids.tolist()) for one in sequences} <= known
            every = [torch.tensor(one.ids[None], dtype=torch.long) for one in sequences]
            scores = torch.cat([model(input_ids=ids).logits for ids in every], dim=1)
            loss = torch.nn.functional.cross_entropy(scores, torch.tensor([0])) / 11
            loss.backward()
            total += loss.item()
        losses.append(total)
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
    assert outcome.losses[:6] == pytest.approx(losses, rel=1e-5)


@torch.no_grad()
def outputs(model: Any, data: DataSets) -> torch.Tensor:
    """[texts, scores], of the validation records one by one."""
    ids = [torch.tensor(data.val[i].ids[None], dtype=torch.long) for i in range(len(data.val))]
    return torch.cat([model(one).logits for one in ids])


def check_validation(outcome: Outcome, scores: torch.Tensor, data: DataSets, problem: str) -> None:
    """The last validation of a run is what these scores of other programs give."""
    terms, targets = outcome.report.terms, data.val.targets
    assert targets is not None
    last = {name: term.validation_last for name, term in terms.items()}
    loss = outcome.validation_losses[-1]
    if problem == VALUE:
        x, y = scores[:, 0].double().numpy(), targets[:, 0]
        assert loss == pytest.approx(float(np.mean((x - y) ** 2)), rel=1e-5)
        assert last == {"pearson": pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-5)}
        return
    labels = torch.from_numpy(np.array(targets))
    functional = torch.nn.functional
    if problem == ONE:
        labels = functional.one_hot(labels[:, 0].long(), scores.size(1)).float()
        found = functional.one_hot(scores.argmax(1), scores.size(1)) > 0
        expected = functional.cross_entropy(scores, labels)
    else:
        found = scores > 0
        expected = functional.binary_cross_entropy_with_logits(scores, labels)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    met = labels > 0
    assert last["accuracy"] == pytest.approx((found == met).all(1).float().mean().item())
    sums = [one.sum(0).float() for one in (found & met, found, met)]
    assert last["f1_macro"] == pytest.approx(f1_macro(*sums))


def check_ranking(outcome: Outcome, model: Any, data: DataSets) -> torch.Tensor:
    """The last validation of a run is what the scores of another program give, which return."""
    with torch.no_grad():
        scores = torch.stack(
            [
                torch.cat([model(torch.tensor(one.ids[None]).long()).logits[0] for one in of_query])
                for of_query in map(data.val.sequences, range(len(data.val)))
            ]
        )
    last = {name: term.validation_last for name, term in outcome.report.terms.items()}
    if data.val.targets is not None:
        labels = torch.from_numpy(np.array(data.val.targets))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels)
        assert last == {"accuracy": pytest.approx(((scores > 0) == (labels > 0)).float().mean())}
    else:
        loss = torch.nn.functional.cross_entropy(scores, torch.zeros(len(scores)).long())
        ranks = 1 + (scores[:, 1:] > scores[:, :1]).sum(1)
        expected = {
            "accuracy": (ranks == 1).float().mean().item(),
            "mrr": (1 / ranks).mean().item(),
            "ndcg_at_10": (1 / torch.log2(1 + ranks)).mean().item(),
        }
        assert last == pytest.approx(expected, rel=1e-5)
    assert outcome.validation_losses[-1] == pytest.approx(loss.item(), rel=1e-5)
    return scores


@pytest.mark.parametrize("kind", RANKED)
def test_transformers_ranks_as_the_run_does(kind: str, found: Found) -> None:
    final = found[kind,].out_dir / "final"
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        final, output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert model.config.num_labels == 1 and model.config.id2label == {0: "relevance"}
    check_ranking(found[kind,], model, data_of(found[kind,], final))


def test_peft_ranks_as_the_run_does(found: Found, tmp_path: Path) -> None:
    outcome = found["lists lora",]
    adapter = outcome.out_dir / "final"
    model = AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=1)
    config = model.peft_config["default"]
    assert config.task_type == "SEQ_CLS" and "score" in config.modules_to_save
    data = data_of(outcome, adapter)
    scores = check_ranking(outcome, model, data)
    outcome.complete()
    assert run(["merge", str(outcome.out_dir), "--out", str(tmp_path / "merged")]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.id2label == {0: "relevance"}
    torch.testing.assert_close(check_ranking(outcome, merged, data), scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("problem", CLASSES)
def test_transformers_gives_the_scores_of_the_run(problem: str, found: Found) -> None:
    outcome = found[problem,]
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        outcome.out_dir / "final", output_loading_info=True
    )
    assert not any(loading.values()), loading
    names = CLASSES[problem] or ["LABEL_0"]
    assert model.config.id2label == dict(enumerate(names))
    assert model.config.label2id == {name: number for number, name in enumerate(names)}
    assert model.config.num_labels == len(names) and model.config.problem_type == problem
    data = data_of(outcome, outcome.out_dir / "final")
    check_validation(outcome, outputs(model, data), data, problem)


def test_peft_gives_the_scores_of_the_run(found: Found, tmp_path: Path) -> None:
    outcome = found["lora",]
    adapter = outcome.out_dir / "final"
    model = AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=3)
    assert model.peft_config["default"].task_type == "SEQ_CLS"
    data = data_of(outcome, adapter)
    scores = outputs(model, data)
    check_validation(outcome, scores, data, ONE)
    outcome.complete()
    assert run(["merge", str(outcome.out_dir), "--out", str(tmp_path / "merged")]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.id2label == dict(enumerate(CLASSES[ONE] or ()))
    torch.testing.assert_close(outputs(merged, data), scores, rtol=0, atol=1e-5)


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert run([*words, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", [*KINDS, "lora", "lists lora", "checkpoint"])
def test_results_are_evaluated_as_in_their_run(
    kind: str, found: Found, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = found[ONE if kind == "checkpoint" else kind,]
    outcome.complete()
    named = outcome.checkpoint if kind == "checkpoint" else outcome.out_dir
    values = run_json(capsys, "evaluate", str(named))
    terms = {name: term.validation_last for name, term in outcome.report.terms.items()}
    assert values["loss"] == pytest.approx(outcome.validation_losses[-1], rel=1e-6)
    assert values["terms"] == pytest.approx(terms, rel=1e-5)
    assert values["perplexity"] is None and values["exact_match"] is None


def test_a_result_apart_from_its_run_knows_its_classes(
    found: Found,
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for kind in (ONE, "lora", LISTS, "lists lora"):
        file = files[LISTS if "lists" in kind else ONE]
        data = ("--data", "JSON", "--data.path", str(file), "--data.val_split_fraction", "0.2")
        alone = tmp_path / kind
        (found[kind,].out_dir / "final").rename(alone)
        values = run_json(capsys, "evaluate", str(alone), *data, "--precision", "32-true")
        alone.rename(found[kind,].out_dir / "final")
        assert values["loss"] == pytest.approx(found[kind,].validation_losses[-1], rel=1e-5)


def test_an_adapter_of_another_program_has_classes_without_names(
    found: Found, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = shutil.copytree(found["lora",].out_dir / "final", tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file), file)  # without what ftkit notes in its header
    scores = find_result(str(adapter)).scores
    assert scores is not None and scores.names == ("LABEL_0", "LABEL_1", "LABEL_2")
    answer = run_json(capsys, "generate", str(adapter), "--prompt", "red", "--precision", "32-true")
    assert {*answer["probabilities"]} == {*scores.names}


def softmax(row: torch.Tensor) -> list[float]:
    return row.softmax(0).tolist()


def sigmoid(row: torch.Tensor) -> list[float]:
    return row.sigmoid().tolist()


@pytest.mark.parametrize(
    ("kind", "probabilities"), [(ONE, softmax), (SEVERAL, sigmoid), (VALUE, torch.Tensor.tolist)]
)
def test_prompts_are_classified_as_transformers_does(
    kind: str,
    probabilities: Callable[[torch.Tensor], list[float]],
    found: Found,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = found[kind,]
    outcome.complete()
    final = outcome.out_dir / "final"
    texts = [f"{'red ' * (number % 5)}cat" for number in range(20)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    answers = run_json(capsys, "generate", str(outcome.out_dir), "--prompts", str(prompts))
    model = AutoModelForSequenceClassification.from_pretrained(final)
    tokenizer, names = Tokenizer(final), [*model.config.id2label.values()]
    for text, answer in zip(texts, answers, strict=True):
        with torch.no_grad():
            expected = probabilities(model(tokenizer.encode(text)[None].long()).logits[0])
        assert answer.pop("text") == text
        if kind == VALUE:
            assert answer == {"value": pytest.approx(expected[0], abs=1e-5)}
            continue
        by_name = dict(zip(names, expected, strict=True))
        assert answer["probabilities"] == pytest.approx(by_name, abs=1e-5)
        ranked = sorted(by_name, key=lambda name: -by_name[name])
        assert [*answer["probabilities"]] == ranked
        if kind == ONE:
            assert answer["label"] == ranked[0]
        else:
            assert answer["labels"] == [name for name in ranked if by_name[name] > 0.5]
    # By itself, without what a batch rounds otherwise.
    one = run_json(capsys, "generate", str(outcome.out_dir), "--prompt", texts[3])
    assert one.pop("instruction") == texts[3]
    for key, value in answers[3].items():
        assert one[key] == (value if key.startswith("label") else pytest.approx(value, abs=1e-6))
    assert run(["generate", str(outcome.out_dir), "--prompt", texts[3]]) == 0
    shown = capsys.readouterr().out.strip()
    assert shown.startswith(one["label"] if kind == ONE else "") and shown


def test_documents_are_ranked_as_transformers_scores_them(
    found: Found, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = found[LISTS,]
    outcome.complete()
    final = outcome.out_dir / "final"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(final), Tokenizer(final)
    asked: list[dict[str, Any]] = [
        {"query": "red blue", "documents": ["cat dog", "green red", "sun", "moon moon"]},
        {"query": "cat", "positive": "dog", "negative_1": "sun"},
    ]
    texts = [["cat dog", "green red", "sun", "moon moon"], ["dog", "sun"]]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in asked))
    answers = run_json(capsys, "generate", str(outcome.out_dir), "--prompts", str(prompts))
    for row, answer, documents in zip(asked, answers, texts, strict=True):
        query = row["query"]
        with torch.no_grad():
            scores = {
                text: model(tokenizer.encode(f"{query}\n{text}")[None].long()).logits[0, 0].item()
                for text in documents
            }
        assert answer["query"] == query
        ranked = sorted(scores, key=lambda text: -scores[text])
        assert [one["document"] for one in answer["ranking"]] == ranked
        for one in answer["ranking"]:
            assert one["score"] == pytest.approx(scores[one["document"]], abs=1e-5)
    words = ("--prompt", "cat", "--input", "dog")
    alone = run_json(capsys, "generate", str(outcome.out_dir), *words)
    assert alone["ranking"][0]["score"] == pytest.approx(
        answers[1]["ranking"][0]["score"], abs=1e-5
    )
    assert run(["generate", str(outcome.out_dir), "--prompts", str(prompts)]) == 0
    assert capsys.readouterr().out.split()[:3] == [">", "red", "blue"]
    for refused in (["--prompt", "cat"], [*words, "--temperature", "1"]):
        command = ["generate", str(outcome.out_dir), *refused]
        assert says(message_of(run, command), refused[-2])


@pytest.mark.parametrize(("kind", "method"), [(LISTS, "hf"), ("lists lora", "adapter")])
def test_the_card_of_a_reranker_scores_as_ftkit_does(
    kind: str, method: CardKind, found: Found, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = found[kind,]
    outcome.complete()
    words = ("--prompt", "Which animal barks?", "--input", "A dog barks.")
    expected = run_json(capsys, "generate", str(outcome.out_dir), *words)["ranking"][0]["score"]
    card = card_text(outcome.report, outcome.checkpoint / "base", method)
    assert "\npipeline_tag: text-ranking\n" in card
    final = str(outcome.out_dir / "final")
    code = with_name(card, final, None).partition("```python\n")[2].partition("```")[0]
    exec(code, {})
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(expected, abs=1e-5)


def test_rankings_are_learned(found: Found) -> None:
    # What chance gives: 4 documents in any order, and a loss of ln 4.
    ranked, by_chance = found[LISTS,], sum(1 / rank for rank in range(1, 5)) / 4
    assert ranked.validation_losses[-1] < math.log(4) - 0.1
    assert (ranked.report.terms["mrr"].validation_last or 0) > by_chance + 0.1


def test_classes_are_learned(found: Found) -> None:
    accuracy, correlation = (
        found[kind,].report.terms[name].validation_last
        for kind, name in ((ONE, "accuracy"), (VALUE, "pearson"))
    )
    assert (accuracy or 0) > 0.9 and (correlation or 0) > 0.5
