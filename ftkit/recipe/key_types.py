"""Types of keys of recipes: what a resumed run may change, and the numbers that a key may have."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

_Value = TypeVar("_Value")
Kind = Literal["fixed", "tunable", "hardware"]
"""Whether a resumed run may change a key."""
Fixed = Annotated[_Value, "fixed"]
"""A key that decides what is learned: it must stay equal."""
Tunable = Annotated[_Value, "tunable"]
"""A key that decides how it is learned: it may change, with a notice."""
Hardware = Annotated[_Value, "hardware"]
"""A key that decides time, memory, or what is written and shown: it may change."""


@dataclass(frozen=True)
class Range:
    """Numbers that a key may have; it may have no number, or a word, as its type says."""

    rule: str
    """What they must do, as a part of a sentence: be at least 1."""
    holds: Callable[[float], bool]
    example: str
    """A value that works."""


def at_least(least: int) -> Range:
    """Numbers from `least`."""
    return Range(f"be at least {least}", lambda number: number >= least, str(least))


def above_0(example: str) -> Range:
    """Numbers above 0, such as the example."""
    return Range("be above 0", lambda number: 0 < number < math.inf, example)


def not_negative(example: str) -> Range:
    """0 and the numbers above it, such as the example."""
    rule = "be a finite number of at least 0"
    return Range(rule, lambda number: 0 <= number < math.inf, example)


FRACTION = Range("lie between 0 and 1", lambda number: 0 <= number <= 1, "0.1")
SHARE = Range("lie in [0, 1)", lambda number: 0 <= number < 1, "0.05")
