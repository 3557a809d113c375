"""Images and audio: read, counted in tokens, computed by the parts of a model that see or hear."""

LIBRARIES = {"soundfile": "audio", "soxr": "audio"}
