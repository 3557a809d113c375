"""Base models of several families."""

from adapters import bases, llama  # noqa: F401 - fixtures of the tests
