"""How an image is shown to people: its size, and a small picture that ftkit draws."""

import base64
import io

from ftkit.data.records.media import Look
from ftkit.extensions.images.files import FILES, decode

_SIDE = 160
"""Pixels of the longer side of a picture."""


def look(file: str, digest: str) -> Look:
    """Return the size of an image and a small picture of it.

    Args:
        file: of the image.
        digest: of what it held when samples were made.

    Raises:
        UserError: it holds something else, or is not there.
    """
    from PIL import Image

    image = decode(FILES.content(file, digest))
    size = f"{image.width} x {image.height}"
    image.thumbnail((_SIDE, _SIDE))
    # On a new picture: files hold more than pixels, such as comments and where they were taken.
    drawn = Image.new("RGB", image.size)
    drawn.paste(image)
    stream = io.BytesIO()
    drawn.save(stream, "JPEG", quality=85)
    return Look(size, f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}")
