"""Checks and measurements that need a GPU, in parts of at most ten minutes, in order of value."""
