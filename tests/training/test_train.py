"""One rank, from the job to the result: the numbers of training, in the process of the test."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import some_metadata
from losses import SEED, load, loss_of
from orders import make_elastic_order
from safetensors.torch import load_file, save_file
from tiny import make_data, make_llama

from ftkit.checkpoint.host_copies import HostCopies
from ftkit.checkpoint.metadata import BaseIdentity
from ftkit.checkpoint.shards import Piece
from ftkit.errors import UserError
from ftkit.models.language_model import LanguageModel
from ftkit.models.pretrained.base_model import fingerprint, open_base, read_blueprint
from ftkit.planning.memory import predict
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import from_dict, read_recipe
from ftkit.recipe.peft_adapter import with_adapter
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe import Method, Recipe
from ftkit.runs.job import Job
from ftkit.runs.report.metrics import Row, read_metrics, read_validation
from ftkit.runs.report.report import Report
from ftkit.strategies.optimizers import clip_gradients
from ftkit.strategies.step_memory import MicroBatchSize
from ftkit.strategies.strategy import Strategy
from ftkit.training.finite import NotFinite
from ftkit.training.journal import Journal
from ftkit.training.loop import StopRequest
from ftkit.training.rank import _explain, run_job
from ftkit.training.recorder import Recorder
from ftkit.training.start import identities
from ftkit.training.step import TrainStep
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import marked


@dataclass(frozen=True)
class Result:
    """Files and report of a run."""

    metrics: list[Row]
    validation: list[Row]
    out_dir: Path
    report: Report

    @property
    def losses(self) -> list[Any]:
        return [row["loss"] for row in self.metrics]

    def weights(self) -> dict[str, torch.Tensor]:
        (file,) = (self.out_dir / "final").glob("*.safetensors")
        return load_file(file)


Train = Callable[..., Result]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "records.json")


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, base: Path, data_file: Path) -> Train:
    """Runs a recipe in this process; keys of the recipe as keyword arguments, dots as `__`."""

    def train_(method: Method, **changes: Any) -> Result:
        out_dir = tmp_path_factory.mktemp("run")
        values = {
            "checkpoint_dir": str(base),
            "out_dir": str(out_dir),
            "precision": "32-true",
            "accelerator": "cpu",
            "data": "JSON",
            "data.json_path": str(data_file),
            "data.mask_prompt": True,
            "data.val_split_fraction": 0.2,
            "data.num_workers": 0,
            "train.global_batch_size": 10,
            "train.micro_batch_size": 4,
            "train.max_steps": 6,
            "train.lr_warmup_steps": 2,
            "train.max_norm": 0.5,
            "train.max_seq_length": 200,
            "eval.interval": 0,
            "eval.max_new_tokens": 0,
            "eval.final_validation": False,
            "optimizer.lr": 1e-2,
        }
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        overrides = [(key, json.dumps(value)) for key, value in values.items()]
        recipe = with_adapter(read_recipe([], overrides, method=method))
        job = Job(
            recipe=recipe,
            devices=Devices(accelerator="cpu", count=2),
            base=recipe.checkpoint_dir,
            command=(),
            started_at_s=time.time(),
        )
        state = job.directory.rank(0)
        state.path.mkdir(parents=True)
        with (
            Display(out_dir) as display,
            Recorder(job.new_report(), state, job.plan, began_s=job.began_s) as recorder,
        ):
            run_job(job, None, StopRequest(), Journal(display, recorder))
        return Result(
            read_metrics(out_dir / "metrics.csv"),
            read_validation(out_dir / "validation.csv"),
            out_dir,
            recorder.report,
        )

    return train_


ALL_LAYERS = {
    "lora_key": True,
    "lora_projection": True,
    "lora_mlp": True,
    "lora_head": True,
}


@pytest.fixture(scope="module")
def lora(train: Train) -> Result:
    return train("lora", eval__final_validation=True, **ALL_LAYERS)


@pytest.fixture(scope="module")
def full(train: Train) -> Result:
    return train("full", eval__final_validation=True)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_the_micro_batch_never_changes_losses_weights_or_learning_rates(
    train: Train, request: pytest.FixtureRequest, method: Method, micro_batch_size: int
) -> None:
    reference: Result = request.getfixturevalue(method)
    result = train(
        method,
        train__micro_batch_size=micro_batch_size,
        eval__final_validation=True,
        **(ALL_LAYERS if method == "lora" else {}),
    )
    assert result.losses == pytest.approx(reference.losses, rel=1e-5)
    assert [r["lr"] for r in result.metrics] == [r["lr"] for r in reference.metrics]
    assert result.validation[0]["val_loss"] == pytest.approx(
        reference.validation[0]["val_loss"], rel=1e-5
    )
    expected, found = reference.weights(), result.weights()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


def test_the_best_of_a_run_that_saves_nothing_better_is_its_last_step(train: Train) -> None:
    found = train("lora", eval__final_validation=True, checkpoint__result="best")
    chosen = found.report.result
    assert chosen is not None
    assert (chosen.step, chosen.validation_loss) == (6, found.validation[-1]["val_loss"])
    assert found.report.validation_loss == chosen.validation_loss


def test_longer_sequences_than_micro_batch_tokens_are_computed_alone_with_a_notice(
    train: Train, full: Result
) -> None:
    found = train(
        "full",
        train__micro_batch_size=None,
        train__micro_batch_tokens=138,
        eval__final_validation=True,
    )
    assert found.losses == pytest.approx(full.losses, rel=1e-5)
    assert found.validation[0]["val_loss"] == pytest.approx(
        full.validation[0]["val_loss"], rel=1e-5
    )
    log = (found.out_dir / "run.log").read_text()
    assert (
        "notice: 8 of 48 training samples have more than train.micro_batch_tokens 138, up to 141: "
        "each is computed on its own"
    ) in log
    assert "6 steps of 10 samples (at most 138 tokens at once)" in log


def test_a_shorter_last_step_is_the_same_on_every_micro_batch(train: Train) -> None:
    """48 samples in steps of 10: the last step has 8, and fewer micro-steps than the others."""
    results = [
        train("full", train__max_steps=None, train__epochs=1, train__micro_batch_size=size)
        for size in (10, 4)
    ]
    assert [row["samples"] for row in results[0].metrics] == [10, 20, 30, 40, 48]
    assert results[1].losses == pytest.approx(results[0].losses, rel=1e-5)
    assert [row["grad_norm"] for row in results[1].metrics] == pytest.approx(
        [row["grad_norm"] for row in results[0].metrics], rel=1e-5
    )


def test_gradient_clipping_bites_in_these_runs(full: Result, lora: Result) -> None:
    assert min(row["grad_norm"] for row in full.metrics) > 0.5  # type: ignore[operator, type-var]
    assert max(row["grad_norm"] for row in lora.metrics) > 0.5  # type: ignore[operator, type-var]


def test_the_loss_of_a_step_is_the_mean_over_its_label_tokens(
    full: Result, base: Path, data_file: Path
) -> None:
    from transformers import AutoModelForCausalLM

    samples = load(base, data_file).train
    order = make_elastic_order(
        samples.lengths,
        samples.label_counts,
        seed=SEED,
        global_batch_size=10,
        micro_batch_size=4,
        total_samples=60,
    )
    model = AutoModelForCausalLM.from_pretrained(base)
    expected = loss_of(model, samples, order.samples(0).tolist())
    assert full.losses[0] == pytest.approx(expected, rel=1e-6)


def test_a_full_result_has_in_transformers_the_validation_loss_of_the_run(
    full: Result, base: Path, data_file: Path
) -> None:
    from transformers import AutoModelForCausalLM

    samples = load(base, data_file).val
    model = AutoModelForCausalLM.from_pretrained(full.out_dir / "final")
    found = loss_of(model, samples, range(len(samples)))
    assert found == pytest.approx(full.validation[0]["val_loss"], rel=1e-5)
    untrained = loss_of(AutoModelForCausalLM.from_pretrained(base), samples, range(len(samples)))
    assert found < untrained - 0.1


def test_a_lora_result_has_in_peft_the_validation_loss_of_the_run(
    lora: Result, base: Path, data_file: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    samples = load(base, data_file).val
    plain = AutoModelForCausalLM.from_pretrained(base)
    untrained = loss_of(plain, samples, range(len(samples)))
    adapted = PeftModel.from_pretrained(plain, lora.out_dir / "final").eval()
    found = loss_of(adapted, samples, range(len(samples)))
    assert found == pytest.approx(lora.validation[0]["val_loss"], rel=1e-5)
    assert found < untrained - 0.1


def test_a_tied_model_stays_tied(train: Train, tmp_path: Path, data_file: Path) -> None:
    from transformers import AutoModelForCausalLM

    tied = make_llama(tmp_path / "tied", tie_word_embeddings=True)
    result = train("full", checkpoint_dir=str(tied), eval__final_validation=True)
    assert "lm_head.weight" not in result.weights()
    samples = load(tied, data_file).val
    model = AutoModelForCausalLM.from_pretrained(result.out_dir / "final")
    found = loss_of(model, samples, range(len(samples)))
    assert found == pytest.approx(result.validation[0]["val_loss"], rel=1e-5)


@pytest.mark.extensions
def test_gradients_are_freed_before_the_forward_of_the_next_step(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[bool] = []
    forward = LanguageModel.forward

    def watch(self: LanguageModel, *args: Any, **options: Any) -> torch.Tensor:
        alive.append(any(p.grad is not None for p in self.parameters()))
        return forward(self, *args, **options)

    monkeypatch.setattr(LanguageModel, "forward", watch)
    train("full", train__micro_batch_size=5, train__max_steps=3, checkpoint__save=False)
    assert alive == [False, True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_copies_for_a_save_take_the_predicted_memory(
    train: Train, base: Path, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    held_bytes = set()
    take = HostCopies.take

    def watch(self: HostCopies, pieces: Iterable[Piece]) -> list[Piece]:
        taken = take(self, pieces)
        held_bytes.add(self.size_bytes)
        return taken

    monkeypatch.setattr(HostCopies, "take", watch)
    report = train(method, train__max_steps=2, train__save_interval=1).report
    batch = MicroBatchSize(sequences=4, positions=8, targets=8)

    def predicted_bytes(*, asynchronous: bool) -> int:
        recipe = from_dict(report.recipe | {"checkpoint": {"asynchronous": asynchronous}}, method)
        plan = make_plan(recipe, Devices(accelerator="cpu", count=1))
        return predict(read_blueprint(str(base)), plan, batch).host_bytes

    assert held_bytes == {predicted_bytes(asynchronous=True) - predicted_bytes(asynchronous=False)}


def test_one_warning_if_memory_cannot_be_page_locked(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = HostCopies.take

    def refused(self: HostCopies, pieces: Iterable[Piece]) -> list[Piece]:
        self.refusal = "operation not supported"
        return take(self, pieces)

    monkeypatch.setattr(HostCopies, "take", refused)
    report = train("lora", train__max_steps=2, train__save_interval=1).report
    assert report.checkpoints and report.checkpoints.saved == 2
    told = [text for text in report.warnings if "page-locked (operation not supported)" in text]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("keys", "of_a_step"),
    [
        ({"train__micro_batch_size": 5}, ["backward", "backward", "hold", "update", "save"]),
        (
            {"train__micro_batch_size": 10, "train__optimizer_in_backward": True},
            ["hold", "backward", "update", "save"],
        ),
    ],
)
def test_copies_have_until_the_first_update_of_the_next_step(
    train: Train, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], of_a_step: list[str]
) -> None:
    events: list[str] = []

    def telling(owner: type, name: str, event: str) -> None:
        do = getattr(owner, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return do(*args, **kwargs)

        monkeypatch.setattr(owner, name, told)

    telling(HostCopies, "take", "save")
    telling(HostCopies, "before_update", "hold")
    telling(Strategy, "backward", "backward")
    telling(Strategy, "clip_gradients", "update")  # the first thing of one
    more = {"train__max_norm": None, "train__max_steps": 3, "train__save_interval": 1}
    train("full", **keys, **more)
    assert events == of_a_step * 3


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 0.01), ("bf16-true", 0.03)])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_bfloat16_stays_close_to_float32(
    train: Train,
    request: pytest.FixtureRequest,
    method: Method,
    precision: str,
    tolerance: float,
) -> None:
    reference: Result = request.getfixturevalue(method)
    options = ALL_LAYERS if method == "lora" else {}
    result = train(method, precision=precision, **options)
    assert result.losses == pytest.approx(reference.losses, rel=tolerance)
    kind = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {tensor.dtype for tensor in result.weights().values()} == {kind}


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "bitsandbytes.optim.AdamW8bit"])
def test_the_optimizer_is_the_named_one(train: Train, optimizer: str) -> None:
    changes: dict[str, Any] = {"optimizer": optimizer, "optimizer.lr": 0.01}
    result = train("full", **changes, train__max_norm=None)
    assert result.report.resolved is not None
    assert str(result.report.resolved.optimizer).endswith(optimizer)
    assert result.losses[-1] < result.losses[0]


def test_an_unknown_optimizer_or_argument_is_refused_with_the_nearest(train: Train) -> None:
    with pytest.raises(UserError, match="AdamW"):
        train("full", optimizer="AdmW")
    with pytest.raises(UserError, match=r"weight_dekay.*weight_decay"):
        train("full", optimizer__weight_dekay=0.1)


def test_a_sequence_longer_than_the_model_is_refused_before_loading(train: Train) -> None:
    with pytest.raises(UserError, match="at most 256"):
        train("full", train__max_seq_length=1000)


def test_a_nan_loss_ends_the_run_with_advice(train: Train) -> None:
    with pytest.raises(NotFinite, match="lower learning rate"):
        train("full", optimizer__lr=1e30, train__max_norm=None, train__lr_warmup_steps=0)


def test_nan_in_the_base_model_is_not_blamed_on_the_learning_rate(
    train: Train, base: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    (file,) = broken.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(NotFinite, match="before anything was learned: the base model"):
        train("full", checkpoint_dir=str(broken))


def test_another_base_model_is_not_reported_as_other_data(base: Path) -> None:
    """Its tokenizer may be another one, and then the samples are, too."""
    data: Any = SimpleNamespace(samples_per_epoch=1, fingerprint="of other tokens")
    recipe = Recipe(checkpoint_dir=str(base))
    model, told = open_base(str(base)), f"checkpoint_dir {base} is not the model that .* of step 5"
    with pytest.raises(UserError, match=told):
        identities(recipe, model, data, some_metadata(5))
    same = some_metadata(5, base=BaseIdentity(name="x", fingerprint=fingerprint(model)))
    with pytest.raises(UserError, match=r"data: these are not the training samples.*that version"):
        identities(recipe, model, data, same)


def test_training_ends_at_the_time_limit_and_the_result_is_kept(train: Train) -> None:
    result = train("full", train__max_time=1e-9, train__max_steps=50)
    assert len(result.metrics) == 1
    assert result.report.outcome == "completed"
    assert "max_time" in result.report.exit_reason
    assert (result.out_dir / "final").is_dir()


@pytest.mark.extensions
@pytest.mark.parametrize(
    "changes",
    [{"checkpoint__save": False}, {"checkpoint_dir": "random:pythia-14m"}],
    ids=["checkpoint.save false", "random weights"],
)
def test_a_run_without_a_result_saves_nothing(train: Train, changes: dict[str, Any]) -> None:
    result = train("lora", train__max_steps=1, **changes)
    assert not (result.out_dir / "final").exists()
    assert result.report.files is not None and result.report.files.final is None


def test_validation_comes_before_during_and_after_training(train: Train) -> None:
    result = train(
        "full",
        eval__interval=2,
        eval__initial_validation=True,
        eval__final_validation=True,
        eval__max_new_tokens=3,
        eval__exact_match=3,
    )
    assert [row["step"] for row in result.validation] == [0, 2, 4, 6]
    loss = result.report.loss
    assert loss is not None
    assert loss.validation_first == result.validation[0]["val_loss"]
    assert loss.validation_last == result.validation[-1]["val_loss"]
    assert loss.perplexity == pytest.approx(math.exp(result.validation[-1]["val_loss"] or 0))
    assert result.report.exact_match is not None
    assert result.report.exact_match.samples == 3
    assert result.report.exact_match.before == 0.0
    log = (result.out_dir / "run.log").read_text()
    assert "exact match before training: 0 % of 3 validation records" in log
    (example,) = result.report.examples
    assert example.before is not None and example.after is not None


def test_an_answer_that_runs_on_is_cut_where_it_is_shown_and_whole_in_the_report(
    train: Train,
) -> None:
    result = train(
        "full", train__max_steps=1, eval__max_new_tokens=100, eval__final_validation=True
    )
    (example,) = result.report.examples
    assert example.after is not None and len(marked(example.after)) > 240
    log = (result.out_dir / "run.log").read_text()
    shown = [line for line in log.splitlines() if "answer: " in line]
    assert shown and all(len(line.partition("answer: ")[2]) <= 240 for line in shown)


def test_a_run_says_which_adapter_it_starts_from(train: Train, lora: Result) -> None:
    further = train("lora", adapter=str(lora.out_dir), train__max_steps=1)
    log = (further.out_dir / "run.log").read_text()
    assert f"starts from the adapter {lora.out_dir / 'final'}" in log
    assert further.losses[0] < lora.losses[0], "it has learned"
    assert "starts from" not in (lora.out_dir / "run.log").read_text()


def test_every_step_has_a_row_and_the_report_its_sums(full: Result) -> None:
    assert [row["step"] for row in full.metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["samples"] for row in full.metrics] == [10, 20, 30, 40, 50, 60]
    report = full.report
    assert report.tokens is not None and report.progress is not None
    assert report.tokens.real == sum(row["tokens"] or 0 for row in full.metrics)
    assert (report.progress.steps, report.progress.samples) == (6, 60)
    assert report.phases_s is not None and report.phases_s.training is not None
    assert report.step_s is not None and report.step_s.forward
    assert report.peak_memory is not None and report.peak_memory.rss_bytes


@pytest.mark.slow
@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_loggers_write_beside_metrics_csv(
    train: Train, logger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    result = train("full", logger_name=logger, train__max_steps=2)
    if logger == "wandb":  # which ends with its process otherwise
        pytest.importorskip("wandb").finish()
    assert len(list(result.out_dir.rglob("metrics.csv"))) == 1
    assert len(result.metrics) == 2
    pattern = {"tensorboard": "events.out.tfevents.*", "wandb": "*.wandb"}[logger]
    assert len(list(result.out_dir.rglob(pattern))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_measuring_memory_changes_no_number(
    train: Train, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    measured = train(method)
    assert measured.report.step_memory
    monkeypatch.setattr("ftkit.training.loop.steps_to_measure", lambda _: set())
    plain = train(method)
    assert plain.report.step_memory is None
    assert measured.losses == plain.losses
    weights = measured.weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in plain.weights().items())


def test_the_speed_of_a_run_is_that_of_steps_whose_memory_was_not_followed(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = train("full").report
    monkeypatch.setattr("ftkit.training.loop.steps_to_measure", lambda _: set())
    plain = train("full").report
    assert measured.throughput and plain.throughput and measured.progress and plain.progress
    assert measured.progress == plain.progress
    assert measured.throughput.window_steps == plain.throughput.window_steps - 1


@pytest.mark.parametrize(("at_step", "told_of"), [(0, 1), (1, 2), (3, 3)])
def test_running_out_of_memory_reports_the_breakdown_of_a_step(
    train: Train, monkeypatch: pytest.MonkeyPatch, at_step: int, told_of: int
) -> None:
    told = []
    run = TrainStep.run

    def fail_late(self: TrainStep, step: int, batches: Any) -> Any:
        if step == at_step:
            raise torch.OutOfMemoryError("no memory left")
        return run(self, step, batches)

    monkeypatch.setattr(TrainStep, "run", fail_late)
    monkeypatch.setattr(Recorder, "on_step_memory", lambda _, measured: told.append(measured))
    with pytest.raises(torch.OutOfMemoryError):
        train("full")
    assert told[-1].step == told_of
    assert told[-1].peak_breakdown_bytes.parameters > 0
    assert bool(told[-1].peak_breakdown_bytes.optimizer_state) == (at_step > 0)


def test_two_ranks_on_one_gpu_get_advice() -> None:
    said = (
        "NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.5\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000"
    )
    error = _explain(torch.distributed.DistBackendError(said))
    assert error.kind == "user"
    assert error.message.startswith("Two ranks have the same GPU. Start one process for each GPU")
    assert "rank 0 and rank 1 both on CUDA device 1b000" in error.message


# --- The norm of the gradients --------------------------------------------------------------------


def with_gradients(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for rows in (2, 300, 7):
        parameter = torch.nn.Parameter(torch.zeros(rows, 50, dtype=dtype))
        parameter.grad = torch.randn(rows, 50, generator=generator).to(dtype)
        parameters.append(parameter)
    return parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_and_the_clipping_of_16_bit_gradients_are_of_32_bits(dtype: torch.dtype) -> None:
    parameters = with_gradients(dtype)
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    numbers = torch.cat([gradient.double().flatten() for gradient in before])
    norm = clip_gradients(parameters, 3.0)
    assert norm.item() == pytest.approx(numbers.norm().item(), rel=1e-5)
    factor = 3.0 / (norm + 1e-6)
    for parameter, gradient in zip(parameters, before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, (gradient.float() * factor).to(dtype))
    kept = [p.grad.clone() for p in parameters if p.grad is not None]
    clip_gradients(parameters, 4.0)
    clip_gradients(parameters, None)
    for parameter, gradient in zip(parameters, kept, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)


def test_gradients_of_32_bits_are_clipped_as_torch_does() -> None:
    ours, theirs = with_gradients(torch.float32), with_gradients(torch.float32)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 3.0)
    assert torch.equal(clip_gradients(ours, 3.0), expected)
    for found, reference in zip(ours, theirs, strict=True):
        assert found.grad is not None and reference.grad is not None
        assert torch.equal(found.grad, reference.grad)


def test_a_reported_norm_has_more_bits_than_the_gradients(train: Train) -> None:
    norms = [float(row["grad_norm"] or 0) for row in train("full", precision="bf16-true").metrics]
    assert not any(torch.tensor(norm).bfloat16().item() == norm for norm in norms)
