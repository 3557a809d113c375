"""The documents as a site: sources, reference, checks."""
