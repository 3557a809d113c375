"""Extensions of ours and other packages: what they bring is used by name, and none breaks ftkit."""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from command import ROOT, command_environment, command_line
from rank_jobs import needs_deepspeed
from runs import start

from ftkit.runs.report.metrics import read_metrics
from ftkit.utils.registry import Installed, Registry, extension_names, installed_rows

_ROWS = '''
from dataclasses import dataclass

from ftkit.cli.command import Command
from ftkit.recipe.options import CommonOptions, word


@dataclass(frozen=True, kw_only=True)
class HelloOptions(CommonOptions):
    """Options of ftkit hello."""

    whom: str = word("WHOM")
    """Who is greeted."""
    times: int = 1
    """How often."""


HELLO = Command(
    name="hello",
    summary="greet somebody",
    options=HelloOptions,
    function="greetings.hello:say",
    examples=("you --times 2",),
    elsewhere={"greet": ""},
)
'''
_READER = """
from ftkit.recipe.readers import Reader

OTHER = Reader(name="other", marks=(), program="greetings.tables:OTHER")
"""
_TABLES = """
from ftkit.extensions.foreign_recipes.translation import Program, idle, rows_by_key, same

OTHER = Program(
    name="Other",
    rows=rows_by_key(
        same("weights", "text", "checkpoint_dir", None),
        same("rounds", "whole>0", "train.epochs", 1),
        idle("it only changes colours", "colours"),
    ),
    finish=lambda reading: None,
)
"""
_NAMES = """
from ftkit.python_names import PythonName

WAVE = PythonName("wave", "greetings.hello")
"""
_OBJECTIVE = """
from dataclasses import dataclass
from ftkit.recipe.objectives import ObjectiveRow


@dataclass(frozen=True, kw_only=True)
class PoliteOptions:
    strength: float = 2.0


POLITE = ObjectiveRow(
    name="polite",
    summary="to be polite",
    class_path="greetings.losses.Polite",
    options=PoliteOptions,
    above_0=("strength",),
)
"""
_LOSSES = """
from ftkit.objectives.supervised import Supervised


class Polite(Supervised):
    def __init__(self, *, strength):
        super().__init__()
        self.strength = strength

    def sums(self, output, batch):
        return [self.strength * one for one in super().sums(output, batch)]
"""
_SECTION = """
from dataclasses import dataclass, field
from typing import Annotated

from ftkit.errors import UserError
from ftkit.recipe.key_types import Tunable, at_least
from ftkit.recipe.recipe_sections import Section, keys_of


@dataclass(frozen=True, kw_only=True)
class Scale:
    factor: Annotated[Tunable[int], at_least(1)] = 1
    \'\'\'Outputs of every layer of the blocks are multiplied by it.\'\'\'


@dataclass(frozen=True, kw_only=True)
class Keys:
    scale: Scale = field(default_factory=Scale)


def check(facts):
    if keys_of(facts.recipe, Keys).scale.factor == 13:
        raise UserError("scale.factor is 13, but may not be. Try --scale.factor 12.")
    return []


def rounds(recipe, trains):
    factor = keys_of(recipe, Keys).scale.factor
    return None if factor == 1 else f"layers times {factor}"


SCALE = Section(
    name="scale", keys=Keys, check=check, rounds=rounds, layers="greetings.layers:scale"
)
TAKEN = Section(name="taken", keys=dataclass(frozen=True)(type(
    "Taken", (), {"__annotations__": {"seed": Tunable[int]}, "seed": 3}
)))
"""
_LAYERS = """
from functools import partial

from greetings.sections import Keys
from ftkit.recipe.recipe_sections import keys_of


def scale(body, base, recipe, trains):
    factor = keys_of(recipe, Keys).scale.factor
    for block in body.blocks:
        block.mlp.register_forward_hook(lambda module, given, output: factor * output)
"""
_OPTIMIZERS = """
from ftkit.recipe.optimizers import OptimizerPackage, OptimizerTraits

OPTIM = OptimizerPackage(
    name="greetings.optim",
    optimizers={
        "Heavy": OptimizerTraits(over_rows="ftkit.strategies.fsdp:over_plain_rows"),
        "Loud": OptimizerTraits(unusable="which shouts. Try --optimizer greetings.optim.Heavy"),
    },
)
"""
_OPTIM = """
import torch


class Heavy(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, damping=0.0):
        super().__init__(params, {"lr": lr, "damping": damping})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(group["damping"]).add_(parameter.grad)
                    parameter.sub_(mean, alpha=group["lr"])


class Loud(Heavy):
    pass
"""
_FORMATS = """
from ftkit.data.records.formats import Format

REC = Format(name="rec", place="greetings.formats:rows", unit="line")


def rows(file):
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        question, _, answer = line.partition("|")
        yield number, {"instruction": question, "output": answer}
"""
_HUBS = """
from ftkit.recipe.hubs import Hub

ACME = Hub(name="acme", models="greetings.hub", data_sets="greetings.hub:Sums")
"""
_HUB = """
import shutil

from ftkit.errors import UserError
from ftkit.utils import embedded

MODEL = embedded.path("quickstart") / "model"


def download(name, *, token, root):
    if name != "org/tiny":
        raise UserError(f"Acme has no {name}. Try acme:org/tiny.")
    return shutil.copytree(MODEL, root / name, dirs_exist_ok=True)


def fetch_settings(name, *, token, root):
    if name != "org/tiny":
        return UserError(f"Acme has no {name}. Try acme:org/tiny.")
    shutil.copytree(MODEL, root / name, ignore=shutil.ignore_patterns("*.safetensors"))


class Sums:
    train_split, val_split, commit = "all", None, "3"

    def __init__(self, wanted):
        self.name = wanted.name

    def rows(self, split):
        for number in range(1, 9):
            yield number, {"instruction": f"{self.name}: {number} + 1?", "output": str(number + 1)}

    def place(self, split, number):
        return f"{self.name}, {number}"
"""
_HELLO = """
def say(options):
    print(*[f"Hello {options.whom}."] * options.times)
    return 4


def wave():
    return "waved"
"""
_METADATA = """\
Metadata-Version: 2.1
Name: ftkit-greetings
Version: 0.3
Summary: Greetings for those who fine-tune
"""


