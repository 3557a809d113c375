"""Processes that this one has started, found without looking at all of the machine's."""

from contextlib import suppress
from pathlib import Path

import psutil

LISTED = Path("/proc/thread-self/children").exists()
"""Whether the system lists the children of a process, as Linux does unless built without."""


def children(pid: int) -> list[int]:
    """Ids of the children of a process; of none if the process has ended."""
    if not LISTED:
        with suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(pid).children()]
        return []
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                found += map(int, (thread / "children").read_text().split())
    return found


def descendants(pid: int) -> list[psutil.Process]:
    """Children of a process, and theirs."""
    found = []
    for child in children(pid):
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(child))
            found += descendants(child)
    return found
