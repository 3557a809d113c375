"""Tasks of the lm-evaluation-harness by name or path: found and checked before anything runs.

The harness's own index is not used for this. It parses all 14,000 files of the harness, whichever
task is named, which takes 6 s of CPU time and 250 MB beside 1 s of imports, in the supervisor of a
run as on its rank; here it takes 0.4 s. Also, what follows `!function` is imported as soon as the
harness reads a file for use, or becomes a plain text like any other. Here it stays a name that can
be refused.
"""

import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ftkit.errors import UserError
from ftkit.utils.names import nearest

EXTRA = "pip install 'ftkit[tasks]'"
TRUST = "--trust_task_code"
"""The option that names the directory whose code may run; no recipe can hold it."""
_SUFFIXES = (".yaml", ".yml")
# Names at the start of a line. They only find candidates, which `file_of` parses.
_NAMED = re.compile(rb"^[\"']?(?:task|group)[\"']? *: *[\"']?([^\s\"'#\[{]+)[\"']?", re.MULTILINE)
_INCLUDE = re.compile(
    rb"^[\"']?include[\"']? *:((?:[^\S\n]*\S+[^\S\n]*$|(?:\n *- +\S+)+))", re.MULTILINE
)
_UNSUPPORTED = {
    "unsafe_code": "runs programs that the model wrote",
    "doc_to_image": "needs images",
    "doc_to_audio": "needs audio",
    "use_prompt": "takes its prompts from another package",
}


@dataclass(frozen=True, kw_only=True)
class TaskFiles:
    """The tasks to evaluate, with the checked files that define them."""

    names: list[str] = field(default_factory=list)
    """Tasks and groups to evaluate, in order."""
    files: dict[str, Path] = field(default_factory=dict)
    """The file of every task and group, members of groups included, by its name."""
    groups: set[str] = field(default_factory=set)
    """Names of groups among these."""
    tags: dict[str, list[str]] = field(default_factory=dict)
    """Names of the tasks with a tag, for each tag that is a member of a group."""
    tasks: list[str] = field(default_factory=list)
    """Every task to evaluate, those of groups included."""


def find_tasks(names: Sequence[str], *, key: str, trusted: Path | None = None) -> TaskFiles:
    """Find tasks and check their files, without running code or importing the harness.

    Arguments and errors are those of `FoundTasks.find`; groups and tags count as tasks.
    """
    found = TaskFiles()
    if not names:
        return found
    harness = _harness_folder(key)
    if trusted is not None and not trusted.expanduser().is_dir():
        raise UserError(f"{TRUST} {trusted} is not a directory. Name the one with the task files.")
    for name in names:
        # Searched one by one: a name may bring a directory whose tasks only it can refer to.
        _Search(found, harness, key, trusted).add(name)
    if twice := next((name for name in found.tasks if found.tasks.count(name) > 1), None):
        raise UserError(
            f"{key} has the task {twice} twice: on its own and in a group, or in two groups. Leave "
            "one of the two out."
        )
    return found


def _harness_folder(key: str) -> "_Folder":
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{key} needs the lm-evaluation-harness. Try {EXTRA}.")
    return _installed(Path(spec.submodule_search_locations[0]) / "tasks")


@functools.cache
def _installed(root: Path) -> "_Folder":
    """Folder of installed files, which is cached: they do not change while the process runs."""
    return _Folder(root)


