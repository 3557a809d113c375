"""Samples: tokenised, in their order, and in the micro-batches of a step."""
