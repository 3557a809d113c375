"""Training in a rank: set-up, the loop with its evaluations, checkpoints and measurements."""
