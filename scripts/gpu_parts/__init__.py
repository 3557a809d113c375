"""What only a GPU can show, in parts of at most ten minutes, in order of value."""
