"""Distillation: losses by their formulas, the same however a step is split, and 0 for a copy."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from computed import filled
from messages import message_of, says
from tiny import make_llama
from torch import Tensor
from transformers_models import make_transformers_model

from ftkit.data.rendering import Rendered
from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import SampleSet
from ftkit.extensions.distillation.distillation import Asft, Distill
from ftkit.extensions.other_models.divergence import FrozenHead
from ftkit.extensions.other_models.reference import TEACHER_HEAD, TEACHER_ROWS, Teacher
from ftkit.extensions.other_models.second_model import check_context, check_logits, check_tokens
from ftkit.models.language_model import LanguageModel, outline_plain
from ftkit.models.load_weights import Whole
from ftkit.models.loss import Head
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.models.pretrained.tokenizer import Tokenizer

WIDTH, TEACHER_WIDTH, VOCABULARY, LABELS = 8, 12, 40, 24
TARGETS = torch.randint(VOCABULARY, (LABELS,), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.rand(LABELS, generator=torch.Generator().manual_seed(2)) * 3 + 0.1
HALVES = [range(5), range(5, LABELS), range(0)]
OPTIONS: dict[str, dict[str, Any]] = {
    "forward": {},
    "reverse": {"divergence": "reverse"},
    "forward, warm": {"temperature": 2.5},
    "reverse, warm, with answers": {
        "divergence": "reverse",
        "temperature": 2.5,
        "sft_weight": 0.7,
    },
    "forward, with answers": {"sft_weight": 0.7},
    "asft": {"alpha": 0.3},
}


def objective_of(name: str) -> Distill:
    return (Asft if name == "asft" else Distill)(**OPTIONS[name])


def make_head(width: int, softcap: float | None, seed: int) -> Head:
    head = Head(nn.Linear(width, VOCABULARY), softcap)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


STUDENT, TEACHER = make_head(WIDTH, None, 3), make_head(TEACHER_WIDTH, None, 4)
CAPPED, CAPPED_TEACHER = make_head(WIDTH, 5.0, 3), make_head(TEACHER_WIDTH, 3.0, 4)
HIDDEN = torch.randn(1, LABELS, WIDTH, generator=torch.Generator().manual_seed(5))
ROWS = torch.randn(LABELS, TEACHER_WIDTH, generator=torch.Generator().manual_seed(6))


def batch_of(labels: range, teacher: Head) -> dict[str, Any]:
    places = torch.tensor(list(labels), dtype=torch.long)
    return {
        "places": places,
        "labels": TARGETS[places],
        "weights": WEIGHTS[places],
        TEACHER_HEAD: FrozenHead(teacher, Whole().whole),
        TEACHER_ROWS: ROWS[places],
    }


def terms_and_gradients(
    objective: Distill, student: Head, teacher: Head, labels: range, **how: Any
) -> tuple[dict[str, float], list[Tensor]]:
    """Sums of the terms over some labels, and the gradients of the loss."""
    batch = batch_of(labels, teacher)
    hidden = HIDDEN.clone().requires_grad_()
    parameters = [hidden, *student.parameters()]
    output = student(hidden, batch["places"], batch["labels"], objective.output(batch), **how)
    sums = objective.sums(output, batch)
    gradients = torch.autograd.grad(sums[0], parameters)
    names = (term.name for term in objective.terms)
    found = {name: value.item() for name, value in zip(names, sums, strict=True)}
    return found, [*gradients]


def expected_loss(
    student: Head, teacher: Head, hidden: Tensor, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Loss, divergence and cross-entropy, summed with weights, as one would write them down."""
    logits = student(hidden, torch.arange(LABELS), None)
    others = teacher(ROWS[None], torch.arange(LABELS), None).detach()
    t = options.get("temperature", 1.0)
    own, other = (torch.softmax(one.double() / t, 1) for one in (logits, others))
    p, q = (own, other) if options.get("divergence") == "reverse" else (other, own)
    divergence = t**2 * (p * (p.log() - q.log())).sum(1)
    cross_entropy = F.cross_entropy(logits.double(), TARGETS, reduction="none")
    loss = divergence + options.get("sft_weight", 0) * cross_entropy
    if "alpha" in options:
        loss = options["alpha"] * divergence + (-cross_entropy.detach()).exp() * cross_entropy
    return tuple((one * WEIGHTS).sum() for one in (loss, divergence, cross_entropy))


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_loss_is_its_formula(name: str, capped: bool) -> None:
    student, teacher = (CAPPED, CAPPED_TEACHER) if capped else (STUDENT, TEACHER)
    options = OPTIONS[name]
    hidden = HIDDEN.clone().requires_grad_()
    loss, divergence, cross_entropy = expected_loss(student, teacher, hidden, options)
    values = loss.item(), divergence.item(), cross_entropy.item()
    expected = torch.autograd.grad(loss, [hidden, *student.parameters()])
    for on_cpu in (False, True):
        found, gradients = terms_and_gradients(
            objective_of(name), student, teacher, range(LABELS), on_cpu=on_cpu
        )
        assert found["loss"] == pytest.approx(values[0], rel=1e-5)
        assert found["cross_entropy"] == pytest.approx(values[2], rel=1e-5)
        assert found.get("divergence", found["loss"]) == pytest.approx(values[1], rel=1e-5)
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_sums_and_gradients_do_not_depend_on_micro_batches(name: str) -> None:
    objective = objective_of(name)
    whole, of_whole = terms_and_gradients(objective, STUDENT, TEACHER, range(LABELS))
    parts = [terms_and_gradients(objective, STUDENT, TEACHER, labels) for labels in HALVES]
    for term, value in whole.items():
        assert sum(found[term] for found, _ in parts) == pytest.approx(value, rel=1e-6)
    for gradient, *of_parts in zip(of_whole, *(found for _, found in parts), strict=True):
        torch.testing.assert_close(gradient, torch.stack(of_parts).sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_adapted_head_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = objective_of(name)
    fused = terms_and_gradients(objective, CAPPED, CAPPED_TEACHER, range(LABELS))
    monkeypatch.setattr(Head, "fuses", lambda head, rows: False)
    monkeypatch.setattr("ftkit.models.loss.rows_at_once", lambda vocabulary: 7)
    found = terms_and_gradients(objective, CAPPED, CAPPED_TEACHER, range(LABELS))
    assert found[0] == pytest.approx(fused[0], rel=1e-5)
    for one, other in zip(found[1], fused[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_number_of_rows_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = Distill(divergence="reverse")
    found = terms_and_gradients(objective, STUDENT, TEACHER, range(LABELS))
    monkeypatch.setattr("ftkit.models.loss.rows_at_once", lambda vocabulary: 7)
    few = terms_and_gradients(objective, STUDENT, TEACHER, range(LABELS))
    assert few[0] == pytest.approx(found[0], rel=1e-6)
    for one, other in zip(few[1], found[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    directory = tmp_path_factory.mktemp("base") / "tiny"
    return open_base(str(make_llama(directory, initializer_range=0.2)))


def loaded(base: BaseModel) -> LanguageModel:
    model = outline_plain(base, torch.float32, tied=base.tied)
    return filled(model, base, rope_length=32).eval()


@pytest.mark.parametrize("name", ["forward", "reverse", "forward, warm"])
def test_a_model_does_not_diverge_from_a_copy_of_itself(name: str, base: BaseModel) -> None:
    student, objective = loaded(base), Distill(**OPTIONS[name])
    ids = torch.randint(2, 400, (2, 20), generator=torch.Generator().manual_seed(0)).tolist()
    samples = SampleSet.of([Rendered(one, ((3, len(one)),)) for one in ids])
    batch = collate([samples[0], samples[1], None], {}, padding_free=True)
    teacher = loaded(base).requires_grad_(False)
    Teacher(teacher, Whole(), nullcontext).add_to(batch)
    arguments = batch["input_ids"], batch["label_indices"], batch["labels"]
    output = student(
        *arguments, objective.output(batch), sequence_lengths=batch["sequence_lengths"]
    )
    loss, cross_entropy = objective.sums(output, batch)
    assert loss.item() == 0
    assert cross_entropy.item() > len(batch["labels"]) * math.log(2)
    loss.backward()
    assert all(p.grad is None or float(p.grad.abs().max()) < 1e-5 for p in student.parameters())
    assert not any(p.grad is not None for p in teacher.parameters())


def model_of_transformers(base: BaseModel) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base.directory, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "kind",
    ["gpt2", *(pytest.param(one, marks=pytest.mark.matrix) for one in ("gemma2", "granite"))],
)
def test_a_teacher_of_another_architecture_is_learned_from(
    kind: str, base: BaseModel, tmp_path: Path
) -> None:
    """The loss is that of the logits that transformers computes with both models."""
    teacher = open_base(
        str(make_transformers_model(tmp_path / "teacher", kind, initializer_range=0.2))
    )
    assert teacher.architecture.implementation != base.architecture.implementation
    check_logits(base, teacher, "teacher")
    check_tokens(base, teacher, "teacher")
    ids = torch.randint(2, 400, (20,), generator=torch.Generator().manual_seed(0))
    samples = SampleSet.of([Rendered(ids.tolist(), ((3, len(ids)),))])
    batch = collate([samples[0]], {}, padding_free=False)
    objective = Distill()
    Teacher(loaded(teacher).requires_grad_(False), Whole(), nullcontext).add_to(batch)
    arguments = batch["input_ids"], batch["label_indices"], batch["labels"]
    found, _ = objective.sums(loaded(base)(*arguments, objective.output(batch)), batch)
    with torch.no_grad():
        own, other = (
            model_of_transformers(one)(ids[None]).logits[0, 2:-1].double().log_softmax(1)
            for one in (base, teacher)
        )
    expected = F.kl_div(own, other, reduction="sum", log_target=True)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    assert expected > 1


def test_a_teacher_needs_the_same_tokens_and_a_context_as_long(
    base: BaseModel, tmp_path: Path
) -> None:
    small = open_base(str(make_llama(tmp_path / "small", vocab_size=384)))
    refused = message_of(check_logits, base, small, "teacher")
    assert says(refused, "teacher", "small", "384", "400")
    refused = message_of(check_context, base, "teacher", 300)
    assert says(refused, "teacher", "256", "300", "--train.max_seq_length 256")
    other = open_base(str(make_llama(tmp_path / "other")))
    check_tokens(base, other, "teacher")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"</s>"', '"<e>"'))
    other = replace(other, tokenizer=Tokenizer(file.parent))
    assert says(message_of(check_tokens, base, other, "teacher"), "teacher", "other", "</s>")
