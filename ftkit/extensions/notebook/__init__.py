"""The Python API, and how runs and plans show themselves in notebooks."""

LIBRARIES = {"IPython": "notebook", "ipywidgets": "notebook", "matplotlib": "plot"}
"""Libraries that it uses where they are there, and the extra of ftkit that has each."""
