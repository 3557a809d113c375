"""GGUF files of results, for llama.cpp and Ollama: models, and LoRA adapters."""
