"""Python processes without the time for imports: forks of one that has imported the libraries.

Importing torch, Lightning, transformers and DeepSpeed takes longer than most runs of tests. A
server imports them once; programs that are started in it are forks of it, and so is every Python
program that one of them starts. Such a fork is like a new interpreter in what tests look at: where
a test has statements of its own in it, it imports ftkit's modules itself, after the start-up file
on its PYTHONPATH, and else has them as the server imported them, with the parsers of recipes that
it would make: commands and what they start have modules of their own, so that no rank has what its
command has changed in its own. It has no files open but those it
was given, and the command line and the environment that the system shows of it are its own. Only
its memory is not predicted at the end of a run, nor are answers to examples longer than a few
tokens, unless a test asks for both (`WHOLE`).
"""

import atexit
import ctypes
import functools
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

from command import PLAIN, command_environment

LIBRARIES = (
    "adlfs",
    "bitsandbytes",
    "deepspeed",
    "peft",
    "s3fs",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
)
"""What a run imports late, beside all that its modules import."""
OURS = "ftkit"
ROOM = 20_000
"""Bytes for the command line of a fork, and as many for its environment."""
PYTHON_FLAGS = {"-P", "-u"}
RANK = "ftkit.training.rank"
COMMANDS = ("ftkit.cli.app", "ftkit.cli.parser", "ftkit.launch.supervisor")
"""What the command imports for a run; other commands import the rest themselves."""
WHOLE = "TESTS_WHOLE_RANKS"
"""Variable with which a rank leaves nothing out. By default it does not predict its memory at the
end, which takes longer than a tiny run."""
MOST_TOKENS = 8
"""Longest answer of a rank to an example: a hundred tokens take as long as all else of such a run,
and a tiny model ends none before."""

_popen = subprocess.Popen
_execute = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


def import_libraries() -> None:
    """Those that are installed."""
    from ftkit.utils.imports import hidden

    for name in LIBRARIES:
        with suppress(ImportError), hidden("mlflow"):  # which DeepSpeed's autotuner would import
            import_module(name)
    with suppress(ImportError):  # DeepSpeed asks each rank several times, half a second each
        import cpuinfo

        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        cpuinfo.get_cpu_info()


def make_parsers() -> None:
    """Those of recipes, each of which takes a process as long as its imports of ours."""
    parsing = import_module("ftkit.recipe.parsing")
    for method in ("full", "lora"):
        parsing._parser(method)


