"""Tasks by name or path: which task files are meant, and whether they may be used."""

import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.evaluation.tasks.files import TRUST, check_settings, own_settings, read_task_file
from ftkit.utils.names import nearest

EXTRA = "pip install 'ftkit[tasks]'"
_SUFFIXES = (".yaml", ".yml")
_NAMED = re.compile(rb"^[\"']?(?:task|group)[\"']? *: *[\"']?([^\s\"'#\[{]+)[\"']?", re.MULTILINE)
_INCLUDE = re.compile(
    rb"^[\"']?include[\"']? *:((?:[^\S\n]*\S+[^\S\n]*$|(?:\n *- +\S+)+))", re.MULTILINE
)
_OF_GROUPS = ("task", "group", "group_alias", "aggregate_metric_list", "metadata", "tag")
"""Keys of a group; all others are settings for its tasks."""


@dataclass(frozen=True, kw_only=True)
class TaskDefinition:
    """A task."""

    name: str
    settings: Mapping[str, Any]
    """As the harness takes them, but that `!function` is a `Code`."""


@dataclass(frozen=True, kw_only=True)
class GroupDefinition:
    """Tasks and groups whose numbers become one."""

    name: str
    settings: Mapping[str, Any]
    """Its own: how the numbers are put together."""
    members: tuple["Definition", ...]


Definition = TaskDefinition | GroupDefinition


def find_tasks(
    names: Sequence[str], *, key: str, trusted: Path | None = None
) -> tuple[Definition, ...]:
    """The tasks that are meant, in this order; no code is run, and nothing heavy imported.

    Args:
        names: of tasks, groups or tags of the harness, task files, or directories of these.
        key: where they were named, for messages.
        trusted: the directory whose code tasks may run.

    Raises:
        UserError: the harness is missing, or a task is, or may not be used.
    """
    if not names:
        return ()
    harness = _harness(key)
    if trusted is not None and not trusted.expanduser().is_dir():
        raise UserError(f"{TRUST} {trusted} is not a directory. Name the one with the task files.")
    found: dict[str, Definition] = {}
    for name in names:
        for definition in _Search(harness, key, trusted).named(name):
            if definition.name in found:
                raise UserError(
                    f"{key} has the task {definition.name} twice. Leave one of the two out."
                )
            found[definition.name] = definition
    leaves = [leaf.name for definition in found.values() for leaf in tasks_in(definition)]
    if twice := next((name for name in leaves if leaves.count(name) > 1), None):
        raise UserError(
            f"{key} has the task {twice} twice: by itself and in a group, or in two groups. "
            "Leave one of the two out."
        )
    return tuple(found.values())


def tasks_in(definition: Definition) -> Iterator[TaskDefinition]:
    """The tasks of a definition: itself, or all in a group."""
    if isinstance(definition, TaskDefinition):
        yield definition
        return
    for member in definition.members:
        yield from tasks_in(member)


def _harness(key: str) -> "_Folder":
    """The task files that the harness came with."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{key} needs the lm-evaluation-harness. Try {EXTRA}.")
    return _installed(Path(spec.submodule_search_locations[0]) / "tasks")


@functools.cache
def _installed(root: Path) -> "_Folder":
    """A folder that does not change; reading its thousands of files takes a second."""
    return _Folder(root)


class _Folder:
    """Task files below a directory; of thousands, those are parsed that may be meant."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    @cached_property
    def contents(self) -> dict[Path, bytes]:
        """Every file that is YAML or may be included by one."""
        found = {}
        for file in sorted(self.root.rglob("*"), key=lambda file: file.as_posix()):
            is_template = "yaml" in file.name and file.suffix not in (".py", ".pyc")
            if (file.suffix in _SUFFIXES or is_template) and file.is_file():
                found[file] = file.read_bytes()
        return found

    def file_of(self, name: str) -> Path | None:
        """The file that defines a task or group."""
        for file in self._by_name.get(name, ()):
            values = self._tried(file)
            if name in (values.get("group"), values.get("task")):
                return file
        return None

    def tagged(self, tag: str) -> list[str]:
        """Names of the tasks with a tag, which a file may have from one that it includes."""
        held = {f for f, text in self.contents.items() if b"tag" in text and tag.encode() in text}
        before = 0
        while len(held) > before:
            before, names = len(held), {file.name for file in held}
            held |= {file for file, included in self._includes.items() if included & names}
        found = set()
        for file in held:
            values = self._tried(file) if file.suffix in _SUFFIXES else {}
            tags = values.get("tag") or []
            name = values.get("task")
            if isinstance(name, str) and tag in ([tags] if isinstance(tags, str) else tags):
                found.add(name)
        return sorted(found)

    @cached_property
    def _includes(self) -> dict[Path, set[str]]:
        """Names of the files that a file includes, of those that include any."""
        found = {}
        for file, content in self.contents.items():
            if match := _INCLUDE.search(content):
                found[file] = {Path(word.strip("\"'")).name for word in match[1].decode().split()}
        return found

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        """Files that may define a task or group of a name."""
        found: dict[str, list[Path]] = {}
        for file, content in self.contents.items():
            for name in _NAMED.findall(content) if file.suffix in _SUFFIXES else ():
                found.setdefault(name.decode(), []).append(file)
        return found

    def names(self) -> Iterator[str]:
        """Of tasks and groups."""
        yield from self._by_name

    def _tried(self, file: Path) -> dict[str, Any]:
        """A file's values; {} if it is not one of tasks."""
        try:
            return read_task_file(file, self.root)
        except UserError:
            return {}


