"""Looks at data: a model without weights, records in a file, what is found."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny import LLAMA, make_tokenizer

from ftkit.data.inspection.command import inspect_data
from ftkit.data.inspection.inspection import FindingKind, Inspection
from ftkit.recipe.parsing import as_text

SETTINGS = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA}


def make_settings(directory: Path, **changes: Any) -> Path:
    """A model of which settings and tokenizer are there, and no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SETTINGS | changes))
    make_tokenizer(directory)
    return directory


def write_records(file: Path, records: Sequence[dict[str, Any]]) -> Path:
    """Records in a file of JSON lines."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def questions(count: int) -> list[dict[str, str]]:
    """Instruction records, each another one."""
    return [
        {"instruction": f"What is number {i}?", "output": f"It is the number {i} of red things."}
        for i in range(count)
    ]


def chats(count: int, system: str = "") -> list[dict[str, Any]]:
    """Conversations of two turns, each another one."""
    first = [{"role": "system", "content": system}] if system else []
    return [
        {
            "messages": [
                *first,
                {"role": "user", "content": f"What is number {i}?"},
                {"role": "assistant", "content": f"Number {i} is red."},
                {"role": "user", "content": "And the next?"},
                {"role": "assistant", "content": f"Number {i + 1} is blue."},
            ]
        }
        for i in range(count)
    ]


def look(model: Path, data: Path, *, show: int = 0, **keys: object) -> Inspection:
    """Inspection of the records in a file; `data__seed=1` stands for data.seed."""
    defaults = {"checkpoint_dir": str(model), "data": "JSON", "data.path": str(data)}
    overrides = [*defaults.items()]
    overrides += [(key.replace("__", "."), as_text(value, key)) for key, value in keys.items()]
    return inspect_data([], overrides, show=show, progress=lambda *_: None)


def kinds(seen: Inspection) -> set[FindingKind]:
    """The kinds of what is found."""
    return {finding.kind for finding in seen.findings}
