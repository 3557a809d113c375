"""`python -m ftkit.utils.confined_child PARENT DESCRIPTOR`: the child of `confined`.

The file behind the descriptor holds the request, and in the end the answer.
"""

import importlib
import json
import os
import resource
import sys
from typing import Any

from ftkit.errors import UserError
from ftkit.utils.confinement import OutOfTime, set_limits, without_limits
from ftkit.utils.damaged_files import DamagedFile
from ftkit.utils.imports import prepare_imports, quick_imports
from ftkit.utils.process import begin_as_child
from ftkit.utils.progress import set_verbosity


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    module, _, name = request["function"].partition(":")
    # Imported before the limits hold: torch alone takes more than a small file justifies.
    with quick_imports():
        function = getattr(importlib.import_module(module), name)
    set_limits(request["seconds"], request["memory_bytes"])
    try:
        return {"result": function(*request["arguments"])}
    except UserError as error:
        return {"error": str(error), "is_damaged": isinstance(error, DamagedFile)}
    # A message and no traceback: a file that exhausts the limits is refused like a damaged one.
    except OutOfTime:
        most = f"{request['seconds']:.0f} s of processor time"
    except Exception as error:
        # torch raises a RuntimeError with these words.
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        most = f"{request['memory_bytes'] / 2**30:.1f} GiB of memory"
    size = f"{request['size'] / 2**20:,.1f} MiB"
    reason = (
        f"{request['file']} is damaged, or made to exhaust this machine: reading it takes more "
        f"than {most}, the limit for its size ({size}). Get a fresh copy of it."
    )
    return {"error": reason, "is_damaged": True}


def _serve(descriptor: int) -> None:
    # A crash at the limits is expected here: it leaves no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    prepare_imports()
    with os.fdopen(descriptor, "r+b") as exchange:
        exchange.seek(0)
        request = json.loads(exchange.read())
        set_verbosity(request["verbosity"])
        answer = _answer(request)
        # The answer may be as large as the limit has room for.
        with without_limits():
            sys.stdout.flush()
            exchange.seek(0)
            # The request may be longer than the answer.
            exchange.truncate()
            exchange.write(json.dumps(answer).encode())


if __name__ == "__main__":
    begin_as_child()
    try:
        _serve(int(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has ended: see ftkit.cli.app
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as if SIGPIPE had ended it: 128 + 13
