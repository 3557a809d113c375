"""Files of images: found, checked by their headers, and decoded.

Files come from anywhere: nothing is fetched, only four formats are read, and what a header says is
checked before anything is decoded.
"""

import base64
import binascii
import hashlib
import io
import os
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from ftkit.data.records.media import BadMedium, MediaFile
from ftkit.data.records.record import Misfit, kind_of
from ftkit.errors import UserError
from ftkit.utils.files import cache_root

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are read; of an animation, its first picture."""
MOST_PIXELS = 2**26
"""Most pixels of an image: 8,192 x 8,192, which takes 192 MiB when it is decoded."""
MOST_BYTES = 2**28
"""Most bytes of a file."""
_ORIENTATION, _ON_ITS_SIDE = 0x0112, range(5, 9)
"""Tag of EXIF, and its values for images that are turned by a quarter."""
_REMOVE = "Correct it, or remove the record."


class BrokenImage(Exception):
    """A file is no image that can be read; the text completes a sentence about it."""


def reference(value: Any, folder: Path | None, *, names_files: bool = True) -> dict[str, Any]:
    """Return file and digest of an image that a record names or holds, and whether it is relative.

    An image that the record holds is kept in ftkit's cache, once for each content.

    Args:
        value: a path, a file or data url, an object with bytes or a path, or bytes.
        folder: directory of the records, in which relative paths begin; None: they are in no file.
        names_files: whether it may be a file of this machine, which no download may name.

    Raises:
        Misfit: there is no such image, or it cannot be read; BadMedium where a file is named.
    """
    held = _held(value, folder)
    if isinstance(held, _Named):
        if not names_files:
            raise Misfit(
                f": its image is the path {_short(str(held.path))}, but data that were downloaded "
                f"hold their images.\n{_REMOVE}"
            )
        try:
            content = read_file(held.path)
            check_header(content)
        except BrokenImage as broken:
            file = MediaFile("image", "", str(held.path), held.is_relative)
            raise BadMedium(f": its image {held.path} {broken}.\n{_REMOVE}", file) from None
        digest = hashlib.sha256(content).hexdigest()
        return {"file": str(held.path), "sha256": digest, "is_relative": held.is_relative}
    content, name = held
    try:
        check_header(content)
    except BrokenImage as broken:
        raise Misfit(f": its image {name} {broken}.\n{_REMOVE}") from None
    digest = hashlib.sha256(content).hexdigest()
    return {"file": str(_kept(content, digest)), "sha256": digest, "is_relative": False}


class _Named(NamedTuple):
    """The file of an image that a record names."""

    path: Path
    is_relative: bool
    """Whether the record says where it lies beside its own file."""


def _kept(content: bytes, digest: str) -> Path:
    """Return the file of the cache with some content."""
    file = cache_root() / "media" / digest[:2] / digest
    if file.is_file():
        return file
    # Renamed into its place, so that it is whole or not there.
    partial = file.with_name(f"{digest}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(file)
    except OSError as error:
        raise UserError(
            f"An image of the records cannot be kept in {file.parent} ({error.strerror}).\n"
            "Set FTKIT_CACHE_DIR to a directory that can be written."
        ) from None
    return file


def _held(value: Any, folder: Path | None) -> _Named | tuple[bytes, str]:
    """The file of an image, or its content and its name in messages."""
    if isinstance(value, Mapping):
        return _held_by_object(value, folder)
    if isinstance(value, bytes):
        return value, "(given as bytes)"
    if not isinstance(value, str):
        raise Misfit(f": its image is {kind_of(value)}, but has to be a path.\n{_REMOVE}")
    if value.startswith("data:"):
        head, _, text = value.partition(",")
        if not head.endswith(";base64"):
            raise Misfit(f": its image is a data url without base64.\n{_REMOVE}")
        return _decoded(text), "(a data url)"
    scheme = urlsplit(value).scheme.lower()
    if scheme in ("http", "https", "ftp", "s3", "gs", "hf"):
        raise Misfit(
            f": its image is {_short(value)}, but ftkit fetches no images.\nDownload them, such as "
            "with curl --remote-name URL, and give their paths."
        )
    path = Path(unquote(urlsplit(value).path)) if scheme == "file" else Path(value).expanduser()
    if path.is_absolute():
        return _Named(path, is_relative=False)
    if folder is None:
        raise Misfit(
            f": its image is the path {_short(value)}, but records that are in no file of this "
            f"machine hold their images.\n{_REMOVE}"
        )
    return _Named(folder / path, is_relative=True)


def _held_by_object(value: Mapping[str, Any], folder: Path | None) -> _Named | tuple[bytes, str]:
    """As `_held`, of an object: bytes and path of a table, or url of OpenAI's parts."""
    content = value.get("bytes")
    if isinstance(content, bytes | str) and content:
        name = value.get("path")
        shown = _short(name) if isinstance(name, str) and name else "(given as bytes)"
        return (content if isinstance(content, bytes) else _decoded(content)), shown
    for key in ("path", "url", "image"):
        if isinstance(value.get(key), str | bytes):
            return _held(value[key], folder)
    raise Misfit(f": its image is an object without bytes, path or url.\n{_REMOVE}")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Misfit(f": its image is not valid base64.\n{_REMOVE}") from None


