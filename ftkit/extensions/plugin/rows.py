"""Classes of a plugin as rows of registries, which find them as any other."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftkit.data.source_rows import DATA_SOURCES, DataRow
from ftkit.extensions.plugin.definitions import Defined, Kind, definitions_of, make
from ftkit.recipe.loggers import LOGGERS, LoggerRow
from ftkit.recipe.objectives import OBJECTIVES, ObjectiveRow
from ftkit.recipe.optimizers import OPTIMIZERS, UNKNOWN, OptimizerPackage
from ftkit.recipe.plugin import PACKAGE, Plugin
from ftkit.training.callback_rows import CALLBACKS, CallbackRow


@contextmanager
def in_registries(plugin: Plugin | None) -> Iterator[None]:
    """Have registries hold the rows of a plugin inside the block; None: no rows of one."""
    with ExitStack() as stack:
        stack.enter_context(OBJECTIVES.holding(_objectives(plugin)))
        stack.enter_context(OPTIMIZERS.holding(_optimizers(plugin)))
        stack.enter_context(DATA_SOURCES.holding(_data(plugin)))
        stack.enter_context(LOGGERS.holding(_loggers(plugin)))
        stack.enter_context(CALLBACKS.holding(_callbacks(plugin)))
        yield


@dataclass(frozen=True, kw_only=True)
class OwnObjective(ObjectiveRow):
    """An objective of a plugin."""

    plugin: Plugin
    defined: Defined

    @property
    def defaults(self) -> dict[str, Any]:
        return {}  # its class has them

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self.defined.check_options(given)
        return dict(given)

    def make(self, options: Mapping[str, Any]) -> Any:
        return make(self.plugin, self.defined, **options)


def _objectives(plugin: Plugin | None) -> list[ObjectiveRow]:
    return [
        OwnObjective(
            name=f"{PACKAGE}.{one.name}",
            summary="",
            class_path="",
            options=one.options_class,
            plugin=plugin,
            defined=one,
            **one.rules,
        )
        for plugin, one in _usable(plugin, "objective")
    ]


@dataclass(frozen=True, kw_only=True)
class OwnOptimizers(OptimizerPackage):
    """Optimizers of a plugin."""

    plugin: Plugin

    def content(self) -> Mapping[str, Any]:
        return {name: getattr(self.plugin.module, name) for name in self.optimizers}


def _optimizers(plugin: Plugin | None) -> list[OptimizerPackage]:
    if plugin is None:
        return []
    found = {one.name: UNKNOWN for _, one in _usable(plugin, "optimizer")}
    return [OwnOptimizers(name=PACKAGE, optimizers=found, plugin=plugin)]


def _data(plugin: Plugin | None) -> list[DataRow]:
    place = "ftkit.extensions.plugin.data:PluginData"
    return [DataRow(f"{PACKAGE}.{one.name}", place) for _, one in _usable(plugin, "data")]


@dataclass(frozen=True, kw_only=True)
class OwnLogger(LoggerRow):
    """A logger of a plugin, which is always used."""

    plugin: Plugin
    defined: Defined

    def made(self, out_dir: Path, log: Any, run_ids: dict[str, str], start_step: int) -> Any:
        return make(self.plugin, self.defined, out_dir)


def _loggers(plugin: Plugin | None) -> list[LoggerRow]:
    return [
        OwnLogger(one.name, "", plugin=plugin, defined=one)
        for plugin, one in _defined(plugin, "logger")
    ]


@dataclass(frozen=True, kw_only=True)
class OwnCallback(CallbackRow):
    """A callback of a plugin, which is always called."""

    plugin: Plugin
    defined: Defined

    def made(self, setup: Any, journal: Any) -> Any:
        return make(self.plugin, self.defined)


def _callbacks(plugin: Plugin | None) -> list[CallbackRow]:
    return [
        OwnCallback(one.name, "", plugin=plugin, defined=one)
        for plugin, one in _defined(plugin, "callback")
    ]


def _defined(plugin: Plugin | None, kind: Kind) -> list[tuple[Plugin, Defined]]:
    """The plugin with each class of a kind that it defines."""
    return [] if plugin is None else [(plugin, one) for one in definitions_of(plugin, kind)]


def _usable(plugin: Plugin | None, kind: Kind) -> list[tuple[Plugin, Defined]]:
    """The same without classes that lack a method, which may be named and are refused then."""
    return [(plugin, one) for plugin, one in _defined(plugin, kind) if not one.missing]
