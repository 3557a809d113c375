"""Keys of records: which are refused by name, and which are not used.

A key that has a meaning in other programs is honoured or refused, so that nothing is trained in
another way than intended. Unknown keys are listed once.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from ftkit.data.records.record import Misfit
from ftkit.models.chat_templates.arguments import ARGUMENTS

LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
"""Limits of weights above 0: products of two are exact enough in float32."""

CONVERSATION_KEYS = ("messages", "conversations", "conversation")
"""Keys of a record that may hold messages."""
LABEL_KEYS = ("label", "kto_tag")
"""Keys that say whether an answer is desirable."""
ANSWER_NAMES = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),  # OpenAI
    ("chosen_conversations", "rejected_conversations"),  # torchtune
)
"""Keys of the two answers of a preference pair."""
REJECTED = ("rejected_response", "rejected_messages")
"""Keys of a rejected answer beside a whole conversation."""
ANSWER_KEYS = frozenset((*(key for names in ANSWER_NAMES for key in names), *REJECTED))
"""Keys of the answers of a pair."""
MEDIA = ("images", "videos", "audios", "image", "video", "audio")
TEMPLATE_VALUES = (
    *("enable_thinking", "reasoning_effort", "model_identity"),
    "thinking",  # of a record; of a message it is what the assistant thinks
)
"""Keys of a record that are arguments of its chat template."""
ARGUMENT_KEYS = (ARGUMENTS, *TEMPLATE_VALUES)
RECORD_WEIGHTS = ("loss_weight", "loss_scale")
_MEANINGFUL = frozenset((*LABEL_KEYS, *REJECTED, *MEDIA, *ARGUMENT_KEYS, "history", "tools"))
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


def check_record_keys(
    row: Mapping[str, Any], uses: Set[str], *, answered: bool, named: bool
) -> None:
    """Refuse a record with a key that changes what is meant to be learned from it.

    Args:
        row: with our names of keys.
        uses: keys that mean something, or nothing, for records of its shape.
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
        if key in MEDIA:
            _check_media(row, key, is_used=key in uses)
        elif key in uses:
            continue
        elif key in LABEL_KEYS:
            if answered:
                check_label(row[key], key)
        elif key in ARGUMENT_KEYS:
            _check_argument(row[key], key)
        elif key == "history":
            _check_history(row[key])
        elif key == "tools":
            _check_tools(row[key])
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
    return weight_among(found, "") if found else 1.0


def weight_among(found: Mapping[str, Any], where: str) -> float:
    """Return the weight that all of some keys give.

    Args:
        found: values by key, at least one.
        where: place within the record, for errors.

    Raises:
        Refusal: a value is out of range, or two differ.
    """
    for key, value in found.items():
        is_number = isinstance(value, int | float)
        if not is_number or not (value == 0 or LEAST_WEIGHT <= value <= MOST_WEIGHT):
            raise Refusal(
                f"{where}: {key} is {value!r}, but a weight is 0, or a number from "
                f"{LEAST_WEIGHT:g} to {MOST_WEIGHT:,.0f}.\nMake {key} such a number, or remove it."
            )
    if len({*found.values()}) > 1:
        raise Refusal(explain_differing(found, where, float))
    return float(next(iter(found.values())))


def explain_differing(said: Mapping[str, Any], where: str, meaning: Callable[[Any], float]) -> str:
    """Message about keys whose values mean different things.

    Args:
        said: values by key, of which two differ.
        where: place within the record.
        meaning: what is compared of a value.
    """
    (key, value), *others = said.items()
    other = next(item for item in others if meaning(item[1]) != meaning(value))
    return f"{where}: {key} is {value}, but {other[0]} is {other[1]}.\nRemove one of the two."


def _check_media(row: Mapping[str, Any], key: str, *, is_used: bool) -> None:
    """Refuse media; a column of an ordinary table may have such a name and hold something else."""
    value = row[key]
    # A number of an ordinary table, such as a count of images.
    if isinstance(value, bool | int | float):
        return
    place = f"<{key.removesuffix('s')}>"
    is_claimed = any(place in row[text] for text in _TEXTS if isinstance(row.get(text), str))
    # A list or an object holds media themselves; a text may be the name of a file that is not used.
    if is_claimed or not (is_used or isinstance(value, str)):
        raise Refusal(explain_media(key, ""))


def _check_argument(value: Any, key: str) -> None:
    if not is_argument(value, key):
        return
    raise Refusal(
        f": {key} is {short(value)}, which is meant for the chat template, but only conversations "
        "pass values to it.\n"
        f"Write the record with messages; or remove {key}, and set it for all records: "
        f"--data.{ARGUMENTS}."
    )


def is_argument(value: Any, key: str) -> bool:
    """Return whether the value of a key of a record is an argument of its chat template."""
    # A text in a column of this name is not a switch of the template.
    return key != "thinking" or isinstance(value, bool)


def _check_history(value: Any) -> None:
    if not is_turns(value):
        return
    raise Refusal(
        ": history holds turns, but a prompt is used as it is, without them.\n"
        "To make a conversation of them all, try --data.columns.instruction prompt "
        "--data.columns.output completion --data.chat_template zephyr; or remove history."
    )


def _check_tools(value: Any) -> None:
    # A list of texts is an ordinary column.
    if any(isinstance(tool, dict) for tool in _listed(value) or ()):
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


def explain_media(key: str, where: str) -> str:
    """Message about a key that holds media."""
    return (
        f"{where}: {key} holds images, audio or video, but of these only images and "
        "audio of conversations and instructions are trained on: the model would learn to answer "
        "without them.\n"
        f"Remove the record, or {key} with its place in the text (<{key.removesuffix('s')}>) if "
        "the answer does not need it."
    )


def _explain_history(value: Any, what: str = "it") -> str:
    return (
        f": history has to be a list of [question, answer], both texts, but {what} is "
        f"{short(value)}.\nCorrect history, or remove it."
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


def short(value: Any) -> str:
    """A value as JSON, for messages: cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 2 * _MOST_CHARACTERS else f"{text[: 2 * _MOST_CHARACTERS]}..."


def _shown(name: str) -> str:
    """Return a key as one short line."""
    text = name if name.isprintable() else repr(name)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
