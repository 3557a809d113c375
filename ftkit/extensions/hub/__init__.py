"""Base models and data sets of the Hugging Face hub by their names; ftkit download."""
