"""Recipes: what a user asks for, checked and typed, and the plan it comes to."""
