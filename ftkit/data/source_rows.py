"""Kinds of data by the names that recipes give them; what reads one is imported when it is used."""

from dataclasses import dataclass

from ftkit.data.spec import DataSource
from ftkit.utils.registry import Registry, imported


@dataclass(frozen=True)
class DataRow:
    """A kind of data."""

    name: str
    place: str
    """MODULE:CLASS of its `DataSource`."""

    @property
    def source(self) -> type[DataSource]:
        """What reads it."""
        found: type[DataSource] = imported(self.place)
        return found


OWN_NAME = "JSON"
"""Records of one's own; it replaces LitGPT's module of that name."""
DATA_SOURCES = Registry(
    "data_sources", (DataRow,), core=(DataRow(OWN_NAME, "ftkit.data.own_data:OwnData"),)
)
