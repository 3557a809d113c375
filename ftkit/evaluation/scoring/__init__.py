"""Scores of answers: exact match, ROUGE-L, and metrics of one's own."""