# --- In the server and its forks ------------------------------------------------------------------


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Python programs are forks; others start as ever.

    Threads of the program that starts one are not in the fork, which uses nothing of theirs.
    """

    def _execute_child(self, *arguments: Any) -> None:
        call = _execute.bind(self, *arguments).arguments
        words = call["args"]
        if not isinstance(words, list | tuple) or str(words[0]) != sys.executable or call["shell"]:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        ends = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
        self.pid = os.fork()
        if not self.pid:
            _leave_with(lambda: _become(call, ends))
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(call[n] for n in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
            *(call[n] for n in ("errread", "errwrite")),
        )


def _become(call: Mapping[str, Any], ends: list[int]) -> None:
    """Be the program, from where a new interpreter would begin."""
    if call["process_group"] >= 0:
        os.setpgid(0, call["process_group"])
    if call["start_new_session"]:
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    given = [os.dup(end) if end >= 0 else None for end in ends]
    for number, end in enumerate(given):
        if end is not None:
            os.dup2(end, number)
    # A kernel has others in their place, and those of the server know what its files were.
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, f"__{name}__")
        new = open(  # noqa: SIM115 - as long as the program
            number,
            "w",
            encoding=old.encoding,
            errors=old.errors,
            buffering=1 if number == 2 else -1,
            closefd=False,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    kept = {0, 1, 2, *call["pass_fds"]}
    for link in list(Path("/proc/self/fd").iterdir()):
        if int(link.name) not in kept:
            with suppress(OSError):  # that of the list itself
                os.close(int(link.name))
    environment = call["env"]
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    if call["cwd"] is not None:
        os.chdir(call["cwd"])
    words = [str(word) for word in call["args"]]
    _show(words, dict(os.environ))
    for finaliser in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finaliser.atexit = False  # of the libraries, which the program may never import
    begun_by_server = not _FORKED
    _FORKED.append(os.getpid())
    ours = _modules_of_ours()
    if OURS in ours and ours[OURS] is _IMPORTED.get(OURS):
        # What the starting program has imported since: tables of rows refer to it.
        _IMPORTED.update(ours)
    for name in ours:
        del sys.modules[name]
    _interpret(words, begun_by_server)


def _modules_of_ours() -> dict[str, ModuleType]:
    return {name: m for name, m in sys.modules.items() if name.partition(".")[0] == OURS}


def _interpret(words: list[str], begun_by_server: bool) -> None:
    """Run a Python command line as a new interpreter does."""
    sys.orig_argv[:] = words
    rest = words[1:]
    flags = set()
    while rest[0] in PYTHON_FLAGS:
        flags.add(rest.pop(0))
    kind = rest.pop(0)
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = {"-c": "", "-m": str(Path.cwd())}.get(kind, str(Path(kind).parent))
    sys.path[:] = [*([] if "-P" in flags else [first]), *path, *_OWN_PATH]
    sys.modules.pop("sitecustomize", None)
    if not find_spec("sitecustomize"):
        if kind != "-c":
            sys.modules.update(_IMPORTED)
        elif rest[0] in PLAIN and begun_by_server:
            sys.modules.update(_OF_COMMANDS)
        if kind == "-m":
            sys.modules.pop(rest[0], None)  # it is run anew
    with suppress(ModuleNotFoundError):
        import_module("sitecustomize")
    if (kind, rest[0]) == ("-m", RANK) and WHOLE not in os.environ:
        memory: Any = import_module("ftkit.planning.memory")
        memory.predict_measured = _without_prediction
        evaluator: Any = import_module("ftkit.training.evaluator")
        evaluator.answer_records = _shortly(evaluator.answer_records)
    main = sys.modules["__main__"] = type(sys)("__main__")
    if kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


def _without_prediction(base: str, beside: str | None, plan: Any, measured: Any, *_: Any) -> Any:
    return measured


def _shortly(answer: Callable[..., Any]) -> Callable[..., Any]:
    def answered(*arguments: Any, max_new_tokens: int, **options: Any) -> Any:
        return answer(*arguments, max_new_tokens=min(max_new_tokens, MOST_TOKENS), **options)

    return answered


def _leave_with(program: Callable[[], None]) -> NoReturn:
    """Run it, and end this process as an interpreter ends."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _show(words: list[str], environment: dict[str, str]) -> None:
    """Have the system show this command line and environment of this process.

    They are written over those that the server began with, for which it has made room. Without a
    zero at its very end a command line is one that was overwritten, and ends at the first zero.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, variables, variables_end = map(int, fields[45:49])
    line = os.fsencode(" ".join(words))[: arguments_end - arguments - 2]
    _write(arguments, line.ljust(arguments_end - arguments - 1, b"\0") + b"x")
    pairs = os.fsencode("".join(f"{name}={value}\0" for name, value in environment.items()))
    _write(variables, pairs[: variables_end - variables].ljust(variables_end - variables, b"\0"))


def _write(address: int, text: bytes) -> None:
    ctypes.memmove(address, text, len(text))


def _serve(requests: socket.socket) -> NoReturn:
    """Start the requested processes; send back their ids and exit codes."""
    from ftkit.utils.imports import hidden, quick_imports, without_hub_kernels

    subprocess.Popen = Popen  # type: ignore[misc]
    without_hub_kernels()
    with quick_imports(), hidden("sklearn"):  # it brings pyarrow, whose allocator has a thread
        import_module(RANK)
        import_libraries()
        make_parsers()
        _IMPORTED.update(_modules_of_ours())
        for name in _IMPORTED:
            del sys.modules[name]
        for name in COMMANDS:
            import_module(name)
        make_parsers()
        _OF_COMMANDS.update(_modules_of_ours())
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork could leave a lock taken"
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork")
    running: list[tuple[subprocess.Popen[bytes], int]] = []
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([requests, ended], [], [])  # type: ignore[type-var]
        if ended in readable:
            os.read(ended, 1000)
            for process, status in list(running):
                if process.poll() is not None:
                    os.write(status, f"{process.returncode}\n".encode())
                    os.close(status)
                    running.remove((process, status))
        if requests in readable:
            text, files, _, _ = socket.recv_fds(requests, 2**20, 3)
            if not text:
                sys.exit()
            out, err, status = files
            process = Popen(**json.loads(text), stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            os.write(status, f"{process.pid}\n".encode())
            os.close(out)
            os.close(err)
            running.append((process, status))


_IMPORTED: dict[str, ModuleType] = {}
"""Modules of ours as the server has them; programs with statements of a test have others."""
_OF_COMMANDS: dict[str, ModuleType] = {}
"""Those of the command: others than those of what it starts, as it may change them."""
_FORKED: list[int] = []
"""Processes that led from the server to this one."""
_OWN_PATH = [
    path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(":")
]


# --- In the tests ---------------------------------------------------------------------------------


class Process:
    """A program that the server has started, with the part of Popen's interface that tests use."""

    def __init__(self, pid: int, status: IO[str], outputs: Sequence[IO[str]]) -> None:
        self.pid, self._told, self._outputs = pid, status, outputs
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._told.readline())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, ...]:
        """Wait for its end; what it wrote, nothing where that went to a file of the caller's."""
        self.wait(timeout)
        for output in self._outputs:
            output.seek(0)
        return tuple(output.read() for output in self._outputs)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The server of this process, which starts when it is first needed."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self._lock = threading.Lock()
        self._requests: socket.socket | None = None

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        cwd: Path | None = None,
        log: IO[str] | None = None,
    ) -> Process:
        """Start a Python program in a process group of its own.

        Args:
            command: `sys.executable` and what follows.
            environment: all of it.
            cwd: where it works; None: where this process does.
            log: what takes its output; None: `communicate` gives it.
        """
        outputs = [] if log else [tempfile.TemporaryFile("w+") for _ in "12"]  # noqa: SIM115
        reading, telling = os.pipe()
        request = {
            "args": [str(word) for word in command],
            "env": dict(environment) | QUIET,
            "cwd": str(cwd or Path.cwd()),
            "process_group": 0,
        }
        with self._lock:
            requests = self._requests or self._begin()
        out, err = (file.fileno() for file in outputs or (log, log))
        socket.send_fds(requests, [json.dumps(request).encode()], [out, err, telling])
        os.close(telling)
        status = os.fdopen(reading)
        return Process(int(status.readline()), status, outputs)

    def _begin(self) -> socket.socket:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = command_environment() | QUIET | {"DS_ACCELERATOR": "cpu", "ROOM": "x" * ROOM}
        with theirs:
            server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), "x" * ROOM],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.pid = server.pid
        atexit.register(self._end, server)
        return self._requests

    def _end(self, server: "subprocess.Popen[bytes]") -> None:
        assert self._requests is not None
        self._requests.close()
        server.wait()


QUIET = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Their threads would not outlive a fork."""
SERVER = Server()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    _serve(socket.socket(fileno=int(sys.argv[1])))
