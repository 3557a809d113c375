"""Corpora of GPT-NeoX: its .bin and .idx files, with the samples of these in its own order."""
