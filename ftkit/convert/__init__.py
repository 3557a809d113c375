"""Conversion of results: merged with their base model, or in the layout of other programs."""
