"""Keys of records: which are refused by name, and which are not used.

A key that has a meaning in other programs is honoured or refused, so that nothing is trained in
another way than intended. Unknown keys are listed once.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ftkit.data.records.record import Misfit, Shape, keys_of
from ftkit.models.chat_templates.arguments import (
    ARGUMENTS,
    RULE,
    arguments_problem,
    given_arguments,
)

_FLAGS = ("train", "loss")
"""Keys of a message or content part that say whether it is trained: 0 or 1, false or true."""
_WEIGHTS = ("weight", "loss_weight", "loss_scale")
"""Keys that say how much its tokens count: 0, 1 or another weight."""
TRAIN_MARKS = (*_FLAGS, *_WEIGHTS)
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
"""Limits of weights above 0: products of two are exact enough in float32."""

LABEL_KEYS = ("label", "kto_tag")
"""Keys that say whether an answer is desirable."""
_REJECTED = ("rejected_response", "rejected_messages")
MEDIA = ("images", "videos", "audios", "image", "video", "audio")
_OF_MESSAGES = (*MEDIA, *LABEL_KEYS)
_TEMPLATE_VALUES = (
    *("enable_thinking", "reasoning_effort", "model_identity"),
    "thinking",  # of a record; of a message it is what the assistant thinks
)
"""Keys of a record that are arguments of its chat template."""
_ARGUMENTS = (ARGUMENTS, *_TEMPLATE_VALUES)
RECORD_WEIGHTS = ("loss_weight", "loss_scale")
_MEANINGFUL = frozenset((*LABEL_KEYS, *_REJECTED, *MEDIA, *_ARGUMENTS, "history", "tools"))
_TEXTS = ("instruction", "input", "output", "prompt", "completion", "text")
_MOST_NAMED = 20
# Bounds memory: see `KeyCounter.add`.
_MOST_COUNTED = 1000
# Characters of a key in a message; values may have twice as many.
_MOST_CHARACTERS = 40


class Refusal(Misfit):
    """A record is valid, but one of its keys requires what ftkit does not support."""


@dataclass(frozen=True, kw_only=True)
class UnusedKeys:
    """Unknown keys of the records of a data set."""

    names: tuple[str, ...] = ()
    """The most frequent ones first; those of messages as messages.KEY."""
    more: int = 0
    """Number of others."""

    @property
    def text(self) -> str:
        """List the keys, as "id, source, score"; empty if there are none."""
        shown = [_shown(name) for name in self.names]
        return ", ".join(shown) + (f" and {self.more:,} more" if self.more else "")


class KeyCounter:
    """Counts unused keys of records."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, key: str) -> None:
        # A table of objects may have a key of its own in every record.
        if key in self._counts or len(self._counts) < _MOST_COUNTED:
            self._counts[key] += 1

    @property
    def unused(self) -> UnusedKeys:
        """The keys so far."""
        by_count_desc = sorted(self._counts, key=lambda key: -self._counts[key])
        more = max(len(by_count_desc) - _MOST_NAMED, 0)
        return UnusedKeys(names=tuple(by_count_desc[:_MOST_NAMED]), more=more)


def is_empty(value: Any) -> bool:
    """Return whether a value is empty: null, an empty text, or a list or object of such."""
    if not value:  # 0 and false are values
        return value is None or isinstance(value, str | list | dict)
    if isinstance(value, list):
        return all(map(is_empty, value))
    return isinstance(value, dict) and all(map(is_empty, value.values()))


def check_record_keys(row: Mapping[str, Any], shape: Shape, *, answered: bool, named: bool) -> None:
    """Refuse a record with a key that changes what is meant to be learned from it.

    Args:
        row: with our names of keys.
        shape: of the record.
        answered: whether it is trained on, and not only used as a prompt.
        named: whether data.columns names the answer, which chooses one of a preference pair.

    Raises:
        Refusal: names the key, and what to do.
    """
    # Most records have none of these keys: one comparison for millions of them.
    if _MEANINGFUL.isdisjoint(row):
        return
    for key in sorted(_MEANINGFUL & row.keys()):
        if is_empty(row[key]):
            continue
        if key in LABEL_KEYS:
            # A label beside a document is a class of it, not a preference.
            if answered and shape != "text":
                check_label(row[key], key)
        elif key in MEDIA:
            _check_media(row, key, shape)
        elif key in _ARGUMENTS:
            _check_argument(row[key], key, shape)
        elif key == "history":
            _check_history(row[key], shape)
        elif key == "tools":
            _check_tools(row[key], shape)
        elif answered and not named:
            _refuse_rejected(row, key)


def check_label(value: Any, key: str, where: str = "") -> None:
    """Refuse a label of preference optimisation, which is a boolean beside an answer.

    Raises:
        Refusal: it is such a label.
    """
    # A number or a text is a class of the record, as in data sets for classification.
    if isinstance(value, bool):
        raise Refusal(
            f"{where} has a {key} that says whether its answer is wanted, as preference "
            "optimisation such as KTO needs it; ftkit would train on unwanted ones too.\n"
            f"Remove the records whose {key} is false, and the key {key} from the others."
            + " To learn from both, train with --objective kto."
            * (not where)
        )


