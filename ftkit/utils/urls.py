"""Urls where runs and models lie, and the local directory that stands for each of them.

A url becomes a path once, where it is parsed: s3://BUCKET/KEY is the directory runs/s3/BUCKET/KEY
in the cache, and from then on a directory like any other. `url_of` is the inverse. A path is
therefore always local, and parents and children of a url are those of its directory.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ftkit.errors import UserError
from ftkit.utils.files import cache_root
from ftkit.utils.registry import Registry


@dataclass(frozen=True)
class UrlKind:
    """A kind of url, such as s3://BUCKET/KEY."""

    name: str
    """The scheme, in lower case."""
    library: str
    """Module that has to be there to use it."""
    extra: str
    """Of ftkit, which installs the library."""
    credentials: str
    """Which ones are found in the environment, in words."""
    module: str
    """Module with the functions of `ftkit.utils.url_files.UrlFiles` and
    `ftkit.runs.url_runs.UrlRuns`."""
    bucket: str = r"[A-Za-z0-9][A-Za-z0-9._-]*"
    """Regular expression of the first word of the place."""
    bucket_rule: str = ""
    """What the error says of a first word that does not match; "": it names no bucket."""


URL_KINDS: Registry[UrlKind] = Registry("url_kinds", (UrlKind,), core=())
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
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
    if (kind := URL_KINDS.get(scheme)) is None:
        known = [f"{name}://" for name in URL_KINDS.names]
        example = f"Try {known[0]}BUCKET/PREFIX, or copy" if known else "Copy"
        places = " and ".join([*([", ".join(known)] if known else []), "directories"])
        raise UserError(
            f"{text} is a url of the kind {scheme}://, but ftkit reads and writes {places}. "
            f"{example} it to this machine and give its path."
        )
    bucket, *parts = place.split("/")
    is_bucket = re.fullmatch(kind.bucket, bucket) is not None
    if kind.bucket_rule and not is_bucket:
        raise UserError(f"{scheme}://{place} {kind.bucket_rule}")
    sound = all(_KEY_PART.fullmatch(part) and part not in (".", "..") for part in parts)
    longest = max((len(os.fsencode(part)) for part in parts), default=0)
    if longest > _MOST_PART_BYTES:
        raise UserError(
            f"{scheme}://{place} has {longest} bytes between two slashes, but at most "
            f"{_MOST_PART_BYTES} are possible. Give shorter names, such as "
            f"{scheme}://BUCKET/out/lora."
        )
    if not is_bucket or not parts or not sound:
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
    is_one = len(parts) > 1 and URL_KINDS.get(scheme) is not None
    return f"{scheme}://{'/'.join(parts)}" if is_one else None


def display_path(path: Path) -> str:
    """The path as the user knows it: the url, if it stands for one."""
    return url_of(path) or str(path)
