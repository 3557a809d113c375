"""Connections between machines: which interface each uses, and whether they reach each other.

Gloo takes the interface of GLOO_SOCKET_IFNAME, or else the one with the address that the host name
resolves to, which is often 127.0.0.1. If that leads nowhere, some rank prints a C++ stack after a
while. So the supervisors try the connections first, in the same way.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ftkit.errors import UserError
from ftkit.launch.interfaces import GLOO, NCCL, check_interfaces, interfaces

_CONNECT_S = 10.0
"""Seconds that an address may take to answer."""
_BETWEEN_TRIES_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address at which a machine listens during the test of connections."""

    host: str
    """Its name."""
    interface: str
    """Interface of the address; empty: unknown."""
    address: str
    """IP address."""
    port: int
    """TCP port."""

    @property
    def text(self) -> str:
        """Text such as 10.0.0.1:4711 (eth0 of node1)."""
        of = f"{self.interface} of {self.host}" if self.interface else self.host
        return f"{self.address}:{self.port} ({of})"


def address_towards(host: str) -> str | None:
    """The address from which this machine sends to a host; None: there is no route.

    It is a loopback address if the host is this machine. Nothing is sent.
    """
    # No such host, or no route to it.
    with suppress(OSError):
        # A UDP socket: connecting it sends nothing, but the kernel chooses the route.
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None


def interface_with(address: str) -> str | None:
    """The interface with an address; None: there is none."""
    return next((name for name, found in interfaces().items() if address in found), None)


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address, which no other machine can reach."""
    return address.startswith("127.") or address == "::1"


def chosen_interface(address: str | None) -> tuple[str, str]:
    """The interface for gloo, and its address.

    Args:
        address: of this machine, as others reach it.

    Raises:
        UserError: no route leads to the other machines, or the named interface does not exist.
    """
    check_interfaces("gloo")
    # Of several, which gloo uses in turn, the first one is tested.
    named = os.environ.get(GLOO, "").partition(",")[0]
    if named:
        return named, interfaces()[named][0]
    if address is None:
        raise UserError(
            f"{socket.gethostname()} has no route to {os.environ['MASTER_ADDR']}, the address of "
            f"rank 0 (MASTER_ADDR). Set MASTER_ADDR to one that every machine reaches, or ${GLOO} "
            "to the network interface that does."
        )
    return interface_with(address) or "", address


@contextmanager
def listening(interface: str, address: str) -> Iterator[Endpoint]:
    """Accept connections to an address of this machine inside the block.

    Raises:
        UserError: nothing can listen on it.
    """
    host = socket.gethostname()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # Nobody calls accept: the kernel completes connections by itself, up to the backlog.
        listener = socket.create_server((address, 0), family=family, backlog=128)
    except OSError as error:
        raise UserError(
            f"{host} cannot listen on {address}: {error.strerror}. Set ${GLOO} to another "
            "network interface."
        ) from None
    with listener:
        port = listener.getsockname()[1]
        yield Endpoint(host=host, interface=interface, address=address, port=port)


def problem_reaching(endpoint: Endpoint) -> str | None:
    """The reason that this machine does not reach another one, with a remedy; None: it does."""
    why = _reason_not_reached(endpoint.address, endpoint.port)
    if why is None:
        return None
    where = " Other machines never reach a loopback address." * is_loopback(endpoint.address)
    return (
        f"{socket.gethostname()} does not reach {endpoint.text}: {why}.{where} Set ${GLOO} (and "
        f"${NCCL} with GPUs) on {endpoint.host} to the network interface with an address that the "
        "other machines reach, and let its ports through."
    )


def reached_within(
    patience_s: float, address: str, port: int, on_wait: Callable[[str], None]
) -> str | None:
    """Wait until something listens at an address; None, or why nothing was reached.

    Args:
        patience_s: how long, in seconds.
        address: name or IP address.
        port: TCP port.
        on_wait: called with the reason when it has taken longer than usual, once.
    """
    # torch's store waits by itself, but prints a C++ stack for every attempt.
    begin_s = time.monotonic()
    is_reported = False
    while (why := _reason_not_reached(address, port)) is not None:
        waited_s = time.monotonic() - begin_s
        if waited_s >= patience_s:
            return why
        if waited_s >= _CONNECT_S and not is_reported:
            is_reported = True
            on_wait(why)
        time.sleep(_BETWEEN_TRIES_S)
    return None


def _reason_not_reached(address: str, port: int) -> str | None:
    """Try to connect once."""
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_S):
            return None
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
