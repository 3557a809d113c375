"""Hosts apart: machines that share no disk work on one run, whose directory is a url."""
