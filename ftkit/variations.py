"""Variations of a recipe, as `--sweep KEY=A,B` names them: for plans and for runs."""

import itertools
from collections.abc import Iterator, Sequence

from ftkit.errors import UserError
from ftkit.parsing import Override

_CLOSING = {"[": "]", "{": "}", '"': '"', "'": "'"}


def variations(sweeps: Sequence[str]) -> list[tuple[Override, ...]]:
    """Every combination of `key=a,b,c`, one such text for each key; one empty one for none.

    A comma inside brackets or quotes belongs to its value: `lora_targets=[q_proj,v_proj],[o_proj]`.

    Raises:
        UserError: a text is not of this form, or a key or a value is named twice.
    """
    choices: dict[str, list[Override]] = {}
    for sweep in sweeps:
        key, equals, text = sweep.removeprefix("--").partition("=")
        values = list(_split(text))
        if not (equals and key and all(values)):
            raise UserError(
                f"--sweep is {sweep!r}, but must be a key and its values. "
                "Try --sweep train.micro_batch_size=1,2,4."
            )
        if key in choices:
            together = ",".join([*(value for _, value in choices[key]), *values])
            raise UserError(
                f"--sweep names {key} twice, but takes all its values at once. "
                f"Try --sweep {key}={together}."
            )
        if len(set(values)) < len(values):
            once = ",".join(dict.fromkeys(values))
            raise UserError(
                f"--sweep is {sweep!r}, but must name each value once. Try --sweep {key}={once}."
            )
        choices[key] = [(key, value) for value in values]
    return list(itertools.product(*choices.values()))


def _split(text: str) -> Iterator[str]:
    """The parts between commas that stand in no brackets and no quotes."""
    part = ""
    open_: list[str] = []
    for letter in text:
        if open_ and letter == open_[-1]:
            open_.pop()
        elif letter in _CLOSING and (not open_ or open_[-1] not in "\"'"):
            open_.append(_CLOSING[letter])
        if letter == "," and not open_:
            yield part.strip()
            part = ""
        else:
            part += letter
    yield part.strip()
