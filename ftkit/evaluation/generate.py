"""`ftkit generate`: answers of a result to one prompt or many.

Answers go to standard output or to a file, notices to standard error.
"""

import gc
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ftkit.data.records.formats import format_of, text_of
from ftkit.data.records.media import MEDIA, as_given, asked_with, numbered
from ftkit.data.records.read import read_records
from ftkit.data.records.record import Record
from ftkit.data.records.shapes import RecordReader
from ftkit.errors import UserError
from ftkit.evaluation.prompting import question_of
from ftkit.evaluation.result import Result, base_result, require_answers
from ftkit.evaluation.session import Answer, Responder, start_session
from ftkit.recipe.objectives import objective_row
from ftkit.recipe.options import GenerateOptions
from ftkit.redaction import printable
from ftkit.utils.accelerators.use import free_cached_memory
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import count_text, marked
from ftkit.utils.files import write_durably
from ftkit.utils.progress import print_notice
from ftkit.utils.registry import imported
from ftkit.utils.texts import explain_not_utf8


def generate(result: Result, options: GenerateOptions) -> int:
    """Answer prompts and return the exit code.

    Args:
        result: the result that answers.
        options: prompts, how to answer them, and where answers go.

    Raises:
        UserError: something is missing, or options contradict each other.
    """
    if (scores := result.scores) is not None:
        place = objective_row(scores.objective["class_path"]).answers_place
        if place:
            return int(imported(place)(result, options))
        require_answers(result, "ftkit generate")
    records = records_of(options)
    check_shapes(records, options)
    results = [result]
    if options.compare_base:
        # One after the other: only one of the models is in memory.
        results.insert(0, base_result(result, options.base))
    # Answers are streamed unless they are collected for a file, for JSON or for two columns.
    live = options.format == "table" and options.out is None and not options.compare_base
    answers = [_answer_all(one, records, options, live=live) for one in results]
    # The result is the last of `answers`, after the base model.
    entries: list[dict[str, object]] = [
        as_given(record)
        | {"answer": own.text}
        | ({"base_answer": answers[0][i].text} if options.compare_base else {})
        | {"tokens": own.tokens, "seconds": round(own.seconds, 3)}
        for i, (record, own) in enumerate(zip(records, answers[-1], strict=True))
    ]
    if options.out is not None:
        write_entries(options.out.expanduser(), entries)
    elif options.format == "json":
        shown = entries if options.prompts is not None else entries[0]
        print(json.dumps(shown, indent=2, ensure_ascii=False))
    elif not live:
        _compare(records, answers, results)
    return 0


def shown(text: str) -> str:
    """Make a text of a model safe for a terminal; files and pipes get it unchanged."""
    return printable(text) if sys.stdout.isatty() else text


def _answer_all(
    result: Result, records: Sequence[Record], options: GenerateOptions, *, live: bool
) -> list[Answer]:
    """Answer all prompts with one result, which is freed from memory at the end."""
    responder = Responder(start_session(result, options), options)
    if responder.notice is not None:
        print_notice(responder.notice, sys.stderr)
    questions = [question_of(record) for record in records]
    # All of them before the first answer, so that one that is refused costs no time.
    prompts = [responder.prompt_of(question) for question in questions]
    answers = []
    if live:
        for question, prompt in zip(questions, prompts, strict=True):
            answers.append(Answer())
            if len(records) > 1:
                # A single answer stands alone, so that it can be piped.
                print(shown(f"> {question.text}"))
            for piece in responder.stream(prompt, answers[-1]):
                print(shown(piece), end="", flush=True)
            print("\n" if len(records) > 1 else "", flush=True)
    else:
        title = f"answering {len(records)} prompts with {result.name}"
        with (
            Display(None, stream=sys.stderr) as display,
            display.phase(title, brief=True) as phase,
        ):
            for prompt in prompts:
                answers.append(responder.answer(prompt))
                phase.advance(len(answers), len(prompts))
    total = Answer(
        tokens=sum(answer.tokens for answer in answers),
        seconds=sum(answer.seconds for answer in answers),
    )
    print_notice(f"{result.name}: {total.speed_text}", sys.stderr)
    # The next model needs the memory, which reference cycles would hold.
    del responder
    gc.collect()
    free_cached_memory()
    return answers


def records_of(options: GenerateOptions, reader: RecordReader | None = None) -> list[Record]:
    """Read the prompts: lines of a text, or records of any shape.

    Args:
        options: that name them.
        reader: of files with records; None: each has one answer, or none.
    """
    if options.prompt is not None:
        if options.image:
            messages, media = numbered([asked_with(options.prompt, "image", options.image)])
            return [{"messages": messages, MEDIA: media}]
        record = {"instruction": options.prompt}
        return [record if options.input is None else record | {"input": options.input}]
    assert options.prompts is not None
    file = options.prompts.expanduser()
    # In a .txt file each line is a prompt; other formats hold records.
    if (kind := format_of(file)) is not None and kind.name != "txt":
        return read_records(file, answered=False, reader=reader)
    try:
        # Not splitlines(), which also cuts at separators that prompts may hold.
        # utf-8-sig drops the byte order mark that editors on Windows write.
        # Any other file, such as a pipe, is text that is not compressed.
        text = text_of(file) if kind is not None else file.read_text(encoding="utf-8-sig")
        lines = text.split("\n")
    except UnicodeDecodeError as error:
        content = io.BytesIO(error.object)  # of a pipe, which cannot be read again
        raise UserError(f"--prompts {explain_not_utf8(file, content)}") from None
    except OSError as error:
        raise UserError(f"--prompts {file} cannot be read ({error}). Name a text file.") from None
    records = [{"instruction": line.strip()} for line in lines if line.strip()]
    if not records:
        raise UserError(f"--prompts {file} holds no prompt. Write one on each line.")
    return records


def check_shapes(records: Sequence[Record], options: GenerateOptions) -> None:
    """Refuse options that have no effect on these prompts."""
    if options.raw and any("messages" in record for record in records):
        raise UserError(
            f"--raw passes text to the model unchanged, but --prompts {options.prompts} holds "
            "conversations. Leave out --raw, or name a file of texts."
        )
    if options.system is not None and any(not question_of(record).messages for record in records):
        raise UserError(
            f"--system begins a conversation, but --prompts {options.prompts} holds plain texts to "
            "continue. Leave out --system."
        )


def write_entries(out: Path, entries: Sequence[dict[str, object]]) -> None:
    """Write answers with their prompts, one on each line as JSON."""
    lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    try:
        write_durably(out, "".join(lines))
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}).") from None
    print_notice(f"{count_text(len(entries), 'answer')} in {out}", sys.stderr)


def _compare(
    records: Sequence[Record], answers: Sequence[Sequence[Answer]], results: Sequence[Result]
) -> None:
    """Show the answers side by side, in a column for each result."""
    with Display(None) as display:
        for i, record in enumerate(records):
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
            for result, what in zip(results, ("base model", "result"), strict=True):
                title = Text(f"{what} {printable(result.name)}")
                table.add_column(title, overflow="fold", ratio=1)
            # Marks show where lines end, because a column also folds them.
            texts = (marked(column[i].text, line_end="\\n\n") for column in answers)
            table.add_row(*(Text(text or "(empty)") for text in texts))
            display.show(Text(f"> {printable(question_of(record).text)}", "cyan"))
            display.show(table)
            if i + 1 < len(records):
                display.show(Text(""))
