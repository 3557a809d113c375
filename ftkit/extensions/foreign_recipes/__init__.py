"""Training files of other programs, read as recipes: axolotl, LLaMA-Factory, TRL."""
