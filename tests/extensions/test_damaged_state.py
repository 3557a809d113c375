"""Small files of a run that are damaged: each is named in one line, and no command ends in them."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from messages import says
from rich.console import Console
from saved_runs import ended, recipe, save_run

from ftkit.errors import UserError
from ftkit.extensions.comparison.runs import read_runs
from ftkit.extensions.object_storage.replica import Replica
from ftkit.extensions.watch.live_page import RunSnapshots
from ftkit.extensions.watch.watch import View, Watcher
from ftkit.recipe.devices import Devices
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job, RankError
from ftkit.runs.lock import Supervisor, claim
from ftkit.runs.report.table import render
from ftkit.runs.restarts import last_session, restarts_of
from ftkit.runs.resume import find_start
from ftkit.runs.state import look
from ftkit.utils.console.terminal import plain_text
from ftkit.utils.urls import local_path

FILES = {
    "the report": "report.json",
    "the job": ".run/job.json",
    "the lock": ".run/lock",
    "the report of a rank": ".run/rank-0/report.json",
    "the error of a rank": ".run/rank-0/error.json",
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "nested": lambda _: b"[" * 100_000,
    "nested objects": lambda _: b'{"host":' * 100_000,
    "not text": lambda _: b"\xff\xfe\x00\x01",
    "a long number": lambda _: b"1" * 10_000,
    "null": lambda _: b"null",
    "a list": lambda _: b"[]",
    "no keys": lambda _: b"{}",
    "other types": lambda content: json.dumps({key: [[1]] for key in json.loads(content)}).encode(),
    "large numbers": lambda content: re.sub(rb"\d+", b"9" * 400, content),
}

OFTEN = ("the report of a rank",)
OF_EACH_KIND = ("cut", "not text", "a list", "other types")
"""A damage to the text, to its encoding, to the JSON and to its values; others repeat them."""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that was killed with its supervisor after a session that had ended."""
    resumed = recipe(tmp_path / "out", resume="auto", accelerator="cpu", precision="bf16-mixed")
    save_run(resumed, 5, 10)
    ended(resumed.out_dir, "interrupted", 12)
    run = RunDirectory(resumed.out_dir)
    run.rank(0).path.mkdir(parents=True)
    job = Job(
        recipe=resumed,
        devices=Devices(accelerator="cpu", count=1),
        base="base",
        command=("ftkit",),
        started_at_s=1_800_000_000.0,
    )
    job.write(run.job)
    (run.rank(0).path / "report.json").write_bytes(run.report.read_bytes())
    RankError(kind="failed", message="gone", happened_at_s=1.0).write(run.rank(0))
    run.lock.write_text('{"host": "node1", "process": 4711}')
    return run


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(
            FILES[file],
            DAMAGES[damage],
            id=f"{file}-{damage}",
            marks=() if file in OFTEN or damage in OF_EACH_KIND else pytest.mark.matrix,
        )
        for file in FILES
        for damage in DAMAGES
    ],
)
def test_a_damaged_file_of_a_run_is_named_or_passed_over(
    name: str, damage: Callable[[bytes], bytes], run: RunDirectory
) -> None:
    file = run.path / name
    file.write_bytes(damage(file.read_bytes()))
    said = []

    def call(use: Callable[[], object]) -> None:
        try:
            use()
        except UserError as error:
            said.append(str(error))

    console = Console(file=io.StringIO())
    call(lambda: console.print(View(Watcher(run.path).look())))
    call(lambda: [plain_text(render(one.report, None)) for one in read_runs([run.path])[0]])
    call(lambda: RunSnapshots(run.path, copy_at=None).all_runs())
    call(lambda: look(run.path))
    call(lambda: RankError.read(run.rank(0)))
    call(lambda: Job.read(run.job))
    Supervisor.of(run.path)
    resumed = recipe(run.path, resume="auto", accelerator="cpu", precision="bf16-mixed")
    with claim(run.path, "go_on"):
        last_session(run)
        restarts_of(run, find_start(resumed), world_size=1, started_at_s=1_900_000_000.0)
    assert not [text for text in said if len(text) > 600]


def test_a_damaged_error_file_of_a_rank_is_an_error_itself(run: RunDirectory) -> None:
    run.rank(0).error.write_bytes(b"[" * 100_000)
    found = RankError.read(run.rank(0))
    assert found is not None and found.kind == "failed"
    assert says(found.message, "error.json is damaged")


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b'{"a": 5}', b"\xff", b""])
def test_a_damaged_record_of_a_url_is_empty(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path))
    directory = local_path("s3://bucket/run")
    directory.mkdir(parents=True)
    (directory / "a").touch()
    replica = Replica.of(directory)
    replica.note("a", "1")
    replica.save()
    assert Replica.of(directory).version("a") == "1"
    (file,) = (tmp_path / "runs/.known").iterdir()
    file.write_bytes(content)
    assert Replica.of(directory).names() == []
