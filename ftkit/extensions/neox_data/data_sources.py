"""The kind of data that recipes name."""

from ftkit.data.source_rows import DataRow

ROWS = (DataRow("NeoX", "ftkit.extensions.neox_data.source:NeoxData"),)
