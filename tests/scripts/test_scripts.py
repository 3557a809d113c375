"""The files around the package: scripts, recipes, and what the package may import."""

import ast
import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import ROOT
from messages import says

import ftkit
from ftkit.moved import moved_modules
from ftkit.recipe.recipe import Component, LoraRecipe, Recipe

SCRIPTS = sorted(p for p in (ROOT / "scripts").glob("[!_]*") if p.is_file() and not p.suffix)
BASH_SCRIPTS = [path for path in SCRIPTS if "bash" in path.read_text().partition("\n")[0]]
RECIPES = sorted(
    path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "sweeps"
)

LIGHT_PACKAGES = [
    "cli",
    "data.records",
    "extensions.comparison",
    "launch",
    "recipe",
    "runs",
    "utils",
]
LIGHT_MODULES = [
    "checkpoint.metadata",
    "checkpoint.store",
    "data.samples.sampler",
    "data.sources",
    "errors",
    "evaluation.result",
    "evaluation.task_programs",
    "extensions.chats.conversations",
    "extensions.chats.turn_names",
    "extensions.harness.tasks",
    "extensions.notebook.api",
    "extensions.notebook.display",
    "extensions.notebook.results",
    "extensions.other_models.code",
    "extensions.other_models.second_model",
    "extensions.packed_weights.stored_forms",
    "extensions.plugin.reading",
    "extensions.plugin.rows",
    "extensions.preference.labels",
    "extensions.preference.pairs",
    "extensions.sweep.sweep",
    "extensions.watch.live_page",
    "extensions.watch.watch",
    "extensions.gguf.convert",
    "extensions.hosts.slurm",
    "extensions.hub.models",
    "extensions.neox_data.source",
    "models.pretrained.single_file",
    "models.pretrained.places",
    "models.pretrained.stored_forms",
    "models.pretrained.tokenizer",
    "strategies.schedule",
    "training.callback_rows",
]
NOT_LIGHT = [
    "cli.child",
    "runs.system_metrics",
    "utils.accelerators.use",
    "utils.confined_child",
    "utils.output_files",
    "utils.safetensors_files",
]
"""In light packages: a program of its own, and what processes use that have torch anyway."""
HEAVY_PACKAGES = [
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "lightning",
    "litgpt",
    "peft",
    "torch",
    "transformers",
]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.extensions
def test_light_modules_import_no_heavy_package() -> None:
    """So that a command answers at once, and a supervisor takes no memory from its ranks."""
    folders = [ROOT / "ftkit" / name.replace(".", "/") for name in LIGHT_PACKAGES]
    assert all(folder.is_dir() for folder in folders)
    files = [file for folder in folders for file in folder.rglob("*.py")]
    found = {str(file.relative_to(ROOT / "ftkit"))[:-3].replace("/", ".") for file in files}
    modules = sorted({*found, *LIGHT_MODULES} - {*NOT_LIGHT})
    program = (
        "import importlib, sys\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(f'ftkit.{module}')\n"
        f"    if heavy := sorted(sys.modules.keys() & {set(HEAVY_PACKAGES)!r}):\n"
        "        sys.exit(f'{module} imports {heavy}')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


FEW_RUNS_NEED = """
    checkpoint.stored_state data.samples.shapes data.samples.stream evaluation.result
    launch.shortage
    models.bodies.embedding_noise models.bodies.exchange models.bodies.expert_products
    models.kept_weights models.liger models.lora.adapter_reading models.lora.experts
    models.offloading models.pretrained.pickled_tensors models.pretrained.random_weights
    models.pretrained.scored_model models.quantization models.trained_part recipe.changes
    recipe.peft_adapter recipe.recorded runs.restarts runs.resume strategies.fsdp
    strategies.fully_shard strategies.gradient_means strategies.optimizer_trial
    training.recorded_steps utils.console.html utils.texts
"""


def test_a_run_loads_what_few_runs_need_only_where_it_needs_it() -> None:
    """By the imports at the top of modules: nobody has to read the others to follow a run."""
    left, found = ["training.rank", "cli.app", "launch.supervisor"], set[str]()
    while left:
        file = ROOT / "ftkit" / f"{(module := left.pop()).replace('.', '/')}.py"
        if module in found or not file.is_file():
            continue
        found.add(module)
        for one in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(one, ast.ImportFrom):
                names = (str(one.module), *(f"{one.module}.{name.name}" for name in one.names))
                left += [name.removeprefix("ftkit.") for name in names]
    assert len(found) > 150
    assert not found.intersection(FEW_RUNS_NEED.split())


NO_MODULES = {
    "ftkit.__file__",
    *(
        "ftkit.adapter_types",
        "ftkit.callbacks",
        "ftkit.commands",
        "ftkit.companions",
        "ftkit.data_sources",
        "ftkit.device_kinds",
        "ftkit.file_formats",
        "ftkit.hubs",
        "ftkit.implementations",
        "ftkit.launchers",
        "ftkit.loggers",
        "ftkit.media_kinds",
        "ftkit.optimizers",
        "ftkit.preferences",
        "ftkit.prompt_styles",
        "ftkit.recipe_readers",
        "ftkit.recipe_sections",
        "ftkit.record_formats",
        "ftkit.record_shapes",
        "ftkit.run_ends",
        "ftkit.stored_forms",
        "ftkit.task_programs",
        "ftkit.url_kinds",
    ),  # groups of entry points
    "ftkit.data.JSON",  # of recipes
    *("ftkit.finetun", "ftkit.objectives.nothing"),  # mistakes that are explained
    *(f"ftkit.{suffix}" for suffix in ("bash", "building", "egg", "lock", "py")),
    *(f"ftkit.{suffix}" for suffix in ("tar.gz", "write_text")),
}


@pytest.mark.extensions
def test_every_name_of_the_package_in_text_is_of_something_that_lives() -> None:
    """In strings of tests, in scripts and in documents, where no import would fail."""
    package = ROOT / "ftkit"
    dead, moved = [], moved_modules()
    for file in subprocess.check_output(["git", "ls-files", "-z"], text=True, cwd=ROOT).split("\0"):
        path = ROOT / file
        if path.suffix not in ("", ".ipynb", ".md", ".py", ".toml", ".yaml") or not path.is_file():
            continue
        for name in re.findall(
            r"(?<![\w./@~-])ftkit(?:[.:][A-Za-z_]\w*)+", path.read_text("utf-8", "replace")
        ):
            parts = re.split("[.:]", name)[1:]
            is_known = name in moved or name in NO_MODULES or parts[0] in dir(ftkit)
            if not is_known and not _lives(package, parts):
                dead.append(f"{file}: {name}")
    assert dead == []


@pytest.mark.extensions
def test_every_source_file_that_a_document_names_exists() -> None:
    named = [
        (document.name, path)
        for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
        for path in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", document.read_text())
    ]
    assert len(named) > 20
    assert [
        (document, path)
        for document, path in named
        if not (ROOT / path).exists() and not (ROOT / "ftkit" / path).exists()
    ] == []


def _lives(package: Path, names: list[str]) -> bool:
    """Return whether names lead to a module, or to a word in the last module on their way."""
    place = package
    for number, name in enumerate(names):
        if (place / name).is_dir():
            place = place / name
            continue
        module = place / f"{name}.py"
        rest = names[number + 1 :] if module.exists() else names[number:]
        module = module if module.exists() else place / "__init__.py"
        return not rest or re.search(rf"\b{rest[0]}\b", module.read_text()) is not None
    return True


@pytest.mark.parametrize(
    "script", [*BASH_SCRIPTS, ROOT / ".ci/run", ROOT / "docs/launchers/slurm.sbatch"], ids=relative
)
def test_a_shell_script_is_clean(script: Path) -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    checker = [beside] if beside.exists() else ["bash", "-n"]
    run = subprocess.run([*checker, script], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


RUN_ELSEWHERE = (
    "check_published_memory",
    "count_launches",
    "execute_notebooks",
    "fuzz",
    "image_families",
    "list_models",
    "make_packed_weights",
    "make_quickstart_model",
    "measure_kto",
)
"""Scripts that other tests run, and that import models even to explain themselves."""


def marks_of(script: Path) -> list[pytest.MarkDecorator]:
    if script in BASH_SCRIPTS:
        return []
    return [pytest.mark.matrix if script.name in RUN_ELSEWHERE else pytest.mark.slow]


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=relative(path), marks=marks_of(path)) for path in SCRIPTS],
)
def test_a_script_explains_itself(script: Path, tmp_path: Path) -> None:
    command = [script] if script in BASH_SCRIPTS else [sys.executable, script]
    run = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage: ")


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.slow
def test_what_python_scripts_import_of_the_package_is_there() -> None:
    """Also where a function imports it, which an explanation does not reach."""
    missing = []
    for script in {*SCRIPTS, *(ROOT / "scripts").rglob("*.py")} - {*BASH_SCRIPTS}:
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ftkit"):
                module = importlib.import_module(str(node.module))
                missing += [
                    f"{relative(script)}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name)
                    and not _is_module(f"{node.module}.{alias.name}")
                ]
    assert missing == []


