"""Formats of foreign checkpoints: each reads one, and gives the state of training in it."""
