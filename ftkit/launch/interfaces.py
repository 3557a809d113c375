"""Network interfaces of this machine that the environment names for gloo and NCCL."""

import os
import socket

import psutil

from ftkit.errors import UserError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def interfaces() -> dict[str, list[str]]:
    """IP addresses of this machine, by network interface."""
    found = {
        # A link-local IPv6 address ends with % and the name of its interface.
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in _FAMILIES]
        for name, entries in psutil.net_if_addrs().items()
    }
    # With those that have no address: their names exist, and get another message.
    return {name: found.get(name, []) for _, name in socket.if_nameindex()}


def check_interfaces(communication: str | None) -> None:
    """Refuse interfaces in the environment that this machine does not have.

    Args:
        communication: backend of the ranks; with nccl, gloo is used besides.

    Raises:
        UserError: lists those that it has.
    """
    there = interfaces()
    shown = ", ".join(f"{name} ({', '.join(found)})" for name, found in there.items() if found)
    # With nccl, gloo carries what is in host memory.
    for name in filter(None, os.environ.get(GLOO, "").split(",")):
        if communication is not None and not there.get(name):
            what = "no address" if name in there else "no such network interface"
            raise UserError(
                f"${GLOO} is {os.environ[GLOO]}, but {socket.gethostname()} has {what}. "
                f"There are: {shown}. Set it to the one that reaches the other machines, or unset "
                "it: ftkit then takes the one with the route to rank 0."
            )
    if communication == "nccl" and not _nccl_finds(os.environ.get(NCCL, ""), list(there)):
        raise UserError(
            f"${NCCL} is {os.environ[NCCL]}, but {socket.gethostname()} has no network interface "
            f"that it names. There are: {shown}. Set it to the beginning of the name of one that "
            "reaches the other machines (or =NAME, or ^NAME for any but that), or unset it."
        )


def _nccl_finds(rule: str, names: list[str]) -> bool:
    """Return whether a rule of NCCL matches an interface.

    A rule lists prefixes of names; a leading = makes them whole names, a leading ^ excludes them.
    """
    if not rule:
        return True
    excludes, rule = rule.startswith("^"), rule.removeprefix("^")
    exact, rule = rule.startswith("="), rule.removeprefix("=")
    words = rule.split(",")

    def is_named(name: str) -> bool:
        return name in words if exact else name.startswith(tuple(words))

    return any(is_named(name) != excludes for name in names)
