"""Peak memory in reports: of each rank, and the largest over the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Highest memory of one rank since the run started."""

    rank: int
    """Global rank."""
    requested_bytes: int | None = None
    """Device memory that was asked for, before torch's allocator rounds it up; None on CPU."""
    allocated_bytes: int | None = None
    """Device memory in tensors, as torch counts it; None on CPU."""
    reserved_bytes: int | None = None
    """Device memory torch took from the driver; None on CPU."""
    rss_bytes: int | None = None
    """Resident host memory, file-mapped pages included."""
    host_bytes: int | None = None
    """Resident host memory without file-mapped pages, highest value sampled."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Highest memory by rank, and the largest value over the ranks; see RankMemory."""

    ranks: list[RankMemory]
    """One entry per rank."""
    requested_bytes: int | None = None
    """Largest over the ranks."""
    allocated_bytes: int | None = None
    """Largest over the ranks."""
    reserved_bytes: int | None = None
    """Largest over the ranks."""
    rss_bytes: int | None = None
    """Largest over the ranks."""
    host_bytes: int | None = None
    """Largest over the ranks."""

    @classmethod
    def of(cls, ranks: Sequence[RankMemory]) -> "PeakMemory":
        """The maxima over the ranks; None where no rank knows the value."""

        def largest(values: list[int | None]) -> int | None:
            return max((value for value in values if value is not None), default=None)

        return cls(
            ranks=list(ranks),
            requested_bytes=largest([rank.requested_bytes for rank in ranks]),
            allocated_bytes=largest([rank.allocated_bytes for rank in ranks]),
            reserved_bytes=largest([rank.reserved_bytes for rank in ranks]),
            rss_bytes=largest([rank.rss_bytes for rank in ranks]),
            host_bytes=largest([rank.host_bytes for rank in ranks]),
        )
