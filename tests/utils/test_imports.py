"""Postponed modules: their code runs when a name of theirs is first used."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from command import command_environment

from ftkit.utils import imports

PACKAGE = """
from made_package.ran import RAN
RAN.append("package")
ANSWER = 42
"""
HELPERS = """
from made_package.ran import RAN
RAN.append("helpers")
def double(number):
    return 2 * number
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Makes a package that is postponed, as its `helpers` are; whose code has run."""
    package = tmp_path / "made_package"
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (package / "helpers.py").write_text(HELPERS)
    (package / "ran.py").write_text("RAN = []\n")
    (package / "inner.py").write_text("from made_package.helpers import double\nBEGUN = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "PACKAGES", ("made_package",))
    monkeypatch.setattr(imports, "FUNCTIONS", ("made_package.helpers",))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    imports.postpone_modules()
    yield importlib.import_module("made_package.ran").RAN
    for name in [name for name in sys.modules if name.partition(".")[0] == "made_package"]:
        del sys.modules[name]


def test_a_module_of_a_package_is_imported_without_the_code_of_the_package(ran: list[str]) -> None:
    inner = importlib.import_module("made_package.inner")
    assert inner.BEGUN
    assert ran == []


def test_a_module_is_found_in_its_package_by_any_way_of_importing(ran: list[str]) -> None:
    names: dict[str, object] = {}
    exec("from made_package import inner\nimport made_package.inner as same", names)
    assert names["inner"] is names["same"] is sys.modules["made_package.inner"]
    assert ran == []


def test_the_code_of_a_package_runs_once_when_a_name_of_it_is_used(ran: list[str]) -> None:
    package = importlib.import_module("made_package")
    assert (package.ANSWER, package.ANSWER) == (42, 42)
    assert ran == ["package"]
    with pytest.raises(AttributeError):
        _ = package.no_such_name


def test_a_function_of_a_postponed_module_runs_it_when_it_is_called(ran: list[str]) -> None:
    helpers = importlib.import_module("made_package.helpers")
    double = helpers.double
    assert ran == []
    assert (double(4), helpers.double(5)) == (8, 10)
    assert ran == ["helpers"]


def test_the_version_of_a_package_needs_none_of_its_code(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: f"1.2 of {name}")
    assert importlib.import_module("made_package").__version__ == "1.2 of made_package"
    assert ran == []


def test_a_package_that_is_not_installed_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "PACKAGES", ("no_such_package",))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    imports.postpone_modules()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package")


def test_transformers_lists_the_same_names_and_each_folder_once() -> None:
    """In two processes: the list is made when transformers is imported."""
    listed = """
import hashlib, os, sys
from pathlib import Path
{before}
opened = []
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(str(arguments[0])))
import transformers
files = [file for file in opened if "/transformers/models/" in file and file.endswith(".py")]
print(len(files) == len(set(files)) > 1000)
names = sorted(transformers._class_to_module.items())
requirements = sorted((k, sorted(v)) for k, v in transformers._object_missing_backend.items())
print(len(names), hashlib.sha256(repr((names, requirements)).encode()).hexdigest())
"""
    postponed = "from ftkit.utils.imports import postpone_modules; postpone_modules()"
    plain, ours = (run_python(listed.format(before=before)) for before in ("", postponed))
    assert ours.splitlines()[0] == "True"
    assert ours.splitlines()[1] == plain.splitlines()[1]
    assert int(ours.split()[1]) > 1000


def test_recipes_are_typed_without_packages_that_jsonargparse_supports() -> None:
    """In ftkit's own processes alone; what a plugin imports there is the package itself."""
    program = """
import sys
{before}
from ftkit.recipe.parsing import read_recipe
keys = [("checkpoint_dir", "base"), ("train.max_steps", "3")]
assert read_recipe([], keys, method="lora").train.max_steps == 3
print(sorted({{"attr", "attrs", "typeshed_client"}} & sys.modules.keys()))
import attrs
print(attrs.has(attrs.make_class("Made", ["x"])))
"""
    postponed = "from ftkit.utils.imports import postpone_modules; postpone_modules()"
    assert run_python(program.format(before=postponed)) == "[]\nTrue\n"
    # Not where ftkit is a module of a program, whose parsers may be of classes of attrs.
    assert "attrs" in run_python(program.format(before=""))


def test_lora_is_imported_without_the_other_adapters_of_peft() -> None:
    found = run_python("""
import sys
from ftkit.utils.imports import postpone_modules
postpone_modules()
from peft.tuners.lora import LoraConfig, LoraModel
print(sorted(name for name in sys.modules if name.startswith("peft.tuners.")
             and name.split(".")[2] not in ("lora", "tuners_utils", "_buffer_dict")))
import peft
print(peft.LoraConfig is LoraConfig, peft.BOFTConfig.__name__, peft.PeftModel.__name__)
""")
    assert found.splitlines() == ["[]", "True BOFTConfig PeftModel"]


def run_python(statements: str) -> str:
    """Output of a new interpreter."""
    found = subprocess.run(
        [sys.executable, "-c", statements],
        env=command_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout
