"""Processes: how they start, pass on signals, and end with their parent."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ftkit.redaction import shown

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Thousands of tokens/s of the quick start on two cores, at rest / beside a busy process, by
# iterations: 1,000 14.7 / 9.0, 10,000 20.0 / 7.1, 300,000 20.3 / between 1.4 and 20.9. On another
# machine: 1,000 16.3 / 7.1, 10,000 17.7 / 2.8, sleeping at once 9.8 / 10.3.
AT_REST, BUSY = 10_000, 1_000
"""Iterations that OpenMP's threads spin before they sleep while they wait for each other, on a
machine with a core for each of them and on one without. libgomp's own 300,000 are as fast as 10,000
at rest, and may cost a busy machine most of its time."""
LOOKS, BETWEEN_LOOKS_S = 5, 0.002
"""Most polls of the machine's load, and the time between two."""


GRACE_S = 10.0
"""Seconds that a child may take to clean up after Ctrl+C."""


def own_program(module: str) -> list[str]:
    """Command line of a module that runs as a child of this process and ends with it.

    The module calls `begin_as_child` before all else. Words that follow are its own arguments. The
    thread that starts it has to outlive it.
    """
    # -P: modules in the current directory are the user's, not ours
    return [sys.executable, "-P", "-m", module, str(os.getpid())]


def begin_as_child() -> None:
    """Have this process end with the one that has started it with `own_program`."""
    # Before slow imports: the parent may end during them.
    die_with_parent(int(sys.argv.pop(1)))


def run_program(
    module: str,
    *words: str,
    exchange: IO[bytes],
    stdin: IO[bytes] | None = None,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | None = None,
) -> int:
    """Run a module in a child until that ends; return its exit code, or minus its signal.

    Requests to end are passed on to the child, which has some seconds to tidy up. Processes that
    it has started end with it, unless they have left its group.

    Args:
        module: begins with `begin_as_child`; its argument is the descriptor of `exchange`.
        words: further arguments.
        exchange: a file that both use.
        stdin: the standard input of the child; None: an empty one.
        stdout: its standard output; None: that of this process.
        stderr: its standard error; None: that of this process.

    Raises:
        KeyboardInterrupt: Ctrl+C has ended the child.
        SystemExit: another signal has.
    """
    with PassingOn(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        child = subprocess.Popen(
            [*own_program(module), str(exchange.fileno()), *words],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(exchange.fileno(),),
            process_group=0,  # Ctrl+C reaches it once, from here
        )
        try:
            signals.to(child)
            code = _wait(child, signals)
        finally:
            # Also where an exception ends the wait, and what a child that has ended has left.
            kill_group(child)
            child.wait()
    if signal.SIGINT in signals.received:
        raise KeyboardInterrupt
    if signals.received:
        raise SystemExit(128 + signals.received[0])
    return code


def _wait(child: "subprocess.Popen[bytes]", signals: "PassingOn") -> int:
    kill_at_s = None
    while True:
        try:
            # With a timeout, because a signal is only noted and does not end the wait.
            return child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            if signals.received and kill_at_s is None:
                kill_at_s = time.monotonic() + GRACE_S
            if kill_at_s is not None and time.monotonic() > kill_at_s:
                kill_group(child)


def kill_group(child: "subprocess.Popen[bytes]") -> None:
    """Kill a child that leads a process group, with all that it has started in it."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(child.pid, signal.SIGKILL)


def start_command(
    words: Sequence[str],
    output: IO[bytes] | None = None,
    *,
    result: IO[bytes] | int | None = None,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start `ftkit WORDS` as a child that gets SIGTERM, and so saves, when this process ends.

    It has a process group of its own: Ctrl+C and a notebook's interrupt reach this process only,
    which decides what it passes on.

    Args:
        words: of the command line.
        output: file for what it prints; None: that of this process.
        result: file for its standard output alone, or subprocess.PIPE.
        stdin: subprocess.PIPE, to send it input.
    """
    # -P: modules in the current directory are the user's, not ours
    command = [sys.executable, "-P", "-m", "ftkit.cli.child", str(os.getpid()), *words]
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=output if result is None else result,
        stderr=output if result is not None or output is None else subprocess.STDOUT,
        process_group=0,
    )


def launcher_starts_again() -> bool:
    """Return whether the launcher of this process restarts a run that has died."""
    variables = os.environ
    # torchrun sets the first in its ranks; Slurm the second in a job that it has requeued.
    return int(variables.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 or (
        "SLURM_RESTART_COUNT" in variables
    )


def print_line(text: str) -> None:
    """Print on stderr in one write: `print` makes two, between which other processes may write."""
    with suppress(OSError):  # the terminal may be gone, or the disk full
        sys.stderr.write(f"{shown(text)}\n")
        sys.stderr.flush()


@contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[[int, Any], None]]) -> Iterator[None]:
    """Handle signals inside the block; one that is ignored stays so, as nohup wants.

    Args:
        handlers: by signal; they get its number and a stack frame.
    """
    before = {number: signal.getsignal(number) for number in handlers}
    changed = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in changed:
            signal.signal(number, handlers[number])
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])


