"""Strategies: single device, DDP, FSDP and DeepSpeed ZeRO on torch and Lightning."""
