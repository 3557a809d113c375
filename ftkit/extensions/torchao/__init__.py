"""Layers of torchao: products of float8 numbers, and quantisation-aware training."""

LIBRARIES = {"torchao": "torchao"}
MOVED = {"ftkit.models.torchao_layers": "layers"}
