"""Paths of data: the files that a path means, for training and for validation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ftkit.data.records.formats import COMPRESSED, format_of, readable, stem_of, suffixes
from ftkit.errors import UserError
from ftkit.recipe import hubs
from ftkit.utils import embedded
from ftkit.utils.names import nearest

VALIDATION = ("val", "validation", "valid", "dev", "test")
"""Names of validation splits, in the order in which they are looked for."""

_NOT_DATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
"""Files that the datasets library writes beside data."""
_SHEETS = (".xlsx", ".xls", ".ods")
_LINES = (".ndjson", ".jsonlines", ".ldjson")


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The files of a data set; an Arrow directory counts as one."""

    train: tuple[Path, ...]
    val: tuple[Path, ...] = ()
    """(): a share of the others is split off."""


def is_hub_name(path: str | Path) -> bool:
    """Return whether a path means a hub data set: owner/name, where no such path exists."""
    text = str(path)
    if not hubs.is_hub_name(text, has_version=False) or Path(text).exists():
        return False
    # A misspelt path of a file, such as data/chats.jsonl, also looks like owner/name.
    return format_of(Path(text)) is None and Path(text).suffix.lower() not in _SHEETS + _LINES


def find_files(path: str | Path, key: str) -> DataFiles:
    """Resolve a path to data files: a file, a directory, or a pattern such as data/*.jsonl.

    Args:
        path: what was given.
        key: of the recipe, for errors.

    Raises:
        UserError: there are none, or none that can be read.
    """
    found = _resolve(path, key)
    # An Arrow directory is read like a file.
    if len(found) == 1 and found[0].is_dir() and format_of(found[0]) is None:
        return _in_directory(found[0], key)
    for file in found:
        if format_of(file) is None:
            raise UserError(_explain_kind(file, path, key))
    return DataFiles(train=tuple(found))


def how_to_set(key: str, value: object) -> str:
    """Sentence that sets a key to a value: as an option, or in the recipe inside a list."""
    return f"Set {key} to {value}." if "[" in key else f"Try --{key} {value}."


def _resolve(given: str | Path, key: str) -> list[Path]:
    """The file or directory, or all that match; they exist."""
    prefix, _, name = str(given).rpartition("embedded:")
    if name != str(given) and not prefix:
        directory = embedded.path(name) / "data" if name.isidentifier() else None
        if directory is None or not directory.is_dir():
            raise UserError(
                f"{key} is {given}, but ftkit has no such data set with it.\n"
                f"{how_to_set(key, 'embedded:quickstart')}"
            )
        return [directory]
    path = Path(given).expanduser()
    if path.exists():
        return [path]
    if set(str(path)) & set("*?["):
        root = Path(path.anchor)
        # Path.glob takes relative patterns alone.
        matches = sorted(root.glob(str(path.relative_to(root))))
        if found := [match for match in matches if match.is_file() or format_of(match)]:
            return found
    siblings = [sibling.name for sibling in path.parent.glob("*")]
    near = nearest(path.name, siblings)
    advice = path.parent / near if near else "FILE, relative to the current directory"
    raise UserError(
        f"{key} is {given}, but there is no such file or directory.\n{how_to_set(key, advice)}"
    )


def _in_directory(directory: Path, key: str) -> DataFiles:
    """Find files for training and validation by name; else take all readable ones."""
    children = sorted(
        child
        for child in directory.iterdir()
        if format_of(child) and child.name not in _NOT_DATA and not child.name.startswith(".")
    )
    train = _split(children, "train")
    val: tuple[Path, ...] = ()
    for name in VALIDATION:
        # A test file without a train file is data like any other.
        val = val or (_split(children, name) if train or name != "test" else ())
    # Named splits come in pairs: otherwise a file with a misspelt name would be ignored.
    for split, files in (("train", train), ("val", val)):
        if not files and (train or val):
            names = [f"{split}{ending}" for ending in suffixes()[:2]]
            raise UserError(
                f"{key} is the directory {directory}, but it has no {' or '.join(names)}, nor one "
                f"of another format.\nAdd {directory / names[0]}, or set {key} to a single file, "
                "of which a part is then used for validation."
            )
    if train:
        return DataFiles(train=train, val=val)
    if not children:
        raise UserError(_explain_no_files(directory, key))
    return DataFiles(train=tuple(children))


def _split(children: Sequence[Path], name: str) -> tuple[Path, ...]:
    """The file of a split, or its shards, such as train-00000-of-00002.parquet."""
    named = {
        child.name.removeprefix(name).lower(): child for child in children if stem_of(child) == name
    }
    # In the order of the formats; an Arrow directory, which has no suffix, comes last.
    endings = [f"{suffix}{packed}" for suffix in suffixes() for packed in ("", *COMPRESSED)]
    for ending in (*endings, *named):
        if ending in named:
            return (named[ending],)
    shard = re.compile(rf"{name}-\d+-of-\d+")
    return tuple(child for child in children if shard.fullmatch(stem_of(child)))


def _explain_no_files(directory: Path, key: str) -> str:
    # Data one level deeper: the advice is a pattern that finds them.
    below = next((path for path in sorted(directory.glob("*/*")) if format_of(path)), None)
    advice = f"Add {directory / 'train.json'} and {directory / 'val.json'}."
    if below is not None:
        advice = how_to_set(key, f"'{directory}/*/*{below.name.removeprefix(stem_of(below))}'")
    return (
        f"{key} is the directory {directory}, but no file in it can be read: only {readable()} "
        f"can.\n{advice}"
    )


def _explain_kind(file: Path, given: str | Path, key: str) -> str:
    ending = file.suffix.lower()
    advice = (
        f"Try renaming the file to {file.stem}.json (a list of records) or {file.stem}.jsonl (a "
        "record per line)."
    )
    if ending in _SHEETS:
        advice = f"Save the sheet as CSV (UTF-8).\n{how_to_set(key, file.with_suffix('.csv'))}"
    elif ending in _LINES:
        advice = f"Try renaming the file to {file.stem}.jsonl."
    named = "" if str(file) == str(given) else f", which means {file}"
    return f"{key} is {given}{named}, but only {readable()} can be read.\n{advice}"
