"""Optimizers of torchao with state of 4 and 8 bits, float8, quantisation-aware training."""

LIBRARIES = {"torchao": "torchao"}
MOVED = {"ftkit.models.torchao_layers": "layers", "ftkit.strategies.torchao": "state"}