class SetUp:
    """scripts/setup_env in a directory of its own, with a stand-in for Python and pip."""

    STAND_IN = """#!/usr/bin/env bash
said="$*"
case "$said" in
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo venv >>calls ;;
  *compileall*) echo bytecode >>calls ;;
  *"import soundfile"*) [[ ! -e no_libsndfile ]]; exit ;;
  *--only-binary*uv) [[ -e no_uv ]] && exit 1 ;;
  *uv_pip.py*) echo "uv ${said##*constraints.txt }" >>calls && cat uv_says 2>/dev/null && exit 1 ;;
  *"-m pip"*) echo "pip ${said##*constraints.txt }" >>calls && cat pip_says 2>/dev/null && exit 1 ;;
  *version_info* | -V | "- half-installed"*) exec {python} "$@" ;;
  "- "*) [[ -e installed ]] && PYTHONPATH=installed exec {python} "$@"; exit 1 ;;
  *) exit 1 ;;
esac
exit 0
"""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "scripts").mkdir()
        for name in ("scripts/setup_env", "scripts/uv_pip.py", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, root / name)
        self.python = root / "python"
        self.python.write_text(self.STAND_IN.replace("{python}", sys.executable))
        self.python.chmod(0o755)

    def run(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / "scripts/setup_env", *options],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHON": str(self.python)} | environment,
        )

    def has(self, torch: str) -> None:
        """This build of torch is installed."""
        metadata = self.root / "installed" / f"torch-{torch}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
        )

    def gpu(self, capability: str, driver: str) -> str:
        """A PATH on which nvidia-smi shows such a GPU."""
        stand_in = self.root / "bin" / "nvidia-smi"
        stand_in.parent.mkdir()
        stand_in.write_text(
            f'#!/bin/sh\ncase "$*" in *query-gpu=compute_cap,driver_version*) '
            f'echo "{capability}, {driver}";; esac\n'
        )
        stand_in.chmod(0o755)
        return f"{stand_in.parent}:{os.environ['PATH']}"

    def calls(self) -> list[str]:
        """Directories created and packages installed since the last call."""
        file = self.root / "calls"
        calls = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return calls