class _Search:
    """The search for what one name or path stands for, and for all its members."""

    def __init__(
        self, found: TaskFiles, harness: "_Folder", key: str, trusted: Path | None
    ) -> None:
        self._found, self._key, self._trusted = found, key, trusted
        self._folders = [harness]
        self._members: set[str] = set()

    def add(self, name: str) -> None:
        """Find what a name or path stands for, and add it to the files found so far."""
        path = Path(name).expanduser()
        if path.suffix in _SUFFIXES or "/" in name or path.is_dir():
            self._add_path(path)
            return
        places = self._named(name)
        if not places:
            # The last folder is that of the harness.
            close = nearest(name, self._folders[-1].names())
            hint = f" Did you mean {close}?" if close else ""
            raise UserError(
                f"{self._key} names {name}, which is neither a task of the harness nor a task file "
                f"or a directory of them.{hint} lm_eval ls tasks lists all."
            )
        for file, folder in places:
            self._add_file(file, folder)

    def _add_path(self, path: Path) -> None:
        if path.is_file():
            self._folders.insert(0, _Folder(path.parent))
            self._add_file(path.resolve(), self._folders[0])
            return
        if not path.is_dir():
            raise UserError(
                f"{self._key} names {path}, but there is no such task file or directory. "
                "Check the path."
            )
        folder = _Folder(path)
        self._folders.insert(0, folder)
        files = folder.task_files()
        if not files:
            raise UserError(f"{self._key} names {path}, which holds no task file. Name another.")
        visited = [self._visit(file, folder, ()) for file in files]
        # What belongs to a group is evaluated with it, and not a second time by itself.
        for name, tasks in visited:
            if name not in self._members:
                self._found.names.append(name)
                self._found.tasks.extend(tasks)

    def _add_file(self, file: Path, folder: "_Folder") -> None:
        name, tasks = self._visit(file, folder, ())
        self._found.names.append(name)
        self._found.tasks.extend(tasks)

    def _named(self, name: str) -> list[tuple[Path, "_Folder"]]:
        """Files of a task, of a group, or of the tasks with a tag; own folders come first."""
        for folder in self._folders:
            if (file := folder.file_of(name)) is not None:
                return [(file, folder)]
        for folder in self._folders:
            if tagged := folder.tagged(name):
                self._found.tags[name] = tagged
                files = map(folder.file_of, tagged)
                return [(file, folder) for file in files if file is not None]
        return []

    def _visit(
        self, file: Path, folder: "_Folder", above: tuple[Path, ...]
    ) -> tuple[str, list[str]]:
        """Check a file and those of its members; return its name and all its tasks."""
        values = read_task_file(file, folder.root)
        # A file with a class is a task, also with a group: the harness looks for the class first.
        is_group = "group" in values and "class" not in values
        name = str(values["group"]) if is_group else values.get("task")
        if not isinstance(name, str):
            raise UserError(f"{file} does not say which task it is. Begin it with task: NAME.")
        check_settings(name, values, self._trusted, file)
        # The harness is given files by these names: a second one would never be evaluated.
        if (known := self._found.files.setdefault(name, file)) != file:
            raise UserError(
                f"{self._key} has the task {name} twice, in {known} and {file}. "
                "Leave one of the two out."
            )
        if not is_group:
            return name, [name]
        self._found.groups.add(name)
        return name, self._visit_members(values.get("task"), name, file, (*above, file))

    def _visit_members(
        self, members: Any, group: str, file: Path, above: tuple[Path, ...]
    ) -> list[str]:
        tasks: list[str] = []
        for member in members if isinstance(members, list) else filter(None, [members]):
            item = {"task": member} if isinstance(member, str) else member
            if not isinstance(item, dict) or not item.keys() & {"task", "group"}:
                raise UserError(
                    f"The group {group} in {file} has a member without a name. Correct it."
                )
            name = str(item.get("group", item.get("task")))
            check_supported(name, item)
            # Members are inline groups, references, inline tasks, or mistakes.
            if "group" in item and isinstance(item.get("task"), list):
                tasks += self._visit_members(item["task"], f"{group}::{name}", file, above)
            elif places := self._named(name):
                for found, folder in places:
                    if found in above:
                        raise UserError(
                            f"The group {group} in {file} is in itself. Take {name} out of it."
                        )
                    named, below = self._visit(found, folder, above)
                    self._members.add(named)
                    tasks += below
            elif "group" not in item and len(item) > 1:
                tasks.append(f"{group}::{name}")  # written in the group itself
            else:
                raise UserError(
                    f"The group {group} in {file} has {name}, which is not a task. Correct it."
                )
        return tasks


