"""Texts in the store of the supervisors, over a connection of their own."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

JOB_TEXT = "job-text"
"""Key: the job of a run at a url, for hosts that do not see its file (`JobAnnouncement`)."""
LEAD = "lead"
"""Key: what the host of rank 0 tells all others (`Lead`)."""
STORE_GONE = dist.DistError
"""What the store raises when rank 0's supervisor, which holds it, is gone."""
POLL_S = 0.25
_PATIENCE_S = 60.0
_MOST_CHARACTERS = 2**20
"""Of one text; the store takes no more than 8 MiB."""


class SharedTexts:
    """Short texts by name that all supervisors see; one thread or several."""

    def __init__(self, store: Any) -> None:
        """Connect.

        Args:
            store: a TCPStore; calls on one connection wait for each other, so this makes another.
        """
        self._store = type(store)(
            store.host, store.port, is_master=False, timeout=timedelta(seconds=_PATIENCE_S)
        )

    def put(self, name: str, text: str) -> None:
        """Set a text."""
        self._store.set(name, text)

    def get(self, name: str) -> str | None:
        """A text; None: there is none of that name."""
        if not self._store.check([name]):
            return None
        found: str = self._store.get(name).decode()
        return found


def end_of_text(text: str) -> str:
    """A text that the store takes: its end, if it is too long."""
    return text[-_MOST_CHARACTERS:]


def index_of(first: int) -> str:
    """Key: what a host has put there (`HostIndex`), by the first of its ranks."""
    return f"host-{first}"


def file_of(rank: int, name: str) -> str:
    """Key: a file that a rank has left."""
    return f"file-{rank}-{name}"


def ready(first: int) -> str:
    """Key: the job file on a host, once it is there; empty: there will be none."""
    return f"ready-{first}"


def over(rank: int) -> str:
    """Key: a rank has ended, and all that it left can be seen."""
    return f"over-{rank}"
