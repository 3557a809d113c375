"""Hosts without a common disk: each has a cache of its own, and the run lies at a url.

The hosts are network namespaces; torchrun, ftkit and its ranks are real processes in them.
"""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from command import ROOT, command_environment, command_line
from hosts import HUB, IMPATIENT, STORE, Host, network
from object_servers import Bucket, Proxy, behind_proxy
from runs import TIMEOUT_S, Process, command_of, rows, wait_for, watched

from ftkit.checkpoint.store import Store
from ftkit.report.report import read_report

URL = "s3://bucket"
KEYS: dict[str, object] = {
    "num_nodes": "auto",
    "resume": "auto",
    "lora_dropout": 0,
    "train__max_steps": 12,
    "train__global_batch_size": 4,
    "train__micro_batch_size": 1,
    "train__save_interval": 4,
    "checkpoint__keep_last": 5,
    "eval__interval": 0,
    "eval__final_validation": "false",
}
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
    with behind_proxy(s3.port, machines[0].listening()) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def alone(common: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run on one device, in a directory."""
    directory = tmp_path_factory.mktemp("alone")
    out_dir = directory / "out"
    line = command_line(*command_of(out_dir, common, **KEYS))
    with watched(out_dir, line, directory, command_environment()) as run:
        code, out, _ = run.end()
    assert code == 0, out
    return losses(out_dir)


def losses(out_dir: Path) -> list[float]:
    return [float(row["loss"]) for row in rows(out_dir)]


def variables_of(host: Host, proxy: Proxy, tmp_path: Path) -> dict[str, str]:
    """Of the environment of a host: its own cache, and the storage."""
    return proxy.environment | {"FTKIT_CACHE_DIR": str(tmp_path / host.name)}


def end(process: Process) -> tuple[int, str]:
    process.wait(timeout=2 * TIMEOUT_S)
    out, err = process.communicate()
    assert process.returncode is not None
    return process.returncode, out + err


@pytest.mark.slow
def test_two_hosts_without_a_common_disk_make_one_run_at_a_url_and_one_goes_on_with_it(
    hosts: tuple[Host, Host],
    reached: Proxy,
    bucket: Bucket,
    alone: list[float],
    common: list[str],
    tmp_path: Path,
) -> None:
    """Each sends the shards of its own rank; a checkpoint counts once all are there."""
    words = command_of(f"{URL}/apart", common, **KEYS | {"stop_after": 8}, strategy="fsdp")
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
    copy = bucket.fetch("apart", tmp_path / "copy")
    assert bucket.steps("apart") == [4, 8]
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

    words = command_of(f"{URL}/apart", common, **KEYS, strategy="single")
    code, out = end(hosts[1].run(ALONE, words, **variables_of(hosts[1], reached, tmp_path)))
    assert code == 0, out
    copy = bucket.fetch("apart", tmp_path / "complete")
    assert read_report(copy).outcome == "completed"
    assert losses(copy) == pytest.approx(alone, rel=1e-5)
    store = Store(copy / "checkpoints")
    assert {step: store.verify(step) for step in store.steps()} == {4: [], 8: [], 12: []}
