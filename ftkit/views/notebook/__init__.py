"""The Python API, and how runs and plans show themselves in notebooks."""
