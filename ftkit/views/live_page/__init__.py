"""The live page: the runs of a directory in a browser on this machine, read from their files."""
