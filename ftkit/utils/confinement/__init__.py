"""Confinement: readers of files in a child process that cannot take all of the machine."""
