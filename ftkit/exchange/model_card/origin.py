"""Origin of a result: its base model and its data, as others can find them, and on which terms."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ftkit.data.records.paths import is_hub_name
from ftkit.models.pretrained.hub import CARD, hub_name
from ftkit.models.pretrained.licences import licence_files
from ftkit.utils.yaml_files import parse_yaml

_FENCE = "---"


@dataclass(frozen=True, kw_only=True)
class BaseOrigin:
    """The base model of a run."""

    name: str
    """As people know it, without directories of this machine."""
    on_hub: str | None = None
    """ORG/NAME; None: it is not known to be there."""
    licence: str | None = None
    """As its card names it, such as apache-2.0; None: it does not."""
    licence_files: tuple[str, ...] = ()
    """Names of those that lie beside it."""

    @classmethod
    def of(cls, name: str, directory: Path | None) -> "BaseOrigin":
        """Of a base model.

        Args:
            name: as a recipe names it.
            directory: where its files are; None: nowhere.
        """
        on_hub = hub_name(name)
        files = [] if directory is None or not directory.is_dir() else licence_files(directory)
        licence = None if directory is None else card_metadata(directory / CARD).get("license")
        short = name if name.startswith(("embedded:", "random:")) else Path(name).name
        return cls(
            name=on_hub or short,
            on_hub=on_hub,
            licence=licence if isinstance(licence, str) else None,
            licence_files=tuple(file.name for file in files),
        )


@dataclass(frozen=True, kw_only=True)
class DataOrigin:
    """The training data of a run."""

    names: tuple[str, ...]
    """Data sets of the hub, names of files, or the kind of data."""
    on_hub: tuple[str, ...] = ()
    """Those of them that are data sets of the hub."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "DataOrigin":
        """Of the data of a recipe, as a report has it."""
        given = data.get("init_args") or {}
        sources = given.get("sources") or [given]
        paths = [str(path) for s in sources if (path := s.get("path") or s.get("json_path"))]
        if not paths:
            return cls(names=(str(data["class_path"]).rpartition(".")[2],))
        on_hub = tuple(path for path in paths if is_hub_name(path))
        kept = [p if p in on_hub or p.startswith("embedded:") else Path(p).name for p in paths]
        return cls(names=tuple(kept), on_hub=on_hub)


def card_metadata(file: Path) -> dict[str, Any]:
    """What a model card says in its head; {} where there is none, or none that can be read."""
    try:
        head, fence, _ = file.read_text(encoding="utf-8").removeprefix(_FENCE).partition("\n---")
        found = parse_yaml(head) if fence else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
