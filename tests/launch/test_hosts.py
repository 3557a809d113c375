"""Several hosts that lose each other: the run goes on with those that are left, with equal losses.

The hosts are network namespaces; torchrun, ftkit and its ranks are real processes in them.
"""

import re
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from command import ROOT, command_environment, command_line
from hosts import IMPATIENT, INTERFACE, PATIENCE_S, STORE, Host, network
from rank_jobs import needs_deepspeed
from runs import TIMEOUT_S, Process, command_of, rows, wait_for, watched

from ftkit.config.parsing import read_recipe
from ftkit.launch.interfaces import GLOO
from ftkit.report.report import Report, read_report
from ftkit.report.restarts import Restart
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.matrix]  # minutes, and its hosts need a quiet machine

STEPS = 48
SAVED = 4
"""Steps between two checkpoints."""
KEYS: dict[str, object] = {
    "num_nodes": "auto",
    "resume": "auto",
    "lora_dropout": 0,
    "train__max_steps": STEPS,
    "train__global_batch_size": 4,
    "train__micro_batch_size": 1,
    "train__save_interval": SAVED,
    "eval__interval": 0,
    "eval__final_validation": "false",
}
SLOW = """
import time
from ftkit.training import step
def run(self, *arguments, real=step.TrainStep.run):
    time.sleep(0.3)
    return real(self, *arguments)
step.TrainStep.run = run
"""
STRATEGIES = [
    pytest.param("ddp", marks=pytest.mark.matrix),
    "fsdp",
    pytest.param("deepspeed", marks=needs_deepspeed),
]


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Host, Host, Host]]:
    """The hub and two hosts."""
    with network(2) as (hub, (first, second)):
        yield hub, first, second


@pytest.fixture
def hosts(machines: tuple[Host, Host, Host]) -> Iterator[tuple[Host, Host]]:
    """Two hosts with nothing on them, before and after."""
    hub, *two = machines
    yield two[0], two[1]
    for host in (hub, *two):
        host.kill()
        host.mend()


