"""JSON files as a data source: their options, where they lie, and how one file is split."""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ftkit import embedded
from ftkit.config.recipe import Component
from ftkit.data.json_records import SUFFIXES, Record, read_records
from ftkit.data.prompt_styles import resolve_prompt_style
from ftkit.data.spec import (
    Content,
    DataSource,
    Part,
    PartSource,
    Rules,
    check_keys,
    check_shared_values,
    check_value,
    instruction_rules,
)
from ftkit.errors import UserError
from ftkit.utils.nearest import nearest

if TYPE_CHECKING:
    from litgpt.prompts import PromptStyle


_DEFAULT_VAL_SPLIT_FRACTION = 0.05  # of litgpt.data.JSON


@dataclass(frozen=True, kw_only=True)
class JsonOptions:
    """The init_args of JSON data; names and defaults are LitGPT's."""

    json_path: str | Path
    """A .json file (a list of records) or .jsonl file (a record per line), a directory with
    train and val files, or embedded:quickstart."""
    mask_prompt: bool = False
    """Train on the answers only."""
    val_split_fraction: float | None = None
    """Share of a single file that is used for validation; 0.05 if not given."""
    prompt_style: Any = "alpaca"
    """How instruction and input become a prompt: a name, or a class of litgpt.prompts."""
    ignore_index: int = -100
    """Accepted with LitGPT's default only."""
    seed: int = 42
    """Seed of the split of a single file."""
    num_workers: int = 4
    """Accepted as LitGPT's; the process that trains collates batches itself."""


class JsonFiles(DataSource):
    """A file of records, which is split, or a directory with one for each split."""

    def __init__(self, options: JsonOptions, *, whole: bool = False) -> None:
        """Describe the data; nothing is read.

        Args:
            options: checked.
            whole: all records of a single file are for validation.
        """
        self._options = options
        self._whole = whole

    @classmethod
    def documented(cls, name: str) -> type:
        return JsonOptions

    @classmethod
    def of(cls, data: Component) -> Self:
        init_args = data["init_args"]
        check_keys(init_args, [field.name for field in dataclasses.fields(JsonOptions)], "JSON")
        optional = ("val_split_fraction", None)
        check_shared_values(dict(item for item in init_args.items() if item != optional))
        path = init_args.get("json_path")
        accepted = path is None or isinstance(path, str | Path)
        check_value("json_path", path, accepted, "the path of a file or directory", "FILE")
        if not path:
            raise UserError(
                "data.json_path is missing; JSON data needs a .json or .jsonl file, or a directory "
                "with train.json and val.json.\nTry --data.json_path FILE."
            )
        return cls(JsonOptions(**init_args))

    def files(self) -> tuple[Path, ...]:
        """The file that is to be split, or the training and the validation file.

        Raises:
            UserError: no such files.
        """
        json_path, fraction = self._options.json_path, self._options.val_split_fraction
        path = _resolve(json_path)
        if path.is_dir():
            if fraction is not None:
                raise UserError(
                    f"data.val_split_fraction is {fraction}, but data.json_path is "
                    f"the directory {path}, whose val file is the validation data.\n"
                    "Remove data.val_split_fraction, or set data.json_path to a single file."
                )
            return _find_split(path, "train"), _find_split(path, "val")
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(
                f"data.json_path is {json_path}, but only {' and '.join(SUFFIXES)} files and "
                f"directories can be read.\nTry renaming the file to {path.stem}.json "
                f"(a list of records) or {path.stem}.jsonl (a record per line)."
            )
        return (path,)

    def prompt_style(self) -> "PromptStyle":
        return resolve_prompt_style(self._options.prompt_style)

    def parts(self) -> tuple[PartSource, ...]:
        options = dataclasses.asdict(self._options) | {"whole": self._whole}
        for key in ("json_path", "num_workers", "ignore_index"):
            del options[key]
        content = Content(files=self.files, options=options, rules=lambda _: self._rules())
        return (PartSource(name="JSON", read=self._read, content=content),)

    def _rules(self) -> Rules:
        return instruction_rules(self.prompt_style(), self._options.mask_prompt)

    def _read(self) -> Part:
        rules = self._rules()
        file, *others = self.files()
        train: Sequence[Record] = read_records(file)
        val: Sequence[Record]
        if others:
            val = read_records(others[0])
        elif self._whole:
            train, val = [], train
        else:
            fraction = self._options.val_split_fraction or _DEFAULT_VAL_SPLIT_FRACTION
            train, val = _split(train, fraction, self._options.seed, file)
        return Part(name="JSON", shape="instruction", rules=rules, train=train, val=val)

    def for_evaluation(self, given: Collection[str]) -> DataSource:
        """All of a file that is named for the evaluation alone: nothing of it was trained on."""
        if "json_path" not in given or "val_split_fraction" in given:
            return self
        return JsonFiles(dataclasses.replace(self._options, val_split_fraction=None), whole=True)


def _split(
    records: Sequence[Record], val_split_fraction: float, seed: int, file: Path
) -> tuple[list[Record], list[Record]]:
    """Split off validation records, exactly as litgpt.data.JSON does with the same seed."""
    import torch
    from torch.utils.data import Subset, random_split

    size = len(records)
    if size < 2:
        raise UserError(
            f"{file} holds one record, but training and validation need one each.\n"
            "Add records, or set data.json_path to a directory with train.json and val.json."
        )
    if not 0 < int(size * val_split_fraction) < size:
        raise UserError(
            f"data.val_split_fraction is {val_split_fraction}, which leaves nothing to train or "
            f"to validate on: {file} holds {size} records.\nTry --data.val_split_fraction "
            f"{0.1 if size >= 10 else 0.5}."
        )
    splits: list[Subset[int]] = random_split(
        range(size),  # type: ignore[arg-type]  # any sequence will do
        [1.0 - val_split_fraction, val_split_fraction],
        generator=torch.Generator().manual_seed(seed),
    )
    train, val = ([records[i] for i in split.indices] for split in splits)
    return train, val


def _resolve(json_path: str | Path) -> Path:
    """The file or directory; it exists."""
    prefix, _, name = str(json_path).rpartition("embedded:")
    if name != str(json_path) and not prefix:
        path = embedded.path(name) / "data" if name.isidentifier() else None
        if path is None or not path.is_dir():
            raise UserError(
                f"data.json_path is {json_path}, but ftkit has no such data set with it.\n"
                "Try --data.json_path embedded:quickstart."
            )
        return path
    path = Path(json_path).expanduser()
    if not path.exists():
        siblings = [sibling.name for sibling in path.parent.glob("*")]
        near = nearest(path.name, siblings)
        advice = path.parent / near if near else "FILE, relative to the current directory"
        raise UserError(
            f"data.json_path is {json_path}, but there is no such file or directory.\n"
            f"Try --data.json_path {advice}."
        )
    return path


def _find_split(directory: Path, split: str) -> Path:
    names = [f"{split}{suffix}" for suffix in SUFFIXES]
    for name in names:
        if (file := directory / name).is_file():
            return file
    raise UserError(
        f"data.json_path is the directory {directory}, but it has no {' or '.join(names)}.\n"
        f"Add {directory / names[0]}, or set data.json_path to a single file, "
        "of which a part is then used for validation."
    )
