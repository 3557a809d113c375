"""Targets, mutations and limits of scripts/fuzz."""
