"""Base models in GGUF files, such as those of llama.cpp: converted once, and trained."""
