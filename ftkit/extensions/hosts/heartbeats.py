"""Heartbeats of the supervisors that torchrun or SLURM started: they notice a lost machine.

A collective with a lost machine waits for half an hour, because a rank may be busy for minutes, as
with a save. Supervisors are never busy, so their silence means that they are gone.
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
"""Interval of heartbeats, and of polls of those of others."""
# Together with BEAT_S, 90 s.
MISSED_BEATS = 18
"""Polls in a row without a new heartbeat, after which a supervisor counts as gone."""


class Silence:
    """Counts the polls in a row in which others were silent.

    Polls, not seconds: no clock is compared with that of another machine, and a process that is
    suspended, perhaps together with all others, does not count meanwhile.
    """

    def __init__(self) -> None:
        self._heard: Mapping[int, int] = {}
        self._silent: dict[int, int] = {}

    def look(self, heard: Mapping[int, int]) -> int | None:
        """Compare the heartbeats with those of the last poll.

        Args:
            heard: heartbeats so far, by rank, of those still running.

        Returns:
            A rank that has been silent for too long, if there is one.
        """
        silent = {rank for rank, beats in heard.items() if beats == self._heard.get(rank)}
        # A heartbeat resets the count: only ranks that are silent now are carried on.
        self._silent = {rank: self._silent.get(rank, 0) + 1 for rank in silent}
        self._heard = dict(heard)
        return next((r for r, looks in self._silent.items() if looks >= MISSED_BEATS), None)


class Heartbeats:
    """Sends the heartbeat of this supervisor inside the block, and watches those of others.

    Rank 0 watches all others, and they watch rank 0.
    """

    def __init__(
        self,
        store: SharedStore,
        rank: int,
        watched: Mapping[int, str],
        on_silence: Callable[[int, str], None],
    ) -> None:
        """Start nothing yet; the block does.

        Args:
            store: the TCPStore of all supervisors.
            rank: of this supervisor.
            watched: names of the machines of others, by rank.
            on_silence: called in a thread, once, with a rank that is gone and a message.
        """
        self._address = store.host, store.port
        self._rank, self._watched, self._on_silence = rank, watched, on_silence
        self._heard = dict.fromkeys(watched, 0)
        self._leaving = threading.Event()
        # Requests to the store may hang forever if the machine of rank 0 is frozen. So another
        # thread, which sends none, decides who is gone.
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
            thread.join(timeout=BEAT_S)  # it may hang in the store

    def _talk(self) -> None:
        with suppress(dist.DistError):  # the store ended with rank 0
            # A connection of its own: calls on one wait for each other.
            store = dist.TCPStore(  # type: ignore[attr-defined]
                *self._address, is_master=False, timeout=timedelta(seconds=BEAT_S * MISSED_BEATS)
            )
            while not self._leaving.is_set():
                store.add(_beats(self._rank), 1)
                # A supervisor that ended in an orderly way is not missed.
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
    """Key: a supervisor has ended in an orderly way."""
    return f"ended-{rank}"


def silence_text(host: str, seconds: float) -> str:
    """Message about a machine that has been silent for this long."""
    silent = f"{host} has sent no heartbeat for {seconds:g} s"
    return f"{silent}: the machine is gone, frozen or cut off from the others"


def beats_of(store: SharedStore, rank: int) -> int:
    """Heartbeats of a supervisor so far."""
    # Not `get`, which would wait for a key that is not there yet.
    return int(store.add(_beats(rank), 0))


def _beats(rank: int) -> str:
    return f"beats-{rank}"
