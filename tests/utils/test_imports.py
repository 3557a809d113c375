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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_optimizer_steps_without_the_code_of_the_compiler() -> None:
    found = run_python("""
import sys
from ftkit.utils.imports import postpone_modules
postpone_modules()
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0)
kept_out = torch.compiler.disable(lambda x: x + 1)
weight.grad = torch.ones(2)
optimizer.step()
optimizer.zero_grad()
print(weight.round(decimals=3).tolist(), kept_out(1))
print(sorted({"sympy", "torch._dynamo.utils"} & sys.modules.keys()))
""")
    assert found == "[0.5, 0.5] 2\n[]\n"


@pytest.mark.slow
def test_a_step_is_simulated_without_the_code_of_the_compiler() -> None:
    """Of real tensors, too: each has one stand-in, of its size."""
    found = run_python("""
import sys
from ftkit.utils.imports import postpone_modules
postpone_modules()
import numpy as np, torch
from ftkit.models.fake_tensors import fake_tensors
table, weight = torch.from_numpy(np.ones((2, 3))), torch.ones(3, 3, dtype=torch.float64)
with fake_tensors() as mode:
    product = table.to("cpu") @ weight
    table.add_(1)
    of_table = [mode.from_tensor(table) for _ in "12"]
print(type(product).__name__, tuple(product.shape), of_table[0] is of_table[1])
print("torch._dynamo.utils" in sys.modules)
""")
    assert found == "FakeTensor (2, 3) True\nFalse\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "",
        pytest.param(
            "import torch._dynamo.config as config; assert config is torch._dynamo.config",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "from torch._dynamo import config; assert config is torch._dynamo.config",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "from torch._dynamo.utils import counters\n"
            "assert counters is torch._dynamo.utils.counters",
            marks=pytest.mark.matrix,
        ),
        "torch._dynamo.reset()",
    ],
)
def test_the_compiler_is_whole_when_something_is_compiled(first: str) -> None:
    """Whatever of it is imported first, its code runs once; what was kept out of graphs stays."""
    program = """
from ftkit.utils.imports import postpone_modules
postpone_modules()
import torch, sys
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
kept_out = torch.compiler.disable(lambda x: x.sin())
kept_out(torch.ones(2))  # called before there are graphs
{first}
def function(x):
    return kept_out(x * 2) + 1
compiled = torch.compile(function, backend=backend)
x = torch.ones(2)
assert torch.equal(compiled(x), function(x))
assert len(graphs) == 2 and not any("sin" in graph.code for graph in graphs), graphs
import torch._dynamo
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
from torch._dynamo.utils import counters
assert counters["stats"]["unique_graphs"] == 2, counters
"""
    run_python(program.format(first=first))


@pytest.mark.slow
def test_peft_asks_whether_a_model_is_of_transformers_without_importing_its_models() -> None:
    found = run_python("""
import sys
from ftkit.utils.imports import postpone_modules
postpone_modules()
from peft.tuners.lora import LoraModel
from peft.tuners import tuners_utils
from torch import nn
modules = {"transformers.modeling_utils", "torch.distributed.tensor", "sympy", "boto3"}
print(isinstance(nn.Linear(1, 1), tuners_utils.PreTrainedModel), modules & sys.modules.keys())
import transformers, torch.distributed
model = transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
print(isinstance(model, tuners_utils.PreTrainedModel))
print(isinstance(nn.Linear(1, 1), transformers.PreTrainedModel))
print(torch.distributed.tensor.Replicate.__name__)
""")
    assert found.splitlines() == [
        "False set()",
        "True",
        "False",
        "Replicate",
    ]


BEFORE_FIRST_STEP = """
import sys
import ftkit

class Looks(ftkit.Callback):
    def on_step(self, run, record):
        heavy = ("lightning.pytorch", "matplotlib", "sympy", "torch._dynamo.config",
                 "torch.distributed.tensor", "torchmetrics.metric", "transformers.modeling_utils")
        (run.out_dir / "heavy.txt").write_text(str([name for name in heavy if name in sys.modules]))
"""


@pytest.mark.slow  # a rank that nothing was imported for beforehand
def test_a_rank_takes_its_first_step_before_it_imports_what_it_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text(BEFORE_FIRST_STEP)
    command = [sys.executable, "-m", "ftkit", "finetune", "embedded:quickstart.yaml"]
    command += ["--plugin", "looks.py", "--out_dir", "out", "--train.max_steps", "1"]
    subprocess.run(command, cwd=tmp_path, env=command_environment(), check=True)
    assert (tmp_path / "out" / "heavy.txt").read_text() == "[]"


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
