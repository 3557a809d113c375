"""Utilities that are independent of training: files, processes, hardware, units."""
