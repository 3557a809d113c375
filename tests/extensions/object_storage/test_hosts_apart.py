"""Hosts without a common disk: each has a cache of its own, and the run lies at a url.

The hosts are network namespaces; torchrun, ftkit and its ranks are real processes in them.
"""

import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from command import ROOT, command_environment, command_line, start_up_of_ranks
from hosts import IMPATIENT, STORE, Host, network
from messages import says
from object_servers import INTERNAL, Bucket, Proxy, behind_proxy, is_write
from plugins import write_documented
from runs import TIMEOUT_S, Process, command_of, losses, losses_of_one, rows, wait_for, watched

from ftkit.checkpoint.store import Store
from ftkit.errors import UserError
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job
from ftkit.runs.report.report import read_report

URL = "s3://bucket"
KEYS: dict[str, object] = {
    "num_nodes": "auto",
    "resume": "auto",
    "train__max_steps": 12,
    "train__global_batch_size": 4,
    "train__micro_batch_size": 1,
    "train__save_interval": 4,
    "checkpoint__keep_last": 5,
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
EXPIRES_SOON = """
import socket
from ftkit.extensions.object_storage import claim
claim.RENEWED_EVERY_S, claim.EXPIRES_S = 1.0, 5.0
claim._machine = socket.gethostname
"""
STEPS = 40
ALONE = "sys.path.insert(0, '')\nfrom ftkit.cli.app import main\nmain()"


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
def reached(s3: Proxy, machines: tuple[Host, Host, Host]) -> Iterator[Proxy]:
    """The storage as the hosts reach it."""
    with behind_proxy(s3.port, "s3", machines[0].listening()) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def alone(common: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run on one device, in a directory."""
    return losses_of_one(tmp_path_factory.mktemp("alone"), common, **KEYS)


@pytest.fixture
def slowly(tmp_path: Path) -> dict[str, str]:
    """Variables with which steps take their time, and supervisors and claims have no patience."""
    start_up = tmp_path / "start-up"
    start_up.mkdir()
    (start_up / "sitecustomize.py").write_text(
        "import sys\n"
        'if "ftkit.training.rank" in sys.orig_argv:\n'
        f"{textwrap.indent(SLOW, '    ')}"
        'elif "torch.distributed.run" not in str(sys.orig_argv):\n'
        f"{textwrap.indent(IMPATIENT + EXPIRES_SOON, '    ')}"
    )
    return {"PYTHONPATH": f"{ROOT}:{start_up}"}


@pytest.fixture
def store(machines: tuple[Host, Host, Host], hosts: tuple[Host, Host]) -> Iterator[None]:
    """A rendezvous store on a host that does not train."""
    hub = machines[0]
    process = hub.run(STORE)
    wait_for(lambda: hub.listens() or process.poll() is not None)
    yield
    process.kill()
    process.communicate()


def by_rank(*hosts: Host) -> list[Host]:
    """The hosts in the order of their ranks, once all have one."""
    wait_for(lambda: all(host.rank() is not None for host in hosts))
    return sorted(hosts, key=lambda host: host.rank() or 0)


def variables_of(host: Host, proxy: Proxy, tmp_path: Path) -> dict[str, str]:
    """Environment of a host: its own cache, and the storage."""
    return proxy.environment | {"FTKIT_CACHE_DIR": str(tmp_path / host.name)}


def end(process: Process) -> tuple[int, str]:
    process.wait(timeout=2 * TIMEOUT_S)
    out, err = process.communicate()
    assert process.returncode is not None
    return process.returncode, out + err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.matrix)])
def test_two_hosts_without_a_shared_disk_make_one_run_at_a_url_and_one_of_them_continues_it(
    strategy: str,
    hosts: tuple[Host, Host],
    reached: Proxy,
    bucket: Bucket,
    alone: list[float],
    common: list[str],
    tmp_path: Path,
) -> None:
    """Each sends the shards of its own rank; a checkpoint counts once all are there."""
    url = f"{URL}/apart-{strategy}"
    words = command_of(url, common, **KEYS | {"stop_after": 8}, strategy=strategy)
    started = [
        host.torchrun(
            words, hosts[0].address, nnodes="2", restarts=0, **variables_of(host, reached, tmp_path)
        )
        for host in hosts
    ]
    ended = [end(process) for process in started]
    assert [code for code, _ in ended] == [0, 0], ended
    for host in hosts:
        host.ends()
    copy = bucket.fetch(f"apart-{strategy}", tmp_path / "copy")
    assert bucket.steps(f"apart-{strategy}") == [4, 8]
    store = Store(copy / "checkpoints")
    assert [store.verify(step) for step in store.steps()] == [[], []]
    report = read_report(copy)
    assert report.resolved and report.resolved.world_size == 2
    assert report.peak_memory and len(report.peak_memory.ranks) == 2
    assert losses(copy) == pytest.approx(alone[:8], rel=1e-5)
    here = [
        {path.name for path in (tmp_path / host.name / "runs").rglob("shard-*")} for host in hosts
    ]
    assert sorted(map(sorted, here)) == [[], ["shard-00000-of-00002.safetensors"]]

    words = command_of(url, common, **KEYS, strategy="single")
    code, out = end(hosts[1].run(ALONE, words, **variables_of(hosts[1], reached, tmp_path)))
    assert code == 0, out
    copy = bucket.fetch(f"apart-{strategy}", tmp_path / "complete")
    assert read_report(copy).outcome == "completed"
    assert losses(copy) == pytest.approx(alone, rel=1e-5)
    store = Store(copy / "checkpoints")
    assert {step: store.verify(step) for step in store.steps()} == {4: [], 8: [], 12: []}


@pytest.mark.slow
@pytest.mark.matrix
def test_ranks_on_another_host_get_the_plugin_with_their_job(
    hosts: tuple[Host, Host], reached: Proxy, bucket: Bucket, common: list[str], tmp_path: Path
) -> None:
    file = write_documented(tmp_path / "my.py", "An objective")
    keys = KEYS | {"train__max_steps": 4, "plugin": file, "objective": "Focal"}
    words = command_of(f"{URL}/plugin", common, **keys, strategy="ddp")
    # After each supervisor has read it, and before any rank starts.
    removed = f"import os\nos.unlink({str(file)!r}) if os.path.exists({str(file)!r}) else None\n"
    start_up = start_up_of_ranks(tmp_path, removed)
    started = []
    for host in hosts:
        variables = variables_of(host, reached, tmp_path) | {"PYTHONPATH": f"{ROOT}:{start_up}"}
        started.append(host.torchrun(words, hosts[0].address, nnodes="2", restarts=0, **variables))
    ended = [end(process) for process in started]
    assert [code for code, _ in ended] == [0, 0], ended
    assert not file.exists()
    copy = bucket.fetch("plugin", tmp_path / "copy")
    file = write_documented(file, "An objective")
    assert (copy / "plugin.py").read_text() == file.read_text()
    alone = losses_of_one(tmp_path, common, **keys)
    assert losses(copy) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.matrix  # minutes
def test_a_run_without_a_shared_disk_survives_the_loss_of_any_host(
    hosts: tuple[Host, Host],
    store: None,
    reached: Proxy,
    bucket: Bucket,
    slowly: dict[str, str],
    common: list[str],
    tmp_path: Path,
) -> None:
    """Shards that were lost with a host make no checkpoint; a claim of a lost host expires."""
    keys = KEYS | {"train__max_steps": STEPS}
    out_dir = tmp_path / "alone"
    with watched(
        out_dir, command_line(*command_of(out_dir, common, **keys)), tmp_path, command_environment()
    ) as run:
        assert run.end()[0] == 0
    expected = losses(out_dir)

    words = command_of(f"{URL}/lost", common, **keys, strategy="fsdp")
    variables = {host: variables_of(host, reached, tmp_path) | slowly for host in hosts}
    reached.fails(
        INTERNAL,
        lambda request: (
            is_write(request)
            and "00001-of-00002" in request.path
            and "step-00000004" not in request.path
        ),
    )
    torchruns = {host: host.torchrun(words, **variables[host]) for host in hosts}

    def wait_until(met: Callable[[], bool], *living: Host) -> None:
        def look() -> bool:
            for host in living:
                assert torchruns[host].poll() is None, torchruns[host].communicate()
            return met()

        wait_for(look)

    def job(host: Host) -> Job | None:
        with suppress(UserError):  # not there yet
            return Job.read(RunDirectory(tmp_path / host.name / "runs/s3/bucket/lost").job)
        return None

    # The other host's shards of later checkpoints never come: rank 0's host has them, the url has
    # not. Which of them is sent first depends on how fast the steps are.
    stays, lost = by_rank(*hosts)
    wait_until(lambda: 4 in bucket.steps("lost"), *hosts)
    committed = tmp_path / stays.name / "runs/s3/bucket/lost/checkpoints/step-00000008"
    wait_until(committed.exists, *hosts)
    later = re.compile(r"lost/checkpoints/step-(?!00000004)\d+/shard-00000")
    wait_until(lambda: later.search(str(reached.requests)) is not None, *hosts)
    lost.kill()
    assert bucket.steps("lost") == [4]
    reached.works()
    wait_until(lambda: (found := job(stays)) is not None and found.plan.world_size == 1, stays)
    resumed = job(stays)
    assert resumed and resumed.start_step == 4
    wait_until(lambda: 8 in bucket.steps("lost"), stays)

    torchruns[lost] = lost.torchrun(words, **variables[lost])
    zero, left = by_rank(*hosts)
    wait_until(lambda: (found := job(zero)) is not None and found.plan.world_size == 2, *hosts)
    resumed = job(zero)
    assert resumed
    wait_until(lambda: max(bucket.steps("lost")) > resumed.start_step, *hosts)
    zero.kill()

    code, said = end(torchruns[left])
    assert code == 0, said
    left.ends()
    copy = bucket.fetch("lost", tmp_path / "copy")
    report = read_report(copy)
    assert (report.outcome, report.exit_code) == ("completed", 0), report.exit_reason
    assert [int(row["step"]) for row in rows(copy)] == list(range(1, STEPS + 1))
    assert losses(copy) == pytest.approx(expected, rel=1e-5)
    checkpoints = Store(copy / "checkpoints")
    assert all(checkpoints.verify(step) == [] for step in checkpoints.steps())
    sizes = [(restart.world_size_before, restart.world_size) for restart in report.restarts]
    assert sizes == [(2, 1), (1, 2), (2, 1)]
    first, second, third = report.restarts
    assert first.reason.startswith("rank 1: ") and first.from_step == 4
    assert says(second.reason, "SIGTERM ... machines ... joined")
    assert says(third.reason, f"rank 0 on {zero.name} was killed")
    assert not any(name.startswith(".run/") for name in bucket.names("lost"))


@pytest.mark.slow
@pytest.mark.matrix
def test_a_mistake_on_one_host_is_reported_once_with_its_name_and_leaves_nothing(
    hosts: tuple[Host, Host],
    reached: Proxy,
    bucket: Bucket,
    common: list[str],
    tiny_base: Path,
    tmp_path: Path,
) -> None:
    words = command_of(f"{URL}/lacks", common, **KEYS)
    hide = f'libc.mount(b"none", b"{tiny_base}", b"tmpfs", 0, None)\n'
    of_slurm = {
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
    started = []
    for task, host in enumerate(hosts):
        of_task = {"SLURM_PROCID": str(task), "SLURM_NODEID": str(task)}
        variables = of_slurm | of_task | variables_of(host, reached, tmp_path)
        started.append(host.run(hide * task + ALONE, words, **variables))
    ended = [end(process) for process in started]
    assert [code for code, _ in ended] == [2, 2], ended
    (message,) = [said for _, said in ended if "ftkit: " in said]
    assert "ftkit: host2: " in message and str(tiny_base) in message, message
    assert bucket.names("lacks") == []
    left = [path for host in hosts for path in (tmp_path / host.name / "runs").rglob("lacks")]
    assert left == []
