"""Hosts in network namespaces: addresses of their own, links that can be cut, and one disk.

They are connected by a bridge in a further namespace, the hub, where something may run that is on
none of them, such as a rendezvous store. All of it is made for a test and removed after it.
"""

import ctypes
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import warm
from command import command_environment
from runs import Process, wait_for

HUB = "10.213.7.254"
PORT = 29400
"""Of the rendezvous store, wherever it runs."""
INTERFACE = "wire0"
"""Of every host."""
PATIENCE_S = 10
"""After which a silent supervisor is gone, with `IMPATIENT`."""
IMPATIENT = """
from ftkit.extensions.hosts import heartbeats
heartbeats.BEAT_S, heartbeats.MISSED_BEATS = 0.5, 20
"""
_CLONE_NEWNET = 0x40000000
_NUMBERS = itertools.count()
_RENDEZVOUS = {
    "last_call_timeout": 8,
    "join_timeout": 90,
    "read_timeout": 10,
    "keep_alive_interval": 2,
    "keep_alive_max_attempt": 4,
}
"""Like torchrun's own settings, but for less patience."""
_ENTER = """
import ctypes, os, runpy, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS = 0x40000000, 0x04000000, 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
with open("/run/netns/{namespace}") as file:
    failed = libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS | CLONE_NEWNS)
failed = failed or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
for file in ("hosts", "resolv.conf"):
    source = f"{files}/{{file}}".encode()
    failed = failed or libc.mount(source, f"/etc/{{file}}".encode(), None, MS_BIND, None)
if failed:
    raise OSError(ctypes.get_errno(), "no namespaces of its own")
socket.sethostname("{name}")
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
{program}
"""
_TORCHRUN = """
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
# For its log it looks for the place of every caller among all modules, which here are thousands.
dynamic_rendezvous.get_method_name = lambda depth=2: ""
sys.argv[:] = ["", *sys.argv[1:]]
runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
"""
STORE = f"""
import time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("{HUB}", {PORT}, is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(3600)
"""


def _ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


def missing() -> str | None:
    """Why there can be no namespaces here; None: there can be."""
    if shutil.which("ip") is None:
        return "ip is missing: apt-get install iproute2"
    try:
        _ip("netns", "add", name := f"ftkit-{os.getpid()}-try")
        try:
            _ip("-n", name, "link", "add", "a0", "type", "veth", "peer", "name", "a1")
            _ip("-n", name, "link", "add", "a2", "type", "bridge")
        finally:
            _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.decode().strip()}"
    return None


