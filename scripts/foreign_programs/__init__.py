"""Programs whose checkpoints ftkit imports: each trains the same few steps."""
