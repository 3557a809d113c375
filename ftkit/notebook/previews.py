"""`ftkit.preview`: a look at data before training, which shows itself in a notebook."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ftkit.config.parsing import as_text
from ftkit.console.terminal import plain_text
from ftkit.inspection.inspection import Inspection
from ftkit.inspection.page import fragment
from ftkit.inspection.text import InspectionText
from ftkit.notebook import display
from ftkit.notebook.child_output import printed, refusal
from ftkit.utils.json_values import from_json
from ftkit.utils.process import PassingOn, start_command

_POLL_S = 0.2


class ShownInspection(Inspection):
    """An inspection that shows itself: as HTML in a notebook, as text anywhere else."""

    def __repr__(self) -> str:
        return plain_text(InspectionText(self))

    def _repr_html_(self) -> str:
        return fragment(self)


def preview(
    recipe: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    /,
    *,
    show: int = 3,
    **keys: Any,
) -> ShownInspection:
    """Look at the data of a recipe before training, as `ftkit data`.

    Args:
        recipe: recipe files, later ones win.
        show: training samples to show token by token.
        keys: of the recipe, dotted: `**{"data.path": "chats.jsonl"}`.

    Raises:
        UserError: as a run would.
        KeyboardInterrupt: it was interrupted.
    """
    several = [recipe] if isinstance(recipe, str | os.PathLike) else recipe or ()
    words = ["data", *(f"--config={os.fspath(file)}" for file in several), f"--show={show}"]
    words += [f"--{key}={as_text(value)}" for key, value in keys.items()]
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as output:
        file = Path(directory) / "inspection.json"
        with PassingOn(signal.SIGINT) as signals:
            child = start_command([*words, "--format=json", f"--out={file}"], output)
            signals.to(child)
            _follow(child, output)
        if child.returncode:
            said = printed(output)
            raise refusal(said, child.returncode) or _ended(said, child.returncode)
        values = json.loads(file.read_text(encoding="utf-8"))
    found: ShownInspection = from_json(ShownInspection, values)
    return found


def _follow(child: "subprocess.Popen[bytes]", output: IO[bytes]) -> None:
    """Wait for the end of the command, and show how far it is."""
    place, told = display.place(), ""
    while True:
        try:
            child.wait(_POLL_S)
            break
        except subprocess.TimeoutExpired:
            progress, _, _ = printed(output).partition("ftkit: ")
            *_, last = ["", *progress.split("\n")[:-1]]
            if last != told:
                place.say(last)
                told = last
    if told:
        place.say("")


def _ended(said: str, code: int) -> BaseException:
    if code == 128 + signal.SIGINT:
        return KeyboardInterrupt()
    return RuntimeError(f"ftkit ended with exit code {code}:\n{said}")
