"""What all tests share: the tiny model, the command, and a check that nothing is left behind."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

# Before torch is imported: threads that spin beside others take very long.
os.environ.update(OMP_NUM_THREADS="1", GOMP_SPINCOUNT="1000")
# Where bytecode is not kept, as in many containers, each process that a test starts would compile
# all modules of ours, which takes longer than importing them does otherwise.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# DeepSpeed's optimizer for the host takes a minute to compile. By default torch keeps it apart for
# each kind of device, so it would be compiled again for simulated cards, with the same flags.
# It includes files of the environment, so that each environment needs a place of its own.
os.environ.setdefault(
    "TORCH_EXTENSIONS_DIR",
    str(Path.home() / ".cache/torch_extensions" / f"ftkit{sys.prefix.replace(os.sep, '-')}"),
)
if "PYTEST_XDIST_WORKER" not in os.environ:  # they share the cache of tokenised data
    os.environ["FTKIT_CACHE_DIR"] = tempfile.mkdtemp(prefix="ftkit-cache-")
import warm
from command import Command, Start, command_environment, command_line, start_up_of_ranks
from descendants import descendants
from durations import pytest_addoption, pytest_configure  # noqa: F401 - hooks of the tests
from runs import DEFAULT_SIGNALS, TIMEOUT_S, Run, command_of, options, watched
from runs import start as start_process

from ftkit.utils.imports import quick_imports
from ftkit.utils.progress import set_verbosity

if TYPE_CHECKING:
    from preloaded import Preloaded
    from results import Ended

sys.dont_write_bytecode = False  # nor compile the tests anew
pytest.register_assert_rewrite("conversions", "rank_jobs")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without looking for garbage among what is imported for the tests, then or later."""
    with quick_imports():
        return (yield)


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["FTKIT_CACHE_DIR"], ignore_errors=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure at once: a run that is ended from outside has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{str(report.longrepr)[-2000:]}", flush=True)


LONGEST = (
    "simulated_card/test_commands.py",
    "extensions/notebook/test_notebooks.py",
    "strategies/test_strategies.py",
    "strategies/test_training_control.py",
    "planning/test_step_memory.py",
    "checkpoint/test_faults.py",
    "strategies/test_transformers_models.py",
    "models/test_quantization.py",
    "checkpoint/test_resume_anywhere.py",
    "models/lora/test_adapters_everywhere.py",
    "checkpoint/test_optimizer_state.py",
    "planning/test_meter.py",
    "strategies/test_model_families.py",
    "strategies/test_router_loss.py",
    "launch/test_ranks.py",
    "extensions/hosts/test_heartbeats.py",
    "extensions/hosts/test_hosts.py",
    "planning/test_command.py",
    "launch/test_shortage.py",
    "runs/test_stop_and_resume.py",
    "extensions/notebook/test_api.py",
    "scripts/test_release.py",
)
"""Files that come first, so that no process is at work on a long one when all others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture
def ftkit(tmp_path: Path) -> Command:
    """Runs the command in an empty directory: `ftkit("finetune", "--help")`.

    With `cold` all processes are interpreters of their own; see warm.py. A run of more than a few
    seconds gets more time by `within_s`: a busy machine takes several times as long.
    """

    def run(
        *arguments: object, before: str = "", cold: bool = False, within_s: float = TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        line = command_line(*arguments, before=before)
        process = start_process(line, tmp_path, command_environment(), cold)
        try:
            out, err = process.communicate(timeout=within_s)
        finally:
            process.kill()
        assert process.returncode is not None
        return subprocess.CompletedProcess(line, process.returncode, out, err)

    return run


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base model in Hugging Face layout."""
    from tiny import make_llama

    return make_llama(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records for it in a JSON file."""
    from tiny import make_data

    return make_data(tmp_path_factory.mktemp("data") / "records.json")


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> "dict[str, Ended]":
    """Runs that have ended, by method: lora, qlora, full, ...; not to be changed."""
    from results import train_all

    return train_all(tmp_path_factory)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Preloaded]":
    """Runs commands whose ranks fail as it is wished."""
    from preloaded import preloaded

    environment = command_environment() | {"DS_ACCELERATOR": "cpu"}
    with preloaded(tmp_path_factory.mktemp("server"), environment) as found:
        yield found


@pytest.fixture(scope="session")
def server_with_cards(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Preloaded]":
    """The same on a machine with simulated cards."""
    from on_card import environment
    from preloaded import preloaded

    with preloaded(tmp_path_factory.mktemp("cards"), environment()) as found:
        yield found


@pytest.fixture(scope="session")
def common(tiny_base: Path, tiny_data: Path) -> list[str]:
    """The smallest run there is."""
    return options(
        checkpoint_dir=tiny_base,
        accelerator="cpu",
        precision="32-true",
        data="JSON",
        data__json_path=tiny_data,
        data__num_workers=0,
        train__global_batch_size=2,
        train__micro_batch_size=2,
        train__max_steps=5,
        train__lr_warmup_steps=1,
        eval__interval=2,
        eval__max_iters=1,
        eval__max_new_tokens=3,
    )


@pytest.fixture(scope="session")
def start(common: list[str], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts a run: `with start(out_dir, key=value) as run`; it does not outlive the block.

    Statements given as `in_ranks` run when a rank's interpreter starts, before any import of ours.
    With `cold` all processes are interpreters of their own; see warm.py.
    """
    directory = tmp_path_factory.mktemp("empty")

    @contextmanager
    def start_(
        out_dir: Path,
        /,
        *switches: str,
        before: str = DEFAULT_SIGNALS,
        in_ranks: str = "",
        cwd: Path = directory,
        cold: bool = False,
        **keys: object,
    ) -> Iterator[Run]:
        words = command_of(out_dir, common, *switches, **keys)
        environment = command_environment()
        if in_ranks:
            start_up = start_up_of_ranks(tmp_path_factory.mktemp("start-up"), in_ranks)
            environment["PYTHONPATH"] += f":{start_up}"
        command = command_line(*words, before=before)
        with watched(out_dir, command, cwd, environment, cold=cold) as run:
            yield run

    return start_


SET_BY_LIBRARIES = (
    "HF_XET_HIGH_PERFORMANCE",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "WANDB_SERVICE",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
)


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in SET_BY_LIBRARIES}


def _children() -> set[psutil.Process]:
    """Processes started here that still run, except those that are kept to the end."""
    running = set()
    for child in descendants(os.getpid()):
        try:
            words = str(child.cmdline())
            kept = child.name().startswith("wandb-") or "multiprocessing" in words
            kept = kept or "ftkit.models.chat_templates.child" in words
            kept = kept or child.pid == warm.SERVER.pid
            if not kept and child.status() != psutil.STATUS_ZOMBIE:
                running.add(child)
        except psutil.NoSuchProcess:
            continue
    return running


@pytest.fixture(autouse=True)
def _full_verbosity() -> Iterator[None]:
    """A command with --quiet sets it for the whole process."""
    # Without monkeypatch, which must be undone before the environment is compared below.
    yield
    set_verbosity("full")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Fails a test that leaves a process running or an environment variable changed."""
    environment, children = _environment(), _children()
    yield
    deadline = time.monotonic() + 10
    while (left := _children() - children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"still running: {left}"
    assert _environment() == environment
