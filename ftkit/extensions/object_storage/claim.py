"""Claim on a url: one run at a time holds it, through an object that the run keeps renewing.

Claims are numbered objects below .run, and the highest number counts. A run that finds a claim
which nobody renews takes the next number; a holder that comes back after a long time sees that it
has lost.
"""

import json
import math
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

from ftkit.errors import UserError
from ftkit.extensions.object_storage.background import begun, ends
from ftkit.extensions.object_storage.objects import Objects
from ftkit.extensions.object_storage.replica import Listing
from ftkit.utils.console.formatting import utc_now
from ftkit.utils.damaged_files import DamagedFile, reading
from ftkit.utils.hardware import boot_id
from ftkit.utils.json_values import from_json
from ftkit.utils.url_files import StorageError

# Four times before it expires: a renewal that fails costs nothing.
RENEWED_EVERY_S = 15.0
EXPIRES_S = 60.0
"""A claim that was not renewed for this long has lost its holder."""
_LOOK_S = 1.0
_NOTICE_EVERY_LOOKS = 15
_MOST_BYTES = 2**16
"""A larger object is not one of our claims, and is not read."""
_RELEASED_WITHIN_S = 10.0
"""After that it is left to expire, so that the command can end."""
_LOOKS_SILENT_S = 5 * EXPIRES_S
"""A claim that seems this old, by two clocks, is watched before its run is shown as running."""
_PREFIX = ".run/claim-"
_NAME = re.compile(rf"{re.escape(_PREFIX)}([0-9]{{6}})\.json")


