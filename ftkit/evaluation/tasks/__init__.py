"""Evaluation by task: task files, and the lm-evaluation-harness on a model in memory."""
