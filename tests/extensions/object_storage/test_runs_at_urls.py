"""Runs whose out_dir is a url: the same run as in a directory, and any machine goes on with it."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command import command_environment, command_line
from messages import says
from object_servers import (
    BROKEN,
    EXPIRED,
    FULL,
    HANGS,
    INTERNAL,
    SECRET,
    SLOW_DOWN,
    Bucket,
    Fault,
    Proxy,
    is_write,
    writes,
)
from plugins import write_documented
from rank_jobs import needs_deepspeed
from remote_runs import Ftkit, ended, learned
from runs import wait_for

from ftkit.checkpoint.store import Store
from ftkit.runs.report.report import read_report

LAYOUTS = {
    "single": (),
    "ddp": ("--devices", "2", "--strategy", "ddp"),
    "fsdp": ("--devices", "2", "--strategy", "fsdp"),
    "deepspeed": ("--devices", "2", "--strategy", "deepspeed"),
}
pytestmark = pytest.mark.usefixtures("s3")


@pytest.mark.slow
def test_a_run_at_a_url_is_the_run_in_a_directory(
    run: Callable[..., str], whole: Callable[[str], Path], bucket: Bucket, tmp_path: Path
) -> None:
    """All its files are there, the losses are the same, and no secret is in any."""
    said = run("a", "s3://bucket/same/run")
    local = whole("finetune")
    copy = bucket.fetch("same/run", tmp_path / "copy")
    names = [{path.relative_to(place) for path in place.rglob("*")} for place in (copy, local)]
    assert names[0] == names[1]
    assert learned(copy) == learned(local)
    store = Store(copy / "checkpoints")
    assert [store.verify(step) for step in (2, 4, 5)] == [[], [], []]
    for name in ("final/adapter_model.safetensors", "checkpoints/latest"):
        assert (copy / name).read_bytes() == (local / name).read_bytes()
    assert read_report(copy).outcome == "completed"
    assert "out_dir: s3://bucket/same/run\n" in (copy / "recipe.yaml").read_text()
    assert "s3://bucket/same/run/final" in said and str(tmp_path / "a") not in said
    everything = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in content for content in [*everything, said.encode()])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("single", "single", marks=pytest.mark.matrix),
        pytest.param("fsdp", "single", marks=pytest.mark.matrix),
        pytest.param("single", "fsdp", marks=pytest.mark.slow),
        pytest.param("ddp", "fsdp", marks=pytest.mark.matrix),
        pytest.param("fsdp", "deepspeed", marks=[pytest.mark.matrix, needs_deepspeed]),
        pytest.param("deepspeed", "ddp", marks=[pytest.mark.matrix, needs_deepspeed]),
        pytest.param("deepspeed", "deepspeed", marks=[pytest.mark.matrix, needs_deepspeed]),
    ],
)
def test_another_machine_continues_a_run_with_the_same_result(
    run: Callable[..., str],
    whole: Callable[[str], Path],
    bucket: Bucket,
    tmp_path: Path,
    before: str,
    after: str,
) -> None:
    """It fetches small files whole, and of shards what its ranks need; nothing is lost."""
    url = f"s3://bucket/on/{before}-{after}"
    full = {"command": "finetune_full"}
    said = run("a", url, "--stop_after", "2", *LAYOUTS[before], **full)
    assert f"--config {url}/recipe.yaml --resume auto" in said
    assert bucket.steps(url.removeprefix("s3://bucket/")) == [2]
    said = run("b", url, "--resume", "auto", *LAYOUTS[after], **full)
    assert says(said, f"step 2 ... {url}/checkpoints/step-00000002")
    shards = (tmp_path / "b").rglob("step-00000002/shard-*")
    assert list(shards) == []  # they were read by ranges
    copy = bucket.fetch(f"on/{before}-{after}", tmp_path / "copy")
    found, expected = learned(copy), learned(whole("finetune_full"))
    assert [row[0] for row in found] == [row[0] for row in expected] == list("12345")
    losses = [[float(row[2]) for row in rows] for rows in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    store = Store(copy / "checkpoints")
    assert [store.verify(step) for step in store.steps()] == [[], [], []]
    assert store.steps() == [2, 4, 5]


@pytest.mark.slow
def test_another_machine_takes_the_plugin_from_the_url(
    run: Callable[..., str], tmp_path: Path
) -> None:
    url = "s3://bucket/plugin"
    plugin = write_documented(tmp_path / "my.py", "An objective", "A callback")
    said = run("a", url, "--stop_after", "2", "--objective", "Focal", "--plugin", plugin)
    assert f"--resume auto --plugin {url}/plugin.py" in said
    plugin.unlink()
    words = ("--config", f"{url}/recipe.yaml", "--plugin", f"{url}/plugin.py")
    said = run("b", url, *words, "--resume", "auto")
    assert says(said, f"step 2 ... {url}/checkpoints/step-00000002")


SPOILS = """
import ftkit

