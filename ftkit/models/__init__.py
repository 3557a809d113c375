"""Models: architectures, base models, layers, adapters, quantisation, the loss."""
