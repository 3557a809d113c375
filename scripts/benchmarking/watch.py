"""A watched process: when its steps ended, and how much memory its largest process took.

All programs are watched in the same way. Memory is a process's own (RssAnon and RssShmem of /proc):
files mapped into memory, such as weights, can be dropped and are not counted.
"""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

MARK = "benchmark: "
"""Prefix of the lines of a program's output that are for the benchmark; JSON follows it."""
POLL_S = 0.02
FAMILY_POLL_S = 0.5
STRIPPED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that are removed, so that every program chooses its number of threads."""

OWN_MEMORY = ("RssAnon", "RssShmem")
"""Fields of /proc/PID/status for memory that no file backs."""

Event = dict[str, Any]


@dataclass
class Watched:
    """Observations of a process from its start to its last step."""

    exit_code: int | None = None
    """Exit code; None: it took too long and was ended."""
    events: list[tuple[float, Event]] = field(default_factory=list)
    """Events that it reported to the benchmark, with the seconds since its start."""
    host_bytes: int = 0
    """Highest memory of the largest of its processes."""
    output: str = ""
    """The rest of its output."""


def watch(
    command: Sequence[str | Path],
    *,
    limit_s: float,
    directory: Path,
    look: Callable[[], list[Event]] = list,
    environment: Mapping[str, str] | None = None,
) -> Watched:
    """Run a command and watch it.

    Args:
        command: what to run.
        limit_s: seconds after which it is ended.
        directory: where it runs.
        look: called every few milliseconds; returns new events from elsewhere than its output.
        environment: variables beside those of this process.
    """
    seen = Watched()
    variables = {key: value for key, value in os.environ.items() if key not in STRIPPED}
    variables |= {"PYTHONUNBUFFERED": "1", **(environment or {})}
    start_s = time.perf_counter()
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=directory,
        env=variables,
        text=True,
        errors="replace",
    )
    lines: list[str] = []
    # In a thread, so that each line gets its time when it comes, and the pipe never fills.
    reader = threading.Thread(target=_read, args=(process, seen, lines, start_s))
    reader.start()
    try:
        _follow(process, seen, look, start_s, limit_s)
    finally:
        if process.poll() is None:  # it took too long, or the benchmark was interrupted
            end(process.pid)
        process.wait()
        reader.join()
    seen.events += [(time.perf_counter() - start_s, event) for event in look()]
    seen.output = "".join(lines)
    return seen


def _follow(
    process: "subprocess.Popen[str]",
    seen: Watched,
    look: Callable[[], list[Event]],
    start_s: float,
    limit_s: float,
) -> None:
    """Observe a process until it ends or the limit is reached."""
    family, family_at_s = [process.pid], 0.0
    while process.poll() is None:
        now_s = time.perf_counter()
        if now_s - start_s > limit_s:
            return
        # Rarely, because psutil looks through all processes of the machine for children.
        if now_s - family_at_s > FAMILY_POLL_S:
            family, family_at_s = [one.pid for one in _family(process.pid)], now_s
        seen.host_bytes = max(seen.host_bytes, *(_host_bytes(pid) for pid in family), 0)
        for event in look():
            event["cpu_s"] = _cpu_s(_family(process.pid))
            seen.events.append((time.perf_counter() - start_s, event))
        time.sleep(POLL_S)
    seen.exit_code = process.returncode


def own_bytes(python: Path, program: str, directory: Path) -> int:
    """Own memory of a process after these imports, in bytes."""
    report = (
        "\nlines = [line.partition(':') for line in open('/proc/self/status')]"
        f"\nown = [value for key, _, value in lines if key in {OWN_MEMORY}]"
        "\nprint(sum(int(value.split()[0]) * 1024 for value in own))"
    )
    done = subprocess.run(
        [python, "-c", program + report], capture_output=True, text=True, cwd=directory, check=True
    )
    return int(done.stdout.splitlines()[-1])


def end(pid: int) -> None:
    """End a process and all its descendants."""
    family = _family(pid)
    for one in family:
        with suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(family, timeout=10)


def _read(
    process: "subprocess.Popen[str]", seen: Watched, lines: list[str], start_s: float
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            event = json.loads(line.removeprefix(MARK))
            event["cpu_s"] = _cpu_s(_family(process.pid))
            seen.events.append((time.perf_counter() - start_s, event))
        else:
            lines.append(line)


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _cpu_s(family: Sequence[psutil.Process]) -> float:
    """Time that processors have spent on processes, which other load hardly changes."""
    total_s = 0.0
    for one in family:
        with suppress(psutil.Error):
            times = one.cpu_times()
            total_s += times.user + times.system
    return total_s


def _host_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    pairs = (line.partition(":") for line in lines)
    return sum(int(value.split()[0]) * 1024 for key, _, value in pairs if key in OWN_MEMORY)
