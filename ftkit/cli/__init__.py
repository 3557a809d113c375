"""The `ftkit` command."""

from ftkit.cli.app import main as main
