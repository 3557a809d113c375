"""Heads that give texts classes, values or scores, and models that give them vectors."""
