"""Base models published in 4 or 8 bits: unpacked when they are read, or kept in FP8 and MXFP4."""

MOVED = {
    "ftkit.models.pretrained.packed_weights": "reading",
    "ftkit.models.stored_weights": "layers",
}
