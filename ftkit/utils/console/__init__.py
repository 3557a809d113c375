"""Output on terminals, in logs and in notebooks: progress, curves, numbers, HTML."""
