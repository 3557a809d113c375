"""Several ranks in one run: nothing is left behind, one voice speaks, and anyone may start them."""

import dataclasses
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from command import Start, command_environment, start_up_of_ranks
from command_table import COMMANDS
from launchers import slurm, torchrun
from messages import key_words, says
from runs import DEFAULT_SIGNALS, FILES, FOREVER, TIMEOUT_S, Run, command_of, rows, watched
from saved_runs import ended, save_run

from ftkit.cli.parser import parse
from ftkit.errors import UserError
from ftkit.launch.ranks import ALLOCATOR_SETTINGS, MATMUL_CACHES, rank_environment
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe import Recipe
from ftkit.runs.job import Job
from ftkit.runs.launchers import ExternalRanks
from ftkit.runs.report.report import Report, read_report

TWO_RANKS = {"devices": 2, "strategy": "ddp", "train__micro_batch_size": 1, "eval__interval": 0}
FSDP = {"strategy": "fsdp"}
LEARNED = ["step", "samples", "loss", "lr", "grad_norm", "tokens"]
"""Columns of metrics.csv that no launcher may change."""


def on_rank(rank: int, statements: str) -> str:
    """Statements for the start of one rank's interpreter."""
    lines = statements.strip().splitlines()
    return f'if os.environ["RANK"] == "{rank}":\n' + "".join(f"    {line}\n" for line in lines)


def raising(where: str, error: str) -> str:
    """Statements that make a function of ftkit raise: `module:function` or `module:Class.method`.

    The first call does what it should, because training goes on for a while.
    """
    module, _, function = where.partition(":")
    return f"""
import importlib
import torch
owner = importlib.import_module("{module}")
*path, name = "{function}".split(".")
for part in path:
    owner = getattr(owner, part)
def fail(*_, **__):
    raise {error}
setattr(owner, name, fail)
"""


def assert_reported(run: Run, out: str, outcome: str, reason: str, phase: str) -> Report:
    """One report, with the cause alone, that was shown too."""
    report = read_report(run.out_dir)
    assert (report.outcome, report.phase) == (outcome, phase)
    assert re.match(reason, report.exit_reason), report.exit_reason
    table = " ".join(out[out.index("ftkit ") :].split())
    assert f"{outcome.replace('_', ' ')} {report.exit_reason}" in table
    assert not run.state.exists()
    return report


# --- A run that completes, beside one that fails ------------------------------------------------


SPEAKING_OF_ALL = """
import warnings
import ftkit.models.language_model
outline = ftkit.models.language_model.outline
def speaking(*arguments):
    warnings.warn("a library warns on all ranks", UserWarning, stacklevel=1)
    return outline(*arguments)
ftkit.models.language_model.outline = speaking
"""
SPEAKING_OF_ONE = """
import ftkit.strategies.schedule
make_schedule = ftkit.strategies.schedule.make_schedule
def noticing(*arguments, **keys):
    for _ in range(2):
        warnings.warn("a library warns on rank 1", UserWarning, stacklevel=1)
        print("a library prints on rank 1", flush=True)
        os.system("echo a program prints on rank 1")
    schedule, notices = make_schedule(*arguments, **keys)
    return schedule, [*notices, "only rank 1 knows this"]
ftkit.strategies.schedule.make_schedule = noticing
"""


def telling_imports(directory: Path) -> str:
    """Each rank writes at its end what it has imported, to a file of its number."""
    return f"""
import atexit, os, pathlib, sys
file = pathlib.Path({str(directory)!r}) / f"imports-{{os.environ['RANK']}}"
atexit.register(lambda: file.write_text(" ".join(sys.modules)))
"""


NOT_FOR_LORA = {
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "lightning.pytorch",
    "litgpt.api",
    "matplotlib",
    "pandas",
    "scipy",
    "sklearn",
    "tensorboard",
    "torch._inductor.compile_fx",
    "torchao",
    "torchmetrics.functional",
}
"""What libraries import, or their packages do, for what a run of plain LoRA does not do."""


End = tuple[int, str, str]
SideBySide = tuple[Run, End, Run, End, list[dict[str, str]]]


