"""Urls of object storage, and the local directory that stands for each of them.

A url becomes a path once, where it is parsed: s3://BUCKET/KEY is the directory runs/s3/BUCKET/KEY
in the cache, and from then on a directory like any other. `url_of` is the inverse. A path is
therefore always local, and parents and children of a url are those of its directory.
"""

import os
import re
from pathlib import Path

from ftkit.errors import UserError
from ftkit.utils.files import cache_root

EXTRAS = {"s3": ("s3", "s3fs"), "gs": ("gs", "gcsfs"), "az": ("az", "adlfs")}
"""For each scheme: the extra of ftkit that installs its library, and the library."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CONTAINER = re.compile(r"(?=.{3,63}$)[a-z0-9]+(?:-[a-z0-9]+)*")
"""A container: Azure's name for a bucket."""
# Without characters that mean something else in globs, urls or file systems.
_KEY_PART = re.compile(r"[^\x00-\x1f\x7f*?\[\]#\\:@]+")
_MOST_PART_BYTES = 200
"""Longest part of a key: a file name on disk has at most 255 bytes, some of them for endings."""


def working_root() -> Path:
    """Parent of the directories that stand for urls, without symbolic links."""
    return cache_root().resolve() / "runs"


def is_url(text: str | os.PathLike[str]) -> bool:
    """Return whether a text is a url, of any scheme."""
    return isinstance(text, str) and _URL.match(text) is not None


def local_path(text: str | os.PathLike[str]) -> Path:
    """The directory that stands for a url; any other text is a path already.

    Raises:
        UserError: the scheme is not supported, or the url names no place in a bucket.
    """
    if not isinstance(text, str) or (found := _URL.fullmatch(text)) is None:
        return Path(text)
    scheme, place = found[1].lower(), found[2].rstrip("/")
    if scheme not in EXTRAS:
        raise UserError(
            f"{text} is a url of the kind {scheme}://, but ftkit reads and writes "
            f"{', '.join(f'{name}://' for name in EXTRAS)} and directories. Try "
            "s3://BUCKET/PREFIX, or copy it to this machine and give its path."
        )
    bucket, *parts = place.split("/")
    if scheme == "az" and not _CONTAINER.fullmatch(bucket):
        raise UserError(
            f"az://{place} names no container: that is 3 to 63 lower-case letters, digits and "
            "single hyphens. The account is named by AZURE_STORAGE_ACCOUNT_NAME. Try "
            "az://CONTAINER/out/lora."
        )
    sound = all(_KEY_PART.fullmatch(part) and part not in (".", "..") for part in parts)
    longest = max((len(os.fsencode(part)) for part in parts), default=0)
    if longest > _MOST_PART_BYTES:
        raise UserError(
            f"{scheme}://{place} has {longest} bytes between two slashes, but at most "
            f"{_MOST_PART_BYTES} are possible. Give shorter names, such as "
            f"{scheme}://BUCKET/out/lora."
        )
    if not _BUCKET.fullmatch(bucket) or not parts or not sound:
        raise UserError(
            f"{scheme}://{place} names no place in a bucket: after its name come one or more words "
            "between single slashes, without any of * ? [ ] # \\ : @. Credentials are found in the "
            f"environment. Try {scheme}://BUCKET/out/lora."
        )
    # Nothing is encoded, so that `url_of` can invert it and parents stay parents.
    return working_root().joinpath(scheme, bucket, *parts)


def url_of(path: Path) -> str | None:
    """The url that a directory, or a file in it, stands for; None: it is only local."""
    try:
        scheme, *parts = path.absolute().relative_to(working_root()).parts
    except ValueError:
        return None
    return f"{scheme}://{'/'.join(parts)}" if scheme in EXTRAS and len(parts) > 1 else None


def display_path(path: Path) -> str:
    """The path as the user knows it: the url, if it stands for one."""
    return url_of(path) or str(path)
