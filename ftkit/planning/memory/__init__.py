"""Memory of a step: measured in runs, and counted without running."""
