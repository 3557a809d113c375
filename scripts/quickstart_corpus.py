"""The small invented world of the quick start: plain text to learn from, instructions to follow.

The base model of the quick start is trained only on the plain text. It learns skills there (finding
a thing or a person in a sentence, reversing lists, kinds, opposites, capitals) but never sees an
instruction, an answer that stands alone, or a prompt template. The instructions require exactly
these skills, so fine-tuning only adds the ability to follow instructions.

Everything here is a function of a seed: the same seed gives the same text on every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

NAMES = ("Mia", "Tom", "Ben", "Anna", "Leo", "Ida", "Max", "Eva", "Sam", "Lena", "Paul", "Nora")
LAST_NAMES = (
    *("Stone", "Brook", "Hill", "Wood", "Field", "Lake"),
    *("Rose", "King", "Moon", "Snow", "Lane", "Green"),
)
COLOURS = ("red", "blue", "green", "white", "black", "pink", "gold")
TOYS = ("ball", "kite", "hat", "cup", "book", "drum", "boat", "bell", "lamp", "box", "doll", "ring")
TOWNS_AND_COUNTRIES = (
    *(("Rome", "Italy"), ("Oslo", "Norway"), ("Paris", "France"), ("Cairo", "Egypt")),
    *(("Lima", "Peru"), ("Madrid", "Spain"), ("Delhi", "India"), ("Tokyo", "Japan")),
    *(("Dublin", "Ireland"), ("Quito", "Ecuador"), ("Berlin", "Germany"), ("Prague", "Czechia")),
    *(("Athens", "Greece"), ("Havana", "Cuba"), ("Vienna", "Austria"), ("Lisbon", "Portugal")),
)
COUNTRY_OF = dict(TOWNS_AND_COUNTRIES)
TOWNS = tuple(COUNTRY_OF)
ANIMALS = ("dog", "cat", "horse", "cow", "goat", "fox", "bear", "duck", "hen", "owl")
FRUITS = ("apple", "pear", "plum", "fig", "peach", "lemon", "cherry", "grape", "melon", "date")
TOOLS = ("hammer", "saw", "axe", "rake", "drill", "file", "knife", "spade", "broom", "brush")
KINDS = {"an animal": ANIMALS, "a fruit": FRUITS, "a tool": TOOLS}
NOUNS = ANIMALS + FRUITS + TOOLS
OPPOSITES = (
    *(("hot", "cold"), ("big", "small"), ("long", "short"), ("old", "new"), ("fast", "slow")),
    *(("high", "low"), ("wet", "dry"), ("full", "empty"), ("hard", "soft"), ("light", "dark")),
    *(("loud", "quiet"), ("happy", "sad"), ("rich", "poor"), ("clean", "dirty")),
    *(("early", "late"), ("near", "far"), ("open", "closed"), ("strong", "weak")),
    *(("thick", "thin"), ("wide", "narrow"), ("sweet", "sour"), ("good", "bad")),
    *(("left", "right"), ("first", "last")),
)
OPPOSITE_OF = {word: other for pair in OPPOSITES for word, other in (pair, pair[::-1])}
HELD_OUT = (
    *("hot", "cold", "fast", "slow", "wet", "dry", "happy", "sad", "big", "small"),
    *("Paris", "Tokyo", "Cairo", "Athens", "Lima"),
)
"""Towns and whole pairs of opposites that no training instruction asks about: the model knows
them from plain text."""
ALL_WORDS = (*NOUNS, *TOYS, *COLOURS, *TOWNS, *LAST_NAMES, *OPPOSITE_OF)

CLOSINGS = (
    "Then {name} went home.",
    "That was all for the day.",
    "{name} was glad to hear it.",
    "Soon it was dark and {name} went to bed.",
    "And so the day went on.",
    "{name} laughed and went to {town}.",
)
"""Plain text always continues after its facts, so the base model does not stop after an answer."""

TEXTS_READ_ALOUD = 16_000
"""Number of first texts that only repeat a text. Learning to look things up in the context begins
with learning to repeat; without these texts it takes many times longer to begin."""
READ_ALOUD_SHARE = 0.1
"""Share of repetitions among the texts after them."""

TRAIN_RECORDS_PER_SKILL = 400
VAL_RECORDS_PER_SKILL = 43
"""Opposites and capitals are fewer, because there are only so many words."""
TRAIN_PAIRS_PER_SKILL = 230
VAL_PAIRS_PER_SKILL = 30
"""Of preference pairs; 90 steps of 32 pairs take nearly each three times."""

_REQUEST = "Write a response that appropriately completes the request.\n\n### Instruction:\n"
_WITH_INPUT = ", paired with an input that provides further context."
_INPUT_AND_ANSWER = "Tell me.\n\n### Input:\n.\n\n### Response:\n"
PROMPT_TEXTS = (
    f"Below is an instruction that describes a task. {_REQUEST}Say?\n\n### Response:\n",
    f"Below is an instruction that describes a task{_WITH_INPUT} {_REQUEST}{_INPUT_AND_ANSWER}",
)
"""The Alpaca template and the words of requests, for the tokenizer alone: they become tokens, but
the model never reads them."""


class Record(TypedDict):
    """One instruction in the Alpaca format."""

    instruction: str
    input: str
    output: str


class Pair(TypedDict):
    """An instruction with a right answer and a wrong one, in the Alpaca format."""

    instruction: str
    input: str
    chosen: str
    rejected: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about the facts of a scene, in two wordings."""

    question: str
    """Wording in plain text, and in half of the instructions."""
    request: str
    """Wording in the other half of the instructions, and nowhere else."""
    answer: str
    wrong: tuple[str, ...]
    """Answers in the same words that are wrong."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Facts, and the questions they answer."""

    facts: str
    questions: tuple[Question, ...]


