"""`ftkit.generate`, `chat`, `evaluate`, `merge`, `export` and `push`: work with a result."""

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, overload

from ftkit.errors import UserError
from ftkit.extensions.notebook.children import (
    failure,
    option_words,
    output_of,
    printed,
    show_progress,
)
from ftkit.extensions.notebook.display import short
from ftkit.utils.process import PassingOn, start_command

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class GeneratedAnswer:
    """An answer; `print` shows its text."""

    text: str
    tokens: int
    """Tokens of the answer."""
    seconds: float
    """Time to generate it."""
    base_text: str | None = None
    """Answer of the base model, with compare_base."""

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
        prompt: one prompt, or several, whose answers are in the same order.
        options: of the command: max_new_tokens=40, compare_base=True, image="cat.png".

    Raises:
        UserError: as the command would.
    """
    words = ["generate", os.fspath(result), "--format=json", *option_words(options)]
    if isinstance(prompt, str):
        return _answer_of(json.loads(output_of([*words, f"--prompt={prompt}"])))
    if not prompt:
        return []
    # Records and not lines of text, because a prompt may have several lines.
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
        """Wait until the model is loaded; see `chat`."""
        self._child, self._said = child, said
        show_progress("ftkit chat", self._answers_soon, said)
        self.has_history: bool = self._read()["history"]
        """True if the model sees earlier turns; without a chat template it does not."""

    def ask(self, text: str, images: Sequence[str | os.PathLike[str]] = ()) -> GeneratedAnswer:
        """Send a message and return the answer; an interrupt ends the answer only.

        Args:
            text: of the message.
            images: files of images before the text, for a model that sees.

        Raises:
            UserError: the message is too long, or the conversation was closed.
        """
        if self._child.poll() is not None:
            raise UserError("This conversation has ended. Start another one: ftkit.chat(RESULT).")
        assert self._child.stdin is not None
        # The child has a process group of its own, which an interrupt of the kernel does not reach.
        with PassingOn(signal.SIGINT) as signals:
            signals.to(self._child)
            asked = {"prompt": text, "images": [os.fspath(image) for image in images]}
            self._child.stdin.write(json.dumps(asked).encode() + b"\n")
            self._child.stdin.flush()
            entry = self._read()
        if "error" in entry:
            raise UserError(entry["error"])
        return _answer_of(entry)

    def close(self) -> None:
        """End the conversation and free its memory."""
        if self._child.poll() is None:
            self._child.communicate()  # closes its input, which ends it

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
        """Return whether a line can be read or the output has ended."""
        assert self._child.stdout is not None
        # The end of the output counts as readable, too.
        return bool(select.select([self._child.stdout], [], [], _POLL_S)[0])

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise failure(printed(self._said), self._child.wait())
        entry: dict[str, Any] = json.loads(line)
        return entry


def chat(result: str | os.PathLike[str], /, **options: Any) -> Chat:
    """Chat with a result, as `ftkit chat`: it is loaded once and remembers the conversation.

    ::

        with ftkit.chat("out/quickstart", max_new_tokens=40) as chat:
            print(chat.ask("Tell me who Lena is. Max Rose met Nora Lake and Lena Lane."))

    Args:
        result: a run, a checkpoint, an adapter, a model or a hub name.
        options: of the command: temperature=0.8, system="Be brief."

    Raises:
        UserError: as the command would.
    """
    # A child that reads and writes lines of JSON: the model stays loaded between turns, the kernel
    # does not import torch, and texts may contain line breaks.
    words = ["chat", os.fspath(result), "--format=json", *option_words(options)]
    said = tempfile.TemporaryFile()  # noqa: SIM115 - it belongs to the conversation
    child = start_command(words, said, result=subprocess.PIPE, stdin=subprocess.PIPE)
    try:
        return Chat(child, said)
    except BaseException:
        # Nobody could close it any more, and it holds the model.
        child.kill()
        child.communicate()
        raise


_Tasks = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics on held-out data."""

    loss: float
    """Loss of the objective: of supervised fine-tuning, nats per label token."""
    perplexity: float | None
    """exp(loss), if it is a cross-entropy."""
    records: int
    label_tokens: int
    exact_match: float | None
    """Fraction of answers that equal the expected ones; None: not measured."""
    terms: dict[str, float]
    """Measurements of the objective beside the loss, such as the accuracy on preference pairs."""
    values: dict[str, Any] = field(repr=False)
    """Complete output of `ftkit evaluate --format json`."""


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation:
    """Metrics on tasks of the lm-evaluation-harness."""

    scores: dict[str, dict[str, float]]
    """Metrics by task: `scores["arc_easy"]["acc"]`. A metric after a filter has the filter in its
    name, as the harness writes it: "exact_match,strict-match"."""
    values: dict[str, Any] = field(repr=False)
    """Complete output of `ftkit evaluate --format json`, with standard errors and records."""


