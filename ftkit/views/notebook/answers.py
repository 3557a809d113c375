"""`ftkit.generate` and `ftkit.chat`: what came out of a run, asked from Python."""

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, overload

from ftkit.errors import UserError
from ftkit.utils.process import PassingOn, start_command
from ftkit.views.notebook.child_output import printed
from ftkit.views.notebook.commands import failure, option_words, output_of, show_progress

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class GeneratedAnswer:
    """An answer; `print` shows its text."""

    text: str
    tokens: int
    """Of the answer."""
    seconds: float
    """It took."""
    base_text: str | None = None
    """The answer of the base model, if it was asked for."""

    def __str__(self) -> str:
        return self.text


@overload
def generate(result: str | os.PathLike[str], prompt: str, /, **options: Any) -> GeneratedAnswer: ...
@overload
def generate(
    result: str | os.PathLike[str], prompt: Sequence[str], /, **options: Any
) -> list[GeneratedAnswer]: ...
def generate(
    result: str | os.PathLike[str], prompt: str | Sequence[str], /, **options: Any
) -> GeneratedAnswer | list[GeneratedAnswer]:
    """Answer a prompt, or several with one loaded model, as `ftkit generate`.

    ::

        print(ftkit.generate(run, "Tell me a story.", temperature=0.8))
        for answer in ftkit.generate("out/quickstart", ["Who is Lena?", "Who is Max?"]):
            print(answer.text, answer.tokens)

    Args:
        result: a run, a checkpoint, an adapter, a model or a hub name.
        prompt: what to ask; of several, each has its answer in their order.
        options: of the command: max_new_tokens=40, compare_base=True.

    Raises:
        UserError: as the command would.
    """
    words = ["generate", os.fspath(result), "--format=json", *option_words(options)]
    if isinstance(prompt, str):
        return _answer_of(json.loads(output_of([*words, f"--prompt={prompt}"])))
    if not prompt:
        return []
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps({"instruction": text}) + "\n" for text in prompt)
        file.flush()
        entries = json.loads(output_of([*words, f"--prompts={file.name}"]))
    return [_answer_of(entry) for entry in entries]


def _answer_of(entry: dict[str, Any]) -> GeneratedAnswer:
    return GeneratedAnswer(
        text=entry["answer"],
        tokens=entry["tokens"],
        seconds=entry["seconds"],
        base_text=entry.get("base_answer"),
    )


class Chat:
    """A conversation with a result, which stays loaded in a child process until `close`."""

    def __init__(self, child: "subprocess.Popen[bytes]", said: IO[bytes]) -> None:
        """Begin; see `chat`."""
        self._child, self._said = child, said
        show_progress("ftkit chat", self._answers_soon, said)
        self.has_history: bool = self._read()["history"]
        """Whether earlier turns count; without a chat template they do not."""

    def ask(self, text: str) -> GeneratedAnswer:
        """Say something; an interrupt ends the answer, and the conversation goes on.

        Raises:
            UserError: it is too long, or the conversation was closed.
        """
        if self._child.poll() is not None:
            raise UserError("This conversation has ended. Begin another one: ftkit.chat(RESULT).")
        assert self._child.stdin is not None
        with PassingOn(signal.SIGINT) as signals:
            signals.to(self._child)
            self._child.stdin.write(json.dumps({"prompt": text}).encode() + b"\n")
            self._child.stdin.flush()
            entry = self._read()
        if "error" in entry:
            raise UserError(entry["error"])
        return _answer_of(entry)

    def close(self) -> None:
        """End the conversation; its memory is free then."""
        if self._child.poll() is None:
            self._child.communicate()  # it ends with its input

    def __enter__(self) -> "Chat":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ftkit chat: {'open' if self._child.poll() is None else 'closed'}>"

    def _answers_soon(self) -> bool:
        """Whether there is a line to read, or will never be."""
        assert self._child.stdout is not None
        return bool(select.select([self._child.stdout], [], [], _POLL_S)[0])

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise failure(printed(self._said), self._child.wait())
        entry: dict[str, Any] = json.loads(line)
        return entry


def chat(result: str | os.PathLike[str], /, **options: Any) -> Chat:
    """Talk with a result, as `ftkit chat`: it is loaded once and remembers what was said.

    ::

        with ftkit.chat("out/quickstart", max_new_tokens=40) as chat:
            print(chat.ask("Tell me who Lena is. Max Rose met Nora Lake and Lena Lane."))

    Args:
        result: a run, a checkpoint, an adapter, a model or a hub name.
        options: of the command: temperature=0.8, system="Be brief."

    Raises:
        UserError: as the command would.
    """
    words = ["chat", os.fspath(result), "--format=json", *option_words(options)]
    said = tempfile.TemporaryFile()  # noqa: SIM115 - it belongs to the conversation
    child = start_command(words, said, result=subprocess.PIPE, stdin=subprocess.PIPE)
    try:
        return Chat(child, said)
    except BaseException:
        child.kill()
        child.communicate()
        raise
