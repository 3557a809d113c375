"""Plans: the memory, disk space and steps of a recipe, before it runs."""
