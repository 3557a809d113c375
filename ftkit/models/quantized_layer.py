"""The base class of quantised layers, known where bitsandbytes is not imported."""


class QuantizedLayer:
    """A layer with packed weights: the tensors that unpack them are in its attributes."""