class _Search:
    """Looks for one name, and for what belongs to it."""

    def __init__(self, harness: _Folder, key: str, trusted: Path | None) -> None:
        self._folders = [harness]
        self._key, self._trusted = key, trusted

    def named(self, name: str) -> list[Definition]:
        """What a name or path stands for.

        Raises:
            UserError: see `find_tasks`.
        """
        path = Path(name).expanduser()
        if path.suffix in _SUFFIXES or "/" in name or path.is_dir():
            return self._at(path)
        found = self._of_name(name, {})
        if found is None:
            close = nearest(name, self._folders[-1].names())
            hint = f" Did you mean {close}?" if close else ""
            raise UserError(
                f"{self._key} names {name}, which is no task of the harness, nor a task file or a "
                f"directory of them.{hint} lm_eval ls tasks shows all."
            )
        return found

    def _at(self, path: Path) -> list[Definition]:
        """What a file or all files of a directory define."""
        if path.is_file():
            folder = _Folder(path.parent)
            self._folders.insert(0, folder)
            return [self._definition(path.resolve(), folder, {})]
        if not path.is_dir():
            raise UserError(
                f"{self._key} names {path}, but there is no such task file or directory. "
                "Check the path."
            )
        folder = _Folder(path)
        self._folders.insert(0, folder)
        found = [
            self._definition(file, folder, {})
            for file, content in folder.contents.items()
            if file.suffix in _SUFFIXES and _NAMED.search(content)
        ]
        if not found:
            raise UserError(f"{self._key} names {path}, which holds no task file. Name another.")
        members = {
            below.name
            for one in found
            if isinstance(one, GroupDefinition)
            for below in _all_below(one)
        }
        return [one for one in found if one.name not in members]

    def _of_name(self, name: str, overrides: Mapping[str, Any]) -> list[Definition] | None:
        """A task or group, or the tasks with a tag; None: there is none."""
        for folder in self._folders:
            if (file := folder.file_of(name)) is not None:
                return [self._definition(file, folder, overrides)]
            if tagged := folder.tagged(name):
                return [one for each in tagged for one in self._of_name(each, overrides) or ()]
        return None

    def _definition(self, file: Path, folder: _Folder, overrides: Mapping[str, Any]) -> Definition:
        values = read_task_file(file, folder.root)
        if _is_group(values):
            return self._group(str(values["group"]), values, overrides, file, (file,))
        if not isinstance(values.get("task"), str):
            raise UserError(f"{file} does not say which task it is. Begin it with task: NAME.")
        settings = {**own_settings(values), **overrides}
        return self._task(settings, file)

    def _task(self, settings: dict[str, Any], file: Path) -> TaskDefinition:
        name = str(settings["task"])
        check_settings(name, settings, self._trusted, file)
        metadata = settings.get("metadata") or {}
        if not isinstance(metadata, dict):
            settings["metadata"] = {"_metadata": metadata}
        return TaskDefinition(name=name, settings=settings)

    def _group(
        self,
        name: str,
        values: Mapping[str, Any],
        overrides: Mapping[str, Any],
        file: Path,
        above: tuple[Path, ...],
    ) -> GroupDefinition:
        """A group with its members, of which some may be written inside it."""
        given = {key: value for key, value in values.items() if key not in _OF_GROUPS}
        members: list[Definition] = []
        items = values.get("task") or []
        for item in items if isinstance(items, list) else [items]:
            members += self._members(item, name, {**given, **overrides}, file, above)
        settings = {key: values[key] for key in _OF_GROUPS if key in values and key != "tag"}
        return GroupDefinition(name=name, settings=settings, members=tuple(members))

    def _members(
        self,
        item: Any,
        group: str,
        overrides: Mapping[str, Any],
        file: Path,
        above: tuple[Path, ...],
    ) -> list[Definition]:
        if isinstance(item, str):
            item = {"task": item}
        if not isinstance(item, dict) or not item.keys() & {"task", "group"}:
            raise UserError(f"The group {group} in {file} has a member without a name. Mend it.")
        if "group" in item and isinstance(item.get("task"), list):
            inner = f"{group}::{item['group']}"
            return [self._group(inner, item, overrides, file, above)]
        name = str(item.get("group", item.get("task")))
        more = {**overrides, **{k: v for k, v in item.items() if k not in ("group", "task")}}
        for folder in self._folders:
            if (found := folder.file_of(name)) is None:
                continue
            if found in above:
                raise UserError(f"The group {group} in {file} is in itself. Take {name} out of it.")
            values = read_task_file(found, folder.root)
            if _is_group(values):
                return [self._group(name, values, more, found, (*above, found))]
            return [self._task(own_settings(values) | more, found)]
        if tagged := self._of_name(name, more):
            return tagged
        if not more:
            raise UserError(f"The group {group} in {file} has {name}, which is no task. Mend it.")
        return [self._task({**more, "task": f"{group}::{name}"}, file)]


def _is_group(values: Mapping[str, Any]) -> bool:
    return "group" in values and "class" not in values


def _all_below(group: GroupDefinition) -> Iterator[Definition]:
    for member in group.members:
        yield member
        if isinstance(member, GroupDefinition):
            yield from _all_below(member)
