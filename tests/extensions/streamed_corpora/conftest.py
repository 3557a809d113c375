"""A corpus that lies elsewhere, and the tokenizer of its tests."""

from pathlib import Path

import pytest
from corpora import write_corpus
from tiny import make_tokenizer

from ftkit.models.pretrained.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpora") / "corpus", 12)
