"""Runs side by side: what differs between their settings, and what came out."""
