"""Everything that ftkit does on GPUs, on simulated cards, with the losses of a CPU.

What the cards cannot show stands in docs/gpus.md.
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from command import command_environment, command_line
from fp8_models import in_fp8
from launchers import slurm, torchrun
from local_tasks import ALL, write_tasks
from on_card import CARDS, OnCard, on_card
from preloaded import Preloaded
from rank_jobs import Outcome, needs_deepspeed, repeated, require_deepspeed
from runs import TIMEOUT_S
from simulated_card.build import needs_card
from simulated_card.counts import Counts
from simulated_card.kinds import KINDS
from simulated_card.machine import cards, with_cards
from simulated_card.settings import Shortage
from transformers_models import make_transformers_model

from ftkit.runs.report.report import read_report

pytestmark = needs_card

DDP = ("--devices", "2", "--strategy", "ddp")
FSDP = ("--devices", "2", "--strategy", "fsdp")
ON_CARD = ("--strategy.offload_optimizer", "false")
"""Offloaded, DeepSpeed compiles its optimizer for the host, which takes a minute the first time."""
ZERO_3 = ("--devices", "2", "--strategy", "deepspeed")
ONE = ("--devices", "1")
BF16, MIXED, FP16 = (("--precision", name) for name in ("bf16-true", "bf16-mixed", "16-mixed"))
NF4, NF4_DQ, FP4_DQ, INT8 = (
    ("--quantize", f"bnb.{kind}") for kind in ("nf4", "nf4-dq", "fp4-dq", "int8")
)
STORED, IN_FP8 = ("--quantize", "stored"), " in FP8"
CHECKPOINTED = ("--memory.activation_checkpointing", "true")
OFFLOADED = (*CHECKPOINTED, "--memory.offload_activations", "true")
IN_BACKWARD = (
    *("--train.optimizer_in_backward", "true", "--train.max_norm", "null"),
    *("--train.micro_batch_size", "11"),
)
IN_ROWS = ("--train.padding_free", "true")
SHARED = ("--strategy.context", "2")
AHEAD_AND_ONCE = ("--strategy.prefetch", "1", "--strategy.sync_every_micro_step", "false")
EXACT, ROUNDED = 1e-6, 3e-3
"""Relative differences of losses: of equal mathematics in float32, and in 16 bits."""


@pytest.fixture(scope="module")
def machine(
    server_with_cards: Preloaded,
    tiny_base: Path,
    tiny_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> OnCard:
    return on_card(server_with_cards, tmp_path_factory.mktemp("cards"), tiny_base, tiny_data)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Gives a model of `transformers_models` with a number of layers, also in FP8, made once."""
    directory = tmp_path_factory.mktemp("models")

    def make(model: str, layers: int) -> Path:
        place = directory / f"{model} {layers}"
        if model.endswith(IN_FP8):
            plain = make(model.removesuffix(IN_FP8), layers)
            return in_fp8(plain, place, "DeepSeek V3")[0]
        return make_transformers_model(place, model, num_hidden_layers=layers)

    return cache(make)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), *ALL)


@dataclass(frozen=True)
class Case:
    """A run on cards, and how near its losses are to those of one CPU."""

    command: str
    words: tuple[str, ...]
    within: float | None = EXACT
    """None: nothing to compare with."""
    fast: bool = False
    matrix: bool = False
    """Whether others hold what it shows, each a part."""
    reference: str | None = None
    """Precision on the CPU, where that one is for GPUs alone."""
    model: str | None = None
    """Of `transformers_models`; None: the tiny Llama."""
    layers: int = 2
    """Of a model of `transformers_models`."""


def lora(*words: tuple[str, ...], **how: object) -> Case:
    return Case("finetune", tuple(word for part in words for word in part), **how)


def full(*words: tuple[str, ...], **how: object) -> Case:
    return Case("finetune_full", tuple(word for part in words for word in part), **how)


def optimizer(name: str, rate: str, *more: str) -> tuple[str, ...]:
    return ("--optimizer", name, "--optimizer.lr", rate, *more)


