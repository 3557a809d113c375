"""LoRA adapters, through PEFT: layers, variants, first values, and PEFT's files."""
