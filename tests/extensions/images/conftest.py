"""Models that see, and chats about pictures, which tests share."""

import json
from pathlib import Path
from typing import Any

import pytest
from seeing_models import KINDS, save_model, write_chats


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with chats.jsonl, its pictures, and a model of each family."""
    directory = tmp_path_factory.mktemp("seen")
    write_chats(directory / "chats.jsonl")
    for kind in KINDS:
        save_model(kind, directory / kind)
    return directory


@pytest.fixture(scope="session")
def rows(seen: Path) -> list[dict[str, Any]]:
    """The chats."""
    return [json.loads(line) for line in (seen / "chats.jsonl").read_text().splitlines()]