@pytest.fixture
def setup(tmp_path: Path) -> SetUp:
    root = tmp_path / "clone"
    root.mkdir()
    return SetUp(root)


TORCH = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]  # type: ignore[index]
FRESH = ["venv", f"uv {TORCH}", "uv setuptools"]
FROM_PIP = f"uv --force-reinstall {TORCH}"
FOR_CUDA_12_6 = f"uv --extra-index-url https://download.pytorch.org/whl/cu126 {TORCH}+cu126"


def install(what: str, *, deepspeed: bool = False) -> list[str]:
    """The calls that install ftkit; DeepSpeed comes where there is a compiler."""
    is_for_tests = "dev" in what
    alone = "uv --no-deps litgpt" + " python-chi" * is_for_tests
    calls = [f"uv --no-build-isolation --editable {what}", alone]
    if (deepspeed or what != ".") and shutil.which("g++"):
        calls.append("uv --no-build-isolation ninja deepspeed")
    return [*calls, *["bytecode"] * is_for_tests]


def test_set_up_installs_torch_and_then_ftkit(setup: SetUp) -> None:
    assert setup.run().returncode == 0
    assert setup.calls() == [*FRESH, *install(".")]


def test_soundfile_that_uv_has_installed_without_its_library_comes_from_pip(setup: SetUp) -> None:
    (setup.root / "no_libsndfile").touch()
    assert setup.run("--dev").returncode == 0
    assert "pip --force-reinstall --no-deps soundfile" in setup.calls()


def test_a_second_set_up_does_and_says_nothing(setup: SetUp) -> None:
    setup.run("--dev")
    assert setup.calls() == [*FRESH, *install(".[dev]")]
    for options in (["--dev"], []):
        run = setup.run(*options)
        assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
        assert setup.calls() == []


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_set_up_follows_a_changed_requirement_and_keeps_its_options(
    setup: SetUp, file: str
) -> None:
    setup.run("--dev")
    setup.calls()
    with (setup.root / file).open("a") as stream:
        stream.write("# changed\n")
    setup.run()
    assert setup.calls()[-len(install(".[dev]")) :] == install(".[dev]")


def test_set_up_adds_an_option_to_the_environment_it_has(setup: SetUp) -> None:
    setup.run()
    setup.calls()
    setup.run("--dev")
    calls = setup.calls()
    assert "venv" not in calls
    assert calls[-len(install(".[dev]")) :] == install(".[dev]")


