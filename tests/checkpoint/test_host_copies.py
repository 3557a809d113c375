"""Copies of the state of training take no more memory than they must, and hold one step's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import some_metadata

from ftkit.checkpoint import host_copies
from ftkit.checkpoint.host_copies import HostCopies
from ftkit.checkpoint.saver import Retention, Saved, Saver
from ftkit.checkpoint.shards import Piece
from ftkit.checkpoint.store import Store
from ftkit.checkpoint.stored_state import StoredState


def piece(name: str, values: torch.Tensor, scales: torch.Tensor | None = None) -> Piece:
    code = None if scales is None else torch.linspace(-1, 1, 256)
    return Piece(name=name, shape=values.shape, start=0, values=values, scales=scales, code=code)


def state() -> list[Piece]:
    """Numbers of every width, in an order in which they are not aligned."""
    return [
        piece("exp_avg/a", torch.arange(301).to(torch.uint8), torch.rand(2)),
        piece("parameter/b", torch.rand(77).to(torch.bfloat16)),
        piece("parameter/a", torch.rand(301)),
        piece("exp_avg/b", torch.rand(77, dtype=torch.float64)),
    ]


STATE_BYTES = 301 + 2 * 4 + 77 * 2 + 301 * 4 + 77 * 8


class Runtime:
    """In the place of CUDA's runtime library."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered.append((address, size))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert address == self.registered.pop()[0]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return {712: "part or all of the requested memory range is already mapped"}[code]


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Runtime], None]:
    """Makes this process one that uses CUDA, as far as copies see."""

    def on_cuda(runtime: Runtime) -> None:
        device = torch.device("cuda")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    return on_cuda


