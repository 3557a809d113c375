"""Kinds of devices, and what is asked of them."""
