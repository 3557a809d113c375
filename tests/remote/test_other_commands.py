"""Commands beside a run at a url: watching it from elsewhere, and cleaning up its checkpoints."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from command import command_environment, command_line
from object_servers import Bucket
from runs import TIMEOUT_S, options, wait_for

from ftkit.checkpoint.store import Store

Begin = Callable[..., warm.Process]


@pytest.fixture
def begin(common: list[str], tmp_path: Path, bucket: Bucket) -> Begin:
    """Starts the command with a cache of its own: `begin("a", "watch", url)`."""

    def start(cache: str, *words: object) -> warm.Process:
        if words[0] == "finetune":
            every = options(train__save_interval=2, eval__interval=0)
            words = ("finetune", *common, *every, *words[1:])
        environment = command_environment() | {"FTKIT_CACHE_DIR": str(tmp_path / cache)}
        return warm.SERVER.start(command_line(*words), environment, cwd=tmp_path)

    return start


def ended(process: warm.Process) -> tuple[int, str]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode is not None
    return process.returncode, out + err


@pytest.mark.slow
def test_a_run_at_a_url_is_watched_and_cleaned_up_from_another_machine(
    begin: Begin, bucket: Bucket, tmp_path: Path
) -> None:
    """While it is at work, once it was killed, and when it is complete."""
    url = "s3://bucket/seen"
    code, said = ended(begin("b", "watch", url))
    assert code == 2 and f"{url} holds no run" in said
    run = begin(
        "a", "finetune", "--out_dir", url, "--resume", "auto", "--checkpoint.keep_last", "100",
        "--train.max_steps", "1000000", "--train.epochs", "null",
    )  # fmt: skip
    watching = None
    try:
        wait_for(lambda: len(bucket.steps("seen")) > 2)
        watching = begin("b", "watch", url, "--interval", "1s")
        code, said = ended(begin("c", "watch", url, "--once"))
        assert code == 0, said
        assert f"{url}  running" in said and "checkpoint" in said and "loss" in said
        code, said = ended(begin("b", "checkpoints", "clean", url, "--keep_last", "1"))
        assert code == 2 and "belongs to a run that is still at work" in said
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
    code, said = ended(watching)
    assert code == 0
    assert f"{url}: training: lora on" in said and "killed at step" in said

    steps = bucket.steps("seen")
    bucket.write("seen/checkpoints/step-00999998/shard-00000-of-00002.safetensors", b"half")
    before = bucket.names("seen/checkpoints")
    clean = ("checkpoints", "clean", url, "--keep_last", "2")
    code, said = ended(begin("b", *clean, "--dry_run"))
    assert code == 0, said
    assert all(f"would remove step-{step:08}" in said for step in (*steps[:-2], 999_998))
    assert bucket.names("seen/checkpoints") == before
    code, said = ended(begin("b", *clean))
    assert code == 0, said
    assert "removed step-00999998 (4 B)" in said
    assert bucket.steps("seen") == steps[-2:]
    left = {name.split("/")[0] for name in bucket.names("seen/checkpoints")}
    assert left == {"latest", *(f"step-{step:08}" for step in steps[-2:])}

    last = str(steps[-1] + 1)
    code, said = ended(
        begin("b", "finetune", "--out_dir", url, "--resume", "auto", "--train.max_steps", last)
    )
    assert code == 0, said
    store = Store(bucket.fetch("seen", tmp_path / "copy") / "checkpoints")
    assert store.steps()[-1] == steps[-1] + 1
    assert all(store.verify(step) == [] for step in store.steps())
    code, said = ended(begin("c", "watch", url))
    assert code == 0 and f"{url}  completed" in said