def read_file(path: Path) -> bytes:
    """Read the file of an image, through links.

    Raises:
        BrokenImage: it is not there, is no regular file, or too large.
    """
    try:
        # Not blocking: opening a pipe would wait for whoever writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise BrokenImage("is not a file, but a directory, a pipe or a device")
            if state.st_size > MOST_BYTES:
                raise BrokenImage(f"has more than {MOST_BYTES // 2**20} MiB")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise BrokenImage("is not there") from None
    except (OSError, ValueError) as error:  # a name with a null character
        raise BrokenImage(f"cannot be read ({error})") from None


def check_header(content: bytes) -> None:
    """Refuse what is no image of a known format, by its header.

    Raises:
        BrokenImage: it is none, or too large.
    """
    _opened(content).close()


def size_by_header(content: bytes) -> tuple[int, int]:
    """Width and height that `decode` gives, without decoding.

    Raises:
        BrokenImage: it is none, or too large.
    """
    with _opened(content) as image:
        try:
            is_turned = image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE
        except Exception as error:  # whatever a damaged header makes of it
            raise BrokenImage(f"is damaged ({error})") from None
        width, height = image.size
    return (height, width) if is_turned else (width, height)


def checked_size(content: bytes) -> tuple[int, int]:
    """Width and height that `decode` gives, of an image that it decodes.

    Of a JPEG, all is read, but only an eighth of the width and height is computed: that finds the
    same damage in a quarter of the time.

    Raises:
        BrokenImage: as `decode`.
    """
    with _opened(content) as image:
        is_plain = image.format == "JPEG" and image.mode in ("RGB", "L")
        try:
            if is_plain and image.getexif().get(_ORIENTATION) is None:
                size = image.size
                image.draft(None, (1, 1))
                image.load()
                return size
        except Exception as error:  # as of `decode`
            raise BrokenImage(f"is damaged ({error})") from None
    return decode(content).size


def decode(content: bytes) -> "Image":
    """Decode an image to RGB, turned as its EXIF says, as transformers does it.

    Raises:
        BrokenImage: it is none, too large, or damaged.
    """
    from PIL import ImageOps

    with _opened(content) as image:
        try:
            return ImageOps.exif_transpose(image).convert("RGB")
        # Decoders raise what they meet in damaged files.
        except Exception as error:
            raise BrokenImage(f"is damaged ({error})") from None


def _opened(content: bytes) -> "Image":
    from PIL import Image

    if not content:
        raise BrokenImage("is empty")
    try:
        with warnings.catch_warnings():
            # Our own bound is lower than that of the warning.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError:
        raise BrokenImage(f"has more than {MOST_PIXELS:,} pixels") from None
    except Exception:  # whatever a decoder meets in a damaged header
        raise BrokenImage(f"is none of {', '.join(FORMATS)}") from None
    if image.width * image.height > MOST_PIXELS:
        size = f"{image.width:,} x {image.height:,}"
        raise BrokenImage(f"is {size}, but may have {MOST_PIXELS:,} pixels")
    return image


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
