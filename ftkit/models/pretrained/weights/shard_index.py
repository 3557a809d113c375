"""The index beside weight files in shards: the files it names, all below its own directory."""

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from ftkit.errors import UserError

_SUFFIXES = (".safetensors", ".bin")


def indexed_files(content: Mapping[str, Any], index: Path) -> list[Path]:
    """The weight files that an index names, whether they exist or not; sorted.

    Only the names are looked at: where a link leads does not matter, because the files of a hub's
    cache are links to other directories.

    Args:
        content: of the index.
        index: model.safetensors.index.json or pytorch_model.bin.index.json.

    Raises:
        UserError: it lists no files, or names one outside of its own directory.
    """
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} does not list the weight files. Download it again.")
    files = set()
    for tensor, name in weight_map.items():
        place = PurePath(name) if isinstance(name, str) and "\0" not in name else PurePath()
        if place.is_absolute() or ".." in place.parts or place.suffix not in _SUFFIXES:
            raise UserError(
                f"{index} says that {tensor} lies in {name!r}, but it has to name a weight file in "
                f"{index.parent}, such as model-00001-of-00002{_SUFFIXES[0]}. Download it again."
            )
        files.add(index.parent / place)
    return sorted(files)
