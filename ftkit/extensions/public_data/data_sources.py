"""Published data sets that a recipe may name."""

from ftkit.data.source_rows import DataRow

ROWS = tuple(
    DataRow(name, "ftkit.extensions.public_data.public_sets:PublicSource")
    for name in ("Alpaca", "Alpaca2k", "AlpacaGPT4", "Deita", "FLAN", "LIMA", "LongForm")
)
