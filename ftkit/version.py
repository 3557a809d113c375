"""The version of ftkit."""

__version__ = "0.1.0"
