"""Architectures: descriptions of models without weights, and names of parameters in files."""
