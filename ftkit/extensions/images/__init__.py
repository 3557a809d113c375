"""Images: read, counted in tokens, and computed by the parts of a model that see."""
