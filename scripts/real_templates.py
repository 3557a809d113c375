"""Chat templates of real models: tokens and masks of ftkit compared with transformers'."""

import json
import re
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from ftkit.extensions.chats.rendering import ChatRenderer
from ftkit.models.chat_templates.sandbox import DATE
from ftkit.models.chat_templates.template import CHAT_TEMPLATE, text_template
from ftkit.models.pretrained.tokenizer import Tokenizer

PLACE = "/vendor/llama.cpp/models/templates/"
"""Directory of the templates in the source distribution of llama-cpp-python."""
SPECIAL = re.compile(
    r"<[|\uff5c][^<>|\uff5c\n{}%]{1,40}[|\uff5c]>|</?[a-zA-Z_]{3,30}>|\[/?[A-Z_]{2,30}\]"
)
"""Texts in a template that look like special tokens."""
NAMES = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Finds a number.",
        "parameters": {
            "type": "object",
            "properties": {"of": {"type": "string", "description": "Whose."}},
            "required": ["of"],
        },
    },
}
CALLED = "kumquatcall"
CALL = {"type": "function", "function": {"name": "lookup", "arguments": {"of": CALLED}}}
SYSTEM = {"role": "system", "content": "Be sysword."}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "system and turns": {
        "messages": [
            SYSTEM,
            {"role": "user", "content": "Askone here."},
            {"role": "assistant", "content": "Saidone there."},
            {"role": "user", "content": "Asktwo again."},
            {"role": "assistant", "content": "Saidtwo at last."},
        ]
    },
    "tools": {
        "messages": [
            SYSTEM,
            {"role": "user", "content": "Askone here."},
            {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "call00001"}]},
            {
                "role": "tool",
                "content": '{"number": "toolword"}',
                "name": "lookup",
                "tool_call_id": "call00001",
            },
            {"role": "assistant", "content": "Saidtwo at last."},
        ],
        "tools": [TOOL],
    },
    "thinking": {
        "messages": [
            {"role": "user", "content": "Askone here."},
            {
                "role": "assistant",
                "content": "Saidone there.",
                "reasoning_content": "Thoughtone first.",
            },
            {"role": "user", "content": "Asktwo again."},
            {
                "role": "assistant",
                "content": "Saidtwo at last.",
                "reasoning_content": "Thoughttwo then.",
            },
        ]
    },
}
"""Each word that is searched for is in one message only."""
OURS = ("Saidone there.", "Saidtwo at last.", CALLED)
NOT_OURS = ("sysword", "Askone", "Asktwo", "toolword")


class Wrong(Exception):
    """Tokens or a mask are wrong."""


def table(source: Path, base: Path, scratch: Path) -> tuple[list[str], bool]:
    """Return a Markdown table of the verdicts, and whether none is wrong.

    Args:
        source: distribution of llama-cpp-python.
        base: a model with a tokenizer of byte pairs.
        scratch: a directory that exists.
    """
    rows, counts = [], {"exact": 0, "split": 0, "put": 0, "refused": 0, "WRONG": 0}
    for name, text in templates(source):
        cells = []
        directory = tokenizer_with(base, text, scratch / "tokenizer")
        for record in CONVERSATIONS.values():
            cell = verdict(directory, record)
            counts[re.match(r"\w+", cell)[0]] += 1
            cells.append(cell)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    heads = ["template", *CONVERSATIONS]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows, ""]
    lines.append(
        f"{len(rows)} templates: " + ", ".join(f"{n} {what}" for what, n in counts.items())
    )
    return lines, not counts["WRONG"]


def templates(source: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each template in a source distribution."""
    with tarfile.open(source) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name.lower()):
            if PLACE in member.name and member.name.endswith(".jinja"):
                file = archive.extractfile(member)
                assert file is not None
                yield Path(member.name).stem, file.read().decode()


def tokenizer_with(base: Path, template: str, out: Path) -> Path:
    """Make a tokenizer that has the special tokens of a template."""
    shutil.rmtree(out, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(base)
    # Some templates put the texts of tokens together from parts.
    written = [template, *_rendered(tokenizer, template)]
    found = dict.fromkeys([*NAMES.values(), *SPECIAL.findall("\n".join(written))])
    tokenizer.add_tokens(list(found), special_tokens=True)
    tokenizer.add_special_tokens({f"{kind}_token": text for kind, text in NAMES.items()})
    tokenizer.save_pretrained(out)
    (out / CHAT_TEMPLATE).write_text(template)
    return out


def _rendered(tokenizer: Any, template: str) -> Iterator[str]:
    """Yield what a template writes of those conversations that it takes."""
    for record in CONVERSATIONS.values():
        with suppress(Exception):  # a template raises what it likes
            yield tokenizer.apply_chat_template(
                record["messages"], record.get("tools"), chat_template=template, tokenize=False
            )


def verdict(directory: Path, record: dict[str, Any]) -> str:
    """Judge a conversation: exact, split into several samples, put together, refused, or wrong."""
    ours, theirs = Tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    template = text_template(directory / CHAT_TEMPLATE, ours.special_tokens)
    (rendering,) = ChatRenderer(ours, template, train_on="assistant").render([record])
    if rendering.refused is not None:
        return f"refused: {cell_text(rendering.refused)}"
    try:
        how, missing = check(rendering.samples, theirs, record)
    except Wrong as error:
        return f"WRONG: {cell_text(error)}"
    count = len(rendering.samples)
    return (how if count == 1 else f"{how}: {count} samples") + missing


def check(samples: Sequence[Any], theirs: Any, record: dict[str, Any]) -> tuple[str, str]:
    """Compare samples with transformers' tokens, and their masks with the words of messages.

    Args:
        samples: of a conversation.
        theirs: tokenizer of transformers.
        record: the conversation.

    Returns:
        How its samples were made, and a note if the template leaves out tool calls.

    Raises:
        Wrong: they differ.
    """
    # Newer versions of transformers take no function as an argument of a template.
    chat_template_utils.datetime = Mock(now=lambda: DATE)
    messages = record["messages"]
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    ends = ends if len(samples) > 1 else [len(messages)]
    if len(ends) != len(samples):
        raise Wrong(f"{len(samples)} samples of {len(ends)} turns")
    trained, how = "", "exact" if len(samples) == 1 else "split"
    for end, sample in zip(ends, samples, strict=True):
        options = {"tools": record.get("tools"), "return_dict": False}
        if sample.ids != theirs.apply_chat_template(messages[:end], **options):
            # Then the sample is the prompt of the turn, and what follows it.
            prompt = theirs.apply_chat_template(
                messages[: end - 1], add_generation_prompt=True, **options
            )
            if sample.ids[: sample.trained[0][0]] != prompt:
                raise Wrong("other tokens than transformers")
            how = "put together"
        for first, last in sample.trained:
            trained += theirs.decode(sample.ids[first:last]) + "\n"
    whole, written = json.dumps(messages), theirs.decode(samples[-1].ids)
    for word in OURS:
        count = 1 if word in whole and word in written else 0
        if trained.count(word) != count:
            raise Wrong(f"{word!r} is trained {trained.count(word)} times")
    for word in NOT_OURS:
        if word in trained:
            raise Wrong(f"{word!r} is trained")
    lost = CALLED in whole and CALLED not in written
    return how, ", but the template leaves out tool calls" * lost


def cell_text(reason: object) -> str:
    """A reason in a cell of a table."""
    return str(reason).partition("\n")[0].replace("|", "\\|")[:90]
