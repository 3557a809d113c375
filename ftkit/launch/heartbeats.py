"""Heartbeats of the supervisors that torchrun or SLURM has started: one that vanishes is noticed.

A collective with a machine that is gone waits for half an hour, and rightly so: others may be busy
for minutes, as when they save. Supervisors are never busy, so their silence means something.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

SharedStore: TypeAlias = Any
"""torch.distributed.Store, which torch does not export for type checkers."""
BEAT_S = 5.0
"""Between two heartbeats, and between two looks at those of others."""
MISSED_BEATS = 18
"""Looks in a row without a new heartbeat after which a supervisor is taken to be gone."""


class Silence:
    """For how many looks in a row others have been silent.

    Looks are counted, not seconds: no clock is compared with that of another machine, and while
    this process stands still, perhaps together with all others, it does not look.
    """

    def __init__(self) -> None:
        self._heard: Mapping[int, int] = {}
        self._silent: dict[int, int] = {}

    def look(self, heard: Mapping[int, int]) -> int | None:
        """Compare with the look before.

        Args:
            heard: heartbeats so far, by rank; of those that are to be there still.

        Returns:
            The rank that has been silent for too long, if there is one.
        """
        silent = {rank for rank, beats in heard.items() if beats == self._heard.get(rank)}
        self._silent = {rank: self._silent.get(rank, 0) + 1 for rank in silent}
        self._heard = dict(heard)
        return next((r for r, looks in self._silent.items() if looks >= MISSED_BEATS), None)


class Heartbeats:
    """Inside the block this supervisor has a heartbeat, and watches those of others.

    Rank 0 watches all others, and they watch rank 0. One thread talks with the store, where it may
    wait for ever for a machine that is frozen. So a second one, which never waits, judges.
    """

    def __init__(
        self,
        store: SharedStore,
        rank: int,
        watched: Mapping[int, str],
        on_silence: Callable[[int, str], None],
    ) -> None:
        """Prepare.

        Args:
            store: the TCPStore that all supervisors are connected with.
            rank: of this supervisor.
            watched: names of the machines of others, by rank.
            on_silence: called in a thread, once, with a rank that is gone and what to say of it.
        """
        self._address = store.host, store.port
        self._rank, self._watched, self._on_silence = rank, watched, on_silence
        self._heard = dict.fromkeys(watched, 0)
        self._leaving = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._talk, self._judge)
        ]

    def __enter__(self) -> "Heartbeats":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        for thread in self._threads:
            thread.join(timeout=BEAT_S)  # it may be waiting for the store for ever

    def _talk(self) -> None:
        with suppress(dist.DistError):  # the store is gone: there is nobody to be heard any more
            # A connection of its own: calls on one wait for each other.
            store = dist.TCPStore(  # type: ignore[attr-defined]
                *self._address, is_master=False, timeout=timedelta(seconds=BEAT_S * MISSED_BEATS)
            )
            while not self._leaving.is_set():
                store.add(_beats(self._rank), 1)
                self._heard = {
                    rank: beats_of(store, rank)
                    for rank in self._watched
                    if not store.check([ended_key(rank)])
                }
                self._leaving.wait(BEAT_S)
            store.set(ended_key(self._rank), "")

    def _judge(self) -> None:
        silence = Silence()
        while not self._leaving.wait(BEAT_S):
            rank = silence.look(self._heard)
            if rank is not None:
                self._on_silence(rank, silence_text(self._watched[rank], MISSED_BEATS * BEAT_S))
                return


def ended_key(rank: int) -> str:
    """The key that a supervisor sets when it ends in an orderly way."""
    return f"ended-{rank}"


def silence_text(host: str, seconds: float) -> str:
    """What is said of a machine that has been silent for so long."""
    silent = f"{host} has not been heard of for {seconds:g} s"
    return f"{silent}: the machine is gone, frozen or cut off from the others"


def beats_of(store: SharedStore, rank: int) -> int:
    """Heartbeats of a supervisor so far."""
    return int(store.add(_beats(rank), 0))


def _beats(rank: int) -> str:
    return f"beats-{rank}"
