"""Streams and events of torch.cuda: everything is done at once, but misuse raises."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from simulated_card import counts


class Event:
    """A moment on the device's clock."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timing = enable_timing
        self._at_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds to another event."""
        if not (self._timing and end._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at_s is None or end._at_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end._at_s - self._at_s) * 1000

    def synchronize(self) -> None:
        counts.note(counts.SYNCHRONIZE, "event", 0)

    def wait(self, stream: Any = None) -> None:
        """The stream waits, the host does not."""

    def query(self) -> bool:
        return True


class Stream:
    """An order of work on a device."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        index = torch.cuda.current_device() if device is None else torch.device(device).index
        self.device = torch.device("cuda", index or 0)
        self.device_index = self.device.index
        self.device_type = 1
        self.stream_id = 0 if priority is None else id(self)
        self.cuda_stream = self.stream_id
        self.priority = priority

    def wait_stream(self, stream: "Stream") -> None:
        """This stream waits, the host does not."""

    def wait_event(self, event: Event) -> None:
        if event._at_s is None:
            raise AssertionError("a stream waits for an event that was never recorded")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        counts.note(counts.SYNCHRONIZE, "stream", 0)

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def install() -> None:
    """Put them in the place of torch's, which need CUDA."""
    defaults: dict[int, Stream] = {}
    chosen: dict[int, Stream] = {}

    def default_stream(device: Any = None) -> Stream:
        index = (
            torch.cuda.current_device()
            if device is None
            else torch.device("cuda", device).index
            if isinstance(device, int)
            else torch.device(device).index or 0
        )
        return defaults.setdefault(index, Stream(torch.device("cuda", index), priority=0))

    def current_stream(device: Any = None) -> Stream:
        stream = default_stream(device)
        return chosen.get(stream.device.index, stream)

    def set_stream(stream: Stream | None) -> None:
        if stream is not None:
            chosen[stream.device.index] = stream

    @contextlib.contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = current_stream(stream.device)
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        if not isinstance(stream, Stream):
            raise TypeError(f"record_stream wants a stream of torch.cuda, not {type(stream)}")

    torch.Tensor.record_stream = record_stream
    replaced = {
        "Event": Event,
        "Stream": Stream,
        "default_stream": default_stream,
        "current_stream": current_stream,
        "set_stream": set_stream,
        "stream": on,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.streams, name):
            setattr(torch.cuda.streams, name, value)