EIGHT_BIT = optimizer("bitsandbytes.optim.AdamW8bit", "1e-3")
SGD = optimizer("SGD", "0.1", "--optimizer.momentum", "0.9")
ADAPTED_EXPERTS = ("--lora_experts", "true", "--lora_dropout", "0")
TRAINED_WHOLE = ("--lora_head", "false", "--lora_modules_to_save", "[embed_tokens,lm_head]")

CASES = {
    # One card: adapters.
    "LoRA": lora(ONE, fast=True),
    "QLoRA": lora(ONE, NF4),
    "full": full(ONE),
    "FP8 as published": lora(ONE, STORED, model="llama in FP8"),
    "experts in FP8 as published": lora(
        ONE, STORED, ADAPTED_EXPERTS, model="qwen3_moe in FP8", matrix=True
    ),
    "FP8 as published, FSDP": lora(FSDP, STORED, model="llama in FP8", matrix=True),
    "DoRA": lora(ONE, ("--lora_variant", "dora"), matrix=True),
    "PiSSA": lora(ONE, ("--lora_init", "pissa"), matrix=True),
    "OLoRA": lora(ONE, ("--lora_init", "olora"), matrix=True),
    "PiSSA, bf16-true": lora(ONE, BF16, ("--lora_init", "pissa"), within=ROUNDED, matrix=True),
    "rank-stabilised": lora(ONE, ("--lora_variant", "rslora"), matrix=True),
    "LoRA+ with whole layers": lora(
        ONE, BF16, TRAINED_WHOLE, ("--lora_plus_ratio", "16"), within=ROUNDED, matrix=True
    ),
    "DoRA, nf4, bf16-mixed": lora(
        ONE, MIXED, NF4, ("--lora_variant", "dora"), within=ROUNDED, matrix=True
    ),
    "nf4-dq, bf16-true": lora(ONE, BF16, NF4_DQ, within=ROUNDED, matrix=True),
    "fp4-dq": lora(ONE, FP4_DQ, matrix=True),
    "int8, bf16-true": lora(ONE, BF16, INT8, within=ROUNDED, matrix=True),
    "LoRA, 16-mixed": lora(ONE, FP16, within=ROUNDED, reference="32-true"),
    "micro-batch of its own": lora(ONE, ("--train.micro_batch_size", "auto"), matrix=True),
    # One card: precisions and optimizers.
    "full, bf16-true": full(ONE, BF16, within=ROUNDED, matrix=True),
    "full, in rows without flash attention": full(ONE, IN_ROWS, matrix=True),
    "full, bf16-mixed": full(ONE, MIXED, CHECKPOINTED, within=ROUNDED, matrix=True),
    "full, 16-mixed": full(ONE, FP16, within=ROUNDED, reference="32-true", matrix=True),
    # Deep enough that some inputs of blocks come back: those of the last two stay.
    "checkpointed in host memory": full(ONE, OFFLOADED, model="llama", layers=4, matrix=True),
    "updates in the backward pass": full(ONE, IN_BACKWARD, OFFLOADED),
    "Muon": full(ONE, optimizer("Muon", "1e-3"), within=ROUNDED, matrix=True),
    "AdamW8bit": full(ONE, EIGHT_BIT, within=ROUNDED),
    "LAMB8bit": full(
        ONE, optimizer("bitsandbytes.optim.LAMB8bit", "1e-3"), within=ROUNDED, matrix=True
    ),
    "SGD": full(ONE, SGD, matrix=True),
    "saved while training waits": full(
        ONE,
        MIXED,
        ("--checkpoint.asynchronous", "false", "--train.save_interval", "2"),
        within=ROUNDED,
        matrix=True,
    ),
    "random weights, fp4-dq": lora(
        ONE,
        FP4_DQ,
        ("--checkpoint_dir", "random:pythia-14m", "--train.max_seq_length", "64"),
        ("--train.max_steps", "2"),
        within=None,
        matrix=True,
    ),
    # Windows of six tokens, shorter than every sequence.
    "Gemma 3, bf16-true": full(ONE, BF16, within=ROUNDED, model="gemma3_text"),
    "Gemma 3": full(ONE, model="gemma3_text", matrix=True),
    "Gemma 3 in rows": full(ONE, IN_ROWS, model="gemma3_text", matrix=True),
    "Mistral, bf16-true": full(ONE, BF16, within=ROUNDED, model="mistral window", matrix=True),
    "Mistral": full(ONE, model="mistral window", matrix=True),
    "Mistral in rows": full(ONE, IN_ROWS, model="mistral window", matrix=True),
    # Mixtures of experts.
    "experts, bf16-true": full(ONE, BF16, within=ROUNDED, model="qwen3_moe", matrix=True),
    "experts, checkpointed in host memory": full(ONE, OFFLOADED, model="qwen3_moe", layers=4),
    "experts, nf4, with adapters": lora(
        ONE, NF4, ADAPTED_EXPERTS, CHECKPOINTED, model="qwen3_moe", matrix=True
    ),
    "FSDP, experts": full(FSDP, model="qwen3_moe", matrix=True),
    "FSDP, experts, bf16-true": full(FSDP, BF16, within=1e-2, model="qwen3_moe", matrix=True),
    "FSDP, experts, in host memory": full(
        FSDP, ("--strategy.cpu_offload", "true"), model="qwen3_moe", matrix=True
    ),
    "FSDP, experts, nf4, with adapters": lora(
        FSDP, NF4, ADAPTED_EXPERTS, OFFLOADED, model="qwen3_moe", layers=4, matrix=True
    ),
    "FSDP, experts with sinks, checkpointed in host memory": full(
        FSDP, OFFLOADED, model="gpt_oss", matrix=True
    ),
    # DDP.
    "DDP, LoRA": lora(DDP),
    "DDP, full, 16-mixed": full(DDP, FP16, within=ROUNDED, reference="32-true", matrix=True),
    "DDP, LoRA, bf16-mixed": lora(DDP, MIXED, CHECKPOINTED, within=ROUNDED, matrix=True),
    "DDP, int8": lora(DDP, MIXED, INT8, within=ROUNDED, matrix=True),
    "DDP that shares sequences, bf16-true": full(DDP, SHARED, BF16, within=1e-2, matrix=True),
    "DDP that shares sequences, 16-mixed": full(
        DDP, SHARED, FP16, within=ROUNDED, reference="32-true", matrix=True
    ),
    # FSDP.
    "FSDP, full": full(FSDP),
    "FSDP that shares sequences, bf16-mixed": lora(
        FSDP, SHARED, MIXED, within=ROUNDED, matrix=True
    ),
    "FSDP, QLoRA": lora(FSDP, NF4_DQ, MIXED, within=ROUNDED),
    "FSDP, bf16-mixed": full(FSDP, MIXED, within=ROUNDED, matrix=True),
    "FSDP that keeps parameters": full(
        FSDP, BF16, CHECKPOINTED, ("--strategy.sharding", "SHARD_GRAD_OP"), within=1e-2, matrix=True
    ),
    "FSDP, updates in the backward pass": full(FSDP, IN_BACKWARD, matrix=True),
    "FSDP, gathered ahead and added up once": full(
        FSDP, OFFLOADED, AHEAD_AND_ONCE, model="llama", layers=4
    ),
    "FSDP, in host memory": full(FSDP, ("--strategy.cpu_offload", "true"), matrix=True),
    "FSDP, in host memory, QLoRA": lora(
        FSDP, NF4, MIXED, ("--strategy.cpu_offload", "true"), within=ROUNDED, matrix=True
    ),
    "FSDP, AdamW8bit": full(FSDP, BF16, EIGHT_BIT, within=1e-2, matrix=True),
    "FSDP, DoRA": lora(FSDP, MIXED, ("--lora_variant", "dora"), within=ROUNDED, matrix=True),
    "FSDP, PiSSA": lora(FSDP, BF16, ("--lora_init", "pissa"), within=1e-2, matrix=True),
    # DeepSpeed.
    "ZeRO-3, LoRA": lora(ZERO_3, ON_CARD),
    "ZeRO-3, full, bf16-mixed": full(ZERO_3, MIXED, within=ROUNDED, matrix=True),
    "ZeRO-3, full, 16-mixed": full(ZERO_3, FP16, within=None, matrix=True),
    "ZeRO-3, parameters in host memory": full(
        ZERO_3, BF16, ("--strategy.offload_parameters", "true"), within=1e-2
    ),
    "ZeRO-3, on the card": full(ZERO_3, BF16, ON_CARD, within=1e-2, matrix=True),
    "ZeRO-3, QLoRA": lora(ZERO_3, BF16, NF4_DQ, CHECKPOINTED, within=ROUNDED, matrix=True),
    "ZeRO-3, checkpointed in host memory": full(
        ZERO_3, ON_CARD, OFFLOADED, model="llama", layers=4, matrix=True
    ),
    "ZeRO-2, LoRA": lora(ZERO_3, BF16, ("--strategy.stage", "2"), within=ROUNDED),
    "ZeRO-1, full": full(
        ZERO_3, BF16, ON_CARD, ("--strategy.stage", "1"), within=1e-2, matrix=True
    ),
}
"""Features of ftkit on GPUs, with readable names."""


