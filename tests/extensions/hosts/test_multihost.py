"""Hosts that share no disk: what a rank leaves on one arrives where rank 0 looks for it."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from ftkit.checkpoint.metadata import receipt_name
from ftkit.extensions.hosts.heartbeats import ended_key
from ftkit.extensions.hosts.multihost import HostRelay, LeadRelay, SharedTexts
from ftkit.runs.directory import RunDirectory
from ftkit.utils.urls import local_path

ELSEWHERE = 1


def receipt(step: int) -> str:
    return json.dumps({"files": {}, "error": f"of step {step}"})


def test_receipts_that_a_rank_leaves_between_two_looks_all_arrive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 0 waits for each of them, and would wait for ever for one that another replaced.

    The first look of a host is made as soon as it takes part, and both receipts are there by then.
    """
    pytest.importorskip("s3fs", reason="the extra dev is not installed")
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    here = RunDirectory(tmp_path / "of-rank-0")
    there = RunDirectory(local_path("s3://bucket/run"))
    left, found = there.rank(ELSEWHERE).path, here.rank(ELSEWHERE).path
    for directory in (left, found):
        directory.mkdir(parents=True)
    steps = (2, 4)
    for step in steps:
        (left / receipt_name(step)).write_text(receipt(step))
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60)
    )
    lead = LeadRelay(store, world_size=2, local_world_size=1)
    host = HostRelay(SharedTexts(store), there, range(ELSEWHERE, 2), ())
    with host, lead:
        lead.begin(here)
        lead.collect()
        arrived = {file.name: file.read_text() for file in found.glob("saved-*.json")}
        store.set(ended_key(ELSEWHERE), "")
    assert arrived == {receipt_name(step): receipt(step) for step in steps}
    assert list(left.glob("saved-*.json")) == []