def _enumerate(parts: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def _without(answers: Iterable[str], answer: str) -> tuple[str, ...]:
    return tuple(other for other in answers if other != answer)


def _thing(rng: random.Random) -> Scene:
    count = rng.choice((2, 3, 3))
    colours, toys = rng.sample(COLOURS, count), rng.sample(TOYS, count)
    things = [f"{colour} {toy}" for colour, toy in zip(colours, toys, strict=True)]
    answers = [f"It is the {thing}." for thing in things]
    return Scene(
        facts=f"{rng.choice(NAMES)} has {_enumerate([f'a {thing}' for thing in things])}.",
        questions=tuple(
            Question(
                question=f"Which thing is {colour}?",
                request=f"Tell me which thing is {colour}.",
                answer=answer,
                wrong=_without(answers, answer),
            )
            for colour, answer in zip(colours, answers, strict=True)
        ),
    )


def _person(rng: random.Random) -> Scene:
    count = rng.choice((2, 3, 3))
    names, last_names = rng.sample(NAMES, count), rng.sample(LAST_NAMES, count)
    people = [f"{name} {last}" for name, last in zip(names, last_names, strict=True)]
    answers = [f"That is {person}." for person in people]
    return Scene(
        facts=f"{people[0]} met {_enumerate(people[1:])}.",
        questions=tuple(
            Question(
                question=f"Who is {name}?",
                request=f"Tell me who {name} is.",
                answer=answer,
                wrong=_without(answers, answer),
            )
            for name, answer in zip(names, answers, strict=True)
        ),
    )


def _backwards(rng: random.Random) -> Scene:
    words = rng.sample(NOUNS, rng.choice((3, 3, 4)))
    return Scene(
        facts=", ".join(words),
        questions=(
            Question(
                question="What are the words backwards?",
                request="Say the words backwards.",
                answer=", ".join(reversed(words)),
                wrong=(", ".join(words),),
            ),
        ),
    )


def _kind(rng: random.Random) -> Scene:
    kind = rng.choice(tuple(KINDS))
    wanted = rng.choice(KINDS[kind])
    nouns = [wanted, *rng.sample([noun for noun in NOUNS if noun not in KINDS[kind]], 2)]
    rng.shuffle(nouns)
    answers = {noun: f"The {noun} is {kind}." for noun in nouns}
    return Scene(
        facts=", ".join(nouns),
        questions=(
            Question(
                question=f"Which of these is {kind}?",
                request=f"Tell me which of these is {kind}.",
                answer=answers[wanted],
                wrong=_without(answers.values(), answers[wanted]),
            ),
        ),
    )


def _opposite_of(word: str) -> Question:
    return Question(
        question=f"What is the opposite of {word}?",
        request=f"Tell me the opposite of {word}.",
        answer=f"The opposite of {word} is {OPPOSITE_OF[word]}.",
        wrong=tuple(
            f"The opposite of {word} is {other}."
            for other in OPPOSITE_OF
            if other not in (word, OPPOSITE_OF[word])
        ),
    )


def _opposites(rng: random.Random) -> Scene:
    words = rng.sample(tuple(OPPOSITE_OF), 3)
    return Scene(facts="", questions=tuple(_opposite_of(word) for word in words))


def _country_of(town: str) -> Question:
    return Question(
        question=f"Where is {town}?",
        request=f"Tell me where {town} is.",
        answer=f"{town} is in {COUNTRY_OF[town]}.",
        wrong=tuple(f"{town} is in {COUNTRY_OF[other]}." for other in TOWNS if other != town),
    )


def _countries(rng: random.Random) -> Scene:
    return Scene(facts="", questions=tuple(_country_of(town) for town in rng.sample(TOWNS, 3)))


SKILLS_FROM_FACTS: tuple[Callable[[random.Random], Scene], ...] = (
    *(_thing, _person, _backwards, _kind),
)
SKILLS_OF_STORIES = (*SKILLS_FROM_FACTS, _backwards, _opposites, _countries)
"""Plain text has the hardest skill twice as often."""


def _read_aloud(rng: random.Random) -> str:
    """A text and its repetition."""
    form = rng.random()
    if form < 0.5:
        text = " ".join(rng.sample(ALL_WORDS, rng.randint(5, 12))) + "."
    elif form < 0.75:
        text = ", ".join(rng.sample(NOUNS, rng.randint(4, 7))) + "."
    else:
        text = rng.choice((_thing, _person))(rng).facts
    reader, listener = rng.sample(NAMES, 2)
    return f"{reader} reads: {text}\n{listener} reads it again: {text}"


def _story(rng: random.Random) -> str:
    """Facts, what follows from them as a question or a statement, and a closing sentence."""
    scene = rng.choice(SKILLS_OF_STORIES)(rng)
    questions = rng.sample(scene.questions, len(scene.questions))
    parts = [scene.facts]
    if rng.random() < 0.5:
        first = questions.pop(0)
        parts = [f"{rng.choice(NAMES)} asks: {first.question}", scene.facts, first.answer]
    parts += [
        f"{question.question} {question.answer}" if rng.random() < 0.5 else question.answer
        for question in questions
    ]
    parts.append(rng.choice(CLOSINGS).format(name=rng.choice(NAMES), town=rng.choice(TOWNS)))
    return rng.choice((" ", "\n")).join(part for part in parts if part)


def corpus(seed: int) -> Iterator[str]:
    """Yield the plain text of the base model, endlessly, in the order of training."""
    rng = random.Random(f"corpus {seed}")
    for _ in range(TEXTS_READ_ALOUD):
        yield _read_aloud(rng)
    while True:
        yield _read_aloud(rng) if rng.random() < READ_ALOUD_SHARE else _story(rng)


def _record(rng: random.Random, question: Question, facts: str) -> Record:
    instruction = rng.choice((question.question, question.request))
    return Record(instruction=instruction, input=facts, output=question.answer)


def records(seed: int) -> tuple[list[Record], list[Record]]:
    """The instructions to learn from and the held-out ones, each in random order.

    No facts occur twice, in either part or across them.
    """
    rng = random.Random(f"records {seed}")
    train: list[Record] = []
    val: list[Record] = []
    seen: set[str] = set()
    for skill in SKILLS_FROM_FACTS:
        of_skill: list[Record] = []
        while len(of_skill) < TRAIN_RECORDS_PER_SKILL + VAL_RECORDS_PER_SKILL:
            scene = skill(rng)
            if scene.facts not in seen:
                seen.add(scene.facts)
                of_skill.append(_record(rng, rng.choice(scene.questions), scene.facts))
        train += of_skill[:TRAIN_RECORDS_PER_SKILL]
        val += of_skill[TRAIN_RECORDS_PER_SKILL:]
    known = {word: _opposite_of(word) for word in OPPOSITE_OF}
    known |= {town: _country_of(town) for town in TOWNS}
    for word, question in known.items():
        part = val if word in HELD_OUT else train
        for instruction in (question.question, question.request):
            part.append(Record(instruction=instruction, input="", output=question.answer))
    rng.shuffle(train)
    rng.shuffle(val)
    return train, val


def pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """Preference pairs to learn from and held-out ones: which of two answers is right.

    Facts are not those of another pair; questions about opposites and towns are held out as those
    of `records` are.
    """
    rng = random.Random(f"pairs {seed}")
    train: list[Pair] = []
    val: list[Pair] = []
    seen: set[str] = set()
    for skill in SKILLS_FROM_FACTS:
        of_skill: list[Pair] = []
        while len(of_skill) < TRAIN_PAIRS_PER_SKILL + VAL_PAIRS_PER_SKILL:
            scene = skill(rng)
            if scene.facts not in seen:
                seen.add(scene.facts)
                of_skill.append(_pair(rng, rng.choice(scene.questions), scene.facts))
        train += of_skill[:TRAIN_PAIRS_PER_SKILL]
        val += of_skill[TRAIN_PAIRS_PER_SKILL:]
    known = {word: _opposite_of(word) for word in OPPOSITE_OF}
    known |= {town: _country_of(town) for town in TOWNS}
    for word, question in known.items():
        (val if word in HELD_OUT else train).append(_pair(rng, question, ""))
    rng.shuffle(train)
    rng.shuffle(val)
    return train, val


def _pair(rng: random.Random, question: Question, facts: str) -> Pair:
    return Pair(
        instruction=rng.choice((question.question, question.request)),
        input=facts,
        chosen=question.answer,
        rejected=rng.choice(question.wrong),
    )


def as_json(part: Sequence[Record] | Sequence[Pair]) -> str:
    """A JSON list with one record per line."""
    return "[\n" + ",\n".join(json.dumps(record) for record in part) + "\n]\n"
