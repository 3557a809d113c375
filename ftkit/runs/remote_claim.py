"""The claim on a url: one run at a time, held by an object that the run renews.

Claims are numbered objects below .run. The one with the highest number counts, and each is created
on the condition that it is not there yet, which the storage decides: of two that want the same
number one gets it. So whoever finds a claim that nobody renews takes the next number, and a holder
that was away for long sees that it has lost. Clocks of different machines are not compared: whether
a claim is renewed is watched.
"""

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from ftkit.console.formatting import utc_now
from ftkit.errors import UserError
from ftkit.remote.background import begun, ends
from ftkit.remote.fetch import Listing
from ftkit.remote.objects import Objects, StorageError

RENEWED_EVERY_S = 15.0
EXPIRES_S = 60.0
"""A claim that was not renewed for as long has no holder any more."""
_CERTAINLY_OLD_S = 3600.0
"""One with a time so long ago need not be watched, whatever the clocks say."""
_GIVEN_BACK_WITHIN_S = 10.0
"""Then it is left to expire: the command ends."""
_SURELY_SILENT_S = 5 * EXPIRES_S
"""One that is as old when it is first seen is not shown as that of a run at work; clocks may
differ by minutes."""
_PREFIX = ".run/claim-"
_NAME = re.compile(rf"{re.escape(_PREFIX)}([0-9]{{6}})\.json")