def test_set_up_with_cuda_installs_no_cpu_build(setup: SetUp) -> None:
    run = setup.run("--cuda")
    assert f"{TORCH} from pip's index ... " in run.stdout
    assert setup.calls() == ["venv", FROM_PIP, "uv setuptools", *install(".", deepspeed=True)]


def test_set_up_installs_deepspeed_on_request(setup: SetUp) -> None:
    setup.run()
    setup.calls()
    assert setup.run("--deepspeed").returncode == 0
    assert setup.calls()[-3:] == install(".", deepspeed=True)


@pytest.mark.parametrize(
    ("capability", "driver", "build"),
    [
        ("9.0", "580.65.06", FROM_PIP),
        ("12.0", "580.65.06", FROM_PIP),
        ("7.5", "595.10", FROM_PIP),
        ("7.0", "580.65.06", FOR_CUDA_12_6),
        ("6.1", "575.57.08", FOR_CUDA_12_6),
        ("9.0", "535.104.05", FOR_CUDA_12_6),
        ("[N/A]", "580.65.06", FROM_PIP),
    ],
)
def test_set_up_takes_the_build_of_torch_that_gpu_and_driver_need(
    setup: SetUp, capability: str, driver: str, build: str
) -> None:
    assert setup.run(PATH=setup.gpu(capability, driver)).returncode == 0
    assert setup.calls() == ["venv", build, "uv setuptools", *install(".", deepspeed=True)]


@pytest.mark.parametrize(
    ("installed", "capability", "expected"),
    [
        ("+cpu", "9.0", [FROM_PIP]),
        ("", "9.0", []),
        ("", "7.0", [FOR_CUDA_12_6]),
        ("+cu126", "7.0", []),
    ],
)
def test_set_up_replaces_a_build_of_torch_that_cannot_use_the_gpu(
    setup: SetUp, installed: str, capability: str, expected: list[Any]
) -> None:
    setup.has(f"{TORCH.removeprefix('torch==')}{installed}")
    setup.run(PATH=setup.gpu(capability, "580.65.06"))
    assert setup.calls() == ["venv", *expected, "uv setuptools", *install(".", deepspeed=True)]


@pytest.mark.parametrize(
    ("options", "what"),
    [(["--notebook"], ".[notebook]"), (["--notebook", "--dev"], ".[dev]")],
)
def test_set_up_installs_jupyter_on_request(setup: SetUp, options: list[str], what: str) -> None:
    assert setup.run(*options).returncode == 0
    assert setup.calls() == [*FRESH, *install(what)]
    assert setup.run("--notebook").stdout == ""


@pytest.fixture
def cut_off(setup: SetUp) -> SetUp:
    """A set-up that has failed once, and would not again."""
    for program in ("uv", "pip"):
        (setup.root / f"{program}_says").write_text("no matching distribution\n")
    run = setup.run("--dev")
    assert run.returncode == 1
    assert "no matching distribution" in run.stderr
    for program in ("uv", "pip"):
        (setup.root / f"{program}_says").unlink()
    assert setup.calls()[0] == "venv"
    return setup


def test_a_set_up_that_was_cut_off_goes_on_with_its_options(cut_off: SetUp) -> None:
    run = cut_off.run()
    assert run.returncode == 0 and "going on" in run.stdout
    assert cut_off.calls() == [*FRESH[1:], *install(".[dev]")]
    assert cut_off.run().stdout == ""


def test_what_was_cut_off_in_the_middle_is_installed_again(cut_off: SetUp) -> None:
    packages = cut_off.root / ".venv/lib/python3.12/site-packages"
    for name, size in (("whole", 4), ("cut", 9), ("gone", None), ("unrecorded", None)):
        metadata = packages / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        if size:
            (packages / f"{name}.py").write_text("x=1\n")
        if name != "unrecorded":
            rows = f"{name}.py,sha256=x,{size or 4}\n{metadata.name}/RECORD,,\n"
            (metadata / "RECORD").write_text(rows)
    cut_off.run()
    assert [path.name for path in packages.glob("*.dist-info")] == ["whole-1.0.dist-info"]


def test_an_environment_that_was_not_made_is_made_anew(cut_off: SetUp) -> None:
    stamp = cut_off.root / ".venv/ftkit_setup"
    stamp.write_text(stamp.read_text().replace("installing", "unfinished"))
    assert cut_off.run().returncode == 0
    assert cut_off.calls()[: len(FRESH)] == FRESH


def with_pip(calls: list[str]) -> list[str]:
    return [re.sub("^uv ", "pip ", call) for call in calls]


