"""Durations, and how much of a run one session does."""

import re

import pytest
from messages import key_words, message_of, says

from ftkit.errors import UserError
from ftkit.runs.job import StopAfter
from ftkit.utils.console.formatting import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60), ("15min", 900), ("2h", 7200), ("1.5h", 5400), ("90 min", 5400), ("0.5s", 0.5)],
)
def test_a_duration_is_a_number_with_its_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "60", "15m", "min", "1h30min", "-1h", "0s", "1e3s", "2 days"])
def test_anything_else_is_refused_with_one_that_works(text: str) -> None:
    message = message_of(parse_duration, text, "checkpoint.save_every")
    assert says(message, f"checkpoint.save_every is {text!r} ... above 0")
    suggested = re.search(r"Try --checkpoint.save_every (\S+)\.$", message)
    assert suggested and parse_duration(suggested[1])


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("500", StopAfter(steps=500)),
        ("1", StopAfter(steps=1)),
        ("90min", StopAfter(seconds=5400)),
        ("2h", StopAfter(seconds=7200)),
    ],
)
def test_a_session_ends_after_steps_or_after_a_time(text: str, stop: StopAfter) -> None:
    assert StopAfter.parse(text) == stop


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "soon", "0s", "90m"])
def test_any_other_end_of_a_session_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=key_words(f"'{text}' ... --stop_after 500")):
        StopAfter.parse(text)
