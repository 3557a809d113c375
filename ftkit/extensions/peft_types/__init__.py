"""Adapters of other types than LoRA, computed by PEFT's layers: VeRA, OFT, LoHa, LoKr, (IA)3."""
