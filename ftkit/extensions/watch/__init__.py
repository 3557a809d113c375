"""Follow a run from another terminal, or in a browser."""
