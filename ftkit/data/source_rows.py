"""Kinds of data by the names that recipes give them; what reads one is imported when it is used."""

import importlib
from dataclasses import dataclass

from ftkit.data.spec import DataSource
from ftkit.utils.registry import Registry


@dataclass(frozen=True)
class DataRow:
    """A kind of data."""

    name: str
    place: str
    """MODULE:CLASS of its `DataSource`."""

    @property
    def source(self) -> type[DataSource]:
        """What reads it."""
        module, _, name = self.place.partition(":")
        found: type[DataSource] = getattr(importlib.import_module(module), name)
        return found


OWN_NAME = "JSON"
"""Records of one's own; it replaces LitGPT's module of that name."""
DATA_SOURCES = Registry(
    "data_sources", (DataRow,), core=(DataRow(OWN_NAME, "ftkit.data.own_data:OwnData"),)
)
