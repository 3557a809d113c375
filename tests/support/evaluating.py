"""JSON and messages of mistakes that `ftkit evaluate` prints."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from messages import message_of

from ftkit.cli.app import run


def values_from(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Gives what it prints of a result."""

    def values(path: object, *argv: object) -> dict[str, Any]:
        capsys.readouterr()
        words = ["evaluate", path, "--accelerator", "cpu", "--format", "json", *argv]
        assert run(list(map(str, words))) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return values


def mistake(*argv: object) -> str:
    """Message of its refusal."""
    return message_of(run, ["evaluate", *map(str, argv)])