@overload
def evaluate(
    result: str | os.PathLike[str], /, *, tasks: None = None, **options: Any
) -> Evaluation: ...
@overload
def evaluate(
    result: str | os.PathLike[str], /, *, tasks: _Tasks, **options: Any
) -> TaskEvaluation: ...
def evaluate(
    result: str | os.PathLike[str],
    /,
    *,
    tasks: _Tasks | None = None,
    **options: Any,
) -> Evaluation | TaskEvaluation:
    """Evaluate a result on held-out data or on tasks, as `ftkit evaluate`.

    ::

        ftkit.evaluate(run).loss
        ftkit.evaluate(run, data="JSON", **{"data.path": "held_out.json"}).exact_match
        ftkit.evaluate(run, tasks=["arc_easy", "my_task.yaml"], limit=100).scores

    Args:
        result: a run, a checkpoint, an adapter, a model or a hub name.
        tasks: names, task files or directories of them.
        options: of the command, with dots as they are there.

    Raises:
        UserError: as the command would.
    """
    words = ["evaluate", os.fspath(result), "--format=json", *option_words(options)]
    if tasks is not None:
        names = [tasks] if isinstance(tasks, str | os.PathLike) else tasks
        joined = ",".join(os.fspath(name) for name in names)
        values = json.loads(output_of([*words, f"--tasks={joined}"]))
        return TaskEvaluation(scores=_scores(values["tasks"]), values=values)
    values = json.loads(output_of(words))
    matches = values["exact_match"]
    return Evaluation(
        loss=values["loss"],
        perplexity=values["perplexity"],
        records=values["records"],
        label_tokens=values["label_tokens"],
        exact_match=None if matches is None else matches["share"],
        terms=values["terms"],
        values=values,
    )


def _scores(measured: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    scores: dict[str, dict[str, float]] = {}
    for one in measured:
        # The harness's own spelling of a metric after a filter.
        metric = ",".join(filter(None, (one["metric"], one["filter"])))
        scores.setdefault(one["task"], {})[metric] = one["value"]
    return scores


def merge(result: str | os.PathLike[str], /, out: str | os.PathLike[str], **options: Any) -> Path:
    """Merge an adapter into its base model, as `ftkit merge`; return the model's directory.

    Prints what the command prints: how much the logits changed.

    ::

        model = ftkit.merge(run, "out/merged", dtype="bfloat16")

    Args:
        result: a LoRA run, its checkpoint or an adapter.
        out: directory to write.
        options: of the command: base="original", overwrite=True.

    Raises:
        UserError: as the command would.
    """
    name = os.fspath(result)
    # The output names it: as a relative path, as users type it, it is the same in every notebook.
    if Path(name).is_absolute():
        name = str(short(Path(name)))
    words = ["merge", name, f"--out={os.fspath(out)}", *option_words(options)]
    print(output_of(words), end="")
    return Path(out)


def export(
    result: str | os.PathLike[str],
    /,
    out: str | os.PathLike[str],
    *,
    format: str,  # noqa: A002 - the option of the command
    **options: Any,
) -> Path:
    """Write a result for other programs, as `ftkit export`; return its directory.

    ::

        ftkit.export("out/merged", "out/gguf", format="gguf", quantization="q8_0")

    Args:
        result: a run, a checkpoint, an adapter or a model.
        out: directory to write.
        format: hf, litgpt, peft or gguf.
        options: of the command: dtype="bfloat16", overwrite=True.

    Raises:
        UserError: as the command would.
    """
    words = ["export", os.fspath(result), f"--out={os.fspath(out)}", f"--format={format}"]
    output_of([*words, *option_words(options)])
    return Path(out)


def push(result: str | os.PathLike[str], repo_id: str, /, **options: Any) -> str:
    """Upload a result with its model card, as `ftkit push`; return its address on the hub.

    The repository is private unless public=True. With dry_run=True nothing is sent.

    ::

        ftkit.push(run, "me/my-adapter")

    Args:
        result: a run, or a directory that merge or export wrote.
        repo_id: the repository on the hub, such as me/my-model.
        options: of the command: message="Trained longer.". A token is better left to $HF_TOKEN.

    Raises:
        UserError: as the command would.
    """
    words = ["push", os.fspath(result), repo_id, "--format=json", *option_words(options)]
    url: str = json.loads(output_of(words))["url"]
    return url
