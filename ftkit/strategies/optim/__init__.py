"""Optimizers: made from a recipe, their schedule, clipping, and the kinds of their state."""
