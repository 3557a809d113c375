"""The command line: find the command, parse its options, call its function, print errors."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence

from ftkit.cli.command import Command, Group
from ftkit.cli.commands import FTKIT
from ftkit.cli.parser import declared, read_options, split_line
from ftkit.errors import UserError
from ftkit.recipe.plugin import Plugin, open_plugin, using
from ftkit.redaction import redacted_output
from ftkit.utils.home import provide_directories
from ftkit.utils.imports import prepare_imports, quick_imports
from ftkit.utils.names import nearest
from ftkit.utils.process import Interrupts, print_line, turns_before_sleep
from ftkit.utils.progress import Verbosity, loading_shown, set_verbosity
from ftkit.utils.registry import imported, missing_extension
from ftkit.utils.streams import failure_of, open_standard_streams, watched_output
from ftkit.version import __version__


def main(verbosity: Verbosity = "full") -> None:
    """Entry point of the `ftkit` command.

    Args:
        verbosity: how much is printed without --quiet.
    """
    open_standard_streams()
    set_verbosity(verbosity)
    sys.stdout = watched_output(sys.stdout)
    sys.stderr = redacted_output(sys.stderr)  # results on standard output stay as they are
    # Before torch is imported: its OpenMP reads the variable once.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(turns_before_sleep()))
    prepare_imports()
    try:
        code = run(sys.argv[1:])
    # Without a traceback: the message names key, value and remedy.
    except UserError as error:
        print_line(f"ftkit: {error}")
        code = error.exit_code
    except KeyboardInterrupt:
        _ignore_interrupts()
        # 128 plus the number of SIGINT, as shells report it.
        code = 130
    except OSError as error:
        if getattr(sys.stdout, "failure", None) is error or isinstance(error, BrokenPipeError):
            code = 1  # told below
        elif error.errno == errno.ENAMETOOLONG:
            # Any key may name a file, and only opening it shows that its name is too long.
            print_line(
                f"ftkit: {str(error.filename)[:60]}... is too long for a path. Give another one."
            )
            code = UserError.exit_code
        else:
            raise
    except RuntimeError as error:
        # Any key may name a file, and only expanding ~USER shows that the user does not exist.
        if str(error) != "Could not determine home directory.":
            raise
        print_line("ftkit: a path begins with ~ and a user that does not exist. Write it in full.")
        code = UserError.exit_code
    # Before its exit, at which Python would end with a code of its own.
    if (failure := failure_of(sys.stdout)) is not None:
        if not isinstance(failure, BrokenPipeError):  # `| head` has ended
            print_line(f"ftkit: standard output cannot be written: {failure.strerror}")
        code = code or 1
    failure_of(sys.stderr)
    _ignore_interrupts()
    sys.exit(code)


def _ignore_interrupts() -> None:
    """Ignore further Ctrl+C: it would print a traceback of Python's own shutdown."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(argv: Sequence[str]) -> int:
    """Run one command line, without the program's name, and return the exit code."""
    if argv and argv[0] == "--version":
        print(f"ftkit {__version__}")
        return 0
    # jsonargparse's option for shell completion; its value may follow an equals sign.
    if argv and argv[0].partition("=")[0] == "--print_shtab":
        from ftkit.cli.help import print_completion  # with jsonargparse, like all of help

        print_completion("=".join(argv).partition("=")[2])
        return 0
    return _run_member(FTKIT, argv)


def _run_member(group: Group, argv: Sequence[str]) -> int:
    """Run the command of a group that the first word names."""
    if not argv or argv[0] in ("-h", "--help"):
        from ftkit.cli.help import print_help

        print_help(group)
        return 0 if argv else UserError.exit_code
    name, rest = argv[0], argv[1:]
    member = group.find(name)
    if isinstance(member, Group):
        return _run_member(member, rest)
    if member is not None:
        return _run_command(member, rest)
    # Names of other programs come before a similar spelling: `tune` means finetune.
    close = group.elsewhere.get(name) or nearest(name, group.words)
    place = f"ftkit {group.name}".strip()
    of = f" of {place}" if group.name else ""
    hint = f"Did you mean {place} {close}?" if close else f"See {place} --help."
    raise UserError(f"{name!r} is not a command{of}. {hint} Commands: {', '.join(group.words)}.")


def _run_command(command: Command, argv: Sequence[str]) -> int:
    line = split_line(command, argv)
    if "quiet" in line.switches:
        set_verbosity("quiet")
    if "help" in line.switches:
        from ftkit.cli.help import print_help

        print_help(command)
        return 0
    provide_directories()
    if line.components:
        from ftkit.cli.help import print_component_help

        with using(_plugin(dict(line.values).get("plugin"))):
            for component, name in line.components:
                print_component_help(component, name)
        return 0
    arguments = [read_options(command, line, argv)]
    if command.opens:
        # Its result is found first: a mistyped path is reported before torch is imported.
        first_word = declared(command.options)[0].name
        arguments.insert(0, imported(command.opens)(getattr(arguments[0], first_word)))
    # Options are checked before this: a typo must not cost the seconds that torch takes.
    with loading_shown(sys.stderr), Interrupts() as interrupts, quick_imports():
        function = _function_of(command)
    # Python may have dropped a Ctrl+C that came in the middle of an import.
    interrupts.check()
    with using(_plugin(getattr(arguments[-1], "plugin", None))):
        return function(*arguments)


def _function_of(command: Command) -> Callable[..., int]:
    try:
        function: Callable[..., int] = imported(command.function)
    except ModuleNotFoundError as error:
        if (extension := missing_extension(error)) is None:
            raise
        raise UserError(
            f"ftkit {command.name} needs ftkit's extension {extension}, which is missing.\n"
            "Install all of ftkit again."
        ) from None
    return function


def _plugin(named: str | None) -> Plugin | None:
    """Open the plugin that --plugin names, shown while it is read; None: it names none."""
    if named is None:
        return None
    # Here, because few commands need the 40 ms of rich.
    from ftkit.utils.console.display import Display

    refused: UserError
    with (
        Display(None, stream=sys.stderr) as display,
        display.phase(f"reading the plugin {named}", brief=True),
    ):
        try:
            return open_plugin(named)
        except UserError as error:  # which says all there is to say
            refused = error
    raise refused
