"""Models of transformers: what they are before they have numbers."""
