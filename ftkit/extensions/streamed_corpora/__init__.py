"""Documents in many files, read as they are trained on: `--data Corpus`."""
