"""`ftkit chat`: a conversation with a result, on a terminal or through a pipe.

Answers go to standard output; everything else to standard error.
"""

import io
import json
import sys
from collections.abc import Iterator, Sequence

from ftkit.data.records.media import Prompt, asked_with, numbered
from ftkit.data.records.record import Record
from ftkit.errors import UserError
from ftkit.evaluation.generate import shown
from ftkit.evaluation.prompting import Question
from ftkit.evaluation.result import Result, require_answers
from ftkit.evaluation.session import Answer, Responder, start_session
from ftkit.recipe.options import ChatOptions
from ftkit.utils.progress import print_notice, print_shown

IMAGE = "/image"
"""Beginning of a line that names an image."""


class Conversation:
    """The messages so far; without a chat template every prompt stands alone."""

    def __init__(self, responder: Responder) -> None:
        """Start a conversation.

        Args:
            responder: answers prompts.
        """
        self._responder = responder
        self._messages: list[Record] = []
        """All turns so far, each a message with its answer."""
        self._asked: list[Record] = []
        """The turns that the newest prompt holds, and its message."""
        self.has_history = responder.prompting is not None

    def ask(self, text: str, longest: int, images: Sequence[str] = ()) -> Prompt:
        """Build the prompt of the next turn; the oldest turns are left out if it is too long.

        The turn is part of the conversation as soon as it is answered.

        Args:
            text: the message.
            longest: tokens to leave room for.
            images: files of images before the text.

        Raises:
            UserError: the chat template does not accept the conversation, or the model no images.
        """
        if not self.has_history:
            if images:
                raise UserError(f"{IMAGE} needs a chat template.\nLeave out --raw.")
            return self._responder.prompt_of(Question(text=text))
        self._asked = [*self._messages, asked_with(text, "image", images)]
        room = self._responder.context_length - longest
        while True:
            messages, media = numbered(self._asked)
            question = Question(text=text, messages=tuple(messages), media=media)
            prompt = self._responder.prompt_of(question)
            # The question itself stays: if it alone is too long, `Responder.stream` refuses it.
            if len(prompt.ids) <= room or len(self._asked) < 3:
                return prompt
            # A question goes with its answer.
            del self._asked[:2]

    def answered(self, text: str) -> None:
        """Record the last message and its answer, complete or not, without surrounding space."""
        if self.has_history:
            self._messages = [*self._asked, {"role": "assistant", "content": text.strip()}]


def chat(result: Result, options: ChatOptions) -> int:
    """Answer line by line until the input ends, and return the exit code.

    Args:
        result: the result that answers.
        options: how it answers.

    Raises:
        UserError: something is missing, or options contradict each other.
    """
    require_answers(result, "ftkit chat")
    responder = Responder(start_session(result, options), options)
    conversation = Conversation(responder)
    if isinstance(sys.stdin, io.TextIOWrapper):  # a line that is no text must not end the chat
        sys.stdin.reconfigure(errors="surrogateescape")
    if options.format == "json":
        return _chat_in_json(conversation, responder, options.max_new_tokens)
    if responder.notice is not None:
        print_notice(responder.notice, sys.stderr)
    if not conversation.has_history:
        print_notice(
            "without a chat template there is no history: each line is answered on its own",
            sys.stderr,
        )
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print_notice(f"Ctrl+C stops an answer, Ctrl+D ends; {IMAGE} FILE adds an image", sys.stderr)
    images: list[str] = []
    for line in _lines():
        if not line.strip():
            continue
        if line.split()[0] == IMAGE:
            if file := line.strip().removeprefix(IMAGE).strip():
                images.append(file)
                _print_aside(f"{file} comes before the next line")
            else:
                _print_aside(f"{IMAGE} names no file. Write {IMAGE} FILE.")
            continue
        if not _is_text(line):
            _print_aside(
                f"This line is not text in {sys.stdin.encoding}. Convert it, as iconv does."
            )
            continue
        if not is_terminal:  # which shows what is typed
            print_notice(f"> {line}", sys.stderr)
        answer = Answer()
        try:
            # At most 256 tokens are kept free, so that a high limit does not shorten the history.
            prompt = conversation.ask(line, min(options.max_new_tokens, 256), images)
            images = []
            for piece in responder.stream(prompt, answer):
                print(shown(piece), end="", flush=True)
        except UserError as error:  # too long a line, or no image
            images = []
            _print_aside(str(error))
            continue
        except KeyboardInterrupt:
            # What was shown of the answer stays in the history.
            _print_aside(" (stopped)")
        conversation.answered(answer.text)
        print(flush=True)
    return 0


def _chat_in_json(conversation: Conversation, responder: Responder, max_new_tokens: int) -> int:
    """Answer lines of JSON with lines of JSON; the first one says whether there is a history."""
    _print_json(history=conversation.has_history)
    while True:
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:  # between two answers there is nothing to stop
            continue
        if not line:
            return 0
        asked = _prompt_in(line)
        if asked is None:
            shown = line.strip().encode(errors="backslashreplace").decode()
            _print_json(error=f'{shown} is not {{"prompt": TEXT}}, perhaps with images: [FILE].')
            continue
        answer = Answer()
        text, images = asked
        try:
            prompt = conversation.ask(text, min(max_new_tokens, 256), images)
            for _ in responder.stream(prompt, answer):
                pass
        except UserError as error:  # too long a text, or no image
            _print_json(error=str(error))
            continue
        except KeyboardInterrupt:
            _print_aside("(stopped)")
        conversation.answered(answer.text)
        _print_json(answer=answer.text, tokens=answer.tokens, seconds=round(answer.seconds, 3))


def _prompt_in(line: str) -> tuple[str, list[str]] | None:
    """Text and images of {"prompt": TEXT, "images": [FILE]}; None: the line is something else."""
    try:
        asked = json.loads(line)
        prompt = asked.get("prompt") if isinstance(asked, dict) else None
        # JSON may hold half a character, which no tokenizer takes.
        if isinstance(prompt, str) and _is_text(prompt):
            images = asked.get("images") or []
            is_list = isinstance(images, list) and all(isinstance(one, str) for one in images)
            return (prompt, images) if is_list else None
    except (ValueError, RecursionError):
        pass
    return None


def _is_text(text: str) -> bool:
    """Return whether a text holds whole characters alone, as tokenizers take them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _print_json(**values: object) -> None:
    print(json.dumps(values, ensure_ascii=False), flush=True)


def _lines() -> Iterator[str]:
    """Yield lines of input; Ctrl+C discards the line that is being written."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # gives input() its editing keys
    while True:
        try:
            yield input("> " if is_terminal else "")
        except KeyboardInterrupt:
            _print_aside("\nCtrl+D ends")
        except EOFError:
            if is_terminal:
                print()
            return


def _print_aside(text: str) -> None:
    print_shown(text, sys.stderr)
