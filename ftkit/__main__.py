"""`python -m ftkit` is the `ftkit` command, for torchrun and for environments without scripts."""

from ftkit.cli import main

main()
