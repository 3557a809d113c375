"""Start of each program for a case: its command line, model and data."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarking.figures import Measured, padding_of, steps_of
from benchmarking.ftkit_run import IMPORTS, SEED, run_ftkit
from benchmarking.peers.cases import (
    LORA_ALPHA,
    LORA_RANK,
    OBJECTIVES,
    OTHER_BATCHES,
    PACKED,
    PADDING_FREE,
    QKV,
    TRL_SETTINGS,
    WITHOUT_PADDING_FREE,
    Case,
)
from benchmarking.watch import Watched, own_bytes, watch
from benchmarking.workload import (
    LONGEST,
    Record,
    alpaca_lengths,
    in_file_order,
    make_labelled,
    make_pairs,
    make_records,
    model_in,
    once,
    order_of_ftkit,
    order_of_litgpt,
    tokens_of,
    tokens_of_each,
    write_data,
)
from ftkit.models.architectures.architecture import HEAD
from ftkit.models.load_weights import initial_score
from ftkit.models.lora.layers import initial_adapter
from ftkit.models.lora.targets import TRAINED, names_of
from ftkit.models.pretrained.base_model import open_base, parameter_shapes
from ftkit.recipe.recipe import Lora

HERE = Path(__file__).parent
LITGPT_DATA_SEED = 42
"""Default seed with which LitGPT shuffles."""
VALIDATION_RECORDS = 2
DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
IMPORTS_OF = {
    "ftkit": IMPORTS,
    "litgpt": "import litgpt.__main__",
    "trl": (
        "import peft, trl, transformers.models.llama.modeling_llama\n"
        "from trl import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer"
    ),
}
"""Imports of each program that trains a Llama."""


@dataclass(frozen=True)
class Workspace:
    """Directories of models and runs."""

    directory: Path
    models: Path
    """Where models lie, which are made once."""
    pythons: dict[str, Path]
    """Python of the environment of each program."""
    limit_s: float
    """Time limit of one run."""
    is_gpu: bool

    def model(self, case: Case) -> Path:
        """The model of a case in Hugging Face layout."""
        return model_in(self.models, case.model, case.precision)

    def litgpt_model(self, case: Case) -> Path:
        """The model of a case in LitGPT's layout."""
        source = self.model(case)

        def make(made: Path) -> None:
            program: list[str | Path] = [self.pythons["litgpt"], HERE / "litgpt_run.py"]
            words = [*program, "convert", source, made]
            seen = watch(words, limit_s=self.limit_s, directory=self.directory)
            if seen.exit_code != 0:
                raise RuntimeError(f"LitGPT's model could not be made:\n{seen.output}")

        return once(source.with_name(source.name + "-litgpt"), make)

    def records(self, case: Case) -> list[Record]:
        """Samples of a case, in the order in which they are trained on."""
        samples = case.steps * case.global_batch_size
        if case.kind == "pairs":
            longest_prompt = OBJECTIVES[case.objective].longest_prompt
            return make_pairs(alpaca_lengths(2 * samples), longest_prompt=longest_prompt)
        lengths = alpaca_lengths(samples)
        return make_labelled(lengths) if case.kind == "labels" else make_records(lengths)

    def imports_bytes(self, program: str) -> int:
        """Bytes that a process of a program holds after its imports."""
        name = program.partition(" ")[0]
        return own_bytes(self.pythons[name], IMPORTS_OF[name], self.directory)


def run_program(program: str, case: Case, place: Workspace, scratch: Path) -> Measured:
    """Run a program on a case.

    Args:
        program: one of PROGRAMS.
        case: what is trained.
        place: with models and environments.
        scratch: an empty directory.
    """
    if program == "ftkit":
        method, keys = ftkit_keys(case, place, scratch)
        column = OBJECTIVES[case.objective].column
        measured = run_ftkit(method, keys, scratch / "out", place.limit_s, column=column)
        # Without the additional last step: see `ftkit_keys`.
        share = case.steps / max(case.steps, len(measured.steps))
        measured = replace(
            measured,
            steps=measured.steps[: case.steps],
            reference_s=measured.reference_s * share,
        )
    elif program == "litgpt":
        words = litgpt_words(case, place, scratch)
        seen = watch(words, limit_s=place.limit_s, directory=scratch)
        # Without the first step, at a learning rate of 0: see `cases`.
        steps = steps_of(seen.events, skip=1)
        padding = padding_in_order(place.records(case), case.micro_batch_size)
        measured = replace(_measured(seen, place.limit_s), steps=steps, padding_fraction=padding)
    else:
        words = trl_words(program, case, place, scratch)
        seen = watch(words, limit_s=place.limit_s, directory=scratch)
        measured = replace(
            _measured(seen, place.limit_s),
            steps=steps_of(seen.events),
            padding_fraction=padding_of(seen.events),
        )
    if measured.failure or program in OTHER_BATCHES:
        return measured
    return with_counted_tokens(measured, place.records(case), case.global_batch_size)


