"""`ftkit extensions`: what the extensions and other packages bring, and whether they work."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

from ftkit.cli.commands import COMMANDS
from ftkit.data.records.formats import RECORD_FORMATS
from ftkit.data.records.media import MEDIA_KINDS
from ftkit.data.records.shape_rows import PREFERENCES, RECORD_SHAPES
from ftkit.data.source_rows import DATA_SOURCES
from ftkit.evaluation.task_programs import TASK_PROGRAMS
from ftkit.models.chat_templates.prompt_styles import STYLES as PROMPT_STYLES
from ftkit.models.pretrained.single_file import FILE_FORMATS
from ftkit.models.pretrained.stored_forms import STORED_FORMS
from ftkit.python_names import PYTHON_NAMES
from ftkit.recipe.adapter_types import ADAPTER_TYPES
from ftkit.recipe.companions import COMPANIONS
from ftkit.recipe.hubs import HUBS
from ftkit.recipe.implementations import IMPLEMENTATIONS
from ftkit.recipe.loggers import LOGGERS
from ftkit.recipe.objectives import OBJECTIVES
from ftkit.recipe.optimizers import OPTIMIZERS
from ftkit.recipe.options import ExtensionsOptions
from ftkit.recipe.plugin import PLUGIN_READERS
from ftkit.recipe.readers import READERS
from ftkit.recipe.recipe_sections import SECTIONS
from ftkit.recipe.strategy_rows import STRATEGIES
from ftkit.runs.launchers import LAUNCHERS
from ftkit.runs.run_ends import RUN_ENDS
from ftkit.training.callback_rows import CALLBACKS
from ftkit.utils.accelerators.kinds import DEVICE_KINDS
from ftkit.utils.progress import print_shown
from ftkit.utils.registry import (
    Installed,
    Registry,
    described,
    extension_names,
    installed_rows,
)
from ftkit.utils.urls import URL_KINDS

_REGISTRIES: tuple[Registry[Any], ...] = (
    ADAPTER_TYPES,
    CALLBACKS,
    COMMANDS,
    COMPANIONS,
    DATA_SOURCES,
    DEVICE_KINDS,
    FILE_FORMATS,
    HUBS,
    IMPLEMENTATIONS,
    LAUNCHERS,
    LOGGERS,
    MEDIA_KINDS,
    OBJECTIVES,
    OPTIMIZERS,
    PLUGIN_READERS,
    PREFERENCES,
    PROMPT_STYLES,
    PYTHON_NAMES,
    READERS,
    RECORD_FORMATS,
    RECORD_SHAPES,
    RUN_ENDS,
    SECTIONS,
    STORED_FORMS,
    STRATEGIES,
    TASK_PROGRAMS,
    URL_KINDS,
)


@dataclass(frozen=True, kw_only=True)
class Extension:
    """An extension, as the command shows it."""

    name: str
    summary: str
    package: str = ""
    """Version of the package that it is; "": it comes with ftkit."""
    brings: dict[str, list[str]] = field(default_factory=dict)
    """Names of its rows, by registry."""
    missing: dict[str, str] = field(default_factory=dict)
    """Libraries that are not installed, with the command that installs each."""
    error: str = ""
    """Why it cannot be used; "": it can."""


def show_extensions(options: ExtensionsOptions) -> int:
    """List extensions and packages, with what each brings."""
    found = [*_own(), *_of_packages()]
    if options.format == "json":
        print(json.dumps([asdict(one) for one in found], indent=2))
    elif not found:
        print_shown("There are no extensions.")
    else:
        for one in found:
            print_shown("\n".join(_lines(one)))
    return 0


def _lines(one: Extension) -> Iterator[str]:
    yield f"{one.name}{f' ({one.package})' if one.package else ''}: {one.summary}"
    for registry, names in one.brings.items():
        yield f"  {registry}: {', '.join(names)}"
    for library, install in one.missing.items():
        yield f"  {library} is not installed: {install}"
    if one.error:
        yield f"  cannot be used: {one.error}"


def _own() -> Iterator[Extension]:
    """Those that come with ftkit."""
    for name in extension_names():
        try:
            module = importlib.import_module(f"ftkit.extensions.{name}")
        # Whatever one of them does wrong, the others are listed.
        except Exception as error:
            yield Extension(name=name, summary="", error=described(error))
            continue
        libraries: dict[str, str] = getattr(module, "LIBRARIES", {})
        yield Extension(
            name=name,
            summary=(module.__doc__ or "").partition("\n")[0],
            brings={
                registry.name: [row.name for row in rows]
                for registry in _REGISTRIES
                if (rows := registry.of_extension(name))
            },
            missing={
                library: extra if " " in extra else f"pip install 'ftkit[{extra}]'"
                for library, extra in libraries.items()
                if find_spec(library) is None
            },
            error=" ".join(registry.broken.get(name, "") for registry in _REGISTRIES).strip(),
        )


def _of_packages() -> Iterator[Extension]:
    """Those of other packages, of which nothing is imported."""
    by_package: dict[str, list[Installed]] = {}
    for row in installed_rows():
        by_package.setdefault(row.package, []).append(row)
    used = {row for registry in _REGISTRIES for row in registry.installed}
    for package, rows in by_package.items():
        brings: dict[str, list[str]] = {}
        for row in rows:
            brings.setdefault(row.registry, []).append(row.name)
        taken = [f"{row.registry}: {row.name}" for row in rows if row not in used]
        yield Extension(
            name=package,
            summary=rows[0].summary,
            package=f"version {rows[0].version}",
            brings=brings,
            error=f"ftkit has names of its own for {', '.join(taken)}." if taken else "",
        )
