"""Runs one after another from a list or from values of keys, then compared."""