def with_counted_tokens(
    measured: Measured, records: Sequence[Record], global_batch_size: int
) -> Measured:
    """Replace the tokens of a run by those of its samples, if they agree with the program's count.

    ftkit counts inputs, to which the last token of a sample does not belong: one less per sample.

    Args:
        measured: a run of a program that takes the records in order.
        records: in the order of training.
        global_batch_size: records of a step.
    """
    steps = []
    for number, step in enumerate(measured.steps):
        batch = records[number * global_batch_size : (number + 1) * global_batch_size]
        tokens = sum(tokens_of(record) for record in batch)
        sequences = sum(len(tokens_of_each(record)) for record in batch)
        if step.tokens not in (tokens, tokens - sequences):
            said = f"counts {step.tokens} tokens in step {number + 1}, the data have {tokens}"
            return replace(measured, failure=said)
        steps.append(replace(step, tokens=tokens))
    return replace(measured, steps=steps)


def ftkit_keys(case: Case, place: Workspace, scratch: Path) -> tuple[str, dict[str, Any]]:
    """Method and keys of ftkit.

    Its cosine ends at the last step, that of the others one step later: ftkit gets one more step,
    which is not counted, with the records of the first batch.
    """
    records = place.records(case)
    records += records[: case.global_batch_size]
    data = in_file_order(records, order_of_ftkit(len(records), SEED))
    write_data(scratch / "data", data, data[:VALIDATION_RECORDS])
    keys: dict[str, Any] = {
        "checkpoint_dir": place.model(case),
        "accelerator": "cuda" if place.is_gpu else "cpu",
        "precision": case.precision,
        "data.path": scratch / "data",
        "train.global_batch_size": case.global_batch_size,
        "train.micro_batch_size": case.micro_batch_size,
        "train.max_steps": case.steps + 1,
        "train.max_seq_length": LONGEST,
        "optimizer.lr": case.learning_rate,
        **OBJECTIVES[case.objective].keys,
    }
    if case.kind != "answers":  # prompts with completions: always masked, and never in a style
        keys |= {"data.mask_prompt": None, "data.prompt_style": None}
    if case.method == "qlora":
        keys["quantize"] = "bnb.nf4"
    if case.method != "full":
        keys |= {"lora_r": LORA_RANK, "lora_alpha": LORA_ALPHA}
    return "full" if case.method == "full" else "lora", keys


def litgpt_words(case: Case, place: Workspace, scratch: Path) -> list[str | Path]:
    """LitGPT's command line; the records of the first batch come twice, see `cases`."""
    records = place.records(case)
    records = records[: case.global_batch_size] + records
    data = in_file_order(records, order_of_litgpt(len(records), LITGPT_DATA_SEED))
    write_data(scratch / "data", data, data[:VALIDATION_RECORDS])
    optimizer = {
        "class_path": "torch.optim.AdamW",
        "init_args": {"lr": case.learning_rate, "weight_decay": 0.0},
    }
    command = "finetune_full" if case.method == "full" else "finetune_lora"
    options: dict[str, Any] = {
        "out_dir": scratch / "out",
        "precision": case.precision,
        "data": "JSON",
        "data.json_path": scratch / "data",
        "data.mask_prompt": "true",
        "data.prompt_style": json.dumps({"class_path": "litgpt.prompts.Default"}),
        "train.global_batch_size": case.global_batch_size,
        "train.micro_batch_size": case.micro_batch_size,
        "train.max_steps": case.steps + 1,
        "train.epochs": 1,
        "train.lr_warmup_steps": 1,
        "train.max_seq_length": LONGEST,
        "train.save_interval": 1_000_000,
        "eval.interval": 1_000_000,
        "eval.final_validation": "false",
        "optimizer": json.dumps(optimizer),
    }
    if case.method != "full":
        options |= {"lora_r": LORA_RANK, "lora_alpha": LORA_ALPHA, "lora_dropout": 0.0}
    if case.method == "qlora":
        options["quantize"] = "bnb.nf4"
    words: list[str | Path] = [place.pythons["litgpt"], HERE / "litgpt_run.py", "run"]
    words += [str(case.steps + 1), command, str(place.litgpt_model(case))]
    return words + [word for key, value in options.items() for word in (f"--{key}", str(value))]


