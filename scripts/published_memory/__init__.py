"""GPU memory that others have published for their own programs, and simulations of these."""