def assert_equal(found: list[Piece], expected: list[Piece]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.name == theirs.name and torch.equal(ours.values, theirs.values)
        assert (ours.scales is None) == (theirs.scales is None)
        assert theirs.scales is None or torch.equal(ours.scales, theirs.scales)


def test_copies_take_only_the_bytes_of_their_sources() -> None:
    copies, pieces = HostCopies(), state()
    taken = copies.take(pieces)
    assert_equal(taken, pieces)
    assert copies.size_bytes == STATE_BYTES
    assert taken[0].values.untyped_storage().nbytes() == STATE_BYTES
    for before in pieces:
        before.values.zero_()
    assert taken[2].values.any(), "a copy"


def test_the_memory_is_kept_for_the_next_save_and_taken_anew_for_another_state() -> None:
    copies = HostCopies()
    first = copies.take(state())[0].values.data_ptr()
    assert copies.take(state())[0].values.data_ptr() == first
    more = [*state(), piece("parameter/c", torch.ones(5))]
    assert_equal(copies.take(more), more)
    assert copies.size_bytes == STATE_BYTES + 20
    copies.release()
    assert copies.size_bytes == 0


def test_on_cuda_the_memory_is_registered_once_with_its_exact_size(
    on_cuda: Callable[[Runtime], None],
) -> None:
    runtime = Runtime()
    on_cuda(runtime)
    copies = HostCopies()
    for _ in range(3):
        copies.take(state())
    ((address, size),) = runtime.registered
    assert size == STATE_BYTES and address % 4096 == 0
    copies.take(state()[:2])
    ((_, size),) = runtime.registered
    assert size == copies.size_bytes < STATE_BYTES
    copies.release()
    assert runtime.registered == [] and copies.refusal is None


def test_memory_that_cannot_be_registered_is_used_as_it_is(
    on_cuda: Callable[[Runtime], None],
) -> None:
    runtime = Runtime(code=712)
    on_cuda(runtime)
    copies, pieces = HostCopies(), state()
    assert_equal(copies.take(pieces), pieces)
    assert copies.refusal == "part or all of the requested memory range is already mapped"
    copies.release()
    assert len(runtime.registered) == 1, "nothing to unregister"


# --- Copies beside training -----------------------------------------------------------------------


class Queue:
    """A stream of a device that does nothing before it must."""

    current: "Queue"
    """The one that work is given to."""

    def __init__(self, device: object = None) -> None:
        self.work: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        self.before, Queue.current = Queue.current, self

    def __exit__(self, *_: object) -> None:
        Queue.current = self.before

    def wait_stream(self, other: "Queue") -> None:
        other.run()

    def wait_event(self, event: "Moment") -> None:
        self.work.append(event.synchronize)

    def run(self) -> None:
        while self.work:
            self.work.pop(0)()


class Moment:
    """An event in a queue."""

    def __init__(self, device: object) -> None:
        self.synchronize: Callable[[], None]

    def record(self, queue: Queue) -> None:
        self.synchronize = queue.run


@pytest.fixture
def queues(on_cuda: Callable[[Runtime], None], monkeypatch: pytest.MonkeyPatch) -> Queue:
    """The queue in which training works; copies on another one are put off as long as allowed."""
    on_cuda(Runtime())
    training = Queue.current = Queue()

    copy = torch.Tensor.copy_

    def copy_later(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        if not non_blocking:
            return copy(self, source)
        Queue.current.work.append(lambda: copy(self, source))
        return self

    monkeypatch.setattr(torch, "Stream", Queue)
    monkeypatch.setattr(torch, "Event", Moment)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: training)
    monkeypatch.setattr(torch.accelerator, "synchronize", training.run)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    return training


@pytest.mark.parametrize("beside", [False, True])
def test_an_update_after_a_save_changes_no_copy(
    queues: Queue, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    monkeypatch.setattr(host_copies, "COPIES_BESIDE_TRAINING", beside)
    copies, pieces = HostCopies(), state()
    expected = [tensor.values.clone() for tensor in pieces]
    taken = copies.take(pieces)
    assert taken[2].values.any() != beside, "put off to where training need not wait"
    copies.before_update()
    for live in pieces:
        queues.work.append(live.values.zero_)
    queues.run()
    copies.wait()
    assert all(torch.equal(copy.values, was) for copy, was in zip(taken, expected, strict=True))


def test_an_update_that_waits_for_nothing_would_be_seen_here(
    queues: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "COPIES_BESIDE_TRAINING", True)
    copies, pieces = HostCopies(), state()
    taken = copies.take(pieces)
    queues.work.append(pieces[2].values.zero_)
    queues.run()
    copies.wait()
    assert not taken[2].values.any()


@pytest.mark.parametrize("beside", [False, True])
def test_a_shard_is_written_from_complete_copies(
    queues: Queue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, beside: bool
) -> None:
    monkeypatch.setattr(host_copies, "COPIES_BESIDE_TRAINING", beside)
    saver, pieces = saver_of(tmp_path), state()
    saver.save(some_metadata(3), pieces, None, wait=False, started=0.0)
    saver.wait()
    (saved,) = saver.finished()
    assert saved.error is None
    stored = StoredState([saved.path / "shard-00000-of-00001.safetensors"])
    for live in pieces:
        end = live.values.numel()
        if live.scales is None:
            assert torch.equal(stored[live.name].read(0, end), live.values)
        else:
            assert live.code is not None
            found = stored[live.name].read_quantized(0, end, live.code)
            codes, scales = found or (None, None)
            assert torch.equal(codes, live.values) and torch.equal(scales, live.scales)
    saver.release()
    assert saver.copies.size_bytes == 0


def saver_of(directory: Path, *, asynchronous: bool = True) -> Saver:
    retention = Retention(keep_last=1, keep_every=None, keep_best=0)
    return Saver(Store(directory), [directory], 0, retention, asynchronous=asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_training_waits_for_takes_no_copy_of_the_state(
    queues: Queue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asynchronous: bool
) -> None:
    saver, large = saver_of(tmp_path, asynchronous=asynchronous), torch.rand(2**20)
    saver.save(some_metadata(3), [piece("parameter/a", large)], None, wait=False, started=0.0)
    saver.wait()
    assert saver.copies.size_bytes == large.nbytes * asynchronous
    copied: list[int] = []
    to_host = torch.Tensor.cpu

    def counted(self: torch.Tensor) -> torch.Tensor:
        copied.append(self.nbytes)
        return to_host(self)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    queues.work.append(lambda: large.fill_(4))
    saver.save(some_metadata(4), [piece("parameter/a", large)], None, wait=True, started=0.0)
    *_, saved = saver.finished()
    assert saved.error is None
    stored = StoredState([saved.path / "shard-00000-of-00001.safetensors"])
    assert (stored["parameter/a"].read(0, 2**20) == 4).all(), "after the update"
    assert max(copied) <= 2**20 and sum(copied) == large.nbytes
    saver.release()


def test_an_older_checkpoint_is_deleted_once_the_newer_one_has_given_a_loss(
    tmp_path: Path,
) -> None:
    """Its weights may be finite, and their loss NaN: a run goes on from the one before."""
    store = Store(tmp_path)

    def save(saver: Saver, step: int, loss: float | None, *, ends: bool) -> list[int]:
        metadata = some_metadata(step, validation_loss=loss)
        saver.save(metadata, [piece("parameter/a", torch.ones(3))], None, wait=ends, started=0.0)
        saver.wait()
        return store.steps()

    session = saver_of(tmp_path)
    assert save(session, 1, None, ends=False) == [1]
    assert save(session, 2, None, ends=False) == [1, 2]
    assert save(session, 3, None, ends=True) == [2, 3]
    session = saver_of(tmp_path)  # it has gone on from 3
    assert save(session, 4, None, ends=False) == [3, 4]
    assert save(session, 5, 0.5, ends=True) == [5]


def test_a_save_that_ends_while_others_are_taken_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saver, taken = saver_of(tmp_path), list[Saved]()

    def made(**values: Any) -> Saved:
        taken.extend(saver.finished())
        return Saved(**values)

    monkeypatch.setattr("ftkit.checkpoint.saver.Saved", made)
    saver.save(some_metadata(3), state(), None, wait=True, started=0.0)
    assert [saved.step for saved in [*taken, *saver.finished()]] == [3]
