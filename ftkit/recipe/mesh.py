"""The mesh of ranks: who shares what, without torch.

Neighbouring ranks may share the rows of a micro-batch: each has a piece of every row, and they
exchange heads for tokens around attention (`ftkit.models.bodies.exchange`). Together they are one
rank of the data. Parameters, gradients and optimizer state are over all ranks, however rows are.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One of the equal pieces of a row, of which each of several ranks has one."""

    index: int = 0
    """Number of the piece, from the first tokens on."""
    count: int = 1
    """Pieces of a row."""

    def tokens(self, of_row: int) -> int:
        """Tokens of a piece of a row that is filled up where it cannot be divided."""
        return -(-of_row // self.count)

    def span(self, of_row: int) -> slice:
        """Tokens of this piece in a row that is filled up."""
        size = self.tokens(of_row)
        return slice(self.index * size, (self.index + 1) * size)


WHOLE = Piece()
"""All of a row."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks as a table of data x context."""

    world_size: int
    """Number of ranks on all machines."""
    context: int = 1
    """Neighbouring ranks that share the rows of a micro-batch."""

    @property
    def data_ranks(self) -> int:
        """Ranks, or neighbours together, that have micro-batches of their own."""
        return self.world_size // self.context

    def data_rank(self, rank: int) -> int:
        """Number of the micro-batches that a rank computes, in [0, data_ranks)."""
        return rank // self.context

    def piece(self, rank: int) -> Piece:
        """Piece of these that a rank has."""
        return Piece(index=rank % self.context, count=self.context)
