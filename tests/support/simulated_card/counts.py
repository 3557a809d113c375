"""Waits of the host, copies, and messages of ranks, with the lines that cause them."""

import atexit
import ctypes
import json
import os
import sys
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simulated_card.settings import Cards, Shortage

KINDS = ("item", "shape", "to_host", "to_host_async", "to_device", "collective", "synchronize")
SYNCHRONIZE = KINDS.index("synchronize")
WAITS = ("item", "shape", "to_host", "synchronize")
"""Kinds for which the host waits until the device has done all that it was given."""

# The directory of a clone is often called ftkit as well.
_PACKAGE = f"{Path(__file__).parents[3]}/ftkit/"


@dataclass(frozen=True, order=True)
class Event:
    """Something that happened, perhaps several times."""

    step: int
    """Optimizer steps done before."""
    micro_step: int
    """Backward passes begun in the step."""
    kind: str
    what: str
    """The collective, or pinned or pageable."""
    where: str
    """FILE:FUNCTION of the innermost line of ftkit, else of a library."""
    thread: str
    """main, or that of a save or a backward pass."""


class _State:
    def __init__(self) -> None:
        self.step = self.micro_step = 0
        self.counted: Counter[Event] = Counter()
        self.contexts: set[int] = set()
        self.callback: Any = None
        self.library: Any = None
        self.cards = 0
        self.lock = threading.RLock()


_state = _State()


def context(device: int) -> None:
    """A process has a context on a device from now on."""
    _state.contexts.add(device)


def contexts() -> list[int]:
    """Devices on which this process has taken memory or has done something else that makes CUDA
    take some for itself."""
    found = set(_state.contexts)
    for index in range(_state.cards):
        values = (ctypes.c_int64 * 5)()
        _state.library.card_memory(index, values)
        if values[4]:
            found.add(index)
    return sorted(found)


def counted() -> Counter[tuple[str, str]]:
    """So far in this process, by kind and by what."""
    found: Counter[tuple[str, str]] = Counter()
    for event, count in _state.counted.items():
        found[event.kind, event.what] += count
    return found


def note(kind: int, what: str, size: int) -> None:
    """Count something."""
    thread = threading.current_thread()
    name = "main" if thread is threading.main_thread() else thread.name.partition("-")[0]
    event = Event(_state.step, _state.micro_step, KINDS[kind], what, _where(), name)
    with _state.lock:
        _state.counted[event] += 1


def _where() -> str:
    """The innermost line of ftkit; without one, the outermost of a library below torch."""
    frame = sys._getframe(2)
    found = "?"
    while frame is not None:
        file = frame.f_code.co_filename
        place = f"{'/'.join(Path(file).parts[-2:])}:{frame.f_code.co_name}"
        if file.startswith(_PACKAGE):
            return f"{file.removeprefix(_PACKAGE)}:{frame.f_code.co_name}"
        if file.endswith("/tests/support/faults.py"):
            return place.partition("/")[2]
        if "/simulated_card/" not in file and "<" not in file and "/torch/" not in file:
            found = place if found == "?" else found
        frame = frame.f_back
    return found  # type: ignore[unreachable]


def install(cards: Cards, library: Any) -> None:
    """Count from now on."""
    import torch

    @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_int64)  # type: ignore[untyped-decorator]
    def callback(kind: int, what: bytes, size: int) -> None:
        note(kind, what.decode().rpartition("::")[2].strip("_"), size)

    _state.callback = callback  # what ctypes hands out must live
    _state.library, _state.cards = library, len(cards.visible())
    library.card_set_callback(callback)
    _follow_steps(torch)
    if cards.shortage is not None:
        run_out(cards.shortage)
    if cards.counts is not None:
        atexit.register(write, Path(cards.counts))
    atexit.register(library.card_set_callback, None)


def replayed() -> None:
    """A graph is replayed, which stands for a backward pass."""
    _state.micro_step += 1


def _follow_steps(torch: Any) -> None:
    """Know where a run is: backward passes and optimizer steps are counted as they come."""
    from torch.optim import optimizer

    backward = torch.autograd.backward

    def counted_backward(*args: Any, **kwargs: Any) -> Any:
        _state.micro_step += 1
        return backward(*args, **kwargs)

    def after_step(*_: Any) -> None:
        if _state.micro_step:  # else it only takes memory for its state
            _state.step += 1
            _state.micro_step = 0

    torch.autograd.backward = counted_backward
    optimizer.register_optimizer_step_post_hook(after_step)


def run_out(shortage: Shortage) -> None:
    """Have memory run out at a moment of this process, if its rank is meant."""
    import torch
    from torch.optim import optimizer

    if shortage.rank != int(os.environ.get("RANK", "0")):
        return

    def reached() -> None:
        if _state.step == shortage.after_steps:
            _state.library.card_fail(shortage.wording.encode())

    def at_step(*_: Any) -> None:
        if _state.micro_step:
            reached()

    if shortage.moment == "step":
        optimizer.register_optimizer_step_pre_hook(at_step)
        return
    owner, name = {
        "construction": (optimizer.Optimizer, "__init__"),
        "forward": (torch.nn.Module, "__call__"),
        "backward": (torch.autograd, "backward"),
    }[shortage.moment]
    function = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        if shortage.moment != "forward" or (args[0].training and torch.is_grad_enabled()):
            reached()
        return function(*args, **kwargs)

    setattr(owner, name, watched)


def write(directory: Path) -> None:
    """Write what was counted in this process; once more overwrites it."""
    rank = os.environ.get("RANK", "supervisor")
    with _state.lock:
        events = [asdict(event) | {"count": n} for event, n in sorted(_state.counted.items())]
    content = {"contexts": contexts(), "events": events}
    (directory / f"rank-{rank}.json").write_text(json.dumps(content, indent=1))


def forget() -> None:
    """Start anew, in a process that does several things."""
    with _state.lock:
        _state.counted.clear()
        _state.step = _state.micro_step = 0


@dataclass(frozen=True)
class Counts:
    """Counts in one process."""

    contexts: list[int]
    events: dict[Event, int]

    @classmethod
    def read(cls, directory: Path, rank: int | str = 0) -> "Counts":
        content = json.loads((directory / f"rank-{rank}.json").read_text())
        events = {Event(**e): n for e in content["events"] for n in [e.pop("count")]}
        return cls(content["contexts"], events)

    def of_step(self, step: int, *kinds: str) -> dict[str, int]:
        """By place, how often something of these kinds happened while a step was done (from 0)."""
        found: Counter[str] = Counter()
        for event, count in self.events.items():
            if event.step == step and event.kind in kinds:
                found[f"{event.kind} {event.what} {event.where}"] += count
        return dict(found)
