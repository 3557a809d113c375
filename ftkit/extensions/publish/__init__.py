"""Results for other programs: model cards; merged, exported, pushed to a hub."""

LIBRARIES = {"gguf": "gguf", "torchao": "torchao"}
"""Libraries that it uses where they are there, and the extra of ftkit that has each."""
MOVED = {"ftkit.exchange.model_card": "model_card"}
