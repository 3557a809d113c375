"""Strategies: single device, DDP and FSDP on torch and Lightning."""
