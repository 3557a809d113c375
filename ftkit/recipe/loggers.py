"""Loggers beside metrics.csv: their names, and what has to be installed; no torch."""

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.utils.registry import Registry, imported

CSV = "csv"
"""The name of metrics.csv, which is always written."""


@dataclass(frozen=True)
class LoggerRow:
    """A logger. What it writes in the directory of a run lies in a directory of its name."""

    name: str
    """Also that of the module that has to be installed."""
    make: str
    """MODULE:FUNCTION that makes a `lightning.fabric.loggers.Logger` of the directory of the run,
    its keys `log`, the ids of the run in each service, to which a new one is added, and the steps
    that are done."""
    install: str = ""
    """Package to install; "": the name."""
    has_service: bool = False
    """Whether it uploads what it writes itself."""

    def made(self, out_dir: Path, log: Any, run_ids: dict[str, str], start_step: int) -> Any:
        """Make it, as `make` says."""
        return imported(self.make)(out_dir, log, run_ids, start_step)

    @property
    def is_installed(self) -> bool:
        """Whether the module of its name is there."""
        return importlib.util.find_spec(self.name) is not None


LOGGERS: Registry[LoggerRow] = Registry("loggers", (LoggerRow,), core=())


def logger_names() -> list[str]:
    """Names that a recipe may give, also of metrics.csv."""
    return [CSV, *LOGGERS.names]


def check_loggers_installed(names: Iterable[str]) -> None:
    """Refuse a run whose loggers are not installed.

    Args:
        names: loggers beside metrics.csv.

    Raises:
        UserError: names what to install.
    """
    for name in names:
        row = LOGGERS.get(name)
        assert row is not None, "a recipe names no other"
        if not row.is_installed:
            raise UserError(
                f"logger_name has {name}, but it is not installed. Try pip install "
                f"{row.install or name}, or --logger_name {CSV}."
            )
