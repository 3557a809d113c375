"""Modules by the names that they had before they became parts of extensions.

Plugins import such names. An extension names them in its ``__init__.py``::

    MOVED = {"ftkit.objectives.preference": "preference"}
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType


class _Moved(MetaPathFinder, Loader):
    """Finds a module of ftkit that no other finder has found, where it is now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Asked for whatever is not there, also by others: nothing of ftkit is imported for those.
        if not fullname.startswith("ftkit.") or fullname.startswith("ftkit.extensions"):
            return None
        moved = moved_modules()
        if any(old.startswith(f"{fullname}.") for old in moved):
            return ModuleSpec(fullname, None, is_package=True)  # a package that is gone
        place = moved.get(fullname)
        return None if place is None else ModuleSpec(fullname, self, origin=place)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a program, for python -m."""
        place = moved_modules()[fullname]
        warnings.warn(f"{fullname} is {place} now.", FutureWarning, stacklevel=2)
        found = importlib.util.find_spec(place)
        assert found is not None and isinstance(found.loader, InspectLoader)
        return found.loader.get_code(place)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None and spec.origin is not None
        warnings.warn(f"{spec.name} is {spec.origin} now.", FutureWarning, stacklevel=2)
        # One module by both names, so that there is one class of each name in it.
        sys.modules[spec.name] = importlib.import_module(spec.origin)


def moved_modules() -> dict[str, str]:
    """Where moved modules are now, by their old names."""
    from ftkit.utils.registry import extension_names

    places: dict[str, str] = {}
    for extension in extension_names():
        package = f"ftkit.extensions.{extension}"
        moved = getattr(importlib.import_module(package), "MOVED", {})
        places |= {old: f"{package}.{new}" for old, new in moved.items()}
    return places


def find_moved_modules() -> None:
    """Let imports of old names find what they name."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