@pytest.fixture
def store(machines: tuple[Host, Host, Host], hosts: tuple[Host, Host]) -> Iterator[None]:
    """A rendezvous store on a host that does not train."""
    hub = machines[0]
    process = hub.run(STORE)
    wait_for(lambda: hub.listens() or process.poll() is not None)
    yield
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def alone(common: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run on one device, without a pause."""
    directory = tmp_path_factory.mktemp("alone")
    out_dir = directory / "out"
    line = command_line(*command_of(out_dir, common, **KEYS))
    with watched(out_dir, line, directory, command_environment()) as run:
        code, out, _ = run.end()
    assert code == 0, out
    return losses(out_dir)


@pytest.fixture
def slowly(tmp_path: Path) -> dict[str, str]:
    """Variables with which steps take their time, and supervisors have little patience."""
    start_up = tmp_path / "start-up"
    start_up.mkdir()
    (start_up / "sitecustomize.py").write_text(
        "import sys\n"
        'if "ftkit.training.rank" in sys.orig_argv:\n'
        f"{textwrap.indent(SLOW, '    ')}"
        'elif "torch.distributed.run" not in str(sys.orig_argv):\n'
        f"{textwrap.indent(IMPATIENT, '    ')}"
    )
    return {"PYTHONPATH": f"{ROOT}:{start_up}"}


def losses(out_dir: Path) -> list[float]:
    return [float(row["loss"]) for row in rows(out_dir)]


def assert_complete(out_dir: Path, alone: list[float]) -> Report:
    """The run is through, with the losses of one device."""
    report = read_report(out_dir)
    assert (report.outcome, report.exit_code) == ("completed", 0), report.exit_reason
    assert [int(row["step"]) for row in rows(out_dir)] == list(range(1, len(alone) + 1))
    assert losses(out_dir) == pytest.approx(alone, rel=1e-5)
    return report


def wait_for_steps(out_dir: Path, count: int, *processes: Process) -> None:
    def met() -> bool:
        for process in processes:
            assert process.poll() is None, process.communicate()
        return len(rows(out_dir)) >= count

    wait_for(met)


def by_rank(*hosts: Host) -> list[Host]:
    """The hosts in the order of their ranks, once all have one."""
    wait_for(lambda: all(host.rank() is not None for host in hosts))
    return sorted(hosts, key=lambda host: host.rank() or 0)


def end(process: Process) -> tuple[int, str, str]:
    process.wait(timeout=2 * TIMEOUT_S)
    out, err = process.communicate()
    assert process.returncode is not None
    of_torch = re.compile(r"\[?[WEI]\d{4} ")  # its log
    lines = [line for line in err.splitlines(keepends=True) if not of_torch.match(line)]
    return process.returncode, out, "".join(lines)


def read_job(out_dir: Path) -> Job:
    """What the ranks do now, once there are some."""
    found: list[Job] = []

    def read() -> bool:
        with suppress(OSError, ValueError):
            found.append(Job.read(RunDirectory(out_dir).job))
        return bool(found)

    wait_for(read)
    return found[0]


def ranks_of(restarts: list[Restart]) -> list[tuple[int | None, int]]:
    return [(restart.world_size_before, restart.world_size) for restart in restarts]


# --- Two hosts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_hosts_give_the_losses_of_one_device(
    strategy: str,
    hosts: tuple[Host, Host],
    alone: list[float],
    common: list[str],
    tmp_path: Path,
) -> None:
    """Gloo finds the way between them by itself, although their names stand for 127.0.1.1."""
    out_dir = tmp_path / "out"
    words = command_of(out_dir, common, **KEYS, strategy=strategy)
    started = [host.torchrun(words, hosts[0].address, nnodes="2", restarts=0) for host in hosts]
    ended = [end(process) for process in started]
    assert [code for code, _, _ in ended] == [0, 0], ended
    for host in hosts:
        host.ends()
    report = assert_complete(out_dir, alone)
    assert report.resolved and report.resolved.world_size == 2
    assert report.restarts == []
    assert read_recipe([out_dir / "recipe.yaml"]).num_nodes == "auto"


# --- Hosts that die -------------------------------------------------------------------------------


def test_a_run_goes_on_without_a_host_with_it_again_and_without_that_of_rank_0(
    hosts: tuple[Host, Host],
    store: None,
    slowly: dict[str, str],
    alone: list[float],
    common: list[str],
    tmp_path: Path,
) -> None:
    out_dir = tmp_path / "out"
    words = command_of(out_dir, common, **KEYS, strategy="fsdp")
    torchruns = {host: host.torchrun(words, **slowly) for host in hosts}
    stays, lost = by_rank(*hosts)
    wait_for_steps(out_dir, SAVED + 2, torchruns[stays])
    lost.kill()
    wait_for(lambda: read_job(out_dir).plan.world_size == 1)
    wait_for_steps(out_dir, 2 * SAVED + 2, torchruns[stays])

    torchruns[lost] = lost.torchrun(words, **slowly)
    zero, left = by_rank(*hosts)
    wait_for(lambda: read_job(out_dir).plan.world_size == 2)
    resumed = read_job(out_dir).start_step
    wait_for_steps(out_dir, resumed + SAVED + 2, *torchruns.values())
    zero.kill()

    code, out, err = end(torchruns[left])
    assert code == 0, out + err
    left.ends()
    assert zero.processes() == []
    report = assert_complete(out_dir, alone)
    first, second, third = report.restarts
    assert ranks_of(report.restarts) == [(2, 1), (1, 2), (2, 1)]
    assert first.reason.startswith("rank 1: ")
    assert second.reason == "SIGTERM, for machines that have joined"
    assert f"rank 0 on {zero.name} was killed with its supervisor" in third.reason
    assert [r.from_step % SAVED for r in (first, third)] == [0, 0]
    assert second.steps_lost == 0 and third.from_step >= resumed + SAVED
    assert f"from step {third.from_step:,} on 1 rank (2 before)" in out


def test_a_run_goes_on_without_a_host_whose_cable_is_pulled(
    hosts: tuple[Host, Host],
    store: None,
    slowly: dict[str, str],
    alone: list[float],
    common: list[str],
    tmp_path: Path,
) -> None:
    """Of rank 0: it ends the run there, and the other one goes on with it."""
    out_dir = tmp_path / "out"
    words = command_of(out_dir, common, **KEYS, strategy="ddp")
    torchruns = {host: host.torchrun(words, **slowly) for host in hosts}
    zero, left = by_rank(*hosts)
    wait_for_steps(out_dir, SAVED + 2, *torchruns.values())
    zero.cut()
    code, out, err = end(torchruns[left])
    assert code == 0, out + err
    wait_for(lambda: len(zero.processes()) == 1)  # torchrun waits for an answer of its store
    zero.mend()
    end(torchruns[zero])
    for host in hosts:
        host.ends()
    report = assert_complete(out_dir, alone)
    (restart,) = report.restarts
    assert ranks_of([restart]) == [(2, 1)]
    gone = f"{left.name} has not been heard of for {PATIENCE_S} s"
    assert restart.reason.startswith(f"rank 1: {gone}")


def test_the_loss_of_the_rendezvous_store_ends_a_run_that_goes_on_elsewhere(
    hosts: tuple[Host, Host],
    slowly: dict[str, str],
    alone: list[float],
    common: list[str],
    tmp_path: Path,
) -> None:
    """Torchrun ends with its store; what it started says why, and how to go on."""
    first, second = hosts
    out_dir = tmp_path / "out"
    words = command_of(out_dir, common, **KEYS, strategy="ddp")
    torchruns = {host: host.torchrun(words, first.address, **slowly) for host in hosts}
    by_rank(*hosts)
    wait_for_steps(out_dir, SAVED + 2, *torchruns.values())
    first.kill()
    code, out, err = end(torchruns[second])
    second.ends()
    assert code != 0
    assert err.count("ftkit: ") == 1, err
    assert "--resume auto" in err

    program = "sys.path.insert(0, '')\nfrom ftkit.cli.app import main\nmain()"
    alone_now = second.run(program, words, **slowly)
    code, out, err = end(alone_now)
    assert (code, err) == (0, ""), out
    second.ends()
    report = assert_complete(out_dir, alone)
    (restart,) = report.restarts
    assert ranks_of([restart]) == [(2, 1)] and restart.from_step % SAVED == 0


# --- Ways between them ----------------------------------------------------------------------------


def started_by_slurm(
    hosts: tuple[Host, Host], words: list[str], **variables: str
) -> list[tuple[int, str, str]]:
    """How a task of srun on each of two nodes ended."""
    common = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "finetune",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODELIST": "host[1-2]",
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29512",
    }
    program = "from ftkit.cli.app import main\nmain()"
    processes = []
    for task, host in enumerate(hosts):
        of_task = {"SLURM_PROCID": str(task), "SLURM_NODEID": str(task)}
        processes.append(host.run(program, words, **common | of_task | variables))
    return [end(process) for process in processes]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {GLOO: "eth9"},
            [
                f"${GLOO} is eth9, but host1 has no such network interface. There are: lo (127",
                f", {INTERFACE} (10.213.7.1",
            ],
        ),
        (
            {GLOO: "lo"},
            [
                "host1 does not reach 127.0.0.1:",
                " (lo of host2): Connection refused. Other machines never reach a loopback",
                f"Set ${GLOO} (and $NCCL_SOCKET_IFNAME with GPUs) on host2 to",
            ],
        ),
    ],
)
def test_hosts_that_do_not_reach_each_other_say_so_once(
    variables: dict[str, str],
    said: list[str],
    hosts: tuple[Host, Host],
    common: list[str],
    tmp_path: Path,
) -> None:
    out_dir = tmp_path / "out"
    words = command_of(out_dir, common, **KEYS)
    ended = started_by_slurm(hosts, words, **variables)
    assert [code for code, _, _ in ended] == [2, 2], ended
    (told,) = [err for _, _, err in ended if err]
    assert told.startswith("ftkit: ") and told.count("\n") == 1, told
    for text in said:
        assert text in told
    assert not out_dir.exists()
