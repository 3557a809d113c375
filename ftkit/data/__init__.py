"""Data sets, tokenised samples, and the order in which steps take them."""
