"""Task files: YAML of the lm-evaluation-harness, read without running anything that it names.

The harness's own loader imports what follows `!function` as soon as it reads a file. Here it stays
a name until somebody trusts the directory where its code lies.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ftkit.errors import UserError

TRUST = "--trust_task_code"
"""The option that names the directory whose code may run; no recipe can hold it."""

_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_ABOUT_FILES = ("tag", "group", "task_list")
"""Keys that are no part of a task's own settings."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """A function or class that a task file names by `!function`."""

    name: str
    """As it is written: utils.process_docs."""
    written_in: Path
    """The task file."""

    @property
    def file(self) -> Path:
        """The Python file that has to have it: beside the task file."""
        module = self.name.rpartition(".")[0].replace(".", "/")
        return (self.written_in.parent / f"{module}.py").resolve()


class _Loader(_BASE):  # type: ignore[misc]
    """Plain values alone, and `!function` as a `Code`."""

    file: Path


def _code(loader: _Loader, node: yaml.ScalarNode) -> Code:
    return Code(name=str(loader.construct_scalar(node)), written_in=loader.file)


_Loader.add_constructor("!function", _code)


def read_task_file(file: Path, root: Path) -> dict[str, Any]:
    """The settings of a task file, with those of the files that it includes.

    Args:
        file: which.
        root: the directory that holds all that it may include.

    Raises:
        UserError: it cannot be read, holds more than plain values, or includes a file elsewhere.
    """
    return _read(file.resolve(), root.resolve(), ())


def _read(file: Path, root: Path, includers: tuple[Path, ...]) -> dict[str, Any]:
    if file in includers:
        raise UserError(f"{file} includes itself. Take that include out.")
    values = _plain(file)
    merged: dict[str, Any] = {}
    includes = values.pop("include", [])
    for name in includes if isinstance(includes, list) else [includes]:
        included = (file.parent / str(name)).resolve()
        if not included.is_relative_to(root):
            raise UserError(f"{file} includes {name}, which lies outside of {root}. Copy it there.")
        merged |= _read(included, root, (*includers, file))
        merged.pop("task_list", None)
    return merged | values


def _plain(file: Path) -> dict[str, Any]:
    try:
        loader = _Loader(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). Name a task file.") from None
    loader.file = file
    try:
        values = loader.get_single_data()
    except yaml.constructor.ConstructorError as error:
        raise UserError(
            f"{file} holds more than plain values ({error.problem}), which is not read. "
            "Take it out."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file} is no YAML ({reason}). Mend it.") from None
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise UserError(f"{file} holds no keys. A task file begins with task: NAME.")
    return values


def own_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of a file's values for the task itself."""
    return {key: value for key, value in values.items() if key not in _ABOUT_FILES}


def check_settings(name: str, values: Mapping[str, Any], trusted: Path | None, own: Path) -> None:
    """Refuse what would run code that nobody has said to trust, and what ftkit does not do at all.

    Args:
        name: of the task.
        values: its settings.
        trusted: the directory whose code may run.
        own: the task file, or one that stands for it.

    Raises:
        UserError: says what it is, and the way out if there is one.
    """
    for key, why in (
        ("unsafe_code", "runs programs that the model wrote"),
        ("doc_to_image", "asks about images"),
        ("doc_to_audio", "asks about sounds"),
        ("use_prompt", "takes its prompts from another package"),
    ):
        if values.get(key):
            raise UserError(
                f"The task {name} {why} ({key}), which ftkit does not do. Leave it out."
            )
    if str(values.get("dataset_path") or "").endswith(".py"):
        raise UserError(
            f"The task {name} reads its data by a program ({values['dataset_path']}), which is "
            "never run. Give the data as files: dataset_path: json, with data_files."
        )
    for metric in values.get("metric_list") or ():
        loads = isinstance(metric, dict) and not values.get("process_results")
        if loads and metric.get("hf_evaluate"):
            raise UserError(
                f"The task {name} loads the metric {metric.get('metric')} from a hub as a program "
                "(hf_evaluate), which is never run. Name a metric of the harness."
            )
    for key, code in _code_in(values):
        _check_code(name, key, code, trusted)
    settings = values.get("dataset_kwargs") or {}
    if settings.get("trust_remote_code") and not (trusted and _is_in(own, trusted)):
        raise UserError(
            f"The task {name} says trust_remote_code in {own}. Take that out, or add "
            f"{TRUST} {own.parent}: no code of a hub is run then either."
        )
    if "class" in values and not isinstance(values["class"], Code):
        raise UserError(f"The task {name} names a class without !function in {own}. Mend it.")


def _code_in(value: Any, key: str = "") -> Iterator[tuple[str, Code]]:
    """Everything by `!function`, with the keys above it."""
    if isinstance(value, Code):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _code_in(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _code_in(item, key)


def _check_code(name: str, key: str, code: Code, trusted: Path | None) -> None:
    what = f"The task {name} needs Python code: {key} is !function {code.name}"
    if trusted is None or not _is_in(code.file, trusted):
        where = "" if trusted is None else f", which lies outside of {TRUST} {trusted}"
        raise UserError(
            f"{what}, of {code.file}{where}. ftkit does not run code of task files. To run it all "
            f"the same, with all that it may do, add {TRUST} {code.file.parent}."
        )
    if not code.file.is_file():
        raise UserError(f"{what}, but there is no {code.file}. Copy it there.")


def _is_in(file: Path, directory: Path) -> bool:
    return file.resolve().is_relative_to(directory.expanduser().resolve())
