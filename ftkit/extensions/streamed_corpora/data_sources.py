"""Data that are read as they are trained on."""

from ftkit.data.source_rows import DataRow

ROWS = (DataRow("Corpus", "ftkit.extensions.streamed_corpora.source:CorpusSource"),)
