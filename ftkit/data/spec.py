"""The `data` section of a recipe, checked before anything heavy is imported.

Imports neither torch nor litgpt, so that a mistake shows before any process is started.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ftkit import embedded
from ftkit.config.recipe import Component
from ftkit.errors import UserError
from ftkit.utils.nearest import nearest

MAP_STYLE = ("Alpaca", "Alpaca2k", "AlpacaGPT4", "Deita", "FLAN", "JSON", "LIMA", "LongForm")
"""Data modules of LitGPT that hold records of instruction and output."""
STREAMING = ("LitData", "MicroLlama", "OpenWebText", "TextFiles", "TinyLlama", "TinyStories")
"""Data modules of LitGPT for pretraining."""

_SUFFIXES = (".json", ".jsonl")
_OWN_DATA = "--data JSON --data.json_path FILE"


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
    """Processes that collate batches."""

    def files(self) -> tuple[Path, Path | None]:
        """The training and the validation file; None if that is to be split off.

        Raises:
            UserError: no such files.
        """
        path = _resolve(self.json_path)
        if path.is_dir():
            if self.val_split_fraction is not None:
                raise UserError(
                    f"data.val_split_fraction is {self.val_split_fraction}, but data.json_path is "
                    f"the directory {path}, whose val file is the validation data.\n"
                    "Remove data.val_split_fraction, or set data.json_path to a single file."
                )
            return _find_split(path, "train"), _find_split(path, "val")
        if path.suffix.lower() not in _SUFFIXES:
            raise UserError(
                f"data.json_path is {self.json_path}, but only .json and .jsonl files and "
                f"directories can be read.\nTry renaming the file to {path.stem}.json "
                f"(a list of records) or {path.stem}.jsonl (a record per line)."
            )
        return path, None


def check_data(data: Component) -> None:
    """Refuse data that cannot be loaded, as far as names, values and files tell.

    The keys of LitGPT's modules other than JSON are checked when they are loaded.

    Raises:
        UserError: unknown class or key, value out of range, or a missing file.
    """
    if data_class(data) == "JSON":
        json_options(data).files()
    else:
        _check_values(data)


def data_class(data: Component) -> str:
    """The name of the data module, one of MAP_STYLE.

    Raises:
        UserError: any other; nothing outside this list is ever imported.
    """
    class_path = data["class_path"]
    package, _, name = class_path.rpartition(".")
    if package in ("", "litgpt.data"):
        if name in MAP_STYLE:
            return name
        if name in STREAMING:
            raise UserError(
                f"data is {class_path}, which streams unlabelled text for pretraining; "
                f"fine-tuning needs records of instruction and output.\nTry {_OWN_DATA}."
            )
    if class_path == "ftkit.data.JSON":
        return "JSON"
    near = nearest(name, MAP_STYLE) or _OWN_DATA.removeprefix("--data ")
    raise UserError(
        f"data is {class_path}, but it has to be one of {', '.join(MAP_STYLE)}.\nTry --data {near}."
    )


def json_options(data: Component) -> JsonOptions:
    """The checked init_args of JSON data.

    Raises:
        UserError: unknown key, value out of range, or no json_path.
    """
    init_args = data["init_args"]
    check_keys(init_args, [field.name for field in fields(JsonOptions)], "JSON")
    _check_values(data)
    if not init_args.get("json_path"):
        raise UserError(
            "data.json_path is missing; JSON data needs a .json or .jsonl file, or a directory "
            "with train.json and val.json.\nTry --data.json_path FILE."
        )
    return JsonOptions(**init_args)


def check_keys(init_args: Iterable[str], known: Iterable[str], module: str) -> None:
    """Refuse keys that the data module does not have.

    Raises:
        UserError: naming the nearest key there is.
    """
    known = sorted(known)
    for key in init_args:
        if key not in known:
            near = nearest(key, known)
            advice = f"--data.{near}" if near else "removing it"
            raise UserError(
                f"data.{key} is not an option of {module}, which has {', '.join(known)}.\n"
                f"Try {advice}."
            )


def _check_values(data: Component) -> None:
    """Check the options that all data modules share."""

    def check(key: str, accepted: bool, rule: str, works: str) -> None:
        if not accepted:
            raise UserError(
                f"data.{key} is {init_args[key]!r}, but has to be {rule}.\n"
                f"Try --data.{key} {works}."
            )

    init_args = data["init_args"]
    for key, value in init_args.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if key == "mask_prompt":
            check(key, isinstance(value, bool), "true or false", "true")
        elif key == "val_split_fraction":
            given = not (value is None and data_class(data) == "JSON")
            number = whole or isinstance(value, float)
            check(key, not given or (number and 0 < value < 1), "between 0 and 1", "0.05")
        elif key == "ignore_index":
            rule = "-100: ftkit hands the model the labelled positions and needs no such mark"
            check(key, whole and value == -100, rule, "-100")
        elif key == "seed":
            check(key, whole and 0 <= value < 2**63, "a whole number, 0 or more", "42")
        elif key == "num_workers":
            check(key, whole and value >= 0, "a whole number, 0 or more", "4")
        elif key == "json_path":
            accepted = value is None or isinstance(value, str | Path)
            check(key, accepted, "the path of a file or directory", "FILE")


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
    for suffix in _SUFFIXES:
        if (file := directory / f"{split}{suffix}").is_file():
            return file
    raise UserError(
        f"data.json_path is the directory {directory}, but it has no {split}.json or "
        f"{split}.jsonl.\nAdd {directory / split}.json, or set data.json_path to a single file, "
        "of which a part is then used for validation."
    )
