"""Files of images: checked by their headers, and decoded.

Only four formats are read, and what a header says is checked before anything is decoded.
"""

import io
import warnings
from typing import TYPE_CHECKING

from ftkit.extensions.images.found_files import BrokenMedium, FilesOf

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are read; of an animation, its first picture."""
MOST_PIXELS = 2**26
"""Most pixels of an image: 8,192 x 8,192, which takes 192 MiB when it is decoded."""
_ORIENTATION, _ON_ITS_SIDE = 0x0112, range(5, 9)
"""Tag of EXIF, and its values for images that are turned by a quarter."""


def check_header(content: bytes) -> None:
    """Refuse what is no image of a known format, by its header.

    Raises:
        BrokenMedium: it is none, or too large.
    """
    _opened(content).close()


def size_by_header(content: bytes) -> tuple[int, int]:
    """Width and height that `decode` gives, without decoding.

    Raises:
        BrokenMedium: it is none, or too large.
    """
    with _opened(content) as image:
        try:
            is_turned = image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE
        except Exception as error:  # whatever a damaged header makes of it
            raise BrokenMedium(f"is damaged ({error})") from None
        width, height = image.size
    return (height, width) if is_turned else (width, height)


def checked_size(content: bytes) -> tuple[int, int]:
    """Width and height that `decode` gives, of an image that it decodes.

    Of a JPEG, all is read, but only an eighth of the width and height is computed: that finds the
    same damage in a quarter of the time.

    Raises:
        BrokenMedium: as `decode`.
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
            raise BrokenMedium(f"is damaged ({error})") from None
    return decode(content).size


def decode(content: bytes) -> "Image":
    """Decode an image to RGB, turned as its EXIF says, as transformers does it.

    Raises:
        BrokenMedium: it is none, too large, or damaged.
    """
    from PIL import ImageOps

    with _opened(content) as image:
        try:
            return ImageOps.exif_transpose(image).convert("RGB")
        # Decoders raise what they meet in damaged files.
        except Exception as error:
            raise BrokenMedium(f"is damaged ({error})") from None


def _opened(content: bytes) -> "Image":
    from PIL import Image

    if not content:
        raise BrokenMedium("is empty")
    try:
        with warnings.catch_warnings():
            # Our own bound is lower than that of the warning.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError:
        raise BrokenMedium(f"has more than {MOST_PIXELS:,} pixels") from None
    except Exception:  # whatever a decoder meets in a damaged header
        raise BrokenMedium(f"is none of {', '.join(FORMATS)}") from None
    if image.width * image.height > MOST_PIXELS:
        size = f"{image.width:,} x {image.height:,}"
        raise BrokenMedium(f"is {size}, but may have {MOST_PIXELS:,} pixels")
    return image


FILES = FilesOf("image", check_header)
"""How records have images."""
reference = FILES.reference
"""Gives what canonical records hold of an image."""
