"""Every command of ftkit by its name, such as "checkpoints list"."""

from ftkit.cli.commands import FTKIT

COMMANDS = {command.name: command for command in FTKIT.commands()}
