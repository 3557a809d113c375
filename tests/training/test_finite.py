"""Numbers that are infinite or NaN end a run before anything is kept of them."""

import json
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command
from messages import says
from rank_jobs import DEEPSPEED, NO_EVALUATION, Case, repeated, run_here, write_job
from safetensors.torch import load_file
from tiny import make_data, make_llama

from ftkit.checkpoint.shards import write_shard
from ftkit.checkpoint.state import trained_parameter
from ftkit.checkpoint.store import Store
from ftkit.checkpoint.stored_state import StoredState
from ftkit.models.lora.targets import our_name
from ftkit.runs.job import Job
from ftkit.runs.report.metrics import read_metrics, read_validation
from ftkit.runs.report.report import read_report
from ftkit.strategies.strategy import Strategy
from ftkit.training.evaluator import Evaluator
from ftkit.training.finite import NotFinite, first_not_finite

STEPS = 3
BY_HAND: tuple[tuple[str, Any], ...] = (
    *NO_EVALUATION,
    ("train.max_steps", STEPS),
    ("train.micro_batch_size", 11),
    ("train.lr_warmup_steps", 0),
    ("train.save_interval", 1),
    ("checkpoint.keep_last", 1),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "records.json")


def in_step(number: int, spoil: Callable[[Strategy], None], before: str) -> Callable[..., None]:
    """Spoils a step before a method of the strategy is called."""

    def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
        plain, calls = getattr(Strategy, before), []

        def spoiled(self: Strategy, *args: Any) -> Any:
            calls.append(self)
            if len(calls) == number:
                spoil(self)
            return plain(self, *args)

        monkeypatch.setattr(Strategy, before, spoiled)

    return prepare


def nan_gradient(strategy: Strategy) -> None:
    gradient = strategy._trained[-1].grad
    assert gradient is not None
    gradient.view(-1)[0] = float("nan")


def infinite_state(strategy: Strategy) -> None:
    """Its update is 0, so that the weights stay finite."""
    strategy.optimizer.state[strategy._trained[-1]]["exp_avg_sq"].fill_(float("inf"))


def infinite_average(strategy: Strategy) -> None:
    assert strategy.averages is not None
    next(iter(strategy.averages.values()))["average"].view(-1)[0] = float("inf")


def nothing(_: pytest.MonkeyPatch) -> None:
    pass


SGD = (("optimizer", "SGD"), ("train.max_norm", None), ("train.lr_schedule", "constant"))
WAYS: dict[str, tuple[Callable[..., None], tuple[tuple[str, Any], ...], str, list[int]]] = {
    "gradient": (in_step(2, nan_gradient, "clip_gradients"), (), "norm ... step 2 ... nan", [1]),
    "gradient, no clipping": (
        in_step(2, nan_gradient, "clip_gradients"),
        (("train.max_norm", None),),
        "norm ... step 2 ... nan",
        [1],
    ),
    "loss": (nothing, (*SGD, ("optimizer.lr", 1e30)), "loss of step 2 ... nan", [1]),
    "update": (nothing, (*SGD, ("optimizer.lr", 1e39)), "step 1 ... parameter", []),
    "update in the backward pass": (
        nothing,
        (*SGD, ("optimizer.lr", 1e39), ("train.optimizer_in_backward", True)),
        "step 1 ... parameter",
        [],
    ),
    "loss in the backward pass": (
        nothing,
        (*SGD, ("optimizer.lr", 1e30), ("train.optimizer_in_backward", True)),
        "loss of step 2 ... nan",
        [1],
    ),
    "optimizer state": (
        in_step(3, infinite_state, "update"),
        (),
        "step 3 ... exp_avg_sq",
        [2],
    ),
    "average": (
        in_step(3, infinite_average, "update"),
        (("train.ema_decay", 0.5),),
        "step 3 ... average",
        [2],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_ends_the_run_and_the_checkpoint_before_stays(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    prepare, changes, words, steps = WAYS[way]
    out = tmp_path / "out"
    prepare(monkeypatch)
    with pytest.raises(NotFinite) as ended:
        run(base, data, out, *changes)
    assert says(str(ended.value), f"{words} ... lower learning rate")
    clips = dict(changes).get("train.max_norm", 1.0) or "backward" in way
    remedy = "--optimizer.lr 0.0001" + " --train.max_norm 1.0" * (not clips)
    assert ended.value.remedy == remedy
    store = Store(out / "checkpoints")
    assert store.steps()[-1:] == steps and not (out / "final").exists()
    for step in store.steps():
        for shard in store.path(step).glob("*.safetensors"):
            assert all(tensor.isfinite().all() for tensor in load_file(shard).values())


def run(
    base: Path,
    data: Path,
    out: Path,
    *changes: tuple[str, Any],
    method: Any = "full",
    stop_after: int | None = None,
) -> Any:
    out.mkdir()
    case = Case("single", method, changes=(*BY_HAND, *changes), stop_after=stop_after)
    job = Job.read(write_job(case, 1, out, base, data))
    shutil.rmtree(job.directory.rank(0).path, ignore_errors=True)
    return run_here(job)


def infinite_weights(strategy: Strategy) -> None:
    with torch.no_grad():
        for parameter in strategy._trained:
            parameter.fill_(float("inf"))


@pytest.mark.parametrize(
    ("spoil", "before"), [(nan_gradient, "clip_gradients"), (infinite_weights, "update")]
)
def test_a_checkpoint_that_is_being_written_meanwhile_is_completed_as_it_was(
    base: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Strategy], None],
    before: str,
) -> None:
    """Its thread writes once the weights are infinite or the run has ended."""
    is_spoiled, write = threading.Event(), write_shard

    def spoiled(strategy: Strategy) -> None:
        spoil(strategy)
        is_spoiled.set()

    def late(path: Path, pieces: Any) -> None:
        assert is_spoiled.wait(60)
        write(path, pieces)

    in_step(2, spoiled, before)(monkeypatch)
    monkeypatch.setattr("ftkit.checkpoint.saver.write_shard", late)
    out = tmp_path / "out"
    with pytest.raises(NotFinite):
        run(base, data, out)
    store = Store(out / "checkpoints")
    assert store.steps() == [1] and store.verify(1) == [] and store.leftovers() == []
    for shard in store.path(1).glob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(shard).values())


