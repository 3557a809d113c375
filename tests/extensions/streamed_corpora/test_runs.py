"""Runs on a corpus: killed and continued on other ranks, they learn what an unbroken one learns."""

import signal
from pathlib import Path
from typing import Any

import pytest
from command import Command, command_environment, command_line
from corpora import documents, lines_of, write_corpus
from runs import options, rows, wait_for, watched

from ftkit.checkpoint.store import Store
from ftkit.runs.report.report import read_report

STEPS = 24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Keys of a run over two corpora, of which one is in every format."""
    root = tmp_path_factory.mktemp("corpora")
    write_corpus(root / "mixed", 6)
    (root / "lines").mkdir()
    (root / "lines" / "a.jsonl").write_bytes(lines_of(documents(20, 8)))
    held = root / "held.jsonl"
    held.write_bytes(lines_of(documents(5, 9)))
    sources = ", ".join(
        f"{{path: {root / name}, val_path: {held}, weight: {weight}}}"
        for name, weight in (("mixed", 2), ("lines", 1))
    )
    return {
        "data": "Corpus",
        "data__sources": f"[{sources}]",
        "data__piece_kib": 1,
        "data__window_pieces": 3,
        "train__max_seq_length": 32,
        "train__global_batch_size": 15,
        "train__micro_batch_size": 2,
        "train__save_interval": 4,
        "eval__interval": 0,
        "eval__max_new_tokens": 0,
        "optimizer__lr": 1e-3,
        "accelerator": "cpu",
        "precision": "32-true",
    }


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_very_samples_that_an_unbroken_one_takes(
    ftkit: Command, corpus: dict[str, object], tiny_base: Path, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"checkpoint_dir": tiny_base} | corpus
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def words(out: Path, **more: object) -> list[str]:
        return ["finetune_full", *options(**keys | {"out_dir": out} | more)]

    done = ftkit(*words(whole, train__max_steps=STEPS))
    assert done.returncode == 0, done.stderr
    line = command_line(*words(broken, train__max_steps=STEPS, devices=2))
    with watched(broken, line, tmp_path, command_environment()) as run:
        wait_for(lambda: len(rows(broken)) > 8 or run.process.poll() is not None)
        for process in run.processes():
            process.send_signal(signal.SIGKILL)
    newest = Store(broken / "checkpoints").newest()
    assert newest is not None and newest < STEPS
    position = Store(broken / "checkpoints").metadata(newest).stream
    assert position is not None and len(position) == 2 and {"window", "samples"} <= {*position[0]}
    again = ftkit(*words(broken, train__max_steps=STEPS, devices=3, resume="auto"))
    assert again.returncode == 0, again.stderr
    for mine, other in zip(rows(broken), rows(whole), strict=True):
        for column in ("step", "samples", "tokens"):
            assert mine[column] == other[column]
        assert float(mine["loss"]) == pytest.approx(float(other["loss"]), rel=1e-5)
    report = read_report(broken)
    assert report.progress is not None and report.progress.epochs > 1
    assert [source.samples for source in report.sources.values()] == [
        source.samples for source in read_report(whole).sources.values()
    ]


@pytest.mark.slow
def test_a_run_ends_when_it_has_trained_on_its_tokens_and_may_be_prolonged(
    ftkit: Command, corpus: dict[str, object], tiny_base: Path, tmp_path: Path
) -> None:
    keys = {"checkpoint_dir": tiny_base} | corpus | {"out_dir": tmp_path / "out"}
    first = ftkit("finetune_full", *options(**keys, train__max_tokens=700))
    assert first.returncode == 0, first.stderr
    assert len(rows(tmp_path / "out")) == 2  # of 15 samples with 31 labels each
    assert "train.max_tokens of 700 reached" in read_report(tmp_path / "out").exit_reason
    complete = ftkit("finetune_full", *options(**keys, train__max_tokens=700, resume="auto"))
    assert complete.returncode == 0 and "--train.max_tokens 1400" in complete.stdout
    more = ftkit("finetune_full", *options(**keys, train__max_tokens=1400, resume="auto"))
    assert more.returncode == 0, more.stderr
    assert len(rows(tmp_path / "out")) == 4
    other = keys | {"data__window_pieces": 2}
    refused = ftkit("finetune_full", *options(**other, train__max_tokens=2000, resume="auto"))
    assert refused.returncode == 2 and "data.window_pieces" in refused.stderr
