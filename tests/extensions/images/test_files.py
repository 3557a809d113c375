"""Files of images: what is read, and what is refused before anything is decoded."""

import base64
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ftkit.data.records.record import Misfit
from ftkit.extensions.images.files import (
    MOST_PIXELS,
    check_header,
    checked_size,
    decode,
    reference,
    size_by_header,
)
from ftkit.extensions.images.found_files import BrokenMedium

Write = Callable[[Path], object]


def _encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def _picture(mode: str = "RGB", size: tuple[int, int] = (8, 4)) -> Image.Image:
    return Image.new(mode, size, 0 if mode in ("I;16", "L", "1", "P") else None)


def _bomb(width: int, height: int) -> bytes:
    """A PNG of about 60 bytes whose header promises many pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IEND", b"")


_TURNED = Image.Exif()
_TURNED[0x0112] = 6
READ: dict[str, tuple[bytes, tuple[int, int]]] = {
    "PNG": (_encoded(_picture()), (8, 4)),
    "JPEG": (_encoded(_picture(), "JPEG"), (8, 4)),
    "WebP": (_encoded(_picture(), "WEBP"), (8, 4)),
    "a GIF": (_encoded(_picture("P"), "GIF"), (8, 4)),
    "the first picture of an animation": (
        _encoded(_picture("P"), "GIF", save_all=True, append_images=[_picture("P", (8, 4))]),
        (8, 4),
    ),
    "a palette": (_encoded(_picture("P")), (8, 4)),
    "alpha": (_encoded(_picture("RGBA")), (8, 4)),
    "grey": (_encoded(_picture("L")), (8, 4)),
    "16 bits": (_encoded(_picture("I;16")), (8, 4)),
    "CMYK": (_encoded(_picture("CMYK"), "JPEG"), (8, 4)),
    "one pixel": (_encoded(_picture(size=(1, 1))), (1, 1)),
    "a line": (_encoded(_picture(size=(10_000, 1))), (10_000, 1)),
    "turned by EXIF": (_encoded(_picture(), "JPEG", exif=_TURNED), (4, 8)),
}


@pytest.mark.parametrize("name", READ)
def test_formats_that_are_read(name: str, tmp_path: Path) -> None:
    content, size = READ[name]
    (tmp_path / "image").write_bytes(content)  # its name says nothing
    assert reference("image", tmp_path)["file"] == str(tmp_path / "image")
    image = decode(content)
    assert (image.mode, image.size) == ("RGB", size)
    assert size_by_header(content) == size
    assert checked_size(content) == size


@pytest.mark.parametrize("name", ["turned by EXIF", "a palette", "alpha", "16 bits", "CMYK"])
def test_pixels_are_those_that_transformers_loads(name: str, tmp_path: Path) -> None:
    from transformers.image_utils import load_image

    content, _ = READ[name]
    (tmp_path / "image").write_bytes(content)
    assert decode(content).tobytes() == load_image(str(tmp_path / "image")).tobytes()


BROKEN: dict[str, tuple[Write, str]] = {
    "nothing": (lambda path: None, "is not there"),
    "a directory": (Path.mkdir, "is not a file"),
    "a pipe": (os.mkfifo, "is not a file"),
    "no bytes": (lambda path: path.write_bytes(b""), "is empty"),
    "a text": (lambda path: path.write_text("hello"), "is none of PNG"),
    "a format that calls programs": (
        lambda path: path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
        "is none of PNG",
    ),
    "TIFF": (lambda path: path.write_bytes(_encoded(_picture(), "TIFF")), "is none of PNG"),
    "a bomb": (lambda path: path.write_bytes(_bomb(60_000, 60_000)), "pixels"),
    "more pixels than are read": (
        lambda path: path.write_bytes(_bomb(MOST_PIXELS // 8 + 1, 8)),
        "pixels",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_are_refused_by_name(name: str, tmp_path: Path) -> None:
    write, words = BROKEN[name]
    write(tmp_path / "image.png")
    with pytest.raises(Misfit, match=words) as refused:
        reference("image.png", tmp_path)
    assert "image.png" in str(refused.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_truncated_image_is_known_once_it_is_decoded(kind: str) -> None:
    noise = Image.frombytes("RGB", (64, 64), os.urandom(64 * 64 * 3))
    content = _encoded(noise, kind)[:-400]
    check_header(content)
    with pytest.raises(BrokenMedium, match="is damaged"):
        decode(content)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "far").write_bytes(READ["PNG"][0])
    (tmp_path / "near").symlink_to(tmp_path / "far")
    assert reference("near", tmp_path) == reference("far", tmp_path) | {
        "file": str(tmp_path / "near")
    }


_PNG = READ["PNG"][0]
_BASE64 = base64.b64encode(_PNG).decode()
HELD: dict[str, Any] = {
    "bytes": _PNG,
    "a data url": f"data:image/png;base64,{_BASE64}",
    "an object of a table": {"bytes": _PNG, "path": "elsewhere.png"},
    "an object with base64": {"bytes": _BASE64},
    "an object with a url": {"url": f"data:image/png;base64,{_BASE64}"},
}


@pytest.mark.parametrize("name", HELD)
def test_an_image_that_a_record_holds_is_kept_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    found = [reference(HELD[name], None) for _ in range(2)]
    assert found[0] == found[1]
    assert Path(found[0]["file"]).read_bytes() == _PNG
    assert len([path for path in (tmp_path / "cache").rglob("*") if path.is_file()]) == 1


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_path_may_be_absolute(form: str, tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(_PNG)
    assert reference(form.format(tmp_path / "a b.png"), None)["file"] == str(tmp_path / "a b.png")


REFUSED: dict[str, Any] = {
    "fetches no images": "https://example.org/cat.png",
    "hold their images": "cat.png",
    "has to be a path": 3,
    "not valid base64": "data:image/png;base64,!!!",
    "without base64": "data:image/svg+xml,<svg/>",
    "without bytes, path or url": {"size": 3},
}


@pytest.mark.parametrize("words", REFUSED)
def test_values_that_are_no_image_here(words: str) -> None:
    with pytest.raises(Misfit, match=words):
        reference(REFUSED[words], None)
