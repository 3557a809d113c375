"""Launching of runs: the supervisor and the processes it starts and watches; no torch."""