def label_of(row: Mapping[str, Any]) -> bool:
    """Return whether the answer of a record is desirable, by its label.

    Raises:
        Refusal: it has no label, two that differ, or one that is neither true nor false.
    """
    found = {key: row[key] for key in LABEL_KEYS if not is_empty(row.get(key))}
    if not found:
        raise Refusal(
            f" has no label; its keys: {keys_of(dict(row))}. The objective learns from answers "
            "with a label: true for desirable ones, false for others.\nAdd label."
        )
    for key, value in found.items():
        # Tables may hold 0 and 1; where some are missing, pandas writes 0.0 and 1.0.
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise Refusal(
                f": {key} is {_short(value)}, but it says whether the answer is desirable.\n"
                f"Make {key} true or false."
            )
    if len({bool(value) for value in found.values()}) > 1:
        raise Refusal(_explain_differing(found, "", bool))
    return bool(next(iter(found.values())))


def check_message_keys(turn: Mapping[str, Any], role: str, where: str) -> None:
    """Refuse a message with a key that changes what is meant to be learned from it.

    Raises:
        Refusal: names the key, and what to do.
    """
    if turn.keys().isdisjoint(_OF_MESSAGES):
        return
    for key in _OF_MESSAGES:
        if is_empty(turn.get(key)):
            continue
        if key in MEDIA:
            raise Refusal(_explain_media(key, where))
        if role == "assistant":
            check_label(turn[key], key, where)


def unused_of(objects: Iterable[Any], used: frozenset[str], prefix: str) -> Iterator[str]:
    """The keys of messages or content parts that have a value but no use.

    Args:
        objects: messages or parts; anything else is passed over.
        used: keys that are read.
        prefix: before each name.
    """
    for one in objects:
        if isinstance(one, dict) and (others := one.keys() - used):
            named = (key for key in one if key in others and not is_empty(one[key]))
            yield from (f"{prefix}.{key}" for key in named)


def is_turns(value: Any) -> bool:
    """Return whether a value is a list of turns, or JSON text of one."""
    return isinstance(_listed(value), list)


def history_of(value: Any) -> list[list[str]]:
    """Return the [question, answer] pairs before an instruction.

    Raises:
        Refusal: an entry is not a pair of texts.
    """
    if is_empty(value):
        return []
    pairs = _listed(value)
    if not isinstance(pairs, list):
        raise Refusal(_explain_history(value))
    for pair in pairs:
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise Refusal(_explain_history(pair, "one of its entries"))
    return pairs


def is_record_weight(key: str, value: Any) -> bool:
    """Return whether a key is the weight of a whole record; a table may have other values."""
    return key in RECORD_WEIGHTS and isinstance(value, int | float)


def record_weight(row: Mapping[str, Any]) -> float:
    """Return the factor of the weights of all tokens of a record.

    Raises:
        Refusal: it is out of range, or there are two that differ.
    """
    found = {key: row[key] for key in RECORD_WEIGHTS if is_record_weight(key, row.get(key))}
    return _weight_among(found, "") if found else 1.0


def mark_of(turn: Mapping[str, Any], where: str) -> float | None:
    """Return the weight of a message or a part; 0: it is not trained; None: it is not marked.

    Args:
        turn: the message or the part.
        where: its place within the record.

    Raises:
        Refusal: a value is out of range, or two differ.
    """
    if turn.keys().isdisjoint(TRAIN_MARKS):
        return None
    said = {key: turn[key] for key in TRAIN_MARKS if not is_empty(turn.get(key))}
    for key in _FLAGS:
        if key in said and (not isinstance(said[key], int | float) or said[key] not in (0, 1)):
            raise Refusal(
                f"{where}: {key} is {said[key]!r}, but it says whether a text is trained: 0 or 1, "
                f"false or true.\nMake {key} 0 or 1, or write a number as weight."
            )
    weights = {key: value for key, value in said.items() if key in _WEIGHTS}
    weight = _weight_among(weights, where) if weights else None
    if len({bool(value) for value in said.values()}) > 1:
        raise Refusal(_explain_differing(said, where, bool))
    return next(map(float, said.values()), None) if weight is None else weight


def _weight_among(found: Mapping[str, Any], where: str) -> float:
    for key, value in found.items():
        is_number = isinstance(value, int | float)
        if not is_number or not (value == 0 or LEAST_WEIGHT <= value <= MOST_WEIGHT):
            raise Refusal(
                f"{where}: {key} is {value!r}, but a weight is 0, or a number from "
                f"{LEAST_WEIGHT:g} to {MOST_WEIGHT:,.0f}.\nMake {key} such a number, or remove it."
            )
    if len({*found.values()}) > 1:
        raise Refusal(_explain_differing(found, where, float))
    return float(next(iter(found.values())))


