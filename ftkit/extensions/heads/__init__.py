"""Heads that give texts classes or values: the objective classify."""
