"""Old names of modules, which plugins import."""

import importlib
import sys

import pytest


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("ftkit.objectives.preference", "ftkit.extensions.preference.preference"),
        ("ftkit.objectives.distillation", "ftkit.extensions.distillation.distillation"),
        # Of a package that is gone.
        ("ftkit.runs.sync.mirror", "ftkit.extensions.object_storage.mirror"),
    ],
)
def test_a_moved_module_is_found_by_its_old_name_with_a_notice(old: str, now: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"{old} is {now} now"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(now)


def test_what_was_never_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"ftkit\.objectives\.nothing"):
        importlib.import_module("ftkit.objectives.nothing")
