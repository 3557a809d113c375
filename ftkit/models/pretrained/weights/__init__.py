"""Weight files, and how they hold the parameters of a model."""
