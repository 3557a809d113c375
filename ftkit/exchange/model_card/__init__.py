"""Model cards: what a result says of itself to those who find it."""
