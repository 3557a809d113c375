"""Runs under an elastic torchrun, on hosts in network namespaces that may be lost and come back."""

import re
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from command import ROOT
from hosts import HUB, IMPATIENT, Host
from runs import TIMEOUT_S, Process, rows, wait_for

from ftkit.errors import UserError
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job

SLOW = """
import time
from ftkit.training import step
def run(self, *arguments, real=step.TrainStep.run):
    time.sleep(0.3)
    return real(self, *arguments)
step.TrainStep.run = run
"""


class ElasticRun:
    """A run under an elastic torchrun on each of two hosts.

    Its steps take their time, and its supervisors have little patience.
    """

    def __init__(self, out_dir: Path, words: list[str]) -> None:
        """Prepare.

        Args:
            out_dir: of the run, in a directory that is for it alone.
            words: after `ftkit`.
        """
        self.out_dir, self.words = out_dir, words
        self.endpoint = HUB
        """Where the rendezvous store is."""
        self.torchruns: dict[Host, Process] = {}
        start_up = out_dir.parent / "start-up"
        start_up.mkdir()
        (start_up / "sitecustomize.py").write_text(
            "import sys\n"
            'if "ftkit.training.rank" in sys.orig_argv:\n'
            f"{textwrap.indent(SLOW, '    ')}"
            'elif "torch.distributed.run" not in str(sys.orig_argv):\n'
            f"{textwrap.indent(IMPATIENT, '    ')}"
        )
        self.variables = {"PYTHONPATH": f"{ROOT}:{start_up}"}

    def begin(self, hosts: Sequence[Host], steps: int) -> tuple[Host, Host]:
        """Start it on both hosts; they, by rank, after so many steps."""
        for host in hosts:
            self.start_on(host)
        zero, one = by_rank(*hosts)
        self.wait_for_steps(steps, zero, one)
        return zero, one

    def start_on(self, host: Host) -> None:
        self.torchruns[host] = host.torchrun(self.words, self.endpoint, **self.variables)

    def wait_for_steps(self, count: int, *hosts: Host) -> None:
        """Wait until so many are done, while torchrun is at work on these hosts."""

        def met() -> bool:
            for host in hosts:
                process = self.torchruns[host]
                assert process.poll() is None, process.communicate()
            return len(rows(self.out_dir)) >= count

        wait_for(met)

    def wait_for_ranks(self, count: int) -> int:
        """Wait until it goes on with so many; the step it went on from."""
        wait_for(lambda: self.job().plan.world_size == count)
        return self.job().start_step

    def job(self) -> Job:
        """Current work of the ranks, once there are some."""
        found: list[Job] = []

        def read() -> bool:
            with suppress(UserError):  # not there yet
                found.append(Job.read(RunDirectory(self.out_dir).job))
            return bool(found)

        wait_for(read)
        return found[0]

    def end_on(self, host: Host) -> tuple[int, str, str]:
        """Exit code and output on a host; no process is left there."""
        ended = end(self.torchruns[host])
        host.ends()
        return ended


def by_rank(*hosts: Host) -> list[Host]:
    """The hosts in the order of their ranks, once all have one."""
    wait_for(lambda: all(host.rank() is not None for host in hosts))
    return sorted(hosts, key=lambda host: host.rank() or 0)


def end(process: Process) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr without the log of torch."""
    process.wait(timeout=2 * TIMEOUT_S)
    out, err = process.communicate()
    assert process.returncode is not None
    of_torch = re.compile(r"\[?[WEI]\d{4} ")  # its log
    lines = [line for line in err.splitlines(keepends=True) if not of_torch.match(line)]
    return process.returncode, out, "".join(lines)
