"""What a command is, for the table of commands, parsing, help and completion."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ftkit.utils.registry import Installed, Registry

FIND_RESULT = "ftkit.evaluation.result:find_result"
"""What `Command.opens` is of commands whose first word is a result: a mistyped path is reported at
once."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, as parsing, help, completion and running need it."""

    name: str
    """The words after ftkit."""
    summary: str
    """One line for the list of commands."""
    text: str = ""
    """The description in its help; "": the summary."""
    options: type
    """The class of its options; see `ftkit.recipe.options`."""
    function: str
    """Module and function that take the options and return the exit code. The module is imported
    only when the command is run."""
    examples: tuple[str, ...]
    """Examples of what follows its name."""
    opens: str = ""
    """A function that turns the first word into the first argument of `function`. It reports
    mistakes in that word before the module of `function` imports torch."""
    usage: tuple[str, ...] = ()
    """Usage after its name; (): derived from its options."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Names that it has in other programs, and for each what to type after ftkit instead; "": its
    name."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Commands that share the first word of their names."""

    name: str
    """The word after ftkit; "": ftkit itself."""
    summary: str
    """One line for the list of commands."""
    text: str
    """The description in its help."""
    usage: str
    """Usage after its name."""
    epilog: str
    """The end of its help."""
    members: "tuple[Command, ...] | Registry[Command | Group]"

    def find(self, word: str) -> "Command | Group | None":
        """Return the command of the group whose name ends in a word; None: there is none."""
        if isinstance(self.members, Registry):
            return self.members.get(word)
        return next((one for one in self.members if one.name.rpartition(" ")[2] == word), None)

    @property
    def installed(self) -> list[Installed]:
        """Commands of other packages, of which nothing is imported yet."""
        return self.members.installed if isinstance(self.members, Registry) else []

    @property
    def words(self) -> list[str]:
        """The last words of all names."""
        own = [member.name.rpartition(" ")[2] for member in self.members]
        return own + [one.name for one in self.installed]

    @property
    def elsewhere(self) -> dict[str, str]:
        """Names of its commands in other programs, with what to type after ftkit instead."""
        return {
            name: text or command.name
            for command in self.commands()
            for name, text in command.elsewhere.items()
        }

    def commands(self) -> Iterator[Command]:
        """All commands, also those of groups in it."""
        for member in self.members:
            if isinstance(member, Group):
                yield from member.commands()
            else:
                yield member