@dataclass(frozen=True, kw_only=True)
class ClaimHolder:
    """Who holds a claim, as its object says."""

    session: str
    """Of one start of the command."""
    host: str
    """Name of its machine."""
    machine: str
    """What no other machine or container has while it runs."""
    process: int
    """Its process id there."""
    process_started_s: float
    """Which another process of that id would not have."""
    renewed_at: str
    """UTC."""

    @classmethod
    def here(cls) -> "ClaimHolder":
        """This process."""
        return cls(
            session=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=_machine(),
            process=os.getpid(),
            process_started_s=psutil.Process().create_time(),
            renewed_at=utc_now(),
        )

    @classmethod
    def parse(cls, content: bytes) -> "ClaimHolder | None":
        """What an object says; None: nothing that can be read."""
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError):
            return None

    def to_bytes(self) -> bytes:
        """What the object says."""
        return json.dumps(asdict(self)).encode()

    @property
    def is_dead(self) -> bool:
        """Whether it was a process of this machine that has ended."""
        if self.machine != _machine():
            return False
        try:
            return psutil.Process(self.process).create_time() != self.process_started_s
        except psutil.NoSuchProcess:
            return True

    @property
    def age_s(self) -> float:
        """Since it was renewed, by two clocks."""
        with suppress(ValueError):
            return time.time() - datetime.fromisoformat(self.renewed_at).timestamp()
        return 0.0

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class RemoteClaim:
    """The claim of this process on a url, renewed by a thread."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._holder = ClaimHolder.here()
        self._name = ""
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost_to: str | None = None
        """Who has taken it over, if somebody has: nothing more may be written then."""
        self.former: ClaimHolder | None = None
        """Whose claim it was, if that has ended without giving it back."""
        self.is_certain = True
        """Whether the storage keeps two runs apart; else nothing but luck does."""

    def take(self, on_waiting: Callable[[str], None]) -> None:
        """Claim the url.

        Args:
            on_waiting: told, once, that a holder is watched which may be gone.

        Raises:
            UserError: another run is at work there.
            StorageError: the storage does not answer.
        """
        while True:
            number, content = self._newest()
            if content is not None:
                self._refuse_living(number, content, on_waiting)
                self.former = ClaimHolder.parse(content)
            name = _name_of(number + 1)
            if self._create(name):
                break
        self._name = name
        older = [n for n in self._objects.listing() if _NAME.fullmatch(n) and n < name]
        self._objects.delete(older)
        self._thread = begun(self._renew)

    def release(self) -> None:
        """Give the claim back; where the storage does not answer soon, it expires."""
        self._ends.set()
        deadline_s = time.monotonic() + _GIVEN_BACK_WITHIN_S
        ends(begun(self._give_back), lambda: time.monotonic() > deadline_s)

    def _give_back(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._name and self.lost_to is None:
            with suppress(StorageError):
                self._objects.delete([self._name])

    def check(self) -> bool:
        """Whether this process still holds it, by what the storage says now."""
        _, content = self._newest()
        if content is None:  # somebody has tidied up
            self._objects.write(self._name, self._holder.to_bytes())
            return True
        holder = ClaimHolder.parse(content)
        if holder is None or holder.session != self._holder.session:
            self.lost_to = str(holder or "another process")
            return False
        return True

    def _create(self, name: str) -> bool:
        content = self._holder.to_bytes()
        try:
            if not self._objects.create(name, content):
                return False
            # A storage that does not know conditions overwrites what is there.
            probe = content + b"\n"
            if self._objects.create(name, probe):
                self._objects.write(name, content)
                self.is_certain = False
        except StorageError:
            # Some refuse the condition itself; those that refuse all writes do so here, too.
            self._objects.write(name, content)
            self.is_certain = False
        return True

    def _newest(self) -> tuple[int, bytes | None]:
        found = [match for name in self._objects.listing() if (match := _NAME.fullmatch(name))]
        if not found:
            return 0, None
        newest = max(found, key=lambda match: match[1])
        try:
            return int(newest[1]), self._objects.read(newest[0])
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # given back just now
                return int(newest[1]), None
            raise

    def _refuse_living(
        self, number: int, content: bytes, on_waiting: Callable[[str], None]
    ) -> None:
        """Return once the holder of a claim is certainly gone.

        Raises:
            UserError: it lives.
        """
        holder = ClaimHolder.parse(content)
        if holder is not None and (holder.is_dead or holder.age_s > _CERTAINLY_OLD_S):
            return
        who = str(holder or "another process")
        is_here = holder is not None and holder.machine == _machine()
        if not is_here:
            on_waiting(
                f"{self._objects.url} is claimed by {who}: watching for up to {EXPIRES_S:g} s "
                "whether it is still at work"
            )
            deadline_s = time.monotonic() + EXPIRES_S
            while time.monotonic() < deadline_s:
                time.sleep(1.0)
                if self._newest() != (number, content):
                    break
            else:
                return
            if self._newest()[1] is None:  # it has ended
                return
        raise UserError(
            f"out_dir {self._objects.url} belongs to a run that is still at work: {who}. "
            "Wait for it, or try another --out_dir."
        )

    def _renew(self) -> None:
        while not self._ends.wait(RENEWED_EVERY_S):
            self._holder = ClaimHolder(**asdict(self._holder) | {"renewed_at": utc_now()})
            with suppress(StorageError):  # the next time, or others take it for dead
                if not self.check():
                    return
                if not self._ends.is_set():
                    self._objects.write(self._name, self._holder.to_bytes())


class ClaimWatch:
    """Whether somebody holds a url, as others see it who look again and again."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._seen: str | None = None
        self._changed_s = 0.0
        self._is_alive = False

    def look(self, listing: Listing) -> tuple[bool, bool]:
        """Whether there is a claim, and whether its holder is there still.

        Args:
            listing: what lies at the url.

        Raises:
            StorageError: the storage does not answer.
        """
        names = [name for name in listing if is_claim(name)]
        if not names:
            self._seen = None
            return False, False
        newest = max(names)
        version = f"{newest} {listing[newest].version}"
        if version != self._seen:
            holder = ClaimHolder.parse(self._objects.read(newest))
            is_first, self._seen, self._changed_s = self._seen is None, version, time.monotonic()
            is_old = is_first and holder is not None and holder.age_s > _SURELY_SILENT_S
            self._is_alive = holder is not None and not holder.is_dead and not is_old
        elif time.monotonic() - self._changed_s > EXPIRES_S or self._holder_died(newest):
            self._is_alive = False
        return True, self._is_alive

    def _holder_died(self, name: str) -> bool:
        holder = ClaimHolder.parse(self._objects.read(name))
        return holder is not None and holder.is_dead


def is_claim(name: str) -> bool:
    """Whether an object says who is at work."""
    return _NAME.fullmatch(name) is not None


def _name_of(number: int) -> str:
    return f"{_PREFIX}{number:06}.json"


def _machine() -> str:
    """What tells this machine from others that may have the same name, also from containers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    known = boot.read_text().strip() if boot.exists() else hex(uuid.getnode())
    try:
        return f"{known}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return known
