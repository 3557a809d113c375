"""GGUF files as base models: checked by their header, converted once into a Hugging Face one."""
