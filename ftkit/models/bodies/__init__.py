"""Bodies: the modules between token ids and the head, of each implementation of models."""
