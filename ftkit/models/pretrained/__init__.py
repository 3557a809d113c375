"""Pretrained (base) models: found, read in our names, and written as other programs read them."""