def ranks_of(case: Case) -> int:
    return 2 if "2" in case.words[:2] else 1


@pytest.mark.extensions
@pytest.mark.parametrize(
    "name",
    [
        name
        if case.fast
        else pytest.param(name, marks=pytest.mark.matrix if case.matrix else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_a_run_on_simulated_cards_learns_as_on_a_cpu(
    machine: OnCard, made: Callable[[str, int], Path], name: str
) -> None:
    case = CASES[name]
    require_deepspeed(*case.words)
    words = case.words
    if case.model is not None:
        words += ("--checkpoint_dir", str(made(case.model, case.layers)))
    found = machine.completed(case.command, *words, ranks=ranks_of(case))
    resolved = read_report(found.out_dir).resolved
    assert resolved.accelerator == "cuda"
    in_row = "varlen" if resolved.precision != "32-true" else "sdpa per sequence"
    is_default = "--train.padding_free" not in case.words and in_row != "varlen"
    assert resolved.attention == ("padded" if is_default else in_row)
    assert len(found.losses) in (2, 4)
    if case.within is not None:
        expected = machine.on_cpu(case.command, *words, precision=case.reference)
        assert found.losses == pytest.approx(expected.losses, rel=case.within)


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_that_is_followed_is_all_that_a_card_gave(machine: OnCard) -> None:
    """Bytes of the tensors followed in a step agree with the allocator within 1 %."""
    _, out = machine.run("finetune_full", *ONE, follows_memory=True)
    measured = read_report(out).step_memory
    assert measured is not None
    (rank,) = measured.ranks
    assert rank.peak_breakdown_bytes.unattributed <= 0.01 * rank.peak_bytes


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("wording", "moment", "rank"),
    [
        ("torch", "backward", 0),
        pytest.param("torch", "forward", 1, marks=pytest.mark.matrix),
        pytest.param("torch", "construction", 0, marks=pytest.mark.matrix),
        pytest.param("torch", "step", 1, marks=pytest.mark.slow),
        pytest.param("driver", "step", 0, marks=pytest.mark.slow),
        pytest.param("driver", "construction", 1, marks=pytest.mark.slow),
        pytest.param("cublas", "forward", 0, marks=pytest.mark.slow),
        pytest.param("cublas", "backward", 1, marks=pytest.mark.matrix),
        pytest.param("nccl", "backward", 1, marks=pytest.mark.slow),
        pytest.param("nccl", "forward", 0, marks=pytest.mark.matrix),
    ],
)
def test_a_card_without_memory_ends_the_run_as_that_whoever_says_so(
    machine: OnCard, wording: str, moment: str, rank: int
) -> None:
    """Outside the matrix: each wording, each moment, each rank."""
    shortage = Shortage(wording=wording, moment=moment, rank=rank)
    words = DDP if rank or wording == "nccl" else ONE
    attempt, out = machine.run(
        "finetune_full", *words, ranks=ranks_of(Case("", words)), shortage=shortage
    )
    report = read_report(out)
    assert (attempt.code, report.outcome) == (3, "out_of_memory"), attempt.output
    if words is DDP:
        assert report.exit_reason.startswith(f"rank {rank}: ")


# --- Going on elsewhere ---------------------------------------------------------------------------

ON_CPU = ("--accelerator", "cpu", "--devices", "1")
PLACES = {"cpu": ON_CPU, "card": ONE, "ddp": DDP, "fsdp": FSDP, "zero": (*ZERO_3, *ON_CARD)}
METHODS = {
    "full": full(),
    "LoRA": lora(),
    "QLoRA": lora(NF4),
    "updates in the backward pass": full(IN_BACKWARD),
}
MOVES = [
    *(
        pytest.param(*move, marks=pytest.mark.slow)
        for move in [
            ("full", "cpu", "card"),
            ("full", "card", "ddp"),
            ("full", "zero", "fsdp"),
            ("QLoRA", "fsdp", "cpu"),
        ]
    ),
    *(
        pytest.param(*move, marks=pytest.mark.matrix)
        for move in [
            ("full", "card", "cpu"),
            ("full", "fsdp", "cpu"),
            ("LoRA", "card", "cpu"),
            ("QLoRA", "cpu", "card"),
            ("updates in the backward pass", "card", "cpu"),
            ("full", "ddp", "fsdp"),
            ("full", "cpu", "fsdp"),
            ("full", "card", "zero"),
            ("QLoRA", "card", "cpu"),
            ("updates in the backward pass", "cpu", "card"),
            ("full", "fsdp", "card"),
            ("full", "zero", "card"),
            ("LoRA", "cpu", "card"),
            ("updates in the backward pass", "fsdp", "cpu"),
        ]
    ),
]
"""Between one device and several on cards there is one format: tests of checkpoints hold that."""


@pytest.mark.parametrize(("method", "source", "target"), MOVES)
def test_a_run_resumes_between_cards_and_cpus(
    machine: OnCard, tmp_path: Path, method: str, source: str, target: str
) -> None:
    require_deepspeed(*PLACES[source], *PLACES[target])
    case, out = METHODS[method], tmp_path / "run"
    whole = machine.on_cpu(case.command, *case.words)
    for place, more in ((source, ("--stop_after", "2")), (target, ("--resume", "auto"))):
        words = (*PLACES[place], *case.words, *more)
        line = machine.words(case.command, *words, "--out_dir", str(out))
        attempt = machine.server.run(*line)
        assert attempt.code == 0, attempt.output
    losses = Outcome(out).losses
    assert losses == pytest.approx(whole.losses, rel=1e-5)


# --- Evaluation, and what is done with results ----------------------------------------------------

EVALUATED = (
    *("--eval.exact_match", "2", "--eval.initial_validation", "true", "--eval.interval", "2"),
    *("--eval.max_iters", "2", "--eval.max_new_tokens", "3", "--train.save_interval", "2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["card", *repeated("ddp", "zero"), "fsdp"])
def test_validation_and_answers_are_those_of_a_cpu(machine: OnCard, place: str) -> None:
    words = (*PLACES[place], *EVALUATED)
    require_deepspeed(*words)
    found = machine.completed("finetune", *words, ranks=1 if place == "card" else 2)
    expected = machine.completed("finetune", *ON_CPU, *EVALUATED)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    ours, theirs = read_report(found.out_dir), read_report(expected.out_dir)
    assert ours.exact_match == theirs.exact_match
    assert ours.examples == theirs.examples


@pytest.mark.slow
@pytest.mark.parametrize("place", ["card", *repeated("ddp", "fsdp", "zero")])
def test_scores_of_tasks_are_those_of_a_cpu(machine: OnCard, tasks: Path, place: str) -> None:
    asked = ("--eval.tasks", f"[{tasks}]", "--eval.limit", "5")
    require_deepspeed(*PLACES[place])
    found = machine.completed("finetune", *PLACES[place], *asked, ranks=1 if place == "card" else 2)
    expected = machine.completed("finetune", *ON_CPU, *asked)
    ours, theirs = (read_report(outcome.out_dir).tasks for outcome in (found, expected))
    assert len(ours) == len(theirs) == 6
    for one, other in zip(ours, theirs, strict=True):
        assert (one.task, one.metric, one.samples) == (other.task, other.metric, other.samples)
        scores = (other.before, other.after)
        assert (one.before, one.after) == pytest.approx(scores, rel=1e-4)


def use(machine: OnCard, *words: object) -> str:
    attempt = machine.server.run(*words)
    assert attempt.code == 0, attempt.output
    return attempt.output


@pytest.mark.slow
def test_results_answer_and_are_evaluated_on_a_card(machine: OnCard) -> None:
    final = machine.completed("finetune", *ONE).out_dir / "final"
    asked = ("generate", final, "--prompt", "what is the colour of cat", "--max_new_tokens", "4")
    answer, on_cpu = use(machine, *asked), use(machine, *asked, "--accelerator", "cpu")
    assert answer.splitlines()[:-1] == on_cpu.splitlines()[:-1]  # the last one has the speed
    assert "loss" in use(machine, "evaluate", final)


@pytest.mark.slow
def test_a_result_does_tasks_on_a_card_as_on_a_cpu(machine: OnCard, tasks: Path) -> None:
    final = machine.completed("finetune", *ONE).out_dir / "final"
    words = ("evaluate", final, "--tasks", tasks, "--precision", "32-true", "--format", "json")
    outputs = [use(machine, *words, "--accelerator", kind) for kind in ("cuda", "cpu")]
    # Behind what says that it takes long, where it does.
    ours, theirs = (json.loads(text[text.index("{") :])["tasks"] for text in outputs)
    assert len(ours) == 6
    for one, other in zip(ours, theirs, strict=True):
        assert (one["task"], one["metric"]) == (other["task"], other["metric"])
        assert one["value"] == pytest.approx(other["value"], rel=1e-4)


@pytest.mark.slow
def test_results_become_other_files_beside_a_card(machine: OnCard, tmp_path: Path) -> None:
    final = machine.completed("finetune", *ONE, *NF4).out_dir / "final"
    use(machine, "merge", final, "--out", tmp_path / "merged")
    assert list((tmp_path / "merged").glob("*.safetensors"))
    words = ("--format", "litgpt", "--out", tmp_path / "exported")
    use(machine, "export", tmp_path / "merged", *words)
    assert (tmp_path / "exported").is_dir()


# --- Whole commands, without forks ----------------------------------------------------------------


def whole_command(
    launcher: list[str],
    *words: str,
    kinds: tuple[str, ...] = CARDS,
    counts: Path | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    pretended = cards(*kinds, counts=None if counts is None else str(counts))
    return subprocess.run(
        [*launcher, *words],
        env=with_cards(command_environment(), pretended),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_the_supervisor_takes_no_memory_of_a_card(machine: OnCard, tmp_path: Path) -> None:
    words = machine.words("finetune", *DDP, "--out_dir", str(tmp_path / "run"))
    ended = whole_command(command_line(), *words, counts=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert Counts.read(tmp_path, 0).contexts == [0]
    assert Counts.read(tmp_path, 1).contexts == [1]
    of_supervisor = tmp_path / "rank-supervisor.json"
    assert not of_supervisor.exists() or not Counts.read(tmp_path, "supervisor").contexts


@pytest.mark.matrix
def test_torchrun_starts_ranks_on_cards(machine: OnCard, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = machine.words("finetune", *DDP[2:], "--out_dir", str(out))
    ended = whole_command(torchrun(words))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    losses = Outcome(out).losses
    assert losses == pytest.approx(machine.on_cpu("finetune").losses, rel=EXACT)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(DDP[2:], id="ddp", marks=pytest.mark.matrix),
        pytest.param(FSDP[2:], id="fsdp", marks=pytest.mark.slow),
        pytest.param((*ZERO_3[2:], *ON_CARD), id="deepspeed", marks=pytest.mark.matrix),
    ],
)
def test_tasks_may_each_see_a_card_of_their_own(
    machine: OnCard, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """As under srun --gpus-per-task=1: every rank sees its own card as cuda:0."""
    require_deepspeed(*words)
    out = tmp_path / "run"
    line = machine.words("finetune", *words, "--out_dir", str(out))

    def of_task(task: int) -> dict[str, str]:
        return with_cards(command_environment(), cards(*CARDS)) | {
            "CUDA_VISIBLE_DEVICES": str(task)
        }

    with slurm(out, line, tmp_path, of_task=of_task, cold=True) as tasks:
        ended = [task.communicate(timeout=TIMEOUT_S) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], ended
    losses = Outcome(out).losses
    assert losses == pytest.approx(machine.on_cpu("finetune", *words).losses, rel=EXACT)


@pytest.mark.matrix
def test_one_talks_with_a_result_on_a_card(machine: OnCard) -> None:
    final = machine.completed("finetune", *ONE).out_dir / "final"
    words = ("chat", str(final), "--max_new_tokens", "4")
    ended = whole_command(command_line(), *words, stdin="hello\n")
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.extensions
def test_a_card_that_torch_has_no_kernels_for_is_refused_before_anything_starts(
    machine: OnCard, tmp_path: Path
) -> None:
    words = machine.words("finetune", "--out_dir", str(tmp_path / "run"))
    ended = whole_command(command_line(), *words, kinds=("v100",))
    assert ended.returncode == 2 and not (tmp_path / "run").exists()
    assert "Tesla V100-SXM2-32GB has compute capability 7.0, for which torch" in ended.stderr
    assert "--index-url https://download.pytorch.org/whl/cu126" in ended.stderr


@pytest.mark.slow
def test_the_interface_that_nccl_is_to_take_is_looked_for_before_anything_starts(
    machine: OnCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth9")
    words = machine.words("finetune", *DDP, "--out_dir", str(tmp_path / "run"))
    ended = whole_command(command_line(), *words)
    assert ended.returncode == 2 and not (tmp_path / "run").exists()
    assert ended.stderr.startswith("ftkit: $NCCL_SOCKET_IFNAME is eth9, but ")


@needs_deepspeed
@pytest.mark.slow
def test_several_cards_without_bfloat16_fine_tune_fully_by_default(
    machine: OnCard, tmp_path: Path
) -> None:
    words = machine.words("finetune_full", "--devices", "2", "--out_dir", str(tmp_path / "run"))
    precision = words.index("--precision")
    del words[precision : precision + 2]
    ended = whole_command(command_line(), *words, kinds=("t4", "t4"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Tesla T4 has no bfloat16 hardware" in ended.stdout + ended.stderr
    resolved = read_report(tmp_path / "run").resolved
    assert resolved is not None
    assert (resolved.strategy, resolved.precision) == ("deepspeed", "16-mixed")


@pytest.mark.slow
def test_a_mig_slice_is_planned_by_its_own_memory(tmp_path: Path) -> None:
    line = ["plan", "--checkpoint_dir", "random:pythia-14m", "--gpu", "auto", "--format", "json"]
    line += ["--train.max_seq_length", "64"]
    ended = whole_command(command_line(), *line, kinds=("h100-mig-1g.10gb",))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert found["gpu"] == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert found["gpu_memory_bytes"] == KINDS["h100-mig-1g.10gb"].memory_bytes
