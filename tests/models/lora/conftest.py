"""Base models of several families, whose layers LitGPT's model has apart."""

import pytest
from adapters import MAKERS

from ftkit.models.pretrained.base_model import BaseModel, open_base


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseModel]:
    directory = tmp_path_factory.mktemp("bases")
    return {
        name: open_base(str(make(directory / name.replace(" ", "-"))), "litgpt")
        for name, make in MAKERS.items()
    }


@pytest.fixture(scope="module")
def llama(bases: dict[str, BaseModel]) -> BaseModel:
    return bases["llama"]
