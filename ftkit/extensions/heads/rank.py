"""`ftkit generate` for rerankers: the documents of a query by their scores."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftkit.data.records.formats import format_of
from ftkit.data.records.keys import CONVERSATION_KEYS, is_empty
from ftkit.data.records.read import read_records
from ftkit.data.records.record import Record
from ftkit.errors import UserError
from ftkit.evaluation.generate import check_shapes, shown, write_entries
from ftkit.evaluation.prompting import check_system, prompting_for
from ftkit.evaluation.result import Result
from ftkit.evaluation.session import start_session
from ftkit.extensions.chats.conversations import text_of
from ftkit.extensions.heads.generate import encoded, refuse_options, scores_of
from ftkit.extensions.heads.queries import (
    QUERY_KEYS,
    TEXTS,
    Found,
    Part,
    QueryReader,
    documents_in,
    one_of,
)
from ftkit.recipe.options import GenerateOptions
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import number_text, shortened

_ASKED = "asked"
_WIDTH = 100
"""Characters of a document that a terminal shows."""
_FILE = (
    "Name a file whose records have a query and documents, a list of texts: --prompts "
    "FILE.jsonl; or give one document: --prompt QUERY --input DOCUMENT."
)


class _AskedReader(QueryReader):
    """Reads queries with any number of documents, of which none need answer it."""

    def _record(self, value: dict[str, Any], row: dict[str, Any]) -> Record:
        return super()._record(value, row) | {_ASKED: self._found_in(row)}

    def _found_in(self, row: Mapping[str, Any]) -> Found:
        if is_empty(row.get("documents")):
            return super()._found_in(row)
        key = one_of(row, (*CONVERSATION_KEYS, *QUERY_KEYS), frozenset(), "query")
        return Found(row[key], documents_in(row, "documents"), None, (key, "documents"))

    def _target(self, found: Found) -> None:
        """None: what is known of the documents is not asked."""


def generate(result: Result, options: GenerateOptions) -> int:
    """Score the documents of queries, show them in their order, and return the exit code.

    Args:
        result: a reranker.
        options: queries with documents, and where answers go.

    Raises:
        UserError: something is missing, or an option means nothing for scores.
    """
    refuse_options(options)
    records = _records_of(options)
    every = [one for record in records for one in record[TEXTS]]
    check_shapes(every, options)
    session = start_session(result, options)
    prompting = prompting_for(session.loaded.prompting, options, session.loaded.base)
    if prompting is not None and options.system is not None:
        check_system(prompting.template, options.system)
    texts = [encoded(one, prompting, session, options.system) for one in every]
    scores: list[float] = []
    title = f"scoring {len(every)} documents"
    with Display(None, stream=sys.stderr) as display, display.phase(title, brief=True) as phase:
        for rows in scores_of(texts, session):
            scores += rows[:, 0].tolist()
            phase.advance(len(scores), len(every))
    entries = []
    for record in records:
        found, count = record[_ASKED], len(record[TEXTS])
        entries.append({"query": found.query, "ranking": _ranking(found.documents, scores[:count])})
        scores = scores[count:]
    if options.out is not None:
        write_entries(options.out.expanduser(), entries)
    elif options.format == "json":
        shown_ones = entries if options.prompts is not None else entries[0]
        print(json.dumps(shown_ones, indent=2, ensure_ascii=False))
    else:
        for entry in entries:
            if len(entries) > 1:
                print(shown(f"> {_said(entry['query'])}"))
            for one in entry["ranking"]:
                text = shortened(" ".join(_said(one["document"]).split()), _WIDTH)
                print(shown(f"{number_text(one['score'])}  {text}"))
            if len(entries) > 1:
                print()
    return 0


def _ranking(documents: Sequence[Part], scores: Sequence[float]) -> list[dict[str, Any]]:
    """Documents with their scores, the highest first."""
    pairs = sorted(zip(documents, scores, strict=True), key=lambda pair: -pair[1])
    return [{"document": document, "score": score} for document, score in pairs]


def _said(part: Part) -> str:
    return part if isinstance(part, str) else "\n".join(map(text_of, part))


def _records_of(options: GenerateOptions) -> list[Record]:
    """Queries with their documents."""
    reader = _AskedReader(together=True)
    if options.prompts is None:
        if options.input is None:
            raise UserError(f"--prompt is a query, which a reranker needs documents for. {_FILE}")
        row = {"query": options.prompt, "documents": [options.input]}
        return reader.records([(0, row)], lambda _: "--prompt")
    file: Path = options.prompts.expanduser()
    if (kind := format_of(file)) is None or kind.name == "txt":
        raise UserError(
            f"--prompts {options.prompts} holds lines of a text, but a reranker scores queries "
            f"with documents. {_FILE}"
        )
    return read_records(file, reader=reader)
