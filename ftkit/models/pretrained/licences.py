"""Licence files: on which terms a model may be used and passed on."""

import re
from pathlib import Path

_LICENCE = re.compile(r"(licen[cs]es?|notices?|use_policy)(?![a-z])[^/]*", re.IGNORECASE)


def licence_files(directory: Path) -> list[Path]:
    """Those of the model in a directory."""
    return sorted(file for file in directory.iterdir() if is_licence(file.name) and file.is_file())


def is_licence(name: str) -> bool:
    """Whether a file of this name is one, whatever its suffix."""
    return _LICENCE.fullmatch(name) is not None