@pytest.fixture(scope="module")
def side_by_side(start: Start, tmp_path_factory: pytest.TempPathFactory) -> SideBySide:
    """At one time: a run that completes, and one whose rank 1 raises in training.

    It then hangs, as a rank may that leaves a process group in which the others wait.
    """
    directory = tmp_path_factory.mktemp("side")
    failing = raising("ftkit.training.step:TrainStep.micro_step", "RuntimeError('a bug')")
    failing += "import atexit, time\natexit.register(time.sleep, 600)\n"
    speaking = SPEAKING_OF_ALL + on_rank(1, SPEAKING_OF_ONE)
    both = directory / "both"  # there when both runs have been seen
    speaking += f"import pathlib, time\nwhile not pathlib.Path({str(both)!r}).exists():\n"
    speaking += "    time.sleep(0.05)\n"
    with (
        start(directory / "good", in_ranks=speaking, cold=True, **TWO_RANKS) as good,
        start(directory / "bad", in_ranks=on_rank(1, failing), **TWO_RANKS | FSDP) as bad,
    ):
        for run in (good, bad):
            run.wait_for(lambda run=run: len(run.processes()) == 3)  # type: ignore[misc]
            run.wait_for(run.knows_ranks)
        ranks = [rank.environ() for run in (good, bad) for rank in run.ranks()]
        both.touch()
        return good, good.end(), bad, bad.end(), ranks


@pytest.mark.slow
def test_two_runs_side_by_side_do_not_collide(side_by_side: SideBySide) -> None:
    good, (code, _, err), _, _, ranks = side_by_side
    assert (code, err) == (0, "")
    assert sorted(path.name for path in good.out_dir.iterdir()) == FILES
    assert len({rank["MASTER_PORT"] for rank in ranks}) == 2


