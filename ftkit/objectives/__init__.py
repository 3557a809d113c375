"""Objectives: what the loss of a step is made of."""
