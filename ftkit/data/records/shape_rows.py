"""Kinds of records: shapes, and how records say which answers are better.

A row is light. What reads and renders its records is named by a string, MODULE:NAME, and imported
when such records are there.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from ftkit.data.records.keys import ARGUMENT_KEYS, LABEL_KEYS, MEDIA
from ftkit.errors import UserError
from ftkit.models.chat_templates import TrainOn
from ftkit.models.chat_templates.arguments import ARGUMENTS
from ftkit.recipe.objectives import Preference
from ftkit.utils.registry import Registry, imported

CONVERSATION = "messages"
"""Shape of conversations, which chat templates write."""


@dataclass(frozen=True, kw_only=True)
class ShapeRow:
    """A shape of records, each of which has one answer, or none."""

    name: str
    noun: str
    """One such record, for people."""
    holds: tuple[str, ...]
    """What such records have, for people, in each layout; none: no file has such records."""
    rule: str
    """What such a record, or a part of it, has to be, as a sentence."""
    keys: tuple[str, ...]
    """Keys of a row by which it is recognised: it has one of them."""
    precedence: tuple[int, int]
    """Of the shapes whose keys a row has, the one with the highest number counts: the first number
    where it has one of the keys, the second where it has all."""
    columns: tuple[str, ...] = ()
    """Canonical keys, as data.columns names them."""
    inside: tuple[str, ...] = ()
    """What data.columns names inside of its values, where these are objects."""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the same keys in other data."""
    uses: frozenset[str] = frozenset()
    """Keys with a meaning in other programs that its reader reads or refuses itself, or that mean
    nothing beside such a record; others are refused by name."""
    takes_media: bool = False
    """Whether its reader takes columns of media with marks in the texts."""
    is_of_plugins: bool = False
    """Whether only a plugin gives such records: they mean nothing without its tokenizer."""

    form_place: str
    """Function that takes a row with our names of keys, data.columns and whether an answer is
    required, and returns the `ftkit.data.records.forms.Form` of such records; raises Misfit."""
    renderer_place: str
    """Class with a method `of` that takes `Rules` and the tokenizer of the base model, or None, and
    returns a `ftkit.data.rendering.Renderer` of canonical records."""
    prompted_place: str = ""
    """The same for rows whose prompt and completion are lists of objects; "": there are none."""
    inside_place: str = ""
    """Function that takes a row and what data.columns names inside, and returns the row with our
    names and the set of those that it has; "": nothing is inside."""
    adapt_place: str = ""
    """Function that takes a canonical record, or one of an instruction, and options by name, and
    returns the record that is rendered; "": records are rendered as they are."""
    ends_place: str = ""
    """Function that takes a tokenizer and a chat template, and returns the ids of the tokens that
    end an answer in it; "": no template writes such records."""
    advice_place: str = ""
    """Function that recommends a change of the data, with the arguments of
    `ftkit.data.prepare.advice_for`; "": there is none."""

    train_on: TrainOn
    """Tokens that carry loss by default, where no prompt style is used."""
    learned: str = ""
    """How such records are learned where data.train_on cannot say it; "": it can."""
    is_split: bool = False
    """Whether long ones may be cut into several samples, as by default they are."""
    has_style: bool = False
    """Whether a prompt style makes its prompts, if no chat template does."""
    has_template: bool = False
    """Whether a chat template writes it."""
    prompts: int
    """Rank among shapes by how well such records show how to prompt a result; the lowest first."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options of data that mean nothing for such records, with what to do; {key} is the option."""

    def claim(self, keys: Set[str]) -> int:
        """Return how surely a row with these keys has this shape; 0: it has not."""
        found = keys & set(self.keys)
        return self.precedence[len(found) == len(self.keys)] if found else 0


@dataclass(frozen=True, kw_only=True)
class PreferenceRow:
    """A way in which records say what is learned of them beside their texts."""

    name: str
    columns: tuple[str, ...] = ()
    """Canonical keys beside those of shapes, as data.columns names them."""
    reader_place: str
    """The `ftkit.data.records.shapes.RecordReader` of such records, which takes what the preference
    has behind its name too."""
    renderer_place: str
    """Class of their `ftkit.data.rendering.Renderer`; takes that of a record with one answer, the
    tokenizer of the base model, or None, and what the preference has behind its name."""
    label_place: str = ""
    """Function that says the label of a sample in words: takes its target, a list of numbers, and
    what the preference has behind its name. "": samples have no labels."""
    answers: tuple[str, ...] = ()
    """Keys of a canonical record that hold a record with one answer each, or a list of such; none:
    it is one itself."""
    turns: TrainOn = "assistant"
    """Turns of conversations that carry loss, by default."""