def test_set_up_without_uv_installs_with_pip_and_says_so(setup: SetUp) -> None:
    (setup.root / "no_uv").touch()
    run = setup.run()
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.count("going on with pip") == 1
    assert setup.calls() == with_pip([*FRESH, *install(".")])


def test_what_uv_cannot_install_and_all_after_it_is_installed_with_pip(setup: SetUp) -> None:
    (setup.root / "uv_says").write_text("no equivalent\n")
    run = setup.run()
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.count("uv failed, trying pip") == 1
    venv, torch, *rest = [*FRESH, *install(".")]
    assert setup.calls() == [venv, torch, *with_pip([torch, *rest])]


def test_a_moved_repository_gets_a_new_environment(setup: SetUp) -> None:
    setup.run()
    setup.calls()
    setup.root = setup.root.rename(setup.root.with_name("moved"))
    setup.python = setup.root / "python"
    assert setup.run().returncode == 0
    assert setup.calls()[: len(FRESH)] == FRESH


def test_an_environment_of_another_maker_is_used_but_never_deleted(setup: SetUp) -> None:
    subprocess.run([setup.python, "-m", "venv", ".venv"], cwd=setup.root, check=True)
    setup.calls()
    assert setup.run().returncode == 0
    assert setup.calls() == [*FRESH[1:], *install(".")]

    (setup.root / ".venv/ftkit_setup").unlink()
    shutil.copy("/bin/false", setup.root / ".venv/bin/python")
    run = setup.run()
    assert run.returncode == 1
    assert "Move it away" in run.stderr
    assert (setup.root / ".venv/bin/python").exists()


def test_an_unsuitable_python_is_named(setup: SetUp) -> None:
    run = setup.run(PYTHON="/bin/false")
    assert run.returncode == 1
    assert says(run.stderr, "PYTHON is /bin/false ... 3.11, 3.12 or 3.13")


def unknown_keys(values: dict[str, Any], kind: Any, prefix: str = "") -> Iterator[str]:
    """Keys that the dataclass or TypedDict `kind` does not have, dotted."""
    types = typing.get_type_hints(kind)
    for key, value in values.items():
        if key not in types:
            yield prefix + key
        elif isinstance(value, dict) and (
            dataclasses.is_dataclass(types[key]) or types[key] is Component
        ):
            yield from unknown_keys(value, types[key], f"{prefix}{key}.")


FULL = ("documents", "documents-stream", "images")
"""Recipes that train all weights, besides those whose names say so."""


def runs_lora(recipe: Path) -> bool:
    trains_all = recipe.stem.endswith("-full") or recipe.stem in FULL
    return recipe.parent.name != "multi_gpu" and not trains_all


@pytest.mark.parametrize("recipe", RECIPES, ids=relative)
def test_a_recipe_uses_known_keys(recipe: Path) -> None:
    values = yaml.safe_load(recipe.read_text())
    is_lora = runs_lora(recipe)
    assert list(unknown_keys(values, LoraRecipe if is_lora else Recipe)) == []
    assert is_lora == any(key.startswith("lora_") for key in values)


@pytest.mark.parametrize("recipe", RECIPES, ids=relative)
def test_a_recipe_says_how_to_run_it(recipe: Path) -> None:
    comment = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    command = "finetune" if runs_lora(recipe) else "finetune_full"
    expected = f"#   ftkit {command} --config {relative(recipe)}"
    if recipe.stem == "quickstart":
        expected = "#   scripts/quickstart"
    assert any(line.split(" --train")[0].split(" --precision")[0] == expected for line in comment)


@pytest.mark.parametrize("recipe", RECIPES, ids=relative)
def test_the_batch_of_a_recipe_divides_evenly(recipe: Path) -> None:
    values = yaml.safe_load(recipe.read_text())
    train = values["train"]
    assert train["global_batch_size"] % (train["micro_batch_size"] * values["devices"]) == 0


def committed_files() -> list[Path]:
    folders = (".ci", ".github", "ftkit", "notebooks", "recipes", "scripts", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [
        path
        for path in [*paths, *ROOT.glob("*.*"), ROOT / "LICENSE"]
        if path.is_file() and "__pycache__" not in path.parts
    ]


def test_no_committed_file_holds_a_path_of_one_machine() -> None:
    own_path = re.compile(rb"(?<![\w.])/(?:home|mnt|root|tmp|Users|work|workspace)/\w")
    texts = {path: path.read_bytes() for path in committed_files()}
    assert len(texts) > 30
    found = [relative(path) for path, text in texts.items() if own_path.search(text)]
    assert found == []
