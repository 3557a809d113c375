"""The core works without any extension: in a copy without them."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT, command_environment, command_line
from runs import start
from tiny import make_llama

_IMPORT_ALL = (
    "import ftkit\n"
    "import pkgutil, importlib, sys\n"
    "left_out = []\n"
    "for module in pkgutil.walk_packages(ftkit.__path__, 'ftkit.'):\n"
    "    if module.name.endswith('.__main__'):\n"
    "        continue\n"
    "    try:\n"
    "        importlib.import_module(module.name)\n"
    "    except ModuleNotFoundError as error:\n"
    "        left_out.append(error.name)\n"
    "print(len(sys.modules), *left_out)\n"
    "assert not any(name.startswith('ftkit.extensions') for name in sys.modules)\n"
)


_WITHOUT_INSTALLED = (
    "import sys\n"
    "sys.meta_path = [f for f in sys.meta_path if not f.__module__.startswith('__editable__')]\n"
)
"""An editable install would find the extensions of this checkout."""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ftkit and its tests, without extensions and theirs."""
    place = tmp_path_factory.mktemp("core")
    for name in ("ftkit", "tests"):
        left_out = shutil.ignore_patterns("extensions", "__pycache__")
        shutil.copytree(ROOT / name, place / name, ignore=left_out)
    for path in ROOT.iterdir():
        if path.name not in ("ftkit", "tests", ".git", ".venv"):
            (place / path.name).symlink_to(path)
    (place / "sitecustomize.py").write_text(_WITHOUT_INSTALLED)
    return place


def variables(core: Path) -> dict[str, str]:
    """With the copy before every other ftkit."""
    return command_environment() | {"PYTHONPATH": os.fspath(core)}


def ended_there(core: Path, cwd: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A command of a copy that has ended; its modules are imported anew, their libraries not."""
    line = command_line(*words)
    process = start(line, cwd, variables(core))
    out, err = process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess(line, process.returncode, out, err)


@pytest.mark.slow
def test_every_module_of_the_core_imports(core: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-c", _IMPORT_ALL],
        capture_output=True,
        text=True,
        env=variables(core),
        cwd=core,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert not [name for name in ended.stdout.split()[1:] if name.startswith("ftkit")]


@pytest.mark.slow
def test_all_its_tests_are_collected(core: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""],
        capture_output=True,
        text=True,
        env=variables(core),
        cwd=core,
    )
    assert ended.returncode == 0, ended.stdout[-2000:]


@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_its_fast_tests_pass(core: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--numprocesses", "3", "--dist", "loadfile"),
            *("-m", "not slow and not matrix and not extensions"),
        ],
        capture_output=True,
        text=True,
        env=variables(core),
        cwd=core,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]


@pytest.mark.slow
def test_what_only_extensions_have_is_refused(core: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.yml").write_text("base_model: x\ndatasets: []\n")
    for words in (
        ("merge", "out"),
        ("finetune", "theirs.yml", "--tool", "axolotl"),
        ("plan", ROOT / "recipes/quickstart.yaml", "--peft", "vera"),
        ("plan", ROOT / "recipes/quickstart.yaml", "--plugin", "my.py"),
    ):
        ended = ended_there(core, tmp_path, *words)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr
        assert words[-1] in ended.stderr or words[0] in ended.stderr


@pytest.mark.slow
def test_weights_in_8_bits_need_their_extension(core: Path, tmp_path: Path) -> None:
    file = make_llama(tmp_path / "model") / "config.json"
    settings = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    file.write_text(json.dumps(settings))
    quickstart = ROOT / "recipes/quickstart.yaml"
    for words in (("--checkpoint_dir", "model"), ("--quantize", "stored")):
        line = command_line("plan", quickstart, *words)
        ended = subprocess.run(
            line, capture_output=True, text=True, env=variables(core), cwd=tmp_path
        )
        assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
        assert "its extension packed_weights is missing" in " ".join(ended.stderr.split())


@pytest.mark.slow
def test_conversations_need_their_extension(core: Path, tmp_path: Path) -> None:
    ended = ended_there(
        core, tmp_path, "plan", ROOT / "recipes/quickstart.yaml", "--data.path=embedded:chats"
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert "ftkit's extension chats, which is missing" in " ".join(ended.stderr.split())


@pytest.mark.slow
def test_models_and_data_by_name_need_their_extension(core: Path, tmp_path: Path) -> None:
    quickstart = ROOT / "recipes/quickstart.yaml"
    for words, key in (
        (("finetune", quickstart, "--checkpoint_dir=org/name"), "checkpoint_dir is org/name"),
        (("data", quickstart, "--checkpoint_dir=org/name"), "checkpoint_dir is org/name"),
        (("plan", quickstart, "--checkpoint_dir=org/name"), "checkpoint_dir is org/name"),
        (("generate", "org/name", "--prompt=x"), "checkpoint_dir is org/name"),
        (("finetune", quickstart, "--data.path=org/name"), "data.path is org/name"),
        (("data", quickstart, "--data.path=org/name"), "data.path is org/name"),
        (("download", "org/name"), "download"),
    ):
        ended = ended_there(core, tmp_path, *words)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
        said = " ".join(ended.stderr.split())
        assert key in said, said
        assert "ftkit's extension hub, which is missing" in said or key == "download", said


@pytest.mark.slow
def test_an_interrupted_download_is_not_to_be_continued_by_a_command_that_is_missing(
    core: Path, tmp_path: Path
) -> None:
    beside = make_llama(tmp_path / "model") / ".cache/huggingface/download"
    beside.mkdir(parents=True)
    (beside / "model.safetensors.x.incomplete").touch()
    ended = ended_there(
        core, tmp_path, "finetune", ROOT / "recipes/quickstart.yaml", "--checkpoint_dir=model"
    )
    assert ended.returncode == 2 and "interrupted download" in ended.stderr, ended.stderr
    assert "ftkit download" not in ended.stderr


@pytest.mark.slow
def test_what_an_extension_needs_of_another_one_is_named_where_it_is_missing(
    tmp_path: Path,
) -> None:
    missing = shutil.ignore_patterns("hub", "comparison", "__pycache__")
    shutil.copytree(ROOT / "ftkit", tmp_path / "ftkit", ignore=missing)
    (tmp_path / "sitecustomize.py").write_text(_WITHOUT_INSTALLED)
    for words, extension in (
        (("push", "out", "org/name"), "hub"),
        (("watch", "out"), "comparison"),
        (("sweep", "sweep.yaml"), "comparison"),
    ):
        ended = ended_there(tmp_path, tmp_path, *words)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
        said = " ".join(ended.stderr.split())
        assert f"ftkit {words[0]} needs ftkit's extension {extension}, which is missing" in said


@pytest.mark.slow
def test_the_quick_start_trains_saves_resumes_and_reports(core: Path, tmp_path: Path) -> None:
    def run(*words: object) -> subprocess.CompletedProcess[str]:
        quickstart = ROOT / "recipes/quickstart.yaml"
        return ended_there(core, tmp_path, "finetune", quickstart, "--out_dir=out", *words)

    short = ("--train.max_steps=3", "--eval.exact_match=0")
    stopped = run(*short, "--stop_after=2")
    assert stopped.returncode == 0, stopped.stderr[-2000:]
    resumed = run(*short, "--resume=auto")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    with (tmp_path / "out/metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3"]
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["outcome"] == "completed"
    assert (tmp_path / "out/final").is_dir()
