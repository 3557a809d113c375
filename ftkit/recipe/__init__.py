"""Recipes: the settings of a run, checked and typed, and the plan made of them."""
