"""Data sources answer for their kind: where the records are, and what is evaluated on."""

import json
from pathlib import Path

import pytest

from ftkit.data.sources import data_source
from ftkit.recipe.recipe import Component


def write(file: Path, count: int) -> Path:
    file.write_text(json.dumps([{"instruction": f"{i}?", "output": f"{i}"} for i in range(count)]))
    return file


def of(path: Path, **options: object) -> Component:
    return Component(class_path="JSON", init_args={"json_path": str(path), **options})


def test_json_data_name_the_files_that_they_are_read_from(tmp_path: Path) -> None:
    file = write(tmp_path / "some.json", 20)
    assert data_source(of(file)).files() == (file,)
    train, val = write(tmp_path / "train.json", 3), write(tmp_path / "val.json", 2)
    assert data_source(of(tmp_path)).files() == (train, val)


@pytest.mark.parametrize(
    ("given", "records"),
    [
        (set[str](), 6),
        ({"mask_prompt"}, 6),
        ({"json_path"}, 20),
        ({"json_path", "val_split_fraction"}, 6),
    ],
)
def test_a_file_named_for_an_evaluation_only_is_used_whole(
    given: set[str], records: int, tmp_path: Path
) -> None:
    source = data_source(of(write(tmp_path / "some.json", 20), val_split_fraction=0.3))
    (part,) = (one.read() for one in source.for_evaluation(given).parts())
    assert (len(part.train), len(part.val)) == (20 - records, records)


def test_a_directory_that_is_named_for_an_evaluation_has_its_validation_file(
    tmp_path: Path,
) -> None:
    """Whatever share the run has split off its own file."""
    write(tmp_path / "train.json", 3)
    write(tmp_path / "val.json", 2)
    source = data_source(of(tmp_path, val_split_fraction=0.3)).for_evaluation({"json_path"})
    assert len(source.parts()[0].read().val) == 2
