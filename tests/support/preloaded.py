"""The command run over and over from one process that has imported everything already.

Imports take longer than a tiny run. So a server imports once and forks: a supervisor for each
command, and from that its ranks, which are started as `ftkit.launch.ranks` starts them but for the
interpreter. The server has one thread, so there is no lock that a fork could leave taken.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
from warm import QUIET

TIMEOUT_S = 120
SUPERVISOR = -1
"""Among ranks with faults, the process that starts them."""


class Attempt:
    """A command under way, or at its end."""

    def __init__(self, server: "Preloaded", pid: int, output: Path) -> None:
        self.pid, self._server, self._output = pid, server, output
        self.code: int | None = None

    @property
    def output(self) -> str:
        """Output of the attempt."""
        return self._output.read_text()

    def ranks(self) -> list[psutil.Process]:
        """Ranks of the attempt by number, once they are there."""
        try:
            return sorted(psutil.Process(self.pid).children(), key=lambda rank: rank.pid)
        except psutil.NoSuchProcess:
            return []

    def wait(self) -> int:
        """Wait for the end; the exit code, negative for a signal."""
        if self.code is None:
            self.code = self._server.read()
        return self.code

    def running(self) -> bool:
        if self.code is None and self._server.readable():
            self.wait()
        return self.code is None

    def kill(self, processes: list[psutil.Process]) -> int:
        """Kill -9; returns once nothing of the command is left, with its exit code."""
        everyone = self.ranks()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        code = self.wait()
        psutil.wait_procs(everyone, timeout=TIMEOUT_S)
        return code


class Preloaded:
    """The server, seen from a test."""

    def __init__(self, process: "subprocess.Popen[str]", directory: Path) -> None:
        self._process, self._directory = process, directory
        self._count = 0

    def start(self, *arguments: object, faults: dict[int, list[Any]] | None = None) -> Attempt:
        """Start a command.

        Args:
            arguments: after `ftkit`.
            faults: for some ranks the name of a function in faults.py, and its arguments.
        """
        self._count += 1
        output = self._directory / f"{self._count}.log"
        request = {
            "arguments": [str(argument) for argument in arguments],
            "output": str(output),
            "faults": faults or {},
        }
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Attempt(self, self.read(), output)

    def run(self, *arguments: object, faults: dict[int, list[Any]] | None = None) -> Attempt:
        """Run a command to its end."""
        attempt = self.start(*arguments, faults=faults)
        attempt.wait()
        return attempt

    def read(self) -> int:
        assert self._process.stdout
        return int(self._process.stdout.readline())

    def readable(self) -> bool:
        return bool(select.select([self._process.stdout], [], [], 0)[0])  # type: ignore[type-var]


@contextmanager
def preloaded(directory: Path, environment: dict[str, str]) -> Iterator[Preloaded]:
    """A server that does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=directory,
        env=environment | QUIET,
    )
    try:
        yield Preloaded(process, directory)
    finally:
        process.kill()
        process.communicate()


class _Forked:
    """A forked process with the part of Popen's interface that the supervisor uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _forked(body: Callable[[], int]) -> int:
    """Run the body in a new process, whose id is returned."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = body()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _write_to(output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _serve() -> NoReturn:
    from ftkit.utils.imports import hidden, quick_imports, without_hub_kernels
    from ftkit.utils.process import die_with_parent

    answers = os.dup(1)
    os.dup2(2, 1)  # where a library writes when it is imported, nobody expects an answer
    without_hub_kernels()
    with quick_imports(), hidden("sklearn"):  # it brings pyarrow, whose allocator has a thread
        import faults
        from warm import import_libraries, make_parsers

        import_libraries()
        make_parsers()

        # imported late by the command
        from ftkit.cli import app
        from ftkit.errors import EXIT_BY_SIGNAL
        from ftkit.launch import ranks, shortage
        from ftkit.launch import supervisor as supervisor_module  # noqa: F401
        from ftkit.recipe import devices
        from ftkit.runs.directory import RunDirectory
        from ftkit.training import rank as training_rank

    os.dup2(answers, 1)
    os.close(answers)
    die_with_parent(os.getppid())
    shortage._ADVICE_S = 600.0  # beside other tests it takes several times as long as by itself
    devices._child = lambda *words, **_: devices._answer(words)  # torch is here already
    training_rank._note_prediction = lambda *_: None  # takes longer than such a run
    assert threading.active_count() == len(list(Path("/proc/self/task").iterdir())) == 1

    def suffer(request: dict[str, Any], rank: int) -> None:
        if str(rank) in request["faults"]:
            name, *arguments = request["faults"][str(rank)]
            getattr(faults, name)(*arguments)

    def start_rank(
        request: dict[str, Any], run: RunDirectory, rank: int, placement: dict[str, str]
    ) -> _Forked:
        supervisor, terminal = os.getpid(), os.dup(1)
        run.rank(rank).path.mkdir(exist_ok=True)

        def body() -> int:
            os.setpgid(0, 0)
            die_with_parent(supervisor)
            for number in (*EXIT_BY_SIGNAL, signal.SIGTSTP):
                signal.signal(number, signal.SIG_DFL)
            for link in list(Path("/proc/self/fd").iterdir()):  # a new program would not have it
                if link.exists() and link.resolve() == run.lock.resolve():
                    os.close(int(link.name))
            os.environ.update(placement)
            _write_to(run.rank(rank).output)
            suffer(request, rank)
            with os.fdopen(terminal, "w") as stream:
                return training_rank.run_rank(run.job, stream)

        pid = _forked(body)
        os.close(terminal)
        return _Forked(pid)

    def run_command(request: dict[str, Any]) -> int:
        die_with_parent(server)
        _write_to(Path(request["output"]))
        ranks.GRACE_S = 0.5
        ranks._start = lambda *arguments: start_rank(request, *arguments)
        suffer(request, SUPERVISOR)
        sys.argv = ["ftkit", *request["arguments"]]
        app.main()
        return 0

    server = os.getpid()
    for line in sys.stdin:
        request = json.loads(line)
        pid = _forked(lambda: run_command(request))  # noqa: B023
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _serve()
