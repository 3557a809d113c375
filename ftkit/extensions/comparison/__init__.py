"""Runs side by side: their different settings, and their results."""

LIBRARIES = {"matplotlib": "plot"}
"""Libraries that it uses where they are there, and the extra of ftkit that has each."""
