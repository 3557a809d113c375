"""Inference with a result: generate, chat and evaluate."""
