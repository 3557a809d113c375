"""Carrying of a run to its url: which files, and who else sends."""
