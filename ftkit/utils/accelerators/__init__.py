"""Kinds of devices, and functions for the device in use."""
