"""Architectures: what models are before they have numbers, and what files call their parameters."""