def test_a_step_with_such_a_gradient_changes_no_weight(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(base, data, tmp_path / "expected")
    kept: list[Strategy] = []

    def spoil(strategy: Strategy) -> None:
        kept.append(strategy)
        nan_gradient(strategy)

    in_step(2, spoil, "clip_gradients")(monkeypatch)
    with pytest.raises(NotFinite):
        run(base, data, tmp_path / "out")
    (strategy,) = kept
    store = Store(tmp_path / "out/checkpoints")
    stored = StoredState.in_checkpoint(store.path(1), store.metadata(1))
    for name, parameter in strategy._model.named_parameters():
        there = trained_parameter(stored, our_name(name)).read(0, parameter.numel())
        assert torch.equal(parameter.detach().view(-1), there)
    rows = read_metrics(tmp_path / "out/metrics.csv")
    # Until then it is the run that it would have been, to the bit; the norm of NaN is no number.
    assert [row["loss"] for row in rows] == expected.losses[:2]
    assert [row["grad_norm"] is None for row in rows] == [False, True]


@pytest.mark.parametrize(("interval", "kept"), [(0, [1, 2]), (1, [2])])
def test_a_stop_keeps_the_checkpoint_before_one_whose_weights_have_given_no_loss(
    base: Path, data: Path, tmp_path: Path, interval: int, kept: list[int]
) -> None:
    """The loss of its next step may be NaN, after a finite update that was too large."""
    run(base, data, tmp_path / "out", ("eval.interval", interval), stop_after=2)
    assert Store(tmp_path / "out/checkpoints").steps() == kept


def test_a_validation_that_is_not_finite_ends_the_run_and_is_reported(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Evaluator._validate

    def spoiled(self: Evaluator, step: int) -> Any:
        if step == 2:
            with torch.no_grad():
                next(self._setup.model.parameters()).fill_(float("nan"))
        return plain(self, step)

    monkeypatch.setattr(Evaluator, "_validate", spoiled)
    with pytest.raises(NotFinite, match="validation loss") as ended:
        run(base, data, tmp_path / "out", ("eval.interval", 1), ("eval.max_iters", 1))
    assert ended.value.computed_from == 2
    rows = read_validation(tmp_path / "out/validation.csv")
    assert [(row["step"], row["val_loss"] is None) for row in rows] == [(1, False), (2, True)]
    assert Store(tmp_path / "out/checkpoints").steps() == [1]


def test_a_base_model_with_such_numbers_is_named_before_the_first_step(
    base: Path, data: Path, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    (file,) = broken.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, file, {"format": "pt"})
    # Frozen weights are no part of the result: they show in the loss.
    for method, where in (("full", "weight"), ("lora", "loss of step 1")):
        with pytest.raises(NotFinite) as ended:
            run(broken, data, tmp_path / method, method=method)
        assert where in str(ended.value) and "before anything was learned" in str(ended.value)
        assert not ended.value.remedy


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_one_number_in_a_tensor_is_enough(value: float, dtype: torch.dtype) -> None:
    if dtype == torch.float8_e4m3fn and value == value:
        pytest.skip("it has no infinity")
    tensor = torch.ones(1000).to(dtype)
    others = [("parameter/a", torch.ones(3)), ("codes/a", torch.ones(3, dtype=torch.uint8))]
    assert first_not_finite([*others, ("parameter/b", tensor)]) is None
    tensor = torch.ones(1000)
    tensor[77] = value
    assert first_not_finite([*others, ("exp_avg/b", tensor.to(dtype))]) == "exp_avg b"


# As a command


Ended = subprocess.CompletedProcess[str]


def trained(ftkit: Command, out: Path, *more: object) -> Ended:
    words = (
        *("finetune_full", "embedded:quickstart", "--data", "JSON"),
        *("--data.path", "embedded:quickstart", "--out_dir", out, "--train.lr_warmup_steps", 0),
        *("--train.lr_schedule", "constant", "--optimizer", "SGD", "--precision", "32-true"),
        *("--train.micro_batch_size", 8, "--eval.max_iters", 1, "--eval.max_new_tokens", 0),
        *("--train.save_interval", 1, "--checkpoint.keep_last", 1),
    )
    return ftkit(*words, *more, within_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["1e30", "1e39"])  # finite weights that give NaN, and NaN
def test_the_printed_command_goes_on_before_it_with_a_lower_rate(
    ftkit: Command, tmp_path: Path, rate: str
) -> None:
    out = tmp_path / "out"
    assert trained(ftkit, out, "--train.max_steps", 1, "--optimizer.lr", "1e-3").returncode == 0
    ended = trained(ftkit, out, "--train.max_steps", 4, "--optimizer.lr", rate, "--resume", "auto")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    report = json.loads((out / "report.json").read_text())
    assert report["outcome"] == "failed" and "lower learning rate" in report["exit_reason"]
    (line,) = [
        line for line in ended.stdout.splitlines() if line.startswith("continue with: ftkit ")
    ]
    words = shlex.split(line.removeprefix("continue with: ftkit "))
    assert words[words.index("--optimizer.lr") + 1] == "0.0001"
    done = ftkit(*words, within_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continuing from step 1" in done.stdout + done.stderr
    assert Store(out / "checkpoints").steps() == [4]
    assert read_report(out).diverged_from is None


SPOILS = """
import ftkit

class Spoils(ftkit.Callback):
    def on_begin(self, run):
        def forward(module, given, made):
            if run.rank == 1 and run.step == 1 and made.requires_grad:
                made.register_hook(lambda gradient: gradient * float("nan"))
        run.model.head.register_forward_pre_hook(lambda m, given: forward(m, None, given[0]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", DEEPSPEED])
def test_all_ranks_end_if_a_gradient_of_one_is_not_finite(
    ftkit: Command, tmp_path: Path, strategy: str
) -> None:
    plugin, out = tmp_path / "spoils.py", tmp_path / "out"
    plugin.write_text(SPOILS)
    ended = trained(
        ftkit,
        *(out, "--train.max_steps", 3, "--optimizer.lr", "1e-3", "--devices", 2),
        *("--strategy", strategy, "--plugin", plugin),
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    report = read_report(out)
    assert says(report.exit_reason, "norm ... step 2"), report.exit_reason
    assert Store(out / "checkpoints").steps() == [1] and not (out / "final").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*repeated("ddp"), "fsdp", DEEPSPEED])
def test_no_rank_saves_an_update_that_overflows(
    ftkit: Command, tmp_path: Path, strategy: str
) -> None:
    out = tmp_path / "out"
    ended = trained(
        ftkit,
        *(out, "--train.max_steps", 1, "--optimizer.lr", "3e38", "--devices", 2),
        *("--optimizer.weight_decay", "1e3", "--strategy", strategy),
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "not finite" in read_report(out).exit_reason
    assert not Store(out / "checkpoints").steps() and not (out / "final").exists()
    assert "start again with: ftkit finetune_full" in ended.stdout
