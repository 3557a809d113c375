"""Several hosts that lose each other: the run goes on with those that are left, with equal losses.

The hosts are network namespaces; torchrun, ftkit and its ranks are real processes in them.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic import ElasticRun, end
from hosts import INTERFACE, PATIENCE_S, STORE, Host, network
from messages import says
from rank_jobs import DEEPSPEED
from runs import command_of, losses, losses_of_one, rows, wait_for

from ftkit.launch.interfaces import GLOO
from ftkit.recipe.parsing import read_recipe
from ftkit.runs.report.report import Report, Restart, read_report

pytestmark = pytest.mark.slow

STEPS = 36
SAVED = 4
"""Steps between two checkpoints."""
KEYS: dict[str, object] = {
    "num_nodes": "auto",
    "resume": "auto",
    "train__max_steps": STEPS,
    "train__global_batch_size": 4,
    "train__micro_batch_size": 1,
    "train__save_interval": SAVED,
    "eval__interval": 0,
    "eval__final_validation": "false",
}
STRATEGIES = ["ddp", "fsdp", DEEPSPEED]


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Host, Host, Host]]:
    """The hub and two hosts."""
    with network(2) as (hub, (first, second)):
        yield hub, first, second
    assert list(Path("/run/netns").glob(f"ftkit-{os.getpid()}-*")) == []


@pytest.fixture
def hosts(machines: tuple[Host, Host, Host]) -> Iterator[tuple[Host, Host]]:
    """Two hosts with nothing on them, before and after."""
    hub, *two = machines
    yield two[0], two[1]
    left = [process for host in two for process in host.processes()]
    for host in (hub, *two):
        host.kill()
        host.mend()
    assert left == []


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
    return losses_of_one(tmp_path_factory.mktemp("alone"), common, **KEYS)


@pytest.fixture
def strategy() -> str:
    return "ddp"


@pytest.fixture
def elastic(tmp_path: Path, common: list[str], strategy: str) -> ElasticRun:
    out_dir = tmp_path / "out"
    return ElasticRun(out_dir, command_of(out_dir, common, **KEYS, strategy=strategy))


def assert_complete(out_dir: Path, alone: list[float]) -> Report:
    """The run is through, with the losses of one device."""
    report = read_report(out_dir)
    assert (report.outcome, report.exit_code) == ("completed", 0), report.exit_reason
    assert [int(row["step"]) for row in rows(out_dir)] == list(range(1, len(alone) + 1))
    assert losses(out_dir) == pytest.approx(alone, rel=1e-5)
    return report


def ranks_of(restarts: list[Restart]) -> list[tuple[int | None, int]]:
    return [(restart.world_size_before, restart.world_size) for restart in restarts]


# --- Two hosts ------------------------------------------------------------------------------------


@pytest.mark.matrix
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
    started = [host.torchrun(words, hosts[0].address, nnodes="2", restarts="0") for host in hosts]
    ended = [end(process) for process in started]
    assert [code for code, _, _ in ended] == [0, 0], ended
    for host in hosts:
        host.ends()
    report = assert_complete(out_dir, alone)
    assert report.resolved and report.resolved.world_size == 2
    assert report.restarts == []
    assert read_recipe([out_dir / "recipe.yaml"]).num_nodes == "auto"


# --- Hosts that die -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fsdp"])
def test_a_run_continues_without_a_lost_host_and_with_it_again(
    hosts: tuple[Host, Host], store: None, alone: list[float], elastic: ElasticRun
) -> None:
    stays, lost = elastic.begin(hosts, SAVED + 2)
    lost.kill()
    resumed = elastic.wait_for_ranks(1)
    elastic.wait_for_steps(resumed + SAVED, stays)
    elastic.start_on(lost)
    resumed_again = elastic.wait_for_ranks(2)
    ended = [elastic.end_on(host) for host in hosts]
    assert [code for code, _, _ in ended] == [0, 0], ended

    report = assert_complete(elastic.out_dir, alone)
    assert ranks_of(report.restarts) == [(2, 1), (1, 2)]
    first, second = report.restarts
    assert first.reason.startswith("rank 1: ")
    assert (first.from_step, first.from_step % SAVED) == (resumed, 0)
    assert says(second.reason, "SIGTERM ... machines ... joined")
    assert (second.from_step, second.steps_lost) == (resumed_again, 0)
    output = "".join(out for _, out, _ in ended)
    assert says(output, f"from step {second.from_step:,} on 2 ranks (1 before)")


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["fsdp"])
def test_a_run_continues_without_the_host_of_rank_0(
    hosts: tuple[Host, Host], store: None, alone: list[float], elastic: ElasticRun
) -> None:
    zero, left = elastic.begin(hosts, SAVED + 2)
    zero.kill()
    code, out, err = elastic.end_on(left)
    assert code == 0, out + err
    report = assert_complete(elastic.out_dir, alone)
    (restart,) = report.restarts
    assert ranks_of([restart]) == [(2, 1)]
    assert says(restart.reason, f"rank 0 on {zero.name} was killed")
    assert restart.from_step >= SAVED and restart.from_step % SAVED == 0
    assert says(out, f"from step {restart.from_step:,} on 1 rank (2 before)")


@pytest.mark.matrix
def test_a_run_continues_without_a_host_that_is_disconnected(
    hosts: tuple[Host, Host], store: None, alone: list[float], elastic: ElasticRun
) -> None:
    """The host of rank 0 ends the run there, and the other one continues it."""
    zero, left = elastic.begin(hosts, SAVED + 2)
    zero.cut()
    code, out, err = elastic.end_on(left)
    assert code == 0, out + err
    wait_for(lambda: len(zero.processes()) == 1)  # torchrun waits for an answer of its store
    zero.mend()
    elastic.end_on(zero)
    report = assert_complete(elastic.out_dir, alone)
    (restart,) = report.restarts
    assert ranks_of([restart]) == [(2, 1)]
    gone = f"{left.name} has sent no heartbeat for {PATIENCE_S} s"
    assert restart.reason.startswith(f"rank 1: {gone}")


@pytest.mark.matrix
def test_the_loss_of_the_rendezvous_store_ends_a_run_that_can_be_continued(
    hosts: tuple[Host, Host], alone: list[float], elastic: ElasticRun
) -> None:
    """Torchrun ends with its store; what it started says why, and how to go on."""
    first, second = hosts
    elastic.endpoint = first.address
    elastic.begin(hosts, SAVED + 2)
    first.kill()
    code, _, err = elastic.end_on(second)
    assert code != 0
    assert err.count("ftkit: ") == 1, err
    assert "--resume auto" in err

    program = "sys.path.insert(0, '')\nfrom ftkit.cli.app import main\nmain()"
    code, out, err = end(second.run(program, elastic.words, **elastic.variables))
    assert (code, err) == (0, ""), out
    report = assert_complete(elastic.out_dir, alone)
    (restart,) = report.restarts
    assert ranks_of([restart]) == [(2, 1)] and restart.from_step % SAVED == 0


# --- Ways between them ----------------------------------------------------------------------------


def started_by_slurm(
    hosts: tuple[Host, Host], words: list[str], **variables: str
) -> list[tuple[int, str, str]]:
    """Exit code and output of a task of srun on each of two nodes."""
    common = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
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
            [f"${GLOO} is eth9 ... host1 ... lo (127.0.0.1", f", {INTERFACE} (10.213.7."],
        ),
        (
            {GLOO: "lo"},
            [
                "host1 does not reach 127.0.0.1:",
                "lo of host2 ... Connection refused ... loopback",
                f"${GLOO} (and $NCCL_SOCKET_IFNAME with GPUs) on host2",
            ],
        ),
    ],
)
def test_hosts_that_do_not_reach_each_other_report_it_once(
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
    (message,) = [err for _, _, err in ended if err]
    assert message.startswith("ftkit: ") and message.count("\n") == 1, message
    assert says(message, *said)
    assert not out_dir.exists()
