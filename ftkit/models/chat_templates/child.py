"""The process that renders templates.

It runs as `python -m ftkit.models.chat_templates.child PARENT DESCRIPTOR LASTS`.
It answers the requests of its parent, one after the other, until the parent closes the connection.
The kernel bounds it, whatever a template calls: timers of CPU time end it, and memory
beyond `_MOST_BYTES` raises MemoryError or ends it too. It imports no torch.
"""

import json
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ftkit.models.chat_templates.confined import begin_call, end_call, run_confined
from ftkit.models.chat_templates.sandbox import NotRendered
from ftkit.utils.process import die_with_parent, stop_with_parent

_MOST_BYTES = 2**30
"""Most address space beyond what the process has when it starts."""


def serve(connection: "Connection[Any, Any]") -> None:
    """Answer requests until the connection is closed.

    A request is a pickled tuple, which the parent alone writes: CPU seconds, a function, and its
    argument tuples, each pickled. For each of these there is a reply in JSON: {"result"}, or why
    there is none, {"reason", "line"}, or {"failed"}, the traceback of a mistake of ours.
    """
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        # Safe to unpickle: at the other end of the connection is the process that started this one.
        seconds, function, calls = pickle.loads(request)  # noqa: S301
        for arguments in calls:
            begin_call(seconds)
            connection.send_bytes(_reply(function, arguments))
        end_call()


def _reply(function: Callable[..., object], arguments: bytes) -> bytes:
    try:
        result = run_confined(function, *pickle.loads(arguments))  # noqa: S301
        # JSON, not a pickle: the parent never unpickles what a template may have influenced.
        return json.dumps({"result": result}).encode()
    except MemoryError:
        reply: dict[str, object] = {
            "reason": f"it needs more than {_MOST_BYTES // 2**20:,} MiB of memory"
        }
    except NotRendered as refusal:
        reply = {"reason": str(refusal), "line": refusal.line}
    except Exception:
        reply = {"failed": traceback.format_exc()}
    return json.dumps(reply).encode()


def _main() -> None:
    parent, descriptor, lasts = map(int, sys.argv[1:])
    # The parent may have blocked or ignored them; their default action ends this process.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGPROF, signal.SIGVTALRM):
        signal.signal(number, signal.SIG_DFL)
    (die_with_parent if lasts else stop_with_parent)(parent)
    # Everything is imported by now: the bound is on what templates add.
    _limit(resource.RLIMIT_AS, _address_space() + _MOST_BYTES)
    # A template that crashes this process must not leave a core dump.
    _limit(resource.RLIMIT_CORE, 0)
    # Python's output when a template makes it crash helps nobody: the parent reports the reason.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    serve(Connection(descriptor))


def _address_space() -> int:
    """Bytes that this process has mapped; libraries preloaded by the environment may map much."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return 0
    return pages * resource.getpagesize()


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    _main()