class _Folder:
    """Task files below a directory; of thousands, only candidates are parsed."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def names(self) -> Iterator[str]:
        """Names of all tasks and groups."""
        yield from self._by_name

    def task_files(self) -> list[Path]:
        """Files that define a task or group."""
        files = {file for named in self._by_name.values() for file in named}
        return sorted(files, key=lambda file: file.as_posix())

    def file_of(self, name: str) -> Path | None:
        """Find the file that defines a task or group; None: there is none."""
        for file in self._by_name.get(name, ()):
            values = self._values_or_none(file)
            if name in (values.get("group"), values.get("task")):
                return file
        return None

    def tagged(self, tag: str) -> list[str]:
        """Names of the tasks with a tag; a file may have its tags from one that it includes."""
        # Parsing is the slow part: only files that hold the word, or include one that does, are
        # parsed.
        held = {f for f, text in self._contents.items() if b"tag" in text and tag.encode() in text}
        before = 0
        # Included files may include others.
        while len(held) > before:
            before, names = len(held), {file.name for file in held}
            held |= {file for file, included in self._includes.items() if included & names}
        found = set()
        for file in held:
            values = self._values_or_none(file) if file.suffix in _SUFFIXES else {}
            tags = values.get("tag") or []
            name = values.get("task")
            if isinstance(name, str) and tag in ([tags] if isinstance(tags, str) else tags):
                found.add(name)
        return sorted(found)

    @cached_property
    def _contents(self) -> dict[Path, bytes]:
        """Every file that is YAML or may be included by one."""
        found = {}
        for file in sorted(self.root.rglob("*"), key=lambda file: file.as_posix()):
            # Such as _default_template_yaml, which files of the harness include.
            is_template = "yaml" in file.name and file.suffix not in (".py", ".pyc")
            if (file.suffix in _SUFFIXES or is_template) and file.is_file():
                found[file] = file.read_bytes()
        return found

    @cached_property
    def _includes(self) -> dict[Path, set[str]]:
        """Names of the files that a file includes, if any."""
        found = {}
        for file, content in self._contents.items():
            # Includes are compared by file name: a wrong candidate only costs time.
            if match := _INCLUDE.search(content):
                found[file] = {Path(word.strip("\"'")).name for word in match[1].decode().split()}
        return found

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        """Files that may define a task or group of a name."""
        found: dict[str, list[Path]] = {}
        for file, content in self._contents.items():
            for name in _NAMED.findall(content) if file.suffix in _SUFFIXES else ():
                found.setdefault(name.decode(), []).append(file)
        return found

    def _values_or_none(self, file: Path) -> dict[str, Any]:
        """Settings in a file; {} if it cannot be read as a task file."""
        try:
            return read_task_file(file, self.root)
        except UserError:
            return {}


# --- One file -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Code:
    """A function or class that a task file names by `!function`."""

    name: str
    """Name of the function as the file has it: utils.process_docs."""
    written_in: Path
    """The task file."""

    @property
    def file(self) -> Path:
        """The Python file beside the task file that has to define it."""
        module = self.name.rpartition(".")[0].replace(".", "/")
        return (self.written_in.parent / f"{module}.py").resolve()


# The loader of libyaml, which is faster, where PyYAML was built with it.
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):  # type: ignore[misc]
    """Reads plain values alone, and `!function` as a `Code`."""

    file: Path


def _code(loader: _Loader, node: yaml.ScalarNode) -> Code:
    return Code(name=str(loader.construct_scalar(node)), written_in=loader.file)


_Loader.add_constructor("!function", _code)


def read_task_file(file: Path, root: Path) -> dict[str, Any]:
    """Read the settings of a task file, with those of the files that it includes.

    Args:
        file: the task file.
        root: directory that holds all that it may include.

    Raises:
        UserError: it cannot be read, holds more than plain values, or includes a file elsewhere.
    """
    return _read(file.resolve(), root.resolve(), ())


def _read(file: Path, root: Path, includers: tuple[Path, ...]) -> dict[str, Any]:
    if file in includers:
        raise UserError(f"{file} includes itself. Take that include out.")
    values = _plain_values(file)
    merged: dict[str, Any] = {}
    includes = values.pop("include", [])
    for name in includes if isinstance(includes, list) else [includes]:
        included = (file.parent / str(name)).resolve()
        # Else a task file from elsewhere could read any YAML of this machine into a report.
        if not included.is_relative_to(root):
            raise UserError(f"{file} includes {name}, which lies outside of {root}. Copy it there.")
        merged |= _read(included, root, (*includers, file))
        # As in the harness: the list defines tasks of that file only.
        merged.pop("task_list", None)
    return merged | values


def _plain_values(file: Path) -> dict[str, Any]:
    try:
        loader = _Loader(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). Name a task file.") from None
    loader.file = file
    try:
        values = loader.get_single_data()
    # Such as !!python/object, or another tag that needs code.
    except yaml.constructor.ConstructorError as error:
        raise UserError(
            f"{file} holds more than plain values ({error.problem}), which is not read. "
            "Take it out."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file} is not valid YAML ({reason}). Correct it.") from None
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise UserError(f"{file} holds no keys. A task file begins with task: NAME.")
    return values


def check_settings(name: str, values: Mapping[str, Any], trusted: Path | None, file: Path) -> None:
    """Refuse a file that would run code outside of a trusted directory.

    Args:
        name: of the task or group.
        values: settings in its file.
        trusted: directory whose code may run.
        file: the file.

    Raises:
        UserError: names the setting, and the option that allows it if there is one.
    """
    check_supported(name, values)
    for key, code in _code_in(values):
        _check_code(name, key, code, trusted)
    loading = values.get("dataset_kwargs") or {}
    if loading.get("trust_remote_code") and not (trusted and _is_in(file, trusted)):
        raise UserError(
            f"The task {name} says trust_remote_code in {file}. Take that out, or add "
            f"{TRUST} {file.parent}: no code of a hub is run then either."
        )
    if "class" in values and not isinstance(values["class"], Code):
        raise UserError(f"The task {name} names a class without !function in {file}. Correct it.")


def check_supported(name: str, values: Mapping[str, Any]) -> None:
    """Refuse settings that ftkit does not support, also in trusted directories.

    Args:
        name: of the task.
        values: its settings, or those that a group gives to its members.

    Raises:
        UserError: names the setting.
    """
    for key, why in _UNSUPPORTED.items():
        if values.get(key):
            raise UserError(
                f"The task {name} {why} ({key}), which ftkit does not support. Leave it out."
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


def _code_in(value: Any, key: str = "") -> Iterator[tuple[str, Code]]:
    """Yield everything named by `!function`, with the keys above it."""
    if isinstance(value, Code):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _code_in(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _code_in(item, key)


def _check_code(name: str, key: str, code: Code, trusted: Path | None) -> None:
    needs = f"The task {name} needs Python code: {key} is !function {code.name}"
    if trusted is None or not _is_in(code.file, trusted):
        where = "" if trusted is None else f", which lies outside of {TRUST} {trusted}"
        raise UserError(
            f"{needs}, of {code.file}{where}. ftkit does not run code of task files. To run it "
            f"anyway, without restrictions, add {TRUST} {code.file.parent}."
        )
    # Without this file the harness would look for a module of that name anywhere.
    if not code.file.is_file():
        raise UserError(f"{needs}, but there is no {code.file}. Copy it there.")


def _is_in(file: Path, directory: Path) -> bool:
    return file.resolve().is_relative_to(directory.expanduser().resolve())
