"""Published data sets, which are downloaded when they are read."""

import pytest

from ftkit.data.source_rows import DATA_SOURCES
from ftkit.data.sources import data_source
from ftkit.extensions.public_data.public_sets import PUBLIC_SETS
from ftkit.recipe.recipe import Component


def test_each_is_named_by_a_row() -> None:
    named = {row.name for row in DATA_SOURCES.of_extension("public_data")}
    assert named == PUBLIC_SETS.keys()


@pytest.mark.parametrize("name", PUBLIC_SETS)
def test_published_sets_may_have_to_be_downloaded(name: str) -> None:
    source = data_source(Component(class_path=f"litgpt.data.{name}", init_args={}))
    assert source.files() is None
    assert source.for_evaluation({"mask_prompt"}) is source
