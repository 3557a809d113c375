"""A look at data before training: counts, lengths, duplicates, findings, samples token by token."""