def _explain_differing(said: Mapping[str, Any], where: str, meaning: Callable[[Any], float]) -> str:
    (key, value), *others = said.items()
    other = next(item for item in others if meaning(item[1]) != meaning(value))
    return f"{where}: {key} is {value}, but {other[0]} is {other[1]}.\nRemove one of the two."


def _check_media(row: Mapping[str, Any], key: str, shape: Shape) -> None:
    """Refuse media; a column of an ordinary table may have such a name and hold something else."""
    value = row[key]
    # A number of an ordinary table, such as a count of images.
    if isinstance(value, bool | int | float):
        return
    place = f"<{key.removesuffix('s')}>"
    if shape == "messages":
        is_claimed = True
    else:
        is_claimed = any(place in row[text] for text in _TEXTS if isinstance(row.get(text), str))
        # A list or an object holds media themselves; a text may be the name of a file that is not
        # used.
        if shape != "text" and not isinstance(value, str):
            is_claimed = True
    if is_claimed:
        raise Refusal(_explain_media(key, ""))


def _check_argument(value: Any, key: str, shape: Shape) -> None:
    # Conversations have them, and documents no template.
    if shape != "instruction" or not _is_argument(value, key):
        return
    raise Refusal(
        f": {key} is {_short(value)}, which is meant for the chat template, but only conversations "
        "pass values to it.\n"
        f"Write the record with messages; or remove {key}, and set it for all records: "
        f"--data.{ARGUMENTS}."
    )


def arguments_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a conversation for its chat template, by name.

    Raises:
        Refusal: they are none, or two differ.
    """
    if row.keys().isdisjoint(_ARGUMENTS):
        return {}
    of_row = {
        key: row[key]
        for key in _TEMPLATE_VALUES
        if not is_empty(row.get(key)) and _is_argument(row[key], key)
    }
    given = _parsed_arguments(row.get(ARGUMENTS))
    for name, arguments in ((f"{ARGUMENTS} ", given), ("", of_row)):
        if (problem := arguments_problem(arguments)) is not None:
            raise Refusal(
                f": {name}{problem}; arguments of the chat template are {RULE}.\nCorrect it."
            )
    for key, value in of_row.items():
        if given.get(key, value) not in (None, value):
            raise Refusal(
                f" has {key} {_short(value)}, but {ARGUMENTS} with {key} {_short(given[key])}.\n"
                "Remove one of the two."
            )
    return given_arguments(given) | of_row


def _parsed_arguments(value: Any) -> Any:
    if is_empty(value):
        return {}
    if not isinstance(value, str):
        return value
    # Tables often store objects as JSON text.
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _is_argument(value: Any, key: str) -> bool:
    # A text in a column of this name is not a switch of the template.
    return key != "thinking" or isinstance(value, bool)


def _check_history(value: Any, shape: Shape) -> None:
    # Instructions use their history, and documents have no turns.
    if not is_turns(value) or shape in ("instruction", "text"):
        return
    if shape == "messages":
        raise Refusal(
            ": history holds turns beside the messages, and their position is not defined.\n"
            "Put them into the messages, or remove history."
        )
    raise Refusal(
        ": history holds turns, but a prompt is used as it is, without them.\n"
        "To make a conversation of them all, try --data.columns.instruction prompt "
        "--data.columns.output completion --data.chat_template zephyr; or remove history."
    )


def _check_tools(value: Any, shape: Shape) -> None:
    found = _listed(value)
    if shape in ("messages", "text") or not isinstance(found, list):
        return
    # A list of texts is an ordinary column.
    if any(isinstance(tool, dict) for tool in found):
        raise Refusal(
            ": tools holds functions that may be called, but only conversations have tools.\n"
            "Write the record with messages, or remove tools."
        )


def _refuse_rejected(row: Mapping[str, Any], key: str) -> None:
    answers = ("output", "completion", "messages", "conversations", "conversation")
    wanted = next((name for name in answers if not is_empty(row.get(name))), "messages")
    ours = "messages" if wanted.startswith("conversation") else wanted
    raise Refusal(
        f" has a rejected answer ({key}), but the objective learns from one answer.\n"
        "To learn which of the two is better, train with --objective dpo. To train only on "
        f"{wanted}, try --data.columns.{ours} {wanted}."
    )


def _explain_media(key: str, where: str) -> str:
    return (
        f"{where}: {key} holds images, audio or video, but ftkit only trains on text so far: the "
        "model would learn to answer without them.\n"
        f"Remove the record, or {key} with its place in the text (<{key.removesuffix('s')}>) if "
        "the answer does not need it."
    )


def _explain_history(value: Any, what: str = "it") -> str:
    return (
        f": history has to be a list of [question, answer], both texts, but {what} is "
        f"{_short(value)}.\nCorrect history, or remove it."
    )


def _listed(value: Any) -> Any:
    """Return a list, parsed from JSON text if need be; None: it is neither."""
    # Tables often store lists as JSON text.
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 2 * _MOST_CHARACTERS else f"{text[: 2 * _MOST_CHARACTERS]}..."


def _shown(name: str) -> str:
    """Return a key as one short line."""
    text = name if name.isprintable() else repr(name)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
