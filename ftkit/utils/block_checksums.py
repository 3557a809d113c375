"""Checksums of a file's blocks, so that a part of the file can be verified without the rest."""

import zlib
from dataclasses import dataclass

BLOCK_BYTES = 8 * 2**20
"""What is fetched of a file at once; it is verified in such blocks, too."""
_DIGITS = 8


@dataclass(frozen=True, kw_only=True)
class BlockChecksums:
    """What each block of a file must be.

    CRC-32 finds damage, such as swapped, missing or flipped parts, but for one in four billion, at
    a quarter of the time of SHA-256, which stands beside it for the file as a whole.
    """

    block_bytes: int
    """Length of every block but the last."""
    crc32: str
    """8 hexadecimal digits for each block, one after the other."""

    def problem(self, size_bytes: int) -> str | None:
        """Why these cannot be the checksums of a file of that length; None: they can."""
        digits = len(self.crc32)
        if self.block_bytes <= 0 or not set(self.crc32) <= set("0123456789abcdef"):
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
        return self.crc32[number * _DIGITS :][:_DIGITS] == checksum_of_block(content)


def checksum_of_block(content: bytes | memoryview) -> str:
    """The CRC-32 of a block, in 8 hexadecimal digits."""
    return f"{zlib.crc32(content):0{_DIGITS}x}"
