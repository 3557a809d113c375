"""Evaluation: validation loss, generated answers, metrics and tasks."""
