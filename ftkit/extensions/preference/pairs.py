"""Preference pairs: rows of many programs as two rows with one answer each."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ftkit.data.records.keys import (
    ANSWER_KEYS,
    ANSWER_NAMES,
    CONVERSATION_KEYS,
    LABEL_KEYS,
    REJECTED,
    Refusal,
    check_record_keys,
    is_empty,
)
from ftkit.data.records.record import Misfit, Record, keys_of, kind_of
from ftkit.data.records.shape_rows import shape_row
from ftkit.data.records.shapes import RecordReader, check_unweighted, recognise
from ftkit.extensions.chats.conversations import role_of, text_of

Row = dict[str, Any]
Turns = list[Any]

_INSTRUCTIONS = ("instruction", "question", "query")
"""Keys of a prompt that is rendered by a style or template, beside prompt, which is not."""
PAIR_KEYS = frozenset(
    (
        *(*ANSWER_KEYS, *_INSTRUCTIONS, *CONVERSATION_KEYS),
        *("prompt", "input", "system", "sys_prompt", "tools", "functions"),
    )
)
"""Keys of a pair that are read."""
_RULE = "A preference pair has a prompt, chosen and rejected, or whole conversations under both."


class PairReader(RecordReader):
    """Reads preference pairs: both answers to a prompt, each as a record of any shape."""

    _is_one_answer = False

    def _record(self, value: dict[str, Any], row: dict[str, Any]) -> Record:
        # First, because programs name the keys of pairs differently. A half is an ordinary record.
        halves = pair_rows(row)
        if self._form is None:
            form = recognise(pair_rows(self._decisive(row))[0], {}, answered=True)
            keys = ", ".join(key for key in self._decisive(row) if key in PAIR_KEYS)
            self._form = dataclasses.replace(form, keys=keys, group="preference pair")
        for half in halves:
            # `named`: there is no doubt which of two answers is meant.
            uses = shape_row(self._form.shape).uses
            check_record_keys(half, uses, answered=True, named=True)
        chosen, rejected = map(self._form.convert, halves)
        # What is left beside the answers and the prompt that a half was made of.
        for key, item in halves[0].items():
            is_used = key in self._form.used or self._form.keeps(key, item, chosen)
            if not (is_used or is_empty(item)):
                self._unused.add(key)
        check_unweighted(
            row, (chosen, rejected), "the answers of a preference pair are compared as wholes"
        )
        return {"chosen": chosen, "rejected": rejected}


def pair_rows(row: Mapping[str, Any]) -> tuple[Row, Row]:
    """Split a preference pair into the rows of its chosen and its rejected answer.

    Known are TRL's pairs (explicit and implicit prompts, texts and conversations), those of
    axolotl, LLaMA-Factory, ms-swift, torchtune and OpenAI.

    Args:
        row: with our names of keys.

    Returns:
        Two rows of one form: instruction and output, prompt and completion, or messages.

    Raises:
        Misfit: it is not a pair.
    """
    if isinstance(row.get("input"), Mapping) and "messages" in row["input"]:  # OpenAI
        row = {**row, "prompt": row["input"]["messages"]}
        del row["input"]
    for names in ANSWER_NAMES:
        chosen, rejected = (row.get(name) for name in names)
        # An empty text is an answer, which is left out and counted like any empty answer.
        are_texts = isinstance(chosen, str) and isinstance(rejected, str) and (chosen or rejected)
        if are_texts or not (is_empty(chosen) or is_empty(rejected)):
            rest = {key: value for key, value in row.items() if key not in names}
            return _with_answers(rest, chosen, rejected)
    for key in REJECTED:
        if not is_empty(row.get(key)):
            return _beside_conversation(row, key)
    raise _no_pair(row)


def _no_pair(row: Mapping[str, Any]) -> Misfit:
    names = next((names for names in ANSWER_NAMES if any(name in row for name in names)), ())
    lacking = next((name for name in names if is_empty(row.get(name))), None)
    why, advice = "", "Add chosen and rejected"
    if lacking is not None:
        why = f": {lacking} is {'empty' if lacking in row else 'missing'}"
        advice = f"Add {lacking}, or remove the record"
    elif any(key in row for key in LABEL_KEYS):
        advice = "To learn from answers with a label, train with --objective kto"
    return Misfit(
        f" is no preference pair{why}; its keys: {keys_of(dict(row))}. {_RULE}\n{advice}."
    )


def _with_answers(rest: Row, chosen: Any, rejected: Any) -> tuple[Row, Row]:
    if type(chosen) is not type(rejected):
        raise Misfit(
            f": chosen is {kind_of(chosen)}, but rejected is {kind_of(rejected)}. {_RULE}\n"
            "Write both in one form."
        )
    if isinstance(chosen, dict):  # one message each
        chosen, rejected = [chosen], [rejected]
    if isinstance(chosen, str):
        return _with_texts(rest, chosen, rejected)
    if not isinstance(chosen, list):
        raise Misfit(f": chosen is {kind_of(chosen)}. {_RULE}\nCorrect or remove the record.")
    return _with_messages(rest, chosen, rejected)


def _with_texts(rest: Row, chosen: str, rejected: str) -> tuple[Row, Row]:
    prompts = ("prompt", *_INSTRUCTIONS)
    key = next((name for name in prompts if not is_empty(rest.get(name))), None)
    texts = [rest.get(key or ""), rest.get("system"), rest.get("sys_prompt"), chosen, rejected]
    for name in ("prompt", *CONVERSATION_KEYS):
        if is_empty(rest.get(name)) or not isinstance(turns := rest[name], list):
            continue
        if name == key or not all(_is_said(turn, texts) for turn in turns):
            raise Misfit(
                f": {name} is a list of messages, but chosen is a text. {_RULE}\n"
                "Write chosen and rejected as lists of messages too."
            )
        # A copy of the whole, which other objectives need.
        rest = {other: value for other, value in rest.items() if other != name}
    if key is None:
        return _without_prompt(rest, chosen, rejected)
    answer = "completion" if key == "prompt" else "output"
    if key in _INSTRUCTIONS:
        rest = {name: value for name, value in rest.items() if name != key} | {
            "instruction": rest[key]
        }
    return rest | {answer: chosen}, rest | {answer: rejected}


def _with_messages(rest: Row, chosen: Turns, rejected: Turns) -> tuple[Row, Row]:
    """Answers that are messages: those behind the prompt, or whole conversations."""
    names = ("prompt", *CONVERSATION_KEYS, *_INSTRUCTIONS)
    given = {name: rest[name] for name in names if not is_empty(rest.get(name))}
    rest = {name: value for name, value in rest.items() if name not in given}
    for name, value in given.items():
        if not isinstance(value, str | list):
            raise Misfit(f": {name} is {kind_of(value)}. {_RULE}\nMake it a list of messages.")
    # A copy of a whole conversation beside it, as in UltraFeedback, is not before it.
    lists = (name for name, value in given.items() if isinstance(value, list))
    context = next((name for name in lists if given[name] not in (chosen, rejected)), None)
    if context is not None:
        prompt = given.pop(context)
        if prompt[-len(chosen) :] == chosen:
            prompt = prompt[: -len(chosen)]
        # Each answer may begin with the prompt.
        chosen, rejected = (
            turns[len(prompt) :] if _begins(prompt, turns) else turns
            for turns in (chosen, rejected)
        )
    else:
        # Each has an answer of its own, also where both are the same.
        common = min(_common(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    for name, value in given.items():
        if isinstance(value, list):
            is_copy = _begins(value, prompt + chosen, prompt + rejected)
        elif all(lacking := [_lacks_prompt(prompt + turns) for turns in (chosen, rejected)]):
            prompt, is_copy = [*prompt, {"role": "user", "content": value}], True
        else:
            texts = [text_of(turn) for turn in prompt + chosen + rejected]
            # Some write the whole prompt as one text.
            is_whole = bool(prompt) and all(_is_said(turn, [value]) for turn in prompt)
            is_copy = not any(lacking) and (is_whole or _is_said({"content": value}, texts))
        if not is_copy:
            raise Refusal(
                f": {name} stands beside conversations (chosen, rejected) that do not have it. "
                f"{_RULE}\nPut it into the messages of both, or remove {name}."
            )
    return (
        rest | {"prompt": prompt, "completion": chosen},
        rest | {"prompt": prompt, "completion": rejected},
    )


def _begins(turns: Turns, *conversations: Turns) -> bool:
    """Return whether one of the conversations begins with these turns."""
    return any(whole[: len(turns)] == turns for whole in conversations)


def _lacks_prompt(conversation: Turns) -> bool:
    """Return whether the assistant speaks first, but for a system prompt."""
    roles = (role_of(turn) for turn in conversation)
    return next((role for role in roles if role != "system"), None) == "assistant"


def _is_said(turn: Any, texts: Sequence[str | None]) -> bool:
    """Return whether the text of a turn is in one of some texts, but for its white space."""
    said = " ".join(text_of(turn).split())
    return any(said in " ".join((text or "").split()) for text in texts)


def _without_prompt(rest: Row, chosen: str, rejected: str) -> tuple[Row, Row]:
    """Split texts that begin alike after their last common word."""
    common = _common(chosen, rejected)
    # Up to a space: a word is not cut, so that tokens are those of the whole text.
    common = max(chosen.rfind(space, 0, common) for space in " \n") + 1
    prompt = chosen[:common].rstrip(" ")
    if not prompt:
        raise Misfit(f" has no prompt, and chosen and rejected begin differently. {_RULE}\nAdd it.")
    return (
        rest | {"prompt": prompt, "completion": chosen[len(prompt) :]},
        rest | {"prompt": prompt, "completion": rejected[len(prompt) :]},
    )


def _beside_conversation(row: Mapping[str, Any], key: str) -> tuple[Row, Row]:
    """Replace the last answer of a conversation, as ms-swift writes pairs."""
    name = next((name for name in CONVERSATION_KEYS if not is_empty(row.get(name))), None)
    turns = row.get(name) if name else None
    rejected = row[key]
    if name is None or not isinstance(turns, list) or len(turns) < 2:
        raise Misfit(f": {key} stands beside no conversation. {_RULE}\nAdd messages.")
    rest = {other: value for other, value in row.items() if other not in (key, name)}
    if isinstance(rejected, list):
        return _with_answers(rest, turns, rejected)
    *prompt, last = turns
    if not isinstance(rejected, str) or not isinstance(last, dict):
        raise Misfit(f": {key} is {kind_of(rejected)}. {_RULE}\nMake it a text.")
    said = "value" if "from" in last and "role" not in last else "content"
    # What belongs to the chosen answer alone is not in the rejected one.
    other = {k: v for k, v in last.items() if k not in ("tool_calls", "reasoning_content")}
    return _with_messages(rest, turns, [*prompt, other | {said: rejected}])


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Number of items with which both begin."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)
