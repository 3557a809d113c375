"""Runs at a url: their claim, download and upload."""
