"""Parallel rendering: chunks of records in order, in other processes where that pays."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from ftkit.data.records.record import Record
from ftkit.data.rendering.renderer import Renderer, Rendering
from ftkit.utils.process import die_with_parent

RECORDS_AT_ONCE = 1000
"""Records of a chunk."""
LEAST_RECORDS = 50_000
"""For which processes are started: each imports what it needs for some seconds first."""
_MOST_PROCESSES = 32

Chunk = tuple[Sequence[Record], Sequence[Rendering]]


def rendered_chunks(renderer: Renderer, records: Sequence[Record]) -> Iterator[Chunk]:
    """Records with what they become, chunk by chunk in their order.

    Where rendering is the work of Python and there is much of it, all cores take part, each in an
    interpreter of its own: a rank may have threads and a GPU, which no fork survives. What comes
    out is the same.
    """
    starts = range(0, len(records), RECORDS_AT_ONCE)
    chunks = [records[start : start + RECORDS_AT_ONCE] for start in starts]
    done = 0
    cores = min(os.cpu_count() or 1, _MOST_PROCESSES)
    if renderer.is_python_bound and len(records) >= LEAST_RECORDS and cores > 1:
        try:
            for renderings in _in_processes(renderer, chunks, cores):
                yield chunks[done], renderings
                done += 1
        except BrokenProcessPool:
            pass  # no memory for so many: the rest is rendered here
    for chunk in chunks[done:]:
        yield chunk, list(renderer.render(chunk))


def _in_processes(
    renderer: Renderer, chunks: Sequence[Sequence[Record]], count: int
) -> Iterator[list[Rendering]]:
    pool = ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(renderer, os.getpid()),
    )
    try:
        yield from pool.map(_render, chunks)
    finally:
        pool.shutdown(cancel_futures=True)


_RENDERER: list[Renderer] = []
"""Of this process, if it was started to render."""


def _begin(renderer: Renderer, parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked for the work ends it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    _RENDERER.append(renderer)


def _render(records: Sequence[Record]) -> list[Rendering]:
    return list(_RENDERER[0].render(records))