@pytest.mark.slow
def test_ranks_know_their_place_by_the_names_that_torchrun_uses(side_by_side: SideBySide) -> None:
    *_, ranks = side_by_side
    places = [(rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"]) for rank in ranks]
    assert places == [("0", "0", "2"), ("1", "1", "2")] * 2


@pytest.mark.slow
def test_only_rank_0_prints_and_libraries_do_not(side_by_side: SideBySide) -> None:
    good, (_, out, _), *_ = side_by_side
    lines, base = out.splitlines(), read_report(good.out_dir).recipe["checkpoint_dir"]
    assert len(lines) == len(set(lines))
    assert lines[:4] == [
        "starting 2 processes on CPU (ddp, 32-true)",
        f"lora fine-tuning of {base}",
        "adapting all linear layers, rank 16, alpha 32; --lora_query true: query and value only",
        f"into {good.out_dir}",
    ]
    assert lines[4].startswith("reading data")
    for noise in ("a library", "a program", "Setting accelerator", "Warning", "deprecated"):
        assert noise not in out


@pytest.mark.slow
def test_the_start_is_shown_before_torch_is_imported_and_logged(
    side_by_side: SideBySide,
) -> None:
    good, (_, out, _), *_ = side_by_side
    first, *_ = (good.out_dir / "run.log").read_text().splitlines()
    assert first.endswith(f"Z {out.splitlines()[0]}")


@pytest.mark.slow
def test_output_of_another_rank_is_in_the_log_once(side_by_side: SideBySide) -> None:
    good, (_, out, _), *_ = side_by_side
    log = (good.out_dir / "run.log").read_text()
    for said in ("library warns", "library prints", "program prints"):
        assert len(re.findall(f"a {said} on rank 1\n", log)) == 1, said
        assert f"rank 1: a {said} on rank 1\n" in log or said == "library warns"
    of_all = [line for line in log.splitlines() if "a library warns on all ranks" in line]
    assert of_all and not any(line.startswith("rank 1: ") for line in of_all)
    assert "rank 1: only rank 1 knows this" in read_report(good.out_dir).warnings
    assert out.count("only rank 1 knows this") == log.count("only rank 1 knows this") == 1


@pytest.mark.slow
def test_an_exception_on_one_rank_is_the_cause_that_is_named(side_by_side: SideBySide) -> None:
    _, _, bad, (code, out, err), _ = side_by_side
    assert (code, err) == (1, "")
    assert_reported(bad, out, "failed", "rank 1: RuntimeError: a bug$", "training")
    log = (bad.out_dir / "run.log").read_text()
    assert re.search(r"rank 1:\nTraceback .*\nRuntimeError: a bug\n", log, re.DOTALL)


# --- The environment of a rank --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerator", "user", "expected"),
    [
        ("cuda", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (
            "cuda",
            {"PYTORCH_ALLOC_CONF": "backend:native"},
            {"PYTORCH_ALLOC_CONF": "backend:native"},
        ),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
        ("cpu", {}, {}),
    ],
)
@pytest.mark.parametrize("placement", [{"RANK": "0"}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}])
def test_gpu_memory_segments_can_grow_unless_the_user_sets_the_allocator(
    common: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accelerator: str,
    user: dict[str, Any],
    expected: dict[str, Any],
    placement: dict[str, Any],
) -> None:
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    found = rank_environment(job_on(accelerator, common, tmp_path).plan, None, placement)
    assert {name: found[name] for name in ALLOCATOR_SETTINGS if name in found} == expected
    assert found.items() >= placement.items()


@pytest.mark.parametrize(
    ("accelerator", "user", "expected"),
    [("cpu", {}, ["64", "64"]), ("cpu", {0: "9"}, ["9", "64"]), ("cuda", {}, [None, None])],
)
def test_caches_of_16_bit_products_are_small_on_a_cpu_unless_the_user_sets_them(
    common: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accelerator: str,
    user: dict[int, str],
    expected: list[str | None],
) -> None:
    for number, name in enumerate(MATMUL_CACHES):
        monkeypatch.delenv(name, raising=False)
        if number in user:
            monkeypatch.setenv(name, user[number])
    found = rank_environment(job_on(accelerator, common, tmp_path).plan, None, {"RANK": "0"})
    assert [found.get(name) for name in MATMUL_CACHES] == expected


@pytest.mark.parametrize("key", ["access_token", "data.access_token"])
def test_a_token_reaches_the_ranks_in_their_environment_and_no_file(
    key: str, common: list[str], tmp_path: Path
) -> None:
    job = job_on("cpu", [*common, "--data", "LIMA", f"--{key}", "my-secret"], tmp_path)
    job.write(tmp_path / "job.json")
    assert "my-secret" not in (tmp_path / "job.json").read_text()
    assert Job.read(tmp_path / "job.json").recipe.data_token is None
    found = rank_environment(job.plan, job.recipe.data_token, {})
    assert found["HF_TOKEN"] == "my-secret"


def job_on(accelerator: str, common: list[str], place: Path) -> Job:
    words = command_of(place / "out", common, accelerator=accelerator)
    recipe = read_recipe([], parse(COMMANDS["finetune"], words[1:]).keys, method="lora")
    devices = Devices(accelerator=accelerator, count=1, names=("A100",))
    return Job(recipe=recipe, devices=devices, base="", command=(), started_at_s=0.0)


# --- Ranks that die -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_is_named(start: Start, tmp_path: Path) -> None:
    with start(tmp_path / "out", **FOREVER | TWO_RANKS | FSDP) as run:
        run.wait_for_steps(2)
        run.ranks()[1].kill()
        code, out, err = run.end()
    assert (code, err) == (1, "")
    reason = "rank 1: the training process was killed by SIGKILL; the kernel does this when"
    report = assert_reported(run, out, "failed", reason, "training")
    assert report.progress and report.progress.steps >= 1
    assert not (run.out_dir / "final").exists()


@pytest.mark.extensions
def test_a_rank_that_dies_while_the_others_still_import_ends_the_run(
    start: Start, tmp_path: Path
) -> None:
    with start(tmp_path / "out", in_ranks=on_rank(1, "os._exit(7)"), **TWO_RANKS) as run:
        code, out, err = run.end()
    assert (code, err) == (1, "")
    assert_reported(run, out, "failed", "rank 1: .* ended with exit code 7; its last", "set_up")


@pytest.mark.slow
def test_an_error_while_importing_is_in_the_log(start: Start, tmp_path: Path) -> None:
    broken = on_rank(1, "sys.modules['ftkit.training.loop'] = None")
    with start(tmp_path / "out", in_ranks=broken, **TWO_RANKS) as run:
        code, out, err = run.end()
    assert (code, err) == (1, "")
    error = "ModuleNotFoundError: import of ftkit.training.loop halted; None in sys.modules"
    reason = f"rank 1: .* ended with exit code 1; its last line: {error}"
    assert_reported(run, out, "failed", reason, "set_up")
    assert f"\nrank 1: {error}" in (run.out_dir / "run.log").read_text()


NO_ADVICE = "from ftkit.launch import preflight; preflight.check = lambda *_, **__: {}"
"""It takes longer than such a run; test_shortage.py is about it."""
OUT_OF_MEMORY = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')"


@pytest.mark.parametrize(
    ("where", "error", "phase"),
    [
        pytest.param(
            "ftkit.models.load_weights:fill", OUT_OF_MEMORY, "set_up", marks=pytest.mark.slow
        ),
        pytest.param(
            "ftkit.models.language_model:LanguageModel.forward",
            "torch.empty(10**15)",
            "training",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ftkit.training.step:TrainStep.update",
            OUT_OF_MEMORY,
            "training",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "ftkit.evaluation.validation:validation_loss",
            "MemoryError()",
            "validation",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "ftkit.models.load_weights:result_weights",
            OUT_OF_MEMORY,
            "saving",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["set-up", "forward, of the host", "optimizer", "validation, of Python", "saving"],
)
def test_out_of_memory_on_one_rank_names_it_and_the_phase(
    start: Start, tmp_path: Path, where: str, error: str, phase: str
) -> None:
    failing = on_rank(1, raising(where, error))
    before = f"{DEFAULT_SIGNALS}\n{NO_ADVICE}"
    with start(tmp_path / "out", before=before, in_ranks=failing, **TWO_RANKS) as run:
        code, out, err = run.end()
    assert (code, err) == (3, "")
    assert_reported(run, out, "out_of_memory", "(?i)rank 1: .*memory", phase)


def test_no_rank_outlives_a_killed_supervisor(start: Start, tmp_path: Path) -> None:
    with start(tmp_path / "out", **FOREVER | TWO_RANKS) as run:
        run.wait_for_steps(1)
        assert len(run.processes()) == 3, "supervisor and two ranks"
        run.process.kill()
        run.end()


def test_a_process_whose_parent_died_before_ends_too() -> None:
    """Between its start and its wish to die with the parent, the parent may have died."""
    program = "from ftkit.utils.process import die_with_parent; die_with_parent(1); print('alive')"
    child = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        env=command_environment(),
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (child.returncode, child.stdout) == (-signal.SIGKILL, b"")


# --- Signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [
        (signal.SIGINT, 130, "Ctrl[+]C"),
        pytest.param(signal.SIGTERM, 143, "SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_all_ranks_after_the_same_step(
    start: Start, tmp_path: Path, number: signal.Signals, code: int, reason: str
) -> None:
    with start(tmp_path / "out", **FOREVER | TWO_RANKS) as run:
        run.wait_for_steps(2)
        run.process.send_signal(number)
        ended, out, err = run.end()
    assert ended == code
    assert says(err, "stopping after the current step ... Ctrl+C")
    report = assert_reported(run, out, "interrupted", reason, "training")
    assert report.progress and report.progress.steps == len(rows(run.out_dir))


def test_ctrl_c_during_set_up_ends_all_ranks(start: Start, tmp_path: Path) -> None:
    with start(tmp_path / "out", **FOREVER | TWO_RANKS) as run:
        run.wait_for(lambda: len(run.processes()) == 3)
        run.process.send_signal(signal.SIGINT)
        code, out, err = run.end()
    assert (code, err) == (130, "\nftkit: stopping\n")
    assert_reported(run, out, "interrupted", "Ctrl[+]C", "set_up")


# --- Ranks that others start --------------------------------------------------------------------


def assert_as_the_built_in_launcher(out_dir: Path, out: str, side_by_side: SideBySide) -> None:
    good, (_, expected_out, _), *_ = side_by_side
    assert sorted(path.name for path in out_dir.iterdir()) == FILES
    expected = [[float(row[key]) for key in LEARNED] for row in rows(good.out_dir)]
    found = [[float(row[key]) for key in LEARNED] for row in rows(out_dir)]
    assert found == [pytest.approx(row, rel=1e-5) for row in expected]
    report = read_report(out_dir)
    assert (report.outcome, report.exit_code) == ("completed", 0)
    assert report.resolved and report.resolved.world_size == 2
    assert report.peak_memory and [rank.rank for rank in report.peak_memory.ranks] == [0, 1]
    for line in ("completed    train.max_steps of 5 reached", "reading data"):
        assert out.count(line) == 1
    words = [" ".join(text.split()[:2]) for text in (out, expected_out)]
    assert words[0] == words[1]


ONE_GPU = Devices(accelerator="cuda", count=1, names=("NVIDIA L4",))
FOUR_TASKS = ExternalRanks(rank=5, world_size=8, local_world_size=4)


def recipe_of_tasks(devices: Devices) -> Recipe:
    count, nodes = FOUR_TASKS.devices_and_nodes(devices)
    recipe = read_recipe([], [("checkpoint_dir", "base")], method="lora")
    return dataclasses.replace(recipe, devices=count, num_nodes=nodes)


def test_a_gpu_for_each_task_is_a_machine_for_each_rank() -> None:
    """As SLURM's --gpus-per-task=1 shows them: whoever counts GPUs finds one, which is cuda:0."""
    recipe = recipe_of_tasks(ONE_GPU)
    assert (recipe.devices, recipe.num_nodes) == (1, 8)
    plan = make_plan(recipe, ONE_GPU)
    assert (plan.world_size, plan.strategy) == (8, "ddp")
    placement = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "5"}
    assert FOUR_TASKS.placement(plan) == placement


@pytest.mark.parametrize(
    "devices",
    [
        dataclasses.replace(ONE_GPU, count=4),
        dataclasses.replace(ONE_GPU, count=8),
        Devices(accelerator="cpu", count=2),
    ],
)
def test_tasks_that_see_every_gpu_or_none_are_ranks_of_their_machine(devices: Devices) -> None:
    recipe = recipe_of_tasks(devices)
    plan = make_plan(recipe, devices)
    assert (plan.devices, recipe.num_nodes, plan.world_size) == (4, 2, 8)
    assert FOUR_TASKS.placement(plan) == {}


def test_more_tasks_than_gpus_that_they_are_shown_are_refused() -> None:
    with pytest.raises(UserError, match=key_words("4 processes ... 2 GPUs ... --gpus-per-task=1")):
        recipe_of_tasks(dataclasses.replace(ONE_GPU, count=2))


AS_IF_EACH_SAW_A_GPU = """
import sys
if "ftkit.training.rank" not in sys.orig_argv:
    import ftkit.launch.ranks
    def devices_and_nodes(self, devices):
        return 1, self.world_size
    ftkit.runs.launchers.ExternalRanks.devices_and_nodes = devices_and_nodes
"""


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.matrix),
        pytest.param("fsdp", marks=pytest.mark.matrix),
    ],
)
def test_tasks_that_are_a_machine_each_give_the_same_results(
    side_by_side: SideBySide, common: list[str], tmp_path: Path, strategy: str
) -> None:
    out_dir = tmp_path / "out"
    (tmp_path / "sitecustomize.py").write_text(AS_IF_EACH_SAW_A_GPU)
    words = command_of(out_dir, common, **TWO_RANKS | {"strategy": strategy})
    environment = command_environment()
    environment["PYTHONPATH"] += f":{tmp_path}"
    with watched(out_dir, torchrun(words), tmp_path, environment) as run:
        code, out, _ = run.end()
    assert code == 0, out
    expected = [row["loss"] for row in rows(side_by_side[0].out_dir)]
    found = [float(row["loss"]) for row in rows(out_dir)]
    assert found == pytest.approx([float(loss) for loss in expected], rel=1e-5)
    resolved = read_report(out_dir).resolved
    assert resolved and (resolved.devices, resolved.world_size) == (1, 2)


