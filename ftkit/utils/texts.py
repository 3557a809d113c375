"""Text files that are not UTF-8: where, and the command that makes them so."""

import shlex
from functools import partial
from pathlib import Path
from typing import BinaryIO

_UNPACK = {".gz": "gzip -dc", ".zst": "zstd -dc"}
_BOMS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_UNDEFINED = frozenset(b"\x81\x8d\x8f\x90\x9d")
"""Bytes that are no character of Windows-1252."""
_MOST_LINE_BYTES = 2**27


def explain_not_utf8(file: Path, stream: BinaryIO) -> str:
    """Say where a text is not UTF-8 or has a NUL byte, and which command converts it.

    Args:
        file: what the text is of, as the user knows it.
        stream: its content from the beginning, decompressed.
    """
    head, has_utf8, before = b"", False, 0
    lines = iter(partial(stream.readline, _MOST_LINE_BYTES), b"")
    for number, line in enumerate(lines, 1):
        head = head or line[:4]
        try:
            text = line.decode()
            at = line.find(0)
        except UnicodeDecodeError as error:
            text, at = line[: error.start].decode(), error.start
        has_utf8 |= not text.isascii()
        if at >= 0:
            what = f"{line[at]:#04x}" if line[at] else "NUL"
            place = f"byte {before + at} is {what} (line {number})"
            return f"{file} is not UTF-8 text: {place}.\n{_advice(file, head, line, at, has_utf8)}"
        before += len(line)
    return f"{file} is not UTF-8 text.\nSave it with the encoding UTF-8."


def _advice(file: Path, head: bytes, line: bytes, at: int, has_utf8: bool) -> str:
    """What to do, and the command for it on a line of its own."""
    encoding = next((name for bom, name in _BOMS.items() if head.startswith(bom)), None)
    if encoding is None and 0 in head[:2]:
        encoding = "UTF-16BE" if head[0] == 0 else "UTF-16LE"
    what, change = f"It is {encoding}: convert it", f"iconv -f {encoding} -t UTF-8"
    if encoding is None and not line[at]:
        what, change = "Get a fresh copy of it, or remove all such bytes", "tr -d '\\000'"
    elif encoding is None and has_utf8:  # only something of it is damaged
        what, change = "Get a fresh copy of it, or remove such bytes", "iconv -f UTF-8 -t UTF-8 -c"
    elif encoding is None:
        encoding = "ISO-8859-1" if _UNDEFINED & {*line} else "WINDOWS-1252"
        what = f"Convert it from the encoding that it has, such as {encoding}"
        change = f"iconv -f {encoding} -t UTF-8"
    return f"{what}, and give the new file:\n{_command(file, change)}"


def _command(file: Path, change: str) -> str:
    """A command of the shell that writes the changed content beside a file."""
    unpack = _UNPACK.get(file.suffix.lower())
    plain = file.with_suffix("") if unpack else file
    new = plain.with_name(f"{plain.stem}.utf8{plain.suffix}")
    old, made = shlex.quote(str(file)), shlex.quote(str(new))
    return f"{unpack} {old} | {change} > {made}" if unpack else f"{change} < {old} > {made}"
