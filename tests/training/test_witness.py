"""Things that a run must not do in a step, because they cost time or memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
from preloaded import Preloaded
from runs import WITHOUT_EVALUATION, options
from witness import FORWARD, MOVED, UPDATED, recorded


@pytest.fixture
def run(server: Preloaded, common: list[str], tmp_path: Path) -> Callable[..., int | None]:
    """Runs the command with a witness in every rank; its exit code."""

    def run(*, ends_at: int | None = None, **keys: object) -> int | None:
        settings = {"checkpoint__save": False, "train__max_steps": 2} | keys
        words = ["finetune_full", *common, *options(**WITHOUT_EVALUATION | settings)]
        fault = ["watched", str(tmp_path), ends_at]
        attempt = server.run(*words, "--out_dir", tmp_path / "out", faults={0: fault, 1: fault})
        return attempt.code

    return run


@pytest.mark.slow
def test_ranks_exchange_no_word_between_the_micro_steps_of_a_step(
    run: Callable[..., int | None], tmp_path: Path
) -> None:
    layout = {"devices": 2, "strategy": "ddp"}
    batch = {"train__global_batch_size": 8, "train__micro_batch_size": 1}
    assert run(**layout, **batch) == 0
    for rank in range(2):
        done = recorded(tmp_path, rank)
        first, last = done.index(FORWARD), len(done) - done[::-1].index(UPDATED)
        for step in " ".join(done[first:last]).split(UPDATED)[:-1]:
            words = step.split()
            # Behind the last one, ranks add up the numbers of the step.
            assert words[words.index(FORWARD) :][:4] == [FORWARD] * 4
            assert words.count(FORWARD) == 4


@pytest.mark.parametrize(("ends_at", "code"), [(None, 0), (3, 1)], ids=["at its end", "in a step"])
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_optimizer_state_stays_where_it_is_when_a_run_ends(
    run: Callable[..., int | None], tmp_path: Path, devices: int, ends_at: int | None, code: int
) -> None:
    layout = {"devices": devices, "strategy": "ddp" if devices == 2 else "auto"}
    batch = {"train__global_batch_size": 2 * devices, "train__micro_batch_size": 1}
    assert run(**layout, **batch, ends_at=ends_at) == code
    done = recorded(tmp_path)
    assert UPDATED in done and MOVED not in done[done.index(UPDATED) :]
