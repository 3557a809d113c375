"""Runs side by side: their different settings, and their results."""