class Host:
    """A machine as far as the network goes."""

    def __init__(self, namespace: str, name: str, address: str, link: tuple[str, str]) -> None:
        self.namespace, self.name, self.address = namespace, name, address
        self._files = Path(tempfile.mkdtemp(prefix=f"{namespace}-"))
        # As Debian has it: the machine's own name stands for an address that others do not reach.
        (self._files / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        (self._files / "resolv.conf").touch()
        self._link = link
        """Namespace and name of its end of the link in the hub."""

    def run(self, program: str, words: Sequence[object] = (), **variables: str) -> Process:
        """Start a program of Python on it.

        Args:
            program: statements.
            words: its arguments.
            variables: of its environment, besides the usual ones.
        """
        text = _ENTER.format(
            namespace=self.namespace, name=self.name, files=self._files, program=program
        )
        command = [sys.executable, "-c", text, *map(str, words)]
        return warm.SERVER.start(command, command_environment() | variables)

    def torchrun(
        self,
        words: Sequence[object],
        endpoint: str = HUB,
        nnodes: str = "1:2",
        restarts: str = "3",
        **variables: str,
    ) -> Process:
        """Start torchrun with one rank of `ftkit WORDS`.

        Args:
            words: after `ftkit`.
            endpoint: address of the rendezvous store; of this host: it runs here.
            nnodes: how many hosts, at least and at most.
            restarts: how often torchrun starts again what has failed.
            variables: of the environment.
        """
        settings = {"is_host": int(endpoint == self.address)} | _RENDEZVOUS
        of_torchrun = {
            "nnodes": nnodes,
            "max-restarts": restarts,
            "rdzv_backend": "c10d",
            "rdzv_id": "run",
            "rdzv_endpoint": f"{endpoint}:{PORT}",
            "rdzv_conf": ",".join(f"{key}={value}" for key, value in settings.items()),
            "local_addr": self.address,
            "nproc_per_node": 1,
        }
        options = [word for key, value in of_torchrun.items() for word in (f"--{key}", value)]
        return self.run(_TORCHRUN, [*options, "-m", "ftkit", *words], **variables)

    def shell(
        self, script: str, directory: Path, words: Sequence[str], **variables: str
    ) -> Process:
        """Start a script of bash in a directory, with arguments, as `run` does a program."""
        program = 'os.chdir(sys.argv[1])\nos.execvp("bash", ["bash", "-c", *sys.argv[2:]])'
        return self.run(program, [directory, script, "bash", *words], **variables)

    def knows(self, name: str, address: str) -> None:
        """Have it find an address by a name, from the next program on."""
        with (self._files / "hosts").open("a") as file:
            file.write(f"{address} {name}\n")

    def listening(self) -> socket.socket:
        """A socket that takes connections on its address, for a server outside of it."""
        made: list[socket.socket] = []

        def listen() -> None:  # namespaces are a thread's, and sockets stay where they were made
            libc = ctypes.CDLL(None, use_errno=True)
            with Path(f"/run/netns/{self.namespace}").open() as file:
                if libc.setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "no such namespace")
            made.append(socket.create_server((self.address, 0), backlog=128))

        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()
        return made[0]

    def processes(self) -> list[psutil.Process]:
        """All that run on it."""
        inode = Path(f"/run/netns/{self.namespace}").stat().st_ino
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                is_here = Path(f"/proc/{process.pid}/ns/net").stat().st_ino == inode
                if is_here and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def rank(self) -> int | None:
        """Rank of the training process on this host, or None if there is none."""
        for process in self.processes():
            with suppress(psutil.Error):
                if "ftkit.training.rank" in process.cmdline():
                    return int(process.environ()["RANK"])
        return None

    def kill(self) -> None:
        """End all its processes at once, as a power cut does."""
        while found := self.processes():
            for process in found:
                with suppress(psutil.Error):
                    process.kill()

    def cut(self) -> None:
        """Pull its network cable."""
        _ip("-n", self._link[0], "link", "set", self._link[1], "down")

    def mend(self) -> None:
        """Put it back."""
        if self._link[1]:
            _ip("-n", self._link[0], "link", "set", self._link[1], "up")

    def listens(self) -> bool:
        """Return whether a rendezvous store takes connections on this host."""
        words = ["ip", "netns", "exec", self.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
        found = subprocess.run(words, capture_output=True, text=True).stdout
        return any(f":{PORT:04X} " in line and " 0A " in line for line in found.splitlines())

    def remove(self) -> None:
        """Leave nothing of it."""
        with suppress(OSError):  # it was not made
            self.kill()
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True)
        shutil.rmtree(self._files)

    def ends(self) -> None:
        """Wait until nothing runs on it."""
        wait_for(lambda: not self.processes())


@contextmanager
def network(count: int) -> Iterator[tuple[Host, list[Host]]]:
    """The hub, which is a host too, and others around it; nothing of them is left."""
    if (reason := missing()) is not None:
        # Network namespaces need root and iproute2.
        pytest.skip(reason)
    prefix = f"ftkit-{os.getpid()}-{next(_NUMBERS)}"
    hub = Host(f"{prefix}-hub", "hub", HUB, ("", ""))
    hosts = []
    try:
        _ip("netns", "add", hub.namespace)
        _ip("-n", hub.namespace, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", hub.namespace, "addr", "add", f"{HUB}/24", "dev", "bridge0")
        for device in ("lo", "bridge0"):
            _ip("-n", hub.namespace, "link", "set", device, "up")
        for number in range(1, count + 1):
            end = f"port{number}"
            name = f"host{number}"
            address = f"10.213.7.{number}"
            host = Host(f"{prefix}-{name}", name, address, (hub.namespace, end))
            hosts.append(host)
            _ip("netns", "add", host.namespace)
            of_peer = ("peer", "name", INTERFACE, "netns", host.namespace)
            _ip("-n", hub.namespace, "link", "add", end, "type", "veth", *of_peer)
            _ip("-n", hub.namespace, "link", "set", end, "master", "bridge0", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield hub, hosts
    finally:
        for host in (*hosts, hub):
            host.remove()