def make_wheel(
    folder: Path,
    *,
    rows: str = _ROWS,
    points: str = "[ftkit.commands]\nhello = greetings.rows:HELLO",
) -> Path:
    """A package that adds to ftkit, as a wheel."""
    files = {
        "greetings/__init__.py": "print('imported')",
        "greetings/rows.py": rows,
        "greetings/hello.py": _HELLO,
        "greetings/readers.py": _READER,
        "greetings/names.py": _NAMES,
        "greetings/objectives.py": _OBJECTIVE,
        "greetings/losses.py": _LOSSES,
        "greetings/optimizers.py": _OPTIMIZERS,
        "greetings/optim.py": _OPTIM,
        "greetings/tables.py": _TABLES,
        "greetings/sections.py": _SECTION,
        "greetings/formats.py": _FORMATS,
        "greetings/layers.py": _LAYERS,
        "greetings/hubs.py": _HUBS,
        "greetings/hub.py": _HUB,
        "ftkit_greetings-0.3.dist-info/METADATA": _METADATA,
        "ftkit_greetings-0.3.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        "ftkit_greetings-0.3.dist-info/entry_points.txt": points,
    }
    record = "ftkit_greetings-0.3.dist-info/RECORD"
    wheel = folder / "ftkit_greetings-0.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(record, "".join(f"{name},,\n" for name in [*files, record]))
    return wheel


_ANEW = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "greetings"]:
    del sys.modules[name]