@pytest.mark.slow
def test_torchrun_gives_the_same_results_and_ranks_import_nothing_that_they_do_not_use(
    side_by_side: SideBySide, common: list[str], tmp_path: Path
) -> None:
    out_dir = tmp_path / "out"
    words = torchrun(command_of(out_dir, common, **TWO_RANKS))
    environment = command_environment()
    environment["PYTHONPATH"] += f":{start_up_of_ranks(tmp_path, telling_imports(tmp_path))}"
    with watched(out_dir, words, tmp_path, environment, cold=True) as run:
        code, out, _ = run.end()  # torchrun itself speaks on standard error
    assert code == 0
    assert_as_the_built_in_launcher(out_dir, out, side_by_side)
    for rank in range(2):  # interpreters of their own, in which nothing of ours has been changed
        imported = set((tmp_path / f"imports-{rank}").read_text().split())
        assert {"torch", "peft", "litgpt.model", "lightning.fabric"} <= imported
        assert imported & NOT_FOR_LORA == set()


@pytest.mark.slow
def test_slurm_gives_the_same_results(
    side_by_side: SideBySide, common: list[str], tmp_path: Path
) -> None:
    out_dir = tmp_path / "out"
    words = command_of(out_dir, common, **TWO_RANKS)
    with slurm(out_dir, words, tmp_path) as tasks:
        (out, err), others = tasks[0].communicate(timeout=TIMEOUT_S), tasks[1].communicate()
        assert [task.returncode for task in tasks] == [0, 0]
    assert (err, others) == ("", ("", ""))
    assert_as_the_built_in_launcher(out_dir, out, side_by_side)


