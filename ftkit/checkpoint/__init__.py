"""Checkpoints: the directories that a run can continue from."""
