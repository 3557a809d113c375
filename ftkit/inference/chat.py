"""`ftkit chat`: a conversation with a result, on a terminal or through a pipe.

Answers go to standard output; everything else to standard error.
"""

import sys
from collections.abc import Iterator

from litgpt.prompts import Llama3, R1Base
from torch import Tensor

from ftkit.config.result_options import ChatOptions
from ftkit.errors import UserError
from ftkit.inference.generate import shown
from ftkit.inference.result import Result
from ftkit.inference.session import Answer, Speaker, put_to_use

WITH_HISTORY = (Llama3, R1Base)
"""Prompt styles of LitGPT that take a whole conversation."""


class Conversation:
    """What was said so far, as far as the prompt style has a place for it."""

    def __init__(self, speaker: Speaker, *, raw: bool) -> None:
        """Begin.

        Args:
            speaker: who answers.
            raw: without a prompt style.
        """
        self._speaker = speaker
        self._messages: list[dict[str, str]] = []
        self.has_history = not raw and isinstance(speaker.style, WITH_HISTORY)

    def ask(self, text: str, longest: int) -> Tensor:
        """The prompt of the next turn; the oldest turns are left out where it would be too long.

        Args:
            text: what is said.
            longest: tokens to leave room for.
        """
        if not self.has_history:
            return self._speaker.prompt_of({"instruction": text})
        self._messages.append({"role": "user", "content": text})
        room = self._speaker.context_length - longest
        while True:
            prompt = self._speaker.tokenizer.encode(self._speaker.style.apply(self._messages))
            if len(prompt) <= room or len(self._messages) < 3:
                return prompt
            del self._messages[:2]

    def answered(self, text: str) -> None:
        """Take note of an answer, or of what there is of it."""
        if self.has_history:
            self._messages.append({"role": "assistant", "content": text})

    def forget(self) -> None:
        """Take back what was said last."""
        if self.has_history:
            self._messages.pop()


def chat(result: Result, options: ChatOptions) -> int:
    """Answer line by line, until the input ends; the exit code.

    Args:
        result: what answers.
        options: how.

    Raises:
        UserError: something is missing, or does not fit.
    """
    speaker = Speaker(put_to_use(result, options), options)
    conversation = Conversation(speaker, raw=options.raw)
    if not conversation.has_history:
        style = "without a prompt style" if options.raw else f"in the style {_name(speaker)}"
        _tell(f"{style} there is no history: each line is answered on its own")
    if sys.stdin.isatty():
        _tell("Ctrl+C stops an answer, Ctrl+D ends")
    for line in _lines():
        if not line.strip():
            continue
        answer = Answer()
        try:
            prompt = conversation.ask(line, min(options.max_new_tokens, 256))
            for piece in speaker.say(prompt, answer):
                print(shown(piece), end="", flush=True)
        except UserError as error:  # too long a line
            conversation.forget()
            _tell(str(error))
            continue
        except KeyboardInterrupt:
            _tell(" (stopped)")
        conversation.answered(answer.text)
        print(flush=True)
    return 0


def _lines() -> Iterator[str]:
    """What is said, line by line; Ctrl+C gives up a line that is being written."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # gives input() its editing keys
    while True:
        try:
            yield input("> " if is_terminal else "")
        except KeyboardInterrupt:
            _tell("\nCtrl+D ends")
        except EOFError:
            if is_terminal:
                print()
            return


def _name(speaker: Speaker) -> str:
    return type(speaker.style).__name__


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
