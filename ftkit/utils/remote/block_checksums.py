"""Checksums of a file's blocks, so that a part of the file can be verified without the rest."""

from dataclasses import dataclass

BLOCK_BYTES = 8 * 2**20
"""What is fetched of a file at once; it is verified in such blocks, too."""
_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class BlockChecksums:
    """What each block of a file must be.

    XXH3 with 64 bits finds damage, such as parts that were swapped, lost or flipped, at a
    twentieth of the time that the SHA-256 of the whole file takes, which stands beside it.
    """

    block_bytes: int
    """Length of every block but the last."""
    xxh3_64: str
    """16 hexadecimal digits for each block, one after the other."""

    def problem(self, size_bytes: int) -> str | None:
        """Why these cannot be the checksums of a file of that length; None: they can."""
        digits = len(self.xxh3_64)
        if self.block_bytes <= 0 or not set(self.xxh3_64) <= set("0123456789abcdef"):
            return "the checksums of its blocks cannot be read"
        if digits != _DIGITS * -(-size_bytes // self.block_bytes):
            return f"it has {digits} digits of checksums for its {size_bytes:,} bytes"
        return None

    def matches(self, number: int, content: bytes | memoryview) -> bool:
        """Whether a block is what it was.

        Args:
            number: of the block, from 0 on.
            content: all of the block.
        """
        import xxhash  # compiled, and commands that read no checkpoint do without

        return self.xxh3_64[number * _DIGITS :][:_DIGITS] == xxhash.xxh3_64_hexdigest(content)
