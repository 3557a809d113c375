"""Models of transformers below their head, with parts of ours in them."""