class Spoils(ftkit.Callback):
    def on_begin(self, run):
        def spoil(module, given):
            if run.step == 2 and given[0].requires_grad:
                given[0].register_hook(lambda gradient: gradient * float("nan"))
        run.model.head.register_forward_pre_hook(spoil)
"""


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        pytest.param("gradient", "norm ... step 3", marks=pytest.mark.slow),
        pytest.param("update", "step 3 ... parameter", marks=pytest.mark.matrix),
    ],
)
def test_numbers_that_are_not_finite_are_not_uploaded_and_the_checkpoint_before_stays(
    put: Callable[..., None],
    begin: Ftkit,
    bucket: Bucket,
    tmp_path: Path,
    cause: str,
    said: str,
) -> None:
    place, plugin = f"not-finite/{cause}", tmp_path / "spoils.py"
    plugin.write_text(SPOILS)
    put(place, "--stop_after", "2")
    shards = [name for name in bucket.names(place) if name.endswith(".safetensors")]
    good = {name: bucket.read(f"{place}/{name}") for name in shards}
    words = ("--plugin", plugin) if cause == "gradient" else ("--optimizer.lr", "1e45")
    often = ("--train.save_interval", "1", "--checkpoint.keep_last", "1")
    code, text = ended(begin("a", f"s3://bucket/{place}", "--resume", "auto", *often, *words))
    assert code == 1, text
    copy = bucket.fetch(place, tmp_path / "copy")
    found = read_report(copy)
    assert found.outcome == "failed" and says(found.exit_reason, said), found.exit_reason
    assert bucket.steps(place) == [2] and Store(copy / "checkpoints").verify(2) == []
    assert not bucket.names(f"{place}/final")
    assert good == {name: bucket.read(f"{place}/{name}") for name in good}


@pytest.mark.matrix
def test_a_complete_run_is_complete_on_any_machine(
    put: Callable[..., None], run: Callable[..., str]
) -> None:
    put("complete")
    named = "s3://bucket/complete/recipe.yaml"
    assert "is complete at step 5" in run(
        "c", "s3://bucket/complete", "--config", named, "--resume", "auto"
    )
    said = run("b", "s3://bucket/complete", "--resume", "auto")
    assert says(said, "s3://bucket/complete is complete at step 5 ... s3://bucket/complete/final")


@pytest.mark.slow
def test_a_run_branches_off_a_checkpoint_at_a_url(
    put: Callable[..., None], run: Callable[..., str], tmp_path: Path
) -> None:
    put("trunk")
    said = run("b", tmp_path / "branch", "--resume", "s3://bucket/trunk/checkpoints/step-00000002")
    assert says(said, "step 2 ... s3://bucket/trunk/checkpoints/step-00000002")
    assert [row[0] for row in learned(tmp_path / "branch")] == list("12345")


@pytest.mark.slow
def test_going_back_moves_later_checkpoints_aside_at_the_url(
    put: Callable[..., None], run: Callable[..., str], bucket: Bucket
) -> None:
    put("back")
    assert bucket.steps("back") == [2, 4, 5]
    run("b", "s3://bucket/back", "--resume", "2", "--stop_after", "1")
    assert bucket.steps("back") == [2, 3]
    aside = bucket.names("back/set_aside/1")
    for step in (4, 5):
        assert f"checkpoints/step-0000000{step}/shard-00000-of-00001.safetensors" in aside
        assert f"checkpoints/step-0000000{step}/metadata.json" in aside
    assert "final/adapter_model.safetensors" in aside
    assert not any(name.startswith("final/") for name in bucket.names("back"))


@pytest.mark.slow
def test_a_new_run_takes_another_url_unless_it_overwrites(
    put: Callable[..., None], run: Callable[..., str], bucket: Bucket
) -> None:
    put("taken")
    before = bucket.read("taken/report.json")
    said = run("b", "s3://bucket/taken", "--train.max_steps", "1")
    assert says(said, "s3://bucket/taken ... s3://bucket/taken-2")
    assert bucket.read("taken/report.json") == before
    run("b", "s3://bucket/taken", "--overwrite", "--train.max_steps", "2")
    assert bucket.steps("taken") == [2]
    assert bucket.read("taken/report.json") != before


@pytest.mark.slow
def test_a_mistake_leaves_the_url_as_it_was(
    begin: Ftkit, put: Callable[..., None], bucket: Bucket
) -> None:
    put("kept", "--stop_after", "2")
    before = {name: bucket.read(f"kept/{name}") for name in bucket.names("kept")}
    for words in (
        ("--overwrite", "--data.json_path", "nowhere.json"),
        ("--resume", "auto", "--optimizer.lr", "1", "--seed", "3"),
        (),
    ):
        code, said = ended(begin("b", "s3://bucket/kept", *words))
        assert code == 2, said
    assert says(said, "stopped at step 2")
    assert {name: bucket.read(f"kept/{name}") for name in bucket.names("kept")} == before


@pytest.mark.matrix
def test_a_second_run_is_refused_while_one_is_at_work_and_continues_after_a_kill(
    begin: Ftkit, run: Callable[..., str], bucket: Bucket
) -> None:
    endless = ("--train.max_steps", "1000000", "--train.epochs", "null")
    first = begin("a", "s3://bucket/claimed", *endless)
    try:
        wait_for(lambda: bool(bucket.steps("claimed")))
        for words in (("--resume", "auto"), (), ("--overwrite",)):
            code, said = ended(begin("b", "s3://bucket/claimed", *words))
            assert code == 2
            assert says(said, "s3://bucket/claimed ... process")
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    newest = max(bucket.steps("claimed"))
    said = run("b", "s3://bucket/claimed", "--resume", "auto", *endless, "--stop_after", "1")
    assert f"continuing from step {newest:,}" in said
    assert newest + 1 in bucket.steps("claimed")
    assert not any(name.startswith(".run/") for name in bucket.names("claimed"))


IMPATIENT = """
from ftkit.extensions.object_storage import objects
from ftkit.extensions.object_storage import mirror
objects.Objects.__init__.__defaults__ = (0.5,)
mirror.LONGEST_WAIT_S = 2.0
"""
"""What fails is given up, and tried again, sooner than a person would wait."""


@pytest.mark.slow
def test_training_continues_through_all_storage_faults_and_uploads_later(
    begin: Ftkit, s3: Proxy, bucket: Bucket, tmp_path: Path
) -> None:
    """And whenever somebody looks, what is there for a checkpoint is whole."""
    endless = ("--train.max_steps", "1000000", "--train.epochs", "null")
    s3.fails(INTERNAL, writes("/shard-"))
    first = begin("a", "s3://bucket/later", *endless, before=IMPATIENT)
    here = tmp_path / "a/runs/s3/bucket/later"
    log, store = here / "run.log", Store(here / "checkpoints")

    def trains_on_and_says(name: str) -> None:
        wait_for(lambda: log.exists() and f"{name} happened" in log.read_text())
        newest = store.newest() or 0
        wait_for(lambda: (store.newest() or 0) > newest)
        text = log.read_text()
        assert "the checkpoint of step" in text and says(text, "not sent yet")

    trains_on_and_says("InternalError")
    assert bucket.names("later/checkpoints")  # other files of checkpoints are there
    for fault, name in ((SLOW_DOWN, "SlowDown"), (FULL, "XMinioStorageFull")):
        s3.fails(fault, writes("/metadata.json"))
        trains_on_and_says(name)
        assert bucket.steps("later") == []
    met = s3.fails(BROKEN, writes("checkpoints/"))
    wait_for(lambda: len(met) > 10)
    s3.fails(Fault(delay_s=0.5), is_write, times=4)
    wait_for(lambda: bool(bucket.steps("later")))
    wait_for(lambda: "s3://bucket/later takes files again" in log.read_text())
    sent = max(bucket.steps("later"))
    s3.fails(EXPIRED, writes("checkpoints/"))
    trains_on_and_says("ExpiredToken")
    amid = Store(bucket.fetch("later", tmp_path / "amid") / "checkpoints")
    steps = bucket.steps("later")
    assert steps and [amid.verify(step) for step in steps] == [[] for _ in steps]
    s3.works()
    wait_for(lambda: max(bucket.steps("later"), default=0) > sent)
    first.send_signal(signal.SIGINT)
    code, said = ended(first)
    assert code == 130
    assert "the checkpoint of step" in said and SECRET not in said and "Traceback" not in said
    copy = bucket.fetch("later", tmp_path / "copy")
    report = read_report(copy)
    assert any("is not sent yet" in warning for warning in report.warnings)
    found = Store(copy / "checkpoints")
    assert found.newest() == report.progress.steps
    kept = found.steps()
    assert len(kept) in (3, 4)  # after a stop one more, until the newest gives a loss
    assert [found.verify(step) for step in kept] == [[] for _ in kept]  # halves are gone
    assert SECRET not in log.read_text()


@pytest.mark.slow
def test_ctrl_c_ends_a_run_although_the_storage_never_answers(
    begin: Ftkit, s3: Proxy, tmp_path: Path
) -> None:
    """The first Ctrl+C ends training, the next one what is done at the end."""
    endless = ("--train.max_steps", "1000000", "--train.epochs", "null")
    first = begin("a", "s3://bucket/silent", *endless)
    met = s3.fails(HANGS, writes("checkpoints/"))
    wait_for(lambda: bool(met))
    first.send_signal(signal.SIGINT)
    wait_for((tmp_path / "a/runs/s3/bucket/silent/report.json").exists)

    def ends_when_told_to() -> bool:
        first.send_signal(signal.SIGINT)
        for _ in range(50):
            time.sleep(0.1)
            if first.poll() is not None:
                return True
        return False

    wait_for(ends_when_told_to)
    code, said = ended(first)
    assert code in (1, 130)
    assert says(said, "s3://bucket/silent ... interrupted")
    assert "Traceback" not in said


@pytest.mark.slow
def test_the_rest_that_could_not_be_uploaded_is_reported_and_uploaded_by_the_next_start(
    begin: Ftkit, run: Callable[..., str], s3: Proxy, bucket: Bucket, tmp_path: Path
) -> None:
    met = s3.fails(EXPIRED, writes("unsent/checkpoints/"))
    first = begin("a", "s3://bucket/unsent")
    wait_for((tmp_path / "a/runs/s3/bucket/unsent/report.json").exists)
    beside_training = len(met) + 4  # files at once
    wait_for(lambda: len(met) > beside_training)
    first.send_signal(signal.SIGINT)
    code, said = ended(first)
    assert code == 1, said
    assert says(said, "s3://bucket/unsent ... this run")
    s3.works()
    assert bucket.steps("unsent") == []
    said = run("a", "s3://bucket/unsent", "--resume", "auto")
    assert says(said, "s3://bucket/unsent is complete at step 5")
    assert bucket.steps("unsent") == [2, 4, 5]
    assert "final/adapter_config.json" in bucket.names("unsent")


@pytest.mark.slow
def test_a_missing_extra_and_invalid_urls_are_refused_before_anything_starts(
    begin: Ftkit, tmp_path: Path
) -> None:
    for url, said in {
        "s3://bucket": "names no place in a bucket",
        "s3://key:secret@bucket/run": "Credentials are found in the environment",
        "hf://bucket/run": "ftkit reads and writes s3://, gs://, az:// and directories",
        "az://My_Container/run": "names no container: that is 3 to 63 lower-case letters",
        "s3://no-such-bucket/run": "there is no such bucket",
    }.items():
        code, text = ended(begin("a", url))
        assert code == 2 and said in text, text
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    environment = command_environment()
    environment["PYTHONPATH"] += f":{hidden}"
    environment["FTKIT_CACHE_DIR"] = str(tmp_path / "a")
    for scheme, module in {"gs": "gcsfs", "az": "adlfs"}.items():
        (hidden / f"{module}.py").write_text("raise ImportError('not here')")
        words = command_line("finetune", "embedded:quickstart", "--out_dir", f"{scheme}://bucket/r")
        result = subprocess.run(
            words, capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        assert result.returncode == 2
        assert f"pip install 'ftkit[{scheme}]'" in result.stderr


@pytest.mark.slow
def test_local_runs_send_no_requests_to_storage(
    run: Callable[..., str], s3: Proxy, tmp_path: Path
) -> None:
    run("a", tmp_path / "out")
    assert s3.requests == []
    assert not (tmp_path / "a/runs").exists()
