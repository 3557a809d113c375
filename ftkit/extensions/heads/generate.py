"""`ftkit generate` for classifiers: the class of a text with probabilities, or its value."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device

from ftkit.data.records.media import as_given
from ftkit.data.records.record import Record
from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import Sample, scored
from ftkit.errors import UserError
from ftkit.evaluation.generate import check_shapes, records_of, shown, write_entries
from ftkit.evaluation.prompting import Prompting, check_system, prompting_for, question_of
from ftkit.evaluation.result import Result
from ftkit.evaluation.session import Session, start_session
from ftkit.extensions.heads.labels import WholeReader
from ftkit.extensions.heads.text_pairs import encode_alone, encode_wholes
from ftkit.models.chat_templates.template import TemplateRefusal
from ftkit.models.language_model import output_of
from ftkit.models.loss import Scores
from ftkit.recipe.objectives import ScoreLabels
from ftkit.recipe.options import GenerateOptions
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import number_text, percent_text

_ROWS = 16
"""Texts of a forward pass."""
_MOST_SHOWN = 5
"""Classes of a text that a terminal shows."""


def generate(result: Result, options: GenerateOptions) -> int:
    """Classify prompts, show what is found, and return the exit code.

    Args:
        result: a classifier.
        options: prompts, and where answers go.

    Raises:
        UserError: something is missing, or an option means nothing for classes.
    """
    refuse_options(options)
    records = records_of(options, WholeReader(answered=False))
    check_shapes(records, options)
    session = start_session(result, options)
    scores = session.loaded.base.architecture.scores
    assert scores is not None
    prompting = prompting_for(session.loaded.prompting, options, session.loaded.base)
    if prompting is not None and options.system is not None:
        check_system(prompting.template, options.system)
    texts = [encoded(record, prompting, session, options.system) for record in records]
    title = f"classifying {len(records)} texts"
    with Display(None, stream=sys.stderr) as display, display.phase(title, brief=True) as phase:
        found = []
        for rows in scores_of(texts, session):
            found += [answer_of(row, scores) for row in rows]
            phase.advance(len(found), len(records))
    entries = [as_given(record) | one for record, one in zip(records, found, strict=True)]
    if options.out is not None:
        write_entries(options.out.expanduser(), entries)
    elif options.format == "json":
        shown_ones = entries if options.prompts is not None else entries[0]
        print(json.dumps(shown_ones, indent=2, ensure_ascii=False))
    else:
        for record, answer in zip(records, found, strict=True):
            if len(records) > 1:
                print(shown(f"> {question_of(record).text}"))
            print(shown(_text(answer)) + "\n" * (len(records) > 1))
    return 0


def answer_of(scores: torch.Tensor, labels: ScoreLabels) -> dict[str, Any]:
    """Return what scores say.

    Args:
        scores: [scores] float32, of one text.
        labels: what they stand for.

    Returns:
        value, of a regression; else label, the likeliest class, or labels, all that are likelier
        than not, and the probability of each class, the likeliest first.
    """
    if labels.problem_type == "regression":
        return {"value": scores[0].item()}
    several = labels.problem_type == "multi_label_classification"
    found = (scores.sigmoid() if several else scores.softmax(0)).tolist()
    pairs = sorted(zip(labels.names, found, strict=True), key=lambda pair: -pair[1])
    probabilities = dict(pairs)
    if several:
        chosen = [name for name, probability in pairs if probability > 0.5]
        return {"labels": chosen, "probabilities": probabilities}
    return {"label": pairs[0][0], "probabilities": probabilities}


def _text(answer: dict[str, Any]) -> str:
    if "value" in answer:
        return number_text(answer["value"])
    every = list(answer["probabilities"].items())
    first = ", ".join(f"{name} {percent_text(share)}" for name, share in every[:_MOST_SHOWN])
    more = f" and {len(every) - _MOST_SHOWN:,} more" if len(every) > _MOST_SHOWN else ""
    label = answer.get("label") or " + ".join(answer.get("labels", ())) or "none"
    return f"{label} ({first}{more})"


def refuse_options(options: GenerateOptions) -> None:
    """Refuse options of answers in tokens."""
    given = {
        "compare_base": options.compare_base,
        "temperature": options.temperature,
        "image": options.image,
    }
    for key, value in given.items():
        if value:
            raise UserError(
                f"--{key} is for models that answer in tokens, but this one gives texts classes, "
                f"values or vectors. Leave --{key} out."
            )


def encoded(
    record: Record, prompting: Prompting | None, session: Session, system: str | None
) -> list[int]:
    """Token ids of a text or two as in training: of a conversation all of it, nothing behind it."""
    base = session.loaded.base
    question = question_of(record)
    messages: Sequence[Any] = record.get("messages") or question.messages
    if "messages" not in record and record.get("output"):
        messages = (*messages, {"role": "assistant", "content": record["output"]})
    # Where neither a run nor an option says how texts are written, one stands for itself.
    is_alone = "messages" not in record and (
        prompting is None or prompting.origin in ("model", "name")
    )
    if not messages or prompting is None or is_alone:
        scores = base.architecture.scores
        if scores is not None and scores.pooling is not None:
            (ids,) = encode_alone(base.tokenizer, [question.text])
        else:
            alone = {"text": question.text}
            if second := record.get("text_pair") or record.get("input"):
                alone["text_pair"] = second
            (ids,) = encode_wholes(base.tokenizer, [alone])
    else:
        if system is not None and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
        template = prompting.template.with_arguments(question.arguments)
        try:
            text = template.render(messages, tools=question.tools, add_generation_prompt=False)
        except TemplateRefusal as refusal:
            raise UserError(
                f"The chat template {template.name} does not accept this conversation: {refusal}. "
                "Try another --chat_template."
            ) from None
        ids, _ = base.tokenizer.encode_rendered(text)
    base.tokenizer.require_embedded(ids, "The text")
    most = base.architecture.context_length
    if not ids or len(ids) > most:
        size = f"{len(ids):,} tokens long" if ids else "empty"
        raise UserError(f"A text is {size}, but must have from 1 to {most:,}. Shorten it.")
    return ids


@torch.no_grad()
def scores_of(texts: Sequence[list[int]], session: Session) -> Iterator[torch.Tensor]:
    """Scores of a few texts at a time, [texts, scores] float32 on the host."""
    model = session.loaded.model
    for start in range(0, len(texts), _ROWS):
        some = texts[start : start + _ROWS]
        nothing = np.empty((0, 2), dtype=np.int32)
        samples = [scored(Sample(np.array(ids, dtype=np.int32), nothing)) for ids in some]
        batch = move_data_to_device(collate(samples, {}), session.device)
        with session.context():
            found = output_of(model, batch, Scores())
        yield found.view(len(some), -1).float().cpu()
