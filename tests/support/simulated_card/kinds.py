"""The kinds of cards, as torch and the driver describe them."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of card."""

    name: str
    """As torch and the driver give it."""
    capability: tuple[int, int]
    """Compute capability."""
    memory_bytes: int
    """What CUDA offers to programs."""
    multiprocessors: int
    parent: str | None = None
    """For a slice (MIG), the kind of the whole card, which is all that the driver's list shows."""


KINDS = {
    "h100": Kind(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        memory_bytes=int(79.1 * GIB),
        multiprocessors=132,
    ),
    "h200": Kind(
        name="NVIDIA H200",
        capability=(9, 0),
        memory_bytes=int(139.8 * GIB),
        multiprocessors=132,
    ),
    "b200": Kind(
        name="NVIDIA B200",
        capability=(10, 0),
        memory_bytes=int(178.3 * GIB),
        multiprocessors=148,
    ),
    "a100": Kind(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        memory_bytes=int(79.1 * GIB),
        multiprocessors=108,
    ),
    "v100": Kind(
        name="Tesla V100-SXM2-32GB",
        capability=(7, 0),
        memory_bytes=int(31.7 * GIB),
        multiprocessors=80,
    ),
    "l4": Kind(
        name="NVIDIA L4", capability=(8, 9), memory_bytes=int(22.0 * GIB), multiprocessors=58
    ),
    "rtx4090": Kind(
        name="NVIDIA GeForce RTX 4090",
        capability=(8, 9),
        memory_bytes=int(23.6 * GIB),
        multiprocessors=128,
    ),
    "t4": Kind(
        name="Tesla T4", capability=(7, 5), memory_bytes=int(14.6 * GIB), multiprocessors=40
    ),
    "h100-mig-1g.10gb": Kind(
        name="NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        capability=(9, 0),
        memory_bytes=int(9.75 * GIB),
        multiprocessors=16,
        parent="h100",
    ),
}
