"""`ftkit chat`: a conversation with a result, on a terminal or through a pipe.

Answers go to standard output; everything else to standard error.
"""

import json
import sys
from collections.abc import Iterator

from torch import Tensor

from ftkit.errors import UserError
from ftkit.evaluation.generate import shown
from ftkit.evaluation.questions import Question
from ftkit.evaluation.result import Result
from ftkit.evaluation.session import Answer, Speaker, put_to_use
from ftkit.models.chat_templates.template import Message
from ftkit.recipe.options import ChatOptions
from ftkit.utils.progress import print_notice


class Conversation:
    """What was said so far; without a chat template, nothing of it counts."""

    def __init__(self, speaker: Speaker) -> None:
        """Begin.

        Args:
            speaker: who answers.
        """
        self._speaker = speaker
        self._messages: list[Message] = []
        self.has_history = speaker.prompting is not None

    def ask(self, text: str, longest: int) -> Tensor:
        """The prompt of the next turn; the oldest turns are left out where it would be too long.

        Args:
            text: what is said.
            longest: tokens to leave room for.

        Raises:
            UserError: the chat template does not take the conversation.
        """
        if not self.has_history:
            return self._speaker.prompt_of(Question(text=text))
        self._messages.append({"role": "user", "content": text})
        room = self._speaker.context_length - longest
        while True:
            question = Question(text=text, messages=tuple(self._messages))
            prompt = self._speaker.prompt_of(question)
            if len(prompt) <= room or len(self._messages) < 3:
                return prompt
            del self._messages[:2]

    def answered(self, text: str) -> None:
        """Take note of an answer, or of what there is of it, without the space around it."""
        if self.has_history:
            self._messages.append({"role": "assistant", "content": text.strip()})

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
    conversation = Conversation(speaker)
    if options.format == "json":
        return _chat_in_json(conversation, speaker, options.max_new_tokens)
    if speaker.notice is not None:
        print_notice(speaker.notice, sys.stderr)
    if not conversation.has_history:
        print_notice(
            "without a chat template there is no history: each line is answered on its own",
            sys.stderr,
        )
    if sys.stdin.isatty():
        print_notice("Ctrl+C stops an answer, Ctrl+D ends", sys.stderr)
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


def _chat_in_json(conversation: Conversation, speaker: Speaker, max_new_tokens: int) -> int:
    """Answer lines of JSON with lines of JSON; the first one says whether turns are remembered."""
    _print_json(history=conversation.has_history)
    while True:
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:  # between two answers there is nothing to stop
            continue
        if not line:
            return 0
        answer = Answer()
        try:
            text = json.loads(line)["prompt"]
            for _ in speaker.say(conversation.ask(text, min(max_new_tokens, 256)), answer):
                pass
        except (KeyError, TypeError, ValueError):
            _print_json(error=f'{line.strip()} is not {{"prompt": TEXT}}.')
            continue
        except UserError as error:  # too long a text
            conversation.forget()
            _print_json(error=str(error))
            continue
        except KeyboardInterrupt:
            _tell("(stopped)")
        conversation.answered(answer.text)
        _print_json(answer=answer.text, tokens=answer.tokens, seconds=round(answer.seconds, 3))


def _print_json(**values: object) -> None:
    print(json.dumps(values, ensure_ascii=False), flush=True)


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


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
