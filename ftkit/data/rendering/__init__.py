"""Rendering: how records become token ids, and which of them carry loss."""