@dataclass(frozen=True, kw_only=True)
class ClaimHolder:
    """The process that holds a claim; content of its object."""

    session: str
    """Unique for each start of the command."""
    host: str
    """Name of its machine."""
    machine: str
    """Id that no other machine or container has while it runs."""
    process: int
    """Its process id there."""
    process_started: float
    """When it started, since boot; distinguishes it from a later process with the same id."""
    renewed_at: str
    """ISO 8601, UTC."""

    @classmethod
    def here(cls) -> "ClaimHolder":
        """Return the holder that this process is."""
        return cls(
            session=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=_machine(),
            process=os.getpid(),
            process_started=_started(os.getpid()),
            renewed_at=utc_now(),
        )

    @classmethod
    def parse(cls, content: bytes) -> "ClaimHolder | None":
        """Read the content of a claim; None: it is damaged, or of another version."""
        try:
            with reading("a claim", "a JSON object that says which process holds it"):
                holder = from_json(cls, json.loads(content))
                assert isinstance(holder, cls), "not an object"
                datetime.fromisoformat(holder.renewed_at)
        except DamagedFile:
            return None
        return holder

    def to_bytes(self) -> bytes:
        """Content of the object."""
        return json.dumps(asdict(self)).encode()

    @property
    def is_dead(self) -> bool:
        """True if it was a process of this machine, and has ended."""
        if self.machine != _machine():
            return False
        # A later process may have the same id, but not the same start.
        return _started(self.process) != self.process_started

    @property
    def seems_silent(self) -> bool:
        """True if it was renewed long ago by two clocks, either of which may be wrong."""
        renewed_s = datetime.fromisoformat(self.renewed_at).timestamp()
        return time.time() - renewed_s > _LOOKS_SILENT_S

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class RemoteClaim:
    """Claim of this process on a url; a thread renews it."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._holder = ClaimHolder.here()
        self._name = ""
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost_to: str | None = None
        """The process that took it over, if one did; nothing more may be written then."""
        self.former: ClaimHolder | None = None
        """The holder before, if that ended without a release."""
        self.is_certain = True
        """True if the storage supports conditional writes, which keep two runs apart."""

    def take(self, on_waiting: Callable[[str], None]) -> None:
        """Claim the url.

        Args:
            on_waiting: called with how long a holder is still watched that may be gone.

        Raises:
            UserError: another run is running there.
            StorageError: the storage does not answer.
        """
        while True:
            # In a loop: whoever loses the race for a number finds the winner's claim.
            number, content = self._newest()
            if content is not None:
                self._refuse_living(number, content, on_waiting)
                self.former = ClaimHolder.parse(content)
            name = _name_of(number + 1)
            # Created on the condition that it does not exist: of two runs that want the same number
            # the storage gives it to one.
            if self._create(name):
                break
        self._name = name
        # Deleted only now: until the new claim existed, they showed others that the url is taken.
        older = [n for n in self._objects.listing() if _NAME.fullmatch(n) and n < name]
        self._objects.delete(older)
        self._thread = begun(self._renew)

    def release(self) -> None:
        """Delete the claim; if the storage does not answer soon, it expires instead."""
        self._ends.set()
        deadline_s = time.monotonic() + _RELEASED_WITHIN_S
        ends(begun(self._delete_claim), lambda: time.monotonic() > deadline_s)

    def _delete_claim(self) -> None:
        if self._thread is not None:
            # A renewal after the deletion would create the claim again.
            self._thread.join()
        if self._name and self.lost_to is None:
            with suppress(StorageError):
                self._objects.delete([self._name])

    def check(self) -> bool:
        """Return whether this process still holds it, according to the storage."""
        _, content = self._newest()
        if content is None:  # somebody has deleted it by hand
            self._objects.write(self._name, self._holder.to_bytes())
            return True
        # By session: the rest of the content changes with each renewal.
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
            # A storage without conditional writes overwrites what is there.
            probe = content + b"\n"
            if self._objects.create(name, probe):
                self._objects.write(name, content)
                self.is_certain = False
        except StorageError:
            # Some storages refuse the condition itself; one that refuses every write does so here.
            self._objects.write(name, content)
            self.is_certain = False
        return True

    def _newest(self) -> tuple[int, bytes | None]:
        listing = self._objects.listing()
        found = [match for name in listing if (match := _NAME.fullmatch(name))]
        if not found:
            return 0, None
        # As text: numbers have leading zeros.
        newest = max(found, key=lambda match: match[1])
        if listing[newest[0]].size_bytes > _MOST_BYTES:
            # Its version shows whether somebody changes it; the content would fill the memory.
            return int(newest[1]), listing[newest[0]].version.encode()
        try:
            return int(newest[1]), self._objects.read(newest[0])
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # released just now
                return int(newest[1]), None
            raise

    def _refuse_living(
        self, number: int, content: bytes, on_waiting: Callable[[str], None]
    ) -> None:
        """Raise a UserError unless the holder of a claim is certainly gone."""
        holder = ClaimHolder.parse(content)
        if holder is not None and holder.is_dead:
            return
        place = f"{self._objects.url}/{_name_of(number)}"
        who = str(holder or f"a process that {place} does not name (it is damaged)")
        is_here = holder is not None and holder.machine == _machine()
        # One that cannot be read is watched like any other: a run may be behind it.
        # One on this machine is alive, as its process shows: it need not be watched.
        if not is_here:
            on_waiting(
                f"{self._objects.url} is claimed by {who}: watching for up to {EXPIRES_S:g} s "
                f"whether it is still running. If you know that it is not, delete {place}"
            )
            if self._is_silent(number, content, on_waiting):
                return
            if self._newest()[1] is None:  # released
                return
        raise UserError(
            f"out_dir {self._objects.url} belongs to a run that is still running: {who}. Wait for "
            "it, or try another --out_dir."
        )

    def _is_silent(self, number: int, content: bytes, on_waiting: Callable[[str], None]) -> bool:
        """Return whether a claim stays unchanged for longer than a living run would leave it."""
        # Polls of this process are counted, not seconds: a process that was suspended must not take
        # others for dead, and a wrong clock of another machine ends no run.
        looks = math.ceil(EXPIRES_S / _LOOK_S)
        for look in range(1, looks + 1):
            time.sleep(_LOOK_S)
            if self._newest() != (number, content):
                return False
            if look % _NOTICE_EVERY_LOOKS == 0 and look < looks:
                on_waiting(f"no sign of it yet; watching for {(looks - look) * _LOOK_S:g} s more")
        return True

    def _renew(self) -> None:
        while not self._ends.wait(RENEWED_EVERY_S):
            self._holder = ClaimHolder(**asdict(self._holder) | {"renewed_at": utc_now()})
            with suppress(StorageError):  # tried again at the next renewal
                if not self.check():
                    return
                if not self._ends.is_set():
                    self._objects.write(self._name, self._holder.to_bytes())


class ClaimWatch:
    """Watches a claim from outside: whether a run at a url is running."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._seen: str | None = None
        self._holder: ClaimHolder | None = None
        self._changed_s = 0.0
        self._is_alive = False
        self.is_in_doubt = False
        """True if the holder seems gone, and was not watched for long enough to be certain."""

    def look(self, listing: Listing) -> tuple[bool, bool]:
        """Return whether there is a claim, and whether its holder is alive.

        Args:
            listing: what lies at the url.

        Raises:
            StorageError: the storage does not answer.
        """
        names = [name for name in listing if is_claim(name)]
        if not names:
            self._seen, self.is_in_doubt = None, False
            return False, False
        newest = max(names)
        # A renewal changes the version in the listing; the claim itself is read only then.
        version = f"{newest} {listing[newest].version}"
        if version != self._seen:
            self._holder = self._read(newest, listing)
            is_first, self._seen, self._changed_s = self._seen is None, version, time.monotonic()
            self._is_alive = self._holder is None or not self._holder.is_dead
            seems_silent = self._holder is None or self._holder.seems_silent
            # Only at first sight: a claim that changes while it is watched has a living holder.
            self.is_in_doubt = is_first and self._is_alive and seems_silent
        elif time.monotonic() - self._changed_s > EXPIRES_S or (
            self._holder is not None and self._holder.is_dead
        ):
            self._is_alive = self.is_in_doubt = False
        return True, self._is_alive

    def _read(self, name: str, listing: Listing) -> ClaimHolder | None:
        if listing[name].size_bytes > _MOST_BYTES:
            return None
        return ClaimHolder.parse(self._objects.read(name))


def is_claim(name: str) -> bool:
    """Return whether an object is a claim."""
    return _NAME.fullmatch(name) is not None


def _name_of(number: int) -> str:
    return f"{_PREFIX}{number:06}.json"


def _started(process: int) -> float:
    """Start of a process of this machine, since boot; -1: it does not exist."""
    # psutil's create_time is of the wall clock, and changes when that is set.
    stat = Path(f"/proc/{process}/stat")
    try:
        if Path("/proc/self/stat").exists():
            # Field 22, in clock ticks; the second field, a name in brackets, may hold anything.
            return float(stat.read_text(errors="replace").rpartition(")")[2].split()[19])
        return psutil.Process(process).create_time()
    except (OSError, ValueError, psutil.Error):
        return -1.0


def _machine() -> str:
    """Id of this machine or container; several may have the same host name."""
    # It also differs after a restart, when process ids begin anew.
    known = boot_id() or hex(uuid.getnode())
    try:
        # Containers of a machine share its boot id, but number their processes themselves.
        return f"{known}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return known
