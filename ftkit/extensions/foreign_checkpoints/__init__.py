"""Runs that other programs began: their checkpoints, made runs that ftkit continues."""
