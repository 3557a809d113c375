"""Rendering in a child process whose time and memory the kernel limits.

One process renders all templates of this one: it starts with the first of them, in about 0.1 s, and
ends with this process, or when a template exceeds a bound; then the next template starts another.
"""

import atexit
import json
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Pipe
from typing import Any

from ftkit.errors import UserError
from ftkit.models.chat_templates.sandbox import NotRendered
from ftkit.utils.process import own_program

MOST_SECONDS = 10.0
"""Most CPU time for one rendering; real ones take less than a thousandth."""
_TIMES_OF_CONVERSATION = 6
"""Multiple of that for all renderings of a conversation, of which each turn has two."""
_MOST_BYTES_OF_CALL = 2**27
"""Most bytes of a conversation, which has to fit in the memory of the process."""
_MOST_BYTES_AT_ONCE, _MOST_CALLS = 2**20, 256
"""Sent before the replies are read."""
_MOST_TRIES = 2
"""Most attempts of a call whose process ends: something else may have ended the first one."""


class Exceeded(NotRendered):
    """A template exceeds `MOST_SECONDS`, or makes the process end in another way."""


def run_confined(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in the child process.

    Args:
        function: what to call, of a module or bound to an object that can be pickled.
        arguments: for it.

    Returns:
        What it returns, as JSON has it: tuples are lists.

    Raises:
        NotRendered: the function raises it, or exceeds the bounds.
    """
    # This is the child already: no second one.
    if _State.seconds_here is not None:
        # Two timers, because each call restarts the one for a single rendering: the other one
        # bounds all renderings of a conversation.
        signal.setitimer(signal.ITIMER_PROF, _State.seconds_here)
        return function(*arguments)
    (result,) = _results(function, [_pickled(arguments)])
    if isinstance(result, NotRendered):
        raise result
    return result


def run_each_confined(
    function: Callable[[Any], Any], items: Iterable[object]
) -> Iterator[Any | NotRendered]:
    """Call a function with each of many items, as `run_confined`, without waiting for each alone.

    Raises:
        Exceeded: an item exceeds the bounds. Other refusals are yielded as results.
    """
    calls: list[bytes] = []
    for item in items:
        try:
            calls.append(_pickled((item,)))
        except NotRendered as refusal:
            # Results stay in the order of the items.
            yield from _results(function, calls)
            yield refusal
            calls = []
        if len(calls) == _MOST_CALLS or sum(map(len, calls)) > _MOST_BYTES_AT_ONCE:
            yield from _results(function, calls)
            calls = []
    yield from _results(function, calls)


def begin_call(seconds: float) -> None:
    """Bound what this process does next; from now on `run_confined` calls functions in it.

    Args:
        seconds: of CPU time for each function that `run_confined` calls.
    """
    _State.seconds_here = seconds
    # The kernel's action, not a handler: code in C may not return to Python for long.
    signal.setitimer(signal.ITIMER_VIRTUAL, _TIMES_OF_CONVERSATION * seconds)


def end_call() -> None:
    """Stop the timers, so that none ends this process while it waits for a request."""
    for timer in (signal.ITIMER_PROF, signal.ITIMER_VIRTUAL):
        signal.setitimer(timer, 0)


class _Died(Exception):
    """The process has ended; the text says how."""

    def __init__(self, returncode: int) -> None:
        super().__init__(
            signal.strsignal(-returncode) if returncode < 0 else f"exit code {returncode}"
        )
        self.returncode = returncode


class _Process:
    """The child process and the connection to it."""

    def __init__(self) -> None:
        # A new interpreter, not a fork: it has neither torch nor the memory of this process.
        self._connection, other = Pipe()
        # The kernel ends a child with the thread that started it, and only the main one lasts.
        lasts = threading.current_thread() is threading.main_thread()
        words = [str(other.fileno()), str(int(lasts))]
        with other:
            # A process group of its own: Ctrl+C reaches this process only.
            self._child = subprocess.Popen(
                [*own_program("ftkit.models.chat_templates.child"), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                process_group=0,
            )

    def replies(self, function: Callable[..., Any], calls: list[bytes]) -> Iterator[Any]:
        """Yield the reply to each call.

        Raises:
            _Died: the process has ended.
        """
        request = pickle.dumps((MOST_SECONDS, function, calls), pickle.HIGHEST_PROTOCOL)
        try:
            # The child reads the whole request before its first reply, so neither blocks the other.
            self._connection.send_bytes(request)
            for _ in calls:
                yield json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._connection.close()
            # Only the exit status tells which bound it was.
            raise _Died(self._child.wait()) from None

    def end(self) -> None:
        self._child.kill()
        self._connection.close()
        self._child.wait()

    def forget(self) -> None:
        """Leave the child to the process that started it, of which this one is a fork."""
        self._connection.close()
        self._child.returncode = 0  # or Popen would wait for a child that is not ours


class _State:
    """The child process of this process, and its lock."""

    # One request at a time: replies carry no number that would tell them apart.
    lock = threading.Lock()
    process: _Process | None = None
    seconds_here: float | None = None
    """CPU time of the bounded process itself."""


def _results(function: Callable[..., Any], calls: list[bytes]) -> list[Any | NotRendered]:
    replies: list[Any] = []
    tries = 0
    with _State.lock:
        # After a death, the call without a reply is tried once more: its process may have been
        # killed by somebody else.
        while len(replies) < len(calls):
            before = len(replies)
            try:
                _State.process = _State.process or _started()
                for reply in _State.process.replies(function, calls[before:]):
                    replies.append(reply)
            except _Died as death:
                _State.process = None
                if death.returncode == -signal.SIGPROF:
                    raise Exceeded(f"takes more than {MOST_SECONDS:g} s for one text") from None
                if death.returncode == -signal.SIGVTALRM:
                    most = _TIMES_OF_CONVERSATION * MOST_SECONDS
                    raise Exceeded(f"takes more than {most:g} s for one conversation") from None
                tries = tries + 1 if before == len(replies) else 1
                if tries == _MOST_TRIES:
                    raise Exceeded(f"ends the process that renders it ({death})") from None
            # Such as KeyboardInterrupt: later replies would be taken for those to the next request.
            except BaseException:
                _end()
                raise
    return [_result(reply) for reply in replies]


def _result(reply: dict[str, Any]) -> Any | NotRendered:
    if "failed" in reply:
        raise RuntimeError(f"in the process that renders chat templates:\n{reply['failed']}")
    if "reason" in reply:
        return NotRendered(reply["reason"], reply.get("line"))
    return reply["result"]


def _started() -> _Process:
    try:
        return _Process()
    except OSError as error:
        raise UserError(
            f"The process that renders chat templates cannot start: {error.strerror}.\n"
            "Free memory, or allow more processes and open files."
        ) from None


def _pickled(arguments: tuple[object, ...]) -> bytes:
    try:
        pickled = pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL)
    except RecursionError:
        raise NotRendered("the conversation is nested too deeply") from None
    if len(pickled) > _MOST_BYTES_OF_CALL:
        raise NotRendered(f"the conversation has more than {_MOST_BYTES_OF_CALL // 2**20} MiB")
    return pickled


@atexit.register
def _end() -> None:
    if _State.process is not None:
        _State.process.end()
        _State.process = None


def _forget() -> None:
    # Another thread may have held it, and does not exist in the fork.
    _State.lock = threading.Lock()
    if _State.process is not None:
        _State.process.forget()
        _State.process = None


os.register_at_fork(after_in_child=_forget)
