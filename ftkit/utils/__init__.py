"""Utilities that know nothing of training: files, processes, hardware, units."""
