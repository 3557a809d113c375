"""The file of system metrics: ``system.csv``, a row for each sample."""

from collections.abc import Mapping
from pathlib import Path

from ftkit.runs.report.metrics import CsvWriter, cell_text
from ftkit.utils.files import widen_table

_FIRST = ("step", "time_s")


class SystemWriter(CsvWriter):
    """Writes samples; a run that goes on elsewhere has further columns."""

    def __init__(self, path: Path, names: tuple[str, ...], after_step: int | None) -> None:
        """Starts a new file, or goes on with the one of an earlier session.

        Args:
            path: of the file.
            names: of what is sampled. Columns of earlier sessions stay, new ones are empty there.
            after_step: as of `MetricsWriter`.

        Raises:
            OSError: the file cannot be written.
            ValueError: it has a row after ``after_step``.
        """
        self._columns = (*_FIRST, *names)
        if after_step is not None and path.exists():
            self._columns = widen_table(path, self._columns)
        super().__init__(path, self._columns, after_step)

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Add a sample.

        Args:
            step: optimizer steps done.
            time_s: when, in seconds since 1970.
            values: by their names.
        """
        cells = (cell_text(values.get(name)) for name in self._columns[len(_FIRST) :])
        self._write_cells((str(step), f"{time_s:.2f}", *cells))
