"""Settings of the simulated cards, handed to processes in an environment variable."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from simulated_card.kinds import KINDS, Kind

VARIABLE = "FTKIT_TEST_CARD"
START = Path(__file__).parent / "start"
"""On PYTHONPATH, it puts the cards into every Python process that has the variable."""

Wording = Literal["torch", "driver", "cublas", "nccl"]
Moment = Literal["construction", "forward", "backward", "step"]


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Memory that runs out once, in one rank."""

    wording: Wording
    """Whose words say it."""
    moment: Moment
    """Making the optimizer, a forward pass, a backward pass, or the optimizer's step."""
    rank: int = 0
    after_steps: int = 0
    """Optimizer steps done before."""


@dataclass(frozen=True, kw_only=True)
class Cards:
    """The cards of a machine, and what happens on them."""

    kinds: tuple[str, ...]
    """Names in KINDS, in the order of the driver's list."""
    library: str
    """The compiled cards."""
    driver: str = "580.65.06"
    cuda: str = "13.0"
    """Of the installed torch."""
    archs: tuple[str, ...] = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
    """What the kernels of the installed torch are compiled for."""
    usable: bool = True
    """Whether torch can use them: not with a driver too old for it."""
    memory_bytes: int | None = None
    """Of every card; None: that of its kind."""
    counts: str | None = None
    """Directory for what is counted, a file for each process that used a card."""
    shortage: Shortage | None = None
    kind: str = "cuda"
    """What torch calls them. Any other is one that torch has no build for: see `private`."""

    def environment(self) -> dict[str, str]:
        """Environment that puts the cards into a process and its children, without PYTHONPATH."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def here(cls) -> "Cards | None":
        """Those of this process."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        values = json.loads(text)
        shortage = values.pop("shortage")
        found = cls(
            **values | {key: tuple(values[key]) for key in ("kinds", "archs")},
        )
        return replace(found, shortage=Shortage(**shortage) if shortage else None)

    def uuid(self, index: int) -> str:
        """UUID of a card, as the driver writes it."""
        digest = hashlib.sha256(f"card {index}".encode()).hexdigest()
        parts = (digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32])
        prefix = "MIG" if KINDS[self.kinds[index]].parent else "GPU"
        return f"{prefix}-{'-'.join(parts)}"

    def visible(self) -> list[int]:
        """Indexes in `kinds` of the cards that CUDA shows, in its order.

        What CUDA_VISIBLE_DEVICES names counts up to the first name that is none; of slices CUDA
        shows one to a process.
        """
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        if named is None:
            found = list(range(len(self.kinds)))
        else:
            found = []
            for name in named.split(","):
                index = self._index(name.strip())
                if index is None or index in found:
                    break
                found.append(index)
        sliced = [i for i in found if KINDS[self.kinds[i]].parent]
        return sliced[:1] if sliced else found

    def _index(self, name: str) -> int | None:
        if name.isdecimal():
            return int(name) if int(name) < len(self.kinds) else None
        matching = [i for i in range(len(self.kinds)) if name and self.uuid(i).startswith(name)]
        return matching[0] if len(matching) == 1 else None

    def shown(self) -> list[Kind]:
        """The kinds of the visible cards."""
        kinds = [KINDS[self.kinds[i]] for i in self.visible()]
        if self.memory_bytes is None:
            return kinds
        return [replace(kind, memory_bytes=self.memory_bytes) for kind in kinds]
