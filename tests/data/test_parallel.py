"""Rendering in several processes gives what one gives."""

from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from tiny import make_tokenizer

from ftkit.data import prepare
from ftkit.data.prepare import make_renderer, rendered_chunks
from ftkit.data.records.record import Record
from ftkit.data.rendering import Renderer, Rendering
from ftkit.data.spec import Part, Rules
from ftkit.models.pretrained.tokenizer import Tokenizer


def conversations(count: int) -> list[Record]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"red {i}?"},
                {"role": "assistant", "content": "" if i % 5 == 0 else "blue " * (i % 7)},
            ]
        }
        for i in range(count)
    ]


@pytest.fixture
def renderer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Renderer:
    monkeypatch.setattr(prepare, "RECORDS_AT_ONCE", 7)
    monkeypatch.setattr(prepare, "LEAST_RECORDS", 20)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    make_tokenizer(tmp_path)
    rules = Rules(chat_template="chatml", train_on="assistant")
    part = Part(name="", shape="messages", rules=rules, train=(), val=())
    return make_renderer(part, Tokenizer(tmp_path))


def all_of(renderer: Renderer, records: Sequence[Record]) -> list[tuple[Record, Rendering]]:
    chunks = rendered_chunks(renderer, records)
    return [pair for chunk, made in chunks for pair in zip(chunk, made, strict=True)]


@pytest.mark.slow
def test_processes_render_what_one_renders_in_the_same_order(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = all_of(renderer, records := conversations(50))
    monkeypatch.setattr(prepare, "_in_processes", None)
    monkeypatch.setattr(prepare, "LEAST_RECORDS", 1000)
    assert found == all_of(renderer, records)
    assert [record for record, _ in found] == records
    assert any(rendering.refused for _, rendering in found)


@pytest.mark.extensions
def test_records_of_broken_processes_are_rendered_here(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(renderer: Renderer, chunks: Sequence[Sequence[Record]], _: int) -> Iterator[object]:
        yield list(renderer.render(chunks[0]))
        raise BrokenProcessPool

    monkeypatch.setattr(prepare, "_in_processes", broken)
    records = conversations(30)
    expected = list(zip(records, renderer.render(records), strict=True))
    assert all_of(renderer, records) == expected


@pytest.mark.extensions
def test_few_records_start_no_process(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_in_processes", None)
    assert len(all_of(renderer, conversations(19))) == 19