SET_TRAIN_ON = "Set train_on (assistant, last or all) instead, and remove {key}"
"""What to do about mask_prompt where there are no instructions."""
_WITHOUT_PROMPT = {
    "prompt_style": "Remove {key}",
    "mask_prompt": SET_TRAIN_ON,
    "chat_template": "Remove {key}",
    ARGUMENTS: "Remove {key}",
    "drop_system": "Remove {key}",
}
"""Options that mean nothing for records that no template writes."""
RECORD_SHAPES = Registry(
    "record_shapes",
    (ShapeRow,),
    core=(
        ShapeRow(
            name="instruction",
            noun="instruction",
            holds=("instruction and output",),
            rule="A record is an object with the texts instruction, output and, if needed, input.",
            keys=("instruction", "output"),
            # Before conversations: a record with both texts is one, whatever else it has.
            precedence=(3, 5),
            columns=("instruction", "input", "output", "sys_prompt", "history"),
            aliases={
                "instruction": ("question", "query", "problem", "prompt", "input", "inputs"),
                "output": ("answer", "response", "completion", "target", "targets", "solution"),
            },
            uses=frozenset({"history"}),
            takes_media=True,
            form_place="ftkit.data.records.forms:instruction_form",
            renderer_place="ftkit.data.rendering:InstructionRenderer",
            train_on="assistant",
            has_style=True,
            has_template=True,
            prompts=1,
        ),
        ShapeRow(
            name="completion",
            noun="completion",
            holds=("prompt and completion",),
            rule="A record is an object with the texts prompt and completion.",
            keys=("prompt", "completion"),
            precedence=(2, 2),
            columns=("prompt", "completion"),
            aliases={
                "prompt": ("question", "query", "instruction", "input"),
                "completion": ("response", "answer", "output", "target", "targets"),
            },
            uses=frozenset(ARGUMENT_KEYS),
            form_place="ftkit.data.records.forms:completion_form",
            renderer_place="ftkit.data.rendering:CompletionRenderer",
            train_on="last",
            prompts=2,
            refused=_WITHOUT_PROMPT,
        ),
        ShapeRow(
            name="text",
            noun="document",
            holds=("text",),
            rule="A record is an object with a text.",
            keys=("text",),
            precedence=(1, 1),
            columns=("text",),
            aliases={"text": ("content", "document", "article", "body")},
            # Beside a document a label is a class of it, and there are no turns.
            uses=frozenset((*LABEL_KEYS, *ARGUMENT_KEYS, *MEDIA, "history", "tools")),
            form_place="ftkit.data.records.forms:text_form",
            renderer_place="ftkit.data.rendering:TextRenderer",
            train_on="all",
            learned="learned whole",
            is_split=True,
            prompts=3,
            refused=_WITHOUT_PROMPT,
        ),
        ShapeRow(
            name="tokens",
            noun="token sequence",
            holds=(),
            rule="A token sequence has input_ids, and may have labels (the same ids, and -100 "
            "where there is no loss) and weights (a number for each token).",
            keys=("input_ids",),
            precedence=(6, 6),
            uses=frozenset(ARGUMENT_KEYS),
            is_of_plugins=True,
            form_place="ftkit.data.records.forms:tokens_form",
            renderer_place="ftkit.data.rendering:TokensRenderer",
            train_on="all",
            learned="learned as their weights say",
            prompts=4,
            refused=_WITHOUT_PROMPT,
        ),
    ),
)
"""Shapes of records by name."""

PREFERENCES: Registry[PreferenceRow] = Registry("preferences", (PreferenceRow,), core=())
"""Ways in which records say what is learned of them beside their texts, by name."""

_EXTENSIONS = {
    CONVERSATION: "chats",
    "pairs": "preference",
    "labels": "preference",
    "classes": "heads",
    "queries": "heads",
}
"""Our extensions that bring rows, to be named where they are missing."""


def shape_row(name: str, by: str = "Such data") -> ShapeRow:
    """Return the row of a shape.

    Args:
        name: of the shape.
        by: what needs it, for the error.

    Raises:
        UserError: the extension that brings it is missing.
    """
    row = RECORD_SHAPES.get(name)
    if row is None:
        raise UserError(f"{by} {lacks_extension(name)}")
    return row


def preference_row(name: Preference) -> PreferenceRow:
    """Return the row of a preference.

    Raises:
        UserError: the extension that brings it is missing.
    """
    short = name.partition(" ")[0]
    row = PREFERENCES.get(short)
    if row is None:
        raise UserError(f"An objective on {short} {lacks_extension(short)}")
    return row


def preference_options(name: Preference) -> dict[str, Any]:
    """Return what a preference has behind the name of its row."""
    found: dict[str, Any] = json.loads(name.partition(" ")[2] or "{}")
    return found


def label_text(name: Preference | None, target: Sequence[float]) -> str | None:
    """Return the label of a sample in words, given its target; None: it has none."""
    place = "" if name is None else preference_row(name).label_place
    if name is None or not place:
        return None
    text: str = imported(place)(target, **preference_options(name))
    return text


def lacks_extension(name: str) -> str:
    """The words, behind what needs a row that is not there, with which it is refused."""
    extension = _EXTENSIONS.get(name, name)
    return f"needs ftkit's extension {extension}, which is missing.\nInstall all of ftkit again."


def known_shapes() -> str:
    """A sentence about the records that can be read."""
    *most, last = [words for row in RECORD_SHAPES for words in row.holds]
    return f"A record has {', '.join(most)}, or {last}."
