"""A process with simulated cards that runs functions of tests, each in a fork of its own."""

import inspect
import json
import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from simulated_card.build import library
from simulated_card.settings import START, Cards


def cards(*kinds: str, **settings: Any) -> Cards:
    """Cards of a machine, compiled if need be."""
    compiled = library(private=settings.get("kind", "cuda") != "cuda")
    return Cards(kinds=kinds, library=str(compiled), **settings)


def with_cards(environment: dict[str, str], machine: Cards) -> dict[str, str]:
    """An environment whose Python processes have the cards.

    Args:
        environment: with ftkit on its PYTHONPATH.
        machine: the cards.
    """
    path = f"{environment['PYTHONPATH']}:{START}"
    return environment | machine.environment() | {"PYTHONPATH": path}


class Machine:
    """The process, seen from a test."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Result of the function in that process, as JSON has it.

        Args:
            function: imports all that it needs, and refers to nothing outside of it.
            *arguments: of it, as JSON has them.

        Raises:
            AssertionError: it raised; with its traceback.
        """
        source = textwrap.dedent(inspect.getsource(function))
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"source": source, "name": function.__name__, "arguments": arguments}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert answer["error"] is None, answer["error"]
        return answer["value"]


@contextmanager
def machine(environment: dict[str, str]) -> Iterator[Machine]:
    """A machine that does not outlive the block; see `with_cards` for its environment."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield Machine(process)
    finally:
        process.kill()
        process.communicate()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the function in a fork."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = {"value": None, "error": None}
        try:
            names: dict[str, Any] = {}
            exec(request["source"], names)
            answer["value"] = names[request["name"]](*request["arguments"])
        except BaseException:
            answer["error"] = traceback.format_exc()
        with os.fdopen(writing, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return json.loads(text) if text else {"value": None, "error": f"ended with {code}"}


def _serve() -> NoReturn:
    from ftkit.utils.imports import quick_imports
    from ftkit.utils.process import die_with_parent

    with quick_imports():
        import bitsandbytes  # noqa: F401 (the forks have these, and torch)
        import torch._dynamo  # noqa: F401 (optimizers import it)

    die_with_parent(os.getppid())
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)
    sys.exit()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    _serve()