"""
"""With a start-up file of their own, forks import ftkit anew, and so what has imported it; see
warm.py."""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ftkit_with(tmp_path: Path) -> Callable[..., Run]:
    """Install a package beside ftkit, and run commands that see it."""

    def install(*, program: str = "", **content: str) -> Run:
        beside = tmp_path / "beside"
        wheel = make_wheel(tmp_path, **content)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*pip, "--upgrade", "--target", beside, wheel], check=True)
        (beside / "sitecustomize.py").write_text(_ANEW)
        environment = command_environment() | {"PYTHONPATH": f"{beside}:{ROOT}"}

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            line = [sys.executable, "-c", program] if program else command_line(*words)
            process = start(line, Path.cwd(), environment)
            out, err = process.communicate()
            assert process.returncode is not None
            return subprocess.CompletedProcess(line, process.returncode, out, err)

        return run

    return install


@pytest.mark.extensions
def test_each_extension_is_in_the_documents_with_a_guide() -> None:
    text = (ROOT / "docs/extensions.md").read_text()
    row = re.compile(r"^\| `(\w+)` \| .+\]\(([\w-]+\.md)(?:#[\w-]+)?\) \|$", re.MULTILINE)
    rows = row.findall(text)
    assert [name for name, _ in rows] == extension_names()
    assert all((ROOT / "docs" / page).is_file() for _, page in rows)


@pytest.mark.slow
def test_a_command_of_another_package_is_one_of_ftkit(ftkit_with: Callable[..., Run]) -> None:
    ftkit = ftkit_with()
    listed = ftkit("--help")
    assert "hello" in listed.stdout
    assert "Greetings for those who fine-tune" in " ".join(listed.stdout.split())
    assert "imported" not in listed.stdout, "nothing of it is, before it is used"
    used = ftkit("hello", "world", "--times", "2")
    assert (used.returncode, used.stderr) == (4, "")
    assert used.stdout.endswith("Hello world. Hello world.\n")
    explained = ftkit("hello", "--help")
    assert "How often." in explained.stdout
    wrong = ftkit("hello", "world", "--times", "often")
    assert (wrong.returncode, wrong.stdout) == (2, "imported\n")
    assert "--times" in wrong.stderr and "Traceback" not in wrong.stderr
    (shown,) = [
        one for one in json.loads(ftkit("extensions", "--format", "json").stdout)
        if one["name"] == "ftkit-greetings"
    ]  # fmt: skip
    assert shown["brings"] == {"commands": ["hello"]}
    assert (shown["package"], shown["error"]) == ("version 0.3", "")


def test_a_name_of_another_package_is_one_of_import_ftkit(
    ftkit_with: Callable[..., Run],
) -> None:
    python = ftkit_with(
        points="[ftkit.python_names]\nwave = greetings.names:WAVE",
        program="import ftkit\nprint('wave' in dir(ftkit))\nfrom ftkit import wave\nprint(wave())",
    )
    assert python().stdout == "True\nimported\nwaved\n"


def test_a_reader_of_another_package_makes_recipes_of_its_files(
    ftkit_with: Callable[..., Run], tmp_path: Path
) -> None:
    ftkit = ftkit_with(points="[ftkit.recipe_readers]\nother = greetings.readers:OTHER")
    file = tmp_path / "theirs.yaml"
    file.write_text("weights: embedded:quickstart\nrounds: 7\ncolours: 3\n")
    recipe = ftkit("finetune", str(file), "--tool", "other", "--print_config")
    assert recipe.returncode == 0, recipe.stderr
    assert "epochs: 7\n" in recipe.stdout and "checkpoint_dir: embedded:quickstart" in recipe.stdout
    assert "a file of Other" in recipe.stderr
    unknown = ftkit("finetune", str(file), "--tool", "others")
    assert unknown.returncode == 2 and "--tool other." in unknown.stderr
    plain = ftkit("finetune", str(file))
    assert plain.returncode == 2, "without its name nothing of the package is imported"
    assert "imported" not in plain.stdout


@pytest.mark.extensions
@pytest.mark.slow
def test_an_objective_of_another_package_is_trained_and_resumed(
    ftkit_with: Callable[..., Run], tmp_path: Path
) -> None:
    ftkit = ftkit_with(points="[ftkit.objectives]\npolite = greetings.objectives:POLITE")
    wrong = ftkit("finetune", "embedded:quickstart", "--objective.strength", "0", *POLITE)
    assert wrong.returncode == 2
    assert "objective.strength is 0" in wrong.stderr and "above 0" in wrong.stderr
    assert "polite" in ftkit("finetune", "--objective.help").stdout
    short = ("--train.max_steps", "2", "--eval.exact_match", "0", "--out_dir", str(tmp_path / "a"))
    for words in (POLITE, (*POLITE, "--stop_after", "1"), (*POLITE, "--resume", "auto")):
        out = ("--out_dir", str(tmp_path / ("a" if words == POLITE else "b")))
        run = ftkit("finetune", str(ROOT / "recipes/quickstart.yaml"), *short, *words, *out)
        assert run.returncode == 0, run.stderr
    polite, resumed = (losses(tmp_path / name) for name in "ab")
    assert polite == resumed and len(polite) == 2
    plain = ftkit("finetune", str(ROOT / "recipes/quickstart.yaml"), *short, "--overwrite")
    assert plain.returncode == 0, plain.stderr
    assert polite[0] == pytest.approx(2 * losses(tmp_path / "a")[0], rel=1e-6)


@pytest.mark.slow
def test_keys_of_another_package_are_keys_of_recipes(
    ftkit_with: Callable[..., Run], tmp_path: Path
) -> None:
    ftkit = ftkit_with(
        points="[ftkit.recipe_sections]\nscale = greetings.sections:SCALE\n"
        "taken = greetings.sections:TAKEN"
    )
    assert "imported" not in ftkit("--help").stdout
    assert "--scale.factor" in ftkit("finetune", "--help").stdout
    quickstart = ("finetune", str(ROOT / "recipes/quickstart.yaml"))
    for factor, told in (("0", "at least 1"), ("13", "--scale.factor 12"), ("x", "a whole number")):
        wrong = ftkit(*quickstart, "--scale.factor", factor)
        assert wrong.returncode == 2 and told in wrong.stderr
        assert "taken" in wrong.stderr and "seed" in wrong.stderr, "the core keeps its own keys"
    short = ("--train.max_steps", "2", "--eval.exact_match", "0", "--overwrite")
    found = {}
    for factor in ("1", "2"):
        out = tmp_path / factor
        run = ftkit(*quickstart, *short, "--scale.factor", factor, "--out_dir", str(out))
        assert run.returncode == 0, run.stderr
        found[factor] = losses(out)
    assert "layers times 2" in run.stdout
    assert found["1"] != found["2"]
    more = ("--resume", "auto", "--train.max_steps", "3", "--scale.factor", "3")
    resumed = ftkit(*quickstart, *more, "--eval.exact_match", "0", "--out_dir", str(out))
    assert resumed.returncode == 0 and "scale.factor 2 -> 3" in resumed.stdout


@pytest.mark.extensions
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("single", marks=pytest.mark.slow),
        # As the strategies' own tests show for classes that are no rows.
        pytest.param("fsdp", marks=pytest.mark.matrix),
        pytest.param("deepspeed", marks=[pytest.mark.matrix, needs_deepspeed]),
    ],
)
def test_an_optimizer_of_another_package_is_trained_and_resumed(
    ftkit_with: Callable[..., Run], tmp_path: Path, strategy: str
) -> None:
    ftkit = ftkit_with(points="[ftkit.optimizers]\ngreetings.optim = greetings.optimizers:OPTIM")
    short = ("--train.max_steps", "3", "--eval.exact_match", "0", "--precision", "32-true")
    ranks = ("--devices", "1" if strategy == "single" else "2", "--strategy", strategy)
    heavy = ("--optimizer", "greetings.optim.Heavy", "--optimizer.damping", "0.5")
    torchs = ("--optimizer", "SGD", "--optimizer.momentum", "0.5")
    for name, words in {
        "whole": heavy,
        "resumed": (*heavy, "--stop_after", "1"),
        "resumed on": (*heavy, "--resume", "auto"),
        "torch's": torchs,
    }.items():
        out = ("--optimizer.lr", "0.01", "--out_dir", str(tmp_path / name.removesuffix(" on")))
        quickstart = str(ROOT / "recipes/quickstart.yaml")
        run = ftkit("finetune", quickstart, *short, *ranks, *words, *out)
        assert run.returncode == 0, run.stderr
    found = losses(tmp_path / "whole")
    assert found == losses(tmp_path / "resumed") and len(found) == 3
    assert found == pytest.approx(losses(tmp_path / "torch's"), rel=1e-6)


@pytest.mark.slow
def test_what_an_optimizer_of_another_package_cannot_do_is_refused(
    ftkit_with: Callable[..., Run],
) -> None:
    ftkit = ftkit_with(points="[ftkit.optimizers]\ngreetings.optim = greetings.optimizers:OPTIM")
    words = ("plan", str(ROOT / "recipes/quickstart.yaml"), "--optimizer")
    loud = ftkit(*words, "greetings.optim.Loud")
    assert loud.returncode == 2 and "which shouts" in loud.stderr
    other = ftkit(*words, "greetings.losses.Polite")
    assert other.returncode == 2 and "or greetings.optim" in other.stderr
    mistyped = ftkit(*words, "greetings.optim.Heavy", "--optimizer.dampin", "1")
    assert mistyped.returncode == 2 and "Did you mean damping?" in mistyped.stderr
    assert "greetings.optim.Heavy" in ftkit("finetune", "--optimizer.help").stdout
    shown = ftkit("plan", str(ROOT / "recipes/quickstart.yaml"), "--optimizer", "AdamW")
    assert shown.returncode == 0 and "imported" not in shown.stdout, "nothing of it is"


def test_files_of_another_package_are_data(ftkit_with: Callable[..., Run], tmp_path: Path) -> None:
    ftkit = ftkit_with(points="[ftkit.record_formats]\nrec = greetings.formats:REC")
    file = tmp_path / "talk.rec"
    file.write_text("Who is Ann?|That is Ann Lee.\n" * 4)
    words = ("data", "embedded:quickstart", "--data", "JSON", "--data.path", str(file))
    shown = ftkit(*words, "--data.val_split_fraction", "0.5", "--format", "json")
    assert shown.returncode == 0, shown.stderr
    assert "That is Ann Lee." in shown.stdout
    file.write_text("")
    empty = ftkit(*words)
    assert empty.returncode == 2 and "talk.rec" in empty.stderr and "Traceback" not in empty.stderr


@pytest.mark.extensions
@pytest.mark.slow
def test_models_and_data_come_from_the_hub_of_another_package(
    ftkit_with: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ftkit = ftkit_with(points="[ftkit.hubs]\nacme = greetings.hubs:ACME")
    monkeypatch.chdir(tmp_path)
    data = ("--data", "JSON", "--data.path", "acme:org/sums", "--data.val_split_fraction", "0.5")
    shown = ftkit("data", "acme:org/tiny", *data, "--format", "json")
    assert shown.returncode == 0, shown.stderr
    (source,) = json.loads(shown.stdout.removeprefix("imported\n"))["sources"]
    assert source["where"] == "acme:org/sums" and "8 instructions" in source["records"]
    there = tmp_path / "checkpoints/acme/org/tiny"
    assert (there / "config.json").is_file() and not (there / "model.safetensors").exists()
    trained = ftkit("finetune", "acme:org/tiny", *data, "--train.max_steps", "1", "--out_dir=out")
    assert trained.returncode == 0, trained.stderr
    assert (there / "model.safetensors").is_file()
    card = (tmp_path / "out/final/README.md").read_text()
    assert "huggingface.co" not in card and "base_model: " not in card
    for words in (("finetune", "acme:org/other"), ("plan", "acme:org/other")):
        missing = ftkit(*words, *data)
        assert missing.returncode == 2 and "Acme has no org/other" in missing.stderr
    unknown = ftkit("finetune", "acne:org/tiny", *data)
    assert unknown.returncode == 2 and "acne:org/tiny does not exist" in unknown.stderr


POLITE = ("--objective", "polite")


def losses(out_dir: Path) -> list[float]:
    return [row["loss"] or 0 for row in read_metrics(out_dir / "metrics.csv")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("import a_package_that_is_not_there", "a_package_that_is_not_there"),
        ("HELLO = 3", "is not a Command"),
        ("", "has no attribute 'HELLO'"),
    ],
)
def test_a_package_that_fails_is_named_and_the_rest_works(
    ftkit_with: Callable[..., Run], rows: str, reason: str
) -> None:
    ftkit = ftkit_with(rows=rows)
    failed = ftkit("hello", "world")
    assert failed.returncode == 2
    assert "ftkit-greetings 0.3" in failed.stderr and reason in failed.stderr
    assert "Traceback" not in failed.stderr
    assert ftkit("checkpoints", "--help").returncode == 0
    assert "hello" in ftkit("--help").stdout


def test_a_package_takes_no_name_of_ftkit(ftkit_with: Callable[..., Run]) -> None:
    ftkit = ftkit_with(points="[ftkit.commands]\nplan = greetings.rows:HELLO")
    assert "imported" not in ftkit("plan", "--help").stdout
    (shown,) = [
        one for one in json.loads(ftkit("extensions", "--format", "json").stdout)
        if one["name"] == "ftkit-greetings"
    ]  # fmt: skip
    assert "commands: plan" in shown["error"]


class TestEntryPoints:
    @pytest.fixture
    def beside(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
        """Put a package into the only directory of packages, as an installer does."""
        monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
        packages = tmp_path / "packages"
        packages.mkdir()
        monkeypatch.setattr("sys.path", [str(packages), str(tmp_path / "missing")])

        def add(package: str, points: str) -> None:
            folder = packages / f"{package}-1.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Name: {package}\nVersion: 1\n")
            (folder / "entry_points.txt").write_text(points)

        return add

    def test_those_of_ftkit_are_found_as_packages_come(
        self, beside: Callable[[str, str], None]
    ) -> None:
        assert installed_rows() == []
        beside("a", "[ftkit.commands]\nhello = a.b:C\n[console_scripts]\nx = a:b")
        (found,) = installed_rows()
        assert found == Installed("commands", "hello", "a.b:C", "a", "1", "")
        beside("b", "[ftkit.objectives]\nnew = b:D")
        assert [one.name for one in installed_rows()] == ["hello", "new"]

    def test_they_are_read_once(
        self, beside: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        beside("a", "[ftkit.commands]\nhello = a.b:C")
        before = installed_rows()
        monkeypatch.setattr("importlib.metadata.distributions", None)
        assert installed_rows() == before

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', "7", '{"PACKAGES": [1, 2]}'])
    def test_a_damaged_cache_costs_only_time(
        self, beside: Callable[[str, str], None], tmp_path: Path, text: str
    ) -> None:
        beside("a", "[ftkit.commands]\nhello = a.b:C")
        before = installed_rows()
        (file,) = (tmp_path / "cache").iterdir()
        file.write_text(text.replace("PACKAGES", str(tmp_path / "packages")))
        assert installed_rows() == before

    def test_a_cache_that_cannot_be_written_costs_only_time(
        self,
        beside: Callable[[str, str], None],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        beside("a", "[ftkit.commands]\nhello = a.b:C")
        (tmp_path / "file").touch()
        monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "file"))
        assert len(installed_rows()) == 1


class TestOwnExtensions:
    @pytest.fixture
    def registry(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[Installed]:
        """A registry with one row, and extensions of which one is broken."""
        for name, text in {
            "good": "from ftkit.utils.registry import Installed\n"
            "ROWS = [Installed('letters', 'b', '', '', '', '')]",
            "broken": "import a_package_that_is_not_there",
            "other": None,
        }.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").touch()
            if text is not None:
                (tmp_path / name / "letters.py").write_text(text)
        monkeypatch.setattr("ftkit.utils.registry.EXTENSIONS", tmp_path)
        package = pytest.importorskip("ftkit.extensions")
        monkeypatch.setattr(package, "__path__", [str(tmp_path)])
        for name in ("good", "broken", "other"):
            monkeypatch.delitem(sys.modules, f"ftkit.extensions.{name}", raising=False)
        return Registry("letters", (Installed,), [Installed("letters", "a", "", "", "", "")])

    def test_a_broken_one_is_one_message_and_the_rest_works(
        self, registry: Registry[Installed], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert registry.get("a") is not None
        assert capsys.readouterr().err == "", "the core's rows need no extension"
        assert registry.get("b") is not None
        assert registry.get("c") is None
        (line,) = capsys.readouterr().err.splitlines()
        assert "broken" in line and "a_package_that_is_not_there" in line
        assert registry.names == ["a", "b"]
        assert [row.name for row in registry.of_extension("good")] == ["b"]

    def test_rows_that_a_block_holds_are_found_inside_it(
        self, registry: Registry[Installed], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def row(name: str, place: str) -> Installed:
            return Installed("letters", name, place, "", "", "")

        def place_of(name: str) -> str | None:
            found = registry.get(name)
            return None if found is None else found.place

        monkeypatch.setattr(registry, "installed", [row("p", "a module that is not there")])
        with registry.holding([row("a", "held"), row("p", "held"), row("q", "held")]):
            assert place_of("a") == "", "what has the name without it keeps it"
            assert (place_of("p"), place_of("q")) == ("held", "held"), "nothing is imported"
            assert registry.names == ["a", "b", "p"], "nor is it offered"
            with registry.holding([]):
                assert place_of("q") is None
            assert place_of("q") == "held"
        assert place_of("q") is None

    def test_without_extensions_the_core_has_its_own(
        self, registry: Registry[Installed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ftkit.utils.registry.EXTENSIONS", tmp_path / "missing")
        assert registry.names == ["a"]
