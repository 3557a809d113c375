"""Configuration: recipes, the devices of this machine, and the plan that both come to; no torch."""