@pytest.mark.slow
def test_a_mistake_under_torchrun_is_reported_once_and_leaves_nothing(
    common: list[str], tmp_path: Path
) -> None:
    words = torchrun(command_of(tmp_path / "out", common, data__json_path="none.json"))
    with watched(tmp_path / "out", words, tmp_path, command_environment()) as run:
        code, out, err = run.end()
    assert (code, out) == (1, ""), "torchrun ends with 1 whatever the ranks end with"
    assert err.count("ftkit: data.json_path is none.json, but there is no such") == 1
    assert set(re.findall(r"exitcode *: (\d+)", err)) == {"2"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_complete_run_under_slurm_ends_well_everywhere(common: list[str], tmp_path: Path) -> None:
    out_dir = tmp_path / "out"
    words = command_of(out_dir, common, resume="auto")
    save_run(read_recipe([], parse(COMMANDS["finetune"], words[1:]).keys, method="lora"), 5)
    ended(out_dir, "completed", 5, result=True)
    with slurm(out_dir, words, tmp_path) as tasks:
        (out, err), others = tasks[0].communicate(timeout=TIMEOUT_S), tasks[1].communicate()
        assert [task.returncode for task in tasks] == [0, 0]
    assert (err, others) == ("", ("", ""))
    assert out.startswith(f"{out_dir} is complete at step 5;")


@pytest.mark.slow
def test_a_mistake_that_ranks_find_under_slurm_is_reported_once(
    common: list[str], tmp_path: Path
) -> None:
    out_dir = tmp_path / "out"
    words = command_of(out_dir, common, train__max_seq_length=100_000, **TWO_RANKS)
    with slurm(out_dir, words, tmp_path) as tasks:
        (out, err), others = tasks[0].communicate(timeout=TIMEOUT_S), tasks[1].communicate()
        assert [task.returncode for task in tasks] == [2, 2]
    beginning, *_ = out.splitlines()
    assert beginning.startswith("starting 2 processes") and others == ("", "")
    assert err.startswith("ftkit: train.max_seq_length is 100000") and err.count("ftkit:") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_rank_killed_under_torchrun_is_named_in_the_report(
    common: list[str], tmp_path: Path
) -> None:
    out_dir = tmp_path / "out"
    words = torchrun(command_of(out_dir, common, **FOREVER | TWO_RANKS))
    with watched(out_dir, words, tmp_path, command_environment()) as run:
        run.wait_for_steps(2)
        (victim,) = [p for p in training(run) if p.environ()["RANK"] == "1"]
        victim.kill()
        code, out, _ = run.end()
    assert code == 1
    assert_reported(run, out, "failed", "rank 1: .* was killed by SIGKILL", "training")


@pytest.mark.slow
def test_nothing_outlives_a_killed_torchrun(common: list[str], tmp_path: Path) -> None:
    out_dir = tmp_path / "out"
    words = torchrun(command_of(out_dir, common, access_token="my-secret", **FOREVER | TWO_RANKS))
    with watched(out_dir, words, tmp_path, command_environment()) as run:
        run.wait_for_steps(2)
        assert len(run.processes()) == 5, "torchrun, two supervisors, two ranks"
        # Each supervisor has the token of its own command line: no file holds it.
        assert [rank.environ()["HF_TOKEN"] for rank in training(run)] == ["my-secret"] * 2
        run.process.kill()
        run.end()


@pytest.mark.slow
def test_ctrl_c_under_torchrun_ends_after_the_step(common: list[str], tmp_path: Path) -> None:
    """In a terminal the supervisors get it twice: from the terminal and from torchrun."""
    out_dir = tmp_path / "out"
    words = torchrun(command_of(out_dir, common, **FOREVER | TWO_RANKS))
    with watched(out_dir, words, tmp_path, command_environment()) as run:
        run.wait_for_steps(2)
        for supervisor in psutil.Process(run.process.pid).children():
            supervisor.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGINT)
        _, out, err = run.end()
    assert err.count("ftkit: stopping after the current step\n") == 1
    assert_reported(run, out, "interrupted", "Ctrl[+]C", "training")


def training(run: Run) -> list[psutil.Process]:
    """The ranks, whoever started them."""
    supervisors = psutil.Process(run.process.pid).children()
    return [rank for supervisor in supervisors for rank in supervisor.children()]
