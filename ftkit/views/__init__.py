"""Views of runs: comparison, watch, live page, notebooks."""
