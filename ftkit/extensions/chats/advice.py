"""Advice on conversations that are not trained on as they are meant: changes that are tried."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ftkit.data.prepare import NO_REASONING, make_renderer
from ftkit.data.records.record import Record
from ftkit.data.spec import Part
from ftkit.extensions.chats.turns import CHANGED, NO_TURN, NOT_MARKED, REFUSED
from ftkit.models.chat_templates import NO_TOOLS
from ftkit.models.chat_templates.arguments import ARGUMENTS
from ftkit.models.chat_templates.template import NAMED

_TO_TEMPLATES = {
    NO_TOOLS: "Use a template with a place for tools: --data.chat_template FILE.",
    NO_REASONING: "Use a template with a place for reasoning: --data.chat_template FILE.",
    NOT_MARKED: "Enclose the text of the assistant in {% generation %} in the template, or use a "
    "template without it: --data.chat_template FILE.",
}
_SPLITTING: tuple[dict[str, str], ...] = (
    {"reasoning": "split"},
    {"train_on": "assistant"},
    {"reasoning": "split", "train_on": "assistant"},
)
"""Options that make a sample of each turn."""


def advice(
    reason: str,
    records: Sequence[Record],
    part: Part,
    tokenizer: Any,
    *,
    used: Sequence[Record],
) -> str:
    """Recommend a change with which conversations are trained on as they are meant.

    Args:
        reason: why they are not.
        records: some of them; each change is tried on these.
        part: how they become samples.
        tokenizer: of the base model.
        used: some records that are trained on, which a change must not lose.
    """
    if reason == NO_TURN:
        return "Add an answer of the assistant to them, or train: true to the turns that are meant."
    if not records:
        return "Correct or remove them."
    if reason == CHANGED:
        for options in _SPLITTING:
            if _trial(part, options, records, tokenizer).taken == len(records):
                words = " ".join(f"--data.{key} {value}" for key, value in options.items())
                return f"Try {words}, which makes a sample of each turn."
    trials = {
        name: _trial(part, _with_template(name), records, tokenizer)
        for name in NAMED
        if name != part.rules.chat_template
        and _trial(part, _with_template(name), used, tokenizer).taken == len(used)
    }
    fitting = {name: trial for name, trial in trials.items() if trial.taken and trial.learns_ends}
    if fitting:
        best = max(fitting, key=lambda name: fitting[name])
        return (
            f"Try --data.chat_template {best}, which accepts {fitting[best].taken:,} of the "
            f"{len(records):,} that were tried."
            + f" Remove data.{ARGUMENTS}."
            * bool(part.rules.chat_template_kwargs)
        )
    if reason.startswith(REFUSED):
        return (
            "Change these conversations as the template requires, or use one that accepts them: "
            "--data.chat_template FILE."
        )
    return _TO_TEMPLATES.get(reason, "Use another template: --data.chat_template FILE.")


def _with_template(name: str) -> dict[str, Any]:
    """Rules that take a chat template by name, also in the place of a prompt style."""
    # Arguments are for one template.
    return {"chat_template": name, "chat_template_kwargs": None, "prompt_style": None}


class _Trial(NamedTuple):
    """Outcome of rendering some records by other rules; the larger of two trials suits better."""

    taken: int
    """Records that become samples, with their reasoning."""
    learns_ends: bool
    """Whether a turn ends with a token of the model that ends an answer."""
    fewer_new: int
    """Tokens for roles and ends that the template of the part does not use, negative."""
    fewer_tokens: int
    """The tokens of all samples, negative: roles and ends in the vocabulary take one each."""


def _trial(
    part: Part, options: Mapping[str, Any], records: Sequence[Record], tokenizer: Any
) -> _Trial:
    rules = dataclasses.replace(part.rules, **options)
    renderer = make_renderer(dataclasses.replace(part, rules=rules), tokenizer)
    made = list(renderer.render(records))
    samples = [sample for one in made for sample in one.samples]
    template = make_renderer(part, tokenizer).template
    written = {token for sample in samples for token in sample.ids}
    new = (
        token in written and text not in template.source + "".join(template.special_tokens.values())
        for text, token in tokenizer.added_tokens.items()
    )
    return _Trial(
        sum(bool(one.samples) and not one.omits_reasoning for one in made),
        any(s.ids[end - 1] in renderer.stop_ids for s in samples for _, end in s.trained),
        -sum(new),
        -sum(len(sample.ids) for sample in samples),
    )
