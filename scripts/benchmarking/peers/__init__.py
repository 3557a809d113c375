"""ftkit beside other programs that fine-tune: the same weights, tokens, batches and precision."""