class PassingOn:
    """Inside the block, signals do not end this process: they are noted and passed on to a child.

    Ctrl+Z pauses the child together with this process. A signal that is ignored stays so. Outside
    the main thread nothing changes, because Python handles signals only there.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self.received: list[signal.Signals] = []
        """Signals so far, the first one first."""
        self._numbers = numbers
        self._waiting: deque[signal.Signals] = deque()
        self._child: subprocess.Popen[bytes] | None = None
        self._handlers = ExitStack()

    def __enter__(self) -> "PassingOn":
        if threading.current_thread() is threading.main_thread():
            handlers = dict.fromkeys(self._numbers, self._receive) | {signal.SIGTSTP: self._pause}
            self._handlers.enter_context(handling(handlers))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def to(self, child: "subprocess.Popen[bytes]") -> None:
        """Pass signals on to this child, also those received since the last child."""
        self._child = child
        self._pass_on()

    def _receive(self, number: int, _: object) -> None:
        self.received.append(signal.Signals(number))
        self._waiting.append(signal.Signals(number))
        self._pass_on()

    def _pass_on(self) -> None:
        while self._child is not None:
            # In one step: another signal may come between any two, and empty the queue.
            try:
                number = self._waiting.popleft()
            except IndexError:
                return
            self._child.send_signal(number)

    def _pause(self, _: int, __: object) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGTSTP)
        # Not SIGTSTP, whose handler is this function.
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._child is not None:
            self._child.send_signal(signal.SIGCONT)


class Interrupts:
    """Inside the block Ctrl+C raises KeyboardInterrupt, as usual, and is noted as well.

    Python raises it wherever it happens to be. In a finaliser or in the callback of a weak
    reference, which every import has, it is only printed as "Exception ignored in", and the program
    would continue. Outside the main thread nothing is noted.
    """

    def __init__(self, *, even_if_ignored: bool = False) -> None:
        """Note interrupts.

        Args:
            even_if_ignored: also where SIGINT is ignored, as in background processes of a shell
                without job control.
        """
        self._received = False
        self._before: Any = None
        ignored = (signal.SIG_IGN,) if even_if_ignored else ()
        self._overridden: tuple[Any, ...] = (signal.default_int_handler, *ignored)

    def __enter__(self) -> "Interrupts":
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) in self._overridden:
            self._before = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise the KeyboardInterrupt that Python could not deliver, if there is one."""
        if self._received:
            raise KeyboardInterrupt

    def sleep(self, seconds: float) -> None:
        """Sleep until the time is over or Ctrl+C is pressed; not at all if it was before."""
        # An interrupt that came before must not be slept through.
        self.check()
        time.sleep(seconds)

    def _receive(self, _: int, __: object) -> None:
        self._received = True
        raise KeyboardInterrupt


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however the parent ends.

    On systems without prctl nothing happens: there an orphan ends when it next writes to a pipe.

    Args:
        parent: its process id, as the parent itself gave it: it may have ended before this call.
    """
    if not sys.platform.startswith("linux"):
        return
    # A parent that ended before this request is noticed by the check after it.
    _request_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def stop_with_parent(parent: int) -> None:
    """Send this process one SIGTERM when its parent ends, however the parent ends.

    The kernel sends the signal when the thread that started this process ends, and again for each
    further thread of the parent that inherits it; only after the last one is there another parent.
    A second SIGTERM would end a run at once. A run does not take SIGUSR2 for a request to end.

    Args:
        parent: its process id, as the parent itself gave it: it may have ended before this call.
    """
    if not sys.platform.startswith("linux"):
        return

    def stop_if_orphaned(*_: object) -> None:
        if os.getppid() != parent:
            # Further ones would send a second SIGTERM.
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR2, stop_if_orphaned)
    _request_signal(signal.SIGUSR2)
    stop_if_orphaned()


def _request_signal(number: signal.Signals) -> None:
    """Have the kernel send this signal when the parent ends; see prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def cleaning_up_on_signals() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl+C does: through its finally clauses."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    return handling({signal.SIGTERM: leave, signal.SIGHUP: leave})


def turns_before_sleep(load: Path = Path("/proc/loadavg")) -> int:
    """Iterations to spin that suit the current load; see GOMP_SPINCOUNT in libgomp's manual.

    Args:
        load: the kernel's file, whose fourth word has the number of runnable threads.
    """
    for _ in range(LOOKS):  # a thread that wakes up for a moment must not count
        try:
            running = int(load.read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):  # not Linux
            return BUSY
        others = running - 1  # without this one
        if (os.cpu_count() or 1) - others >= len(os.sched_getaffinity(0)):
            return AT_REST
        time.sleep(BETWEEN_LOOKS_S)
    return BUSY
