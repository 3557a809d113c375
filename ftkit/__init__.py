"""Fine-tune language models with PyTorch Lightning: full, LoRA and QLoRA."""

__version__ = "0.1.0"