def trl_words(program: str, case: Case, place: Workspace, scratch: Path) -> list[str | Path]:
    """TRL's command line, with the settings of the training in a file."""
    file_of_records = scratch / "records.json"
    records = place.records(case)
    file_of_records.write_text(json.dumps(records))
    packed = program in PACKED
    objective = OBJECTIVES[case.objective]
    settings = {"bf16": False} | TRL_SETTINGS[program] | objective.settings
    if objective.trainer in WITHOUT_PADDING_FREE:
        settings = {key: value for key, value in settings.items() if key not in PADDING_FREE}
    if case.kind == "labels":
        # Where ftkit cuts prompts with answers to others.
        settings["max_length"] = max(tokens for one in records for tokens in tokens_of_each(one))
    start = scratch / "start.safetensors"
    save_file(start_of(case, place.model(case)), start)
    what = {
        "records": str(file_of_records),
        "model": str(place.model(case)),
        "start": str(start),
        "out_dir": str(scratch / "out"),
        "method": "full" if case.method == "full" else "lora",
        "quantize": case.method == "qlora",
        "rank": LORA_RANK,
        "alpha": LORA_ALPHA,
        "targets": QKV,
        "dtype": str(DTYPES[case.precision]).removeprefix("torch."),
        "micro_batch_size": 1 if packed else case.micro_batch_size,
        "micro_steps": 1 if packed else case.micro_steps,
        "steps": case.steps,
        "learning_rate": case.learning_rate,
        "trainer": objective.trainer,
        "logged": objective.logged,
        "factor": objective.factor,
        "settings": settings,
    }
    file = scratch / "trl.json"
    file.write_text(json.dumps(what))
    return [place.pythons["trl"], HERE / "trl_run.py", file]


def start_of(case: Case, model: Path) -> dict[str, torch.Tensor]:
    """Values that ftkit draws for a run of a case, by their names in the model that TRL trains.

    LoRA begins with random numbers, and so does the score of a reward model. With ftkit's numbers,
    TRL has the same losses in every step.
    """
    base, values = open_base(str(model)), {}
    shapes = parameter_shapes(base)
    if case.method != "full":
        for ours, (_, width) in (
            (name, shape) for name, shape in shapes.items() if len(shape) == 2
        ):
            layer = ours.removesuffix(".weight")
            theirs = names_of(base, layer)[0]
            if theirs.endswith(tuple(QKV)):
                drawn = base.architecture.seed_name(f"{layer}.lora_A.{TRAINED}.weight")
                name = f"base_model.model.{theirs}.lora_A.default.weight"
                shape = torch.Size((LORA_RANK, width))
                values[name] = initial_adapter(drawn, shape, SEED, Lora())
    if OBJECTIVES[case.objective].trainer == "Reward":
        values["score.weight"] = initial_score(torch.Size((1, shapes[HEAD][1])), SEED)
    return values


def padding_in_order(records: Sequence[Record], micro_batch_size: int) -> float:
    """Share of padding if samples are taken in order and padded to the longest in their batch."""
    lengths = [tokens_of(record) for record in records]
    batches = [
        lengths[first : first + micro_batch_size]
        for first in range(0, len(lengths), micro_batch_size)
    ]
    return 1 - sum(lengths) / sum(max(batch) * len(batch) for batch in batches)


def environments(names: Sequence[str], directory: Path | None) -> dict[str, Path]:
    """The Python of each program; ftkit has that of this process.

    Args:
        names: of the programs.
        directory: where environments lie; None: the programs are installed beside ftkit.
    """
    from benchmarking.peers.environments import python_of

    pythons = {"ftkit": Path(sys.executable)}
    for name in names:
        first = name.partition(" ")[0]
        if first not in pythons:
            pythons[first] = python_of(first, directory) if directory else Path(sys.executable)
    return pythons


def _measured(seen: Watched, limit_s: float) -> Measured:
    """Measurements that are read in the same way from both other programs."""
    if seen.exit_code is None:
        return Measured(failure=f"not done after {limit_s:.0f} s")
    first = [ended_s for ended_s, event in seen.events if "step" in event]
    if seen.exit_code != 0 or not first:
        return _failed(seen)
    memory = [event["device_memory"] for _, event in seen.events if "device_memory" in event]
    allocated, reserved = (memory[-1] if memory else None) or (None, None)
    return Measured(
        first_step_s=first[0],
        host_bytes=seen.host_bytes,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
    )


def _failed(seen: Watched) -> Measured:
    lines = [line for line in seen.output.splitlines() if line.strip()]
    return Measured(failure=lines[-1].strip() if lines else f"exit code {seen.exit_code}")
