"""Recipe + devices -> plan: every "auto" resolved and every rule kept."""

import dataclasses
import re
import tomllib
from importlib import metadata
from typing import Any

import pytest
from command import ROOT
from messages import key_words, message_of, says

from ftkit.errors import UserError
from ftkit.recipe.batches import MicroBatch
from ftkit.recipe.devices import Devices
from ftkit.recipe.kernels import LIGER, check_kernels_installed
from ftkit.recipe.objectives import objective_row
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import Plan, make_plan
from ftkit.recipe.recipe import Eval, Method, Recipe
from ftkit.recipe.recipe_keys import accepted_types, key_types
from ftkit.recipe.sections import check_validations

CPU = Devices(accelerator="cpu", count=8)
EMULATING_CPU = dataclasses.replace(CPU, bf16_native=False)
GPU = Devices(accelerator="cuda", count=1, names=("A100",))
OLD_GPU = Devices(accelerator="cuda", count=1, names=("V100",), bf16_native=False)
FOUR_GPUS = Devices(accelerator="cuda", count=4, names=("A100",) * 4)
FOUR_OLD_GPUS = dataclasses.replace(FOUR_GPUS, names=("V100",) * 4, bf16_native=False)
EIGHT_BIT = "bitsandbytes.optim.AdamW8bit"
DISTILLED: dict[str, object] = {
    "objective": "distill",
    "teacher": "large",
    "devices": 4,
    "memory__shard_model_beside": True,
}


def recipe(method: Method = "lora", **keys: object) -> Recipe:
    """A recipe with these keys; dots are written as two underscores."""
    pairs = [(key.replace("__", "."), str(value)) for key, value in keys.items()]
    return read_recipe([], [("checkpoint_dir", "base"), *pairs], method=method)


def plan(machine: Devices = CPU, /, method: Method = "lora", **keys: object) -> Plan:
    return make_plan(recipe(method, **keys), machine)


def refusal(machine: Devices = CPU, /, **keys: object) -> str:
    return message_of(plan, machine, **keys)


# --- Batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "micro", "steps"), [(16, 16, 1), (16, 4, 4), (16, 5, 4), (16, 1, 16), (1, 1, 1)]
)
def test_micro_steps_cover_the_global_batch(batch: int, micro: int, steps: int) -> None:
    made = plan(train__global_batch_size=batch, train__micro_batch_size=micro)
    assert made.micro_steps == steps
    assert made.notices == ()


def test_a_micro_batch_larger_than_the_global_batch_is_cut_with_a_notice() -> None:
    made = plan(train__global_batch_size=4, train__micro_batch_size=8)
    assert (made.micro_batch_size, made.micro_steps) == (4, 1)
    assert made.notices == ("train.micro_batch_size 8 is more than the global batch: 4 is used.",)


@pytest.mark.parametrize(
    ("machine", "keys", "sequences", "tokens"),
    [
        (CPU, {}, 16, 2048),
        (GPU, {}, 16, 8192),
        (CPU, {"devices": 2, "strategy": "ddp"}, 16, 2048),
        (CPU, {"train__global_batch_tokens": 500}, 500, 2048),
        # Where all of a step has to be one micro-batch.
        (CPU, {"train__optimizer_in_backward": True}, 16, None),
        # Of kinds of devices that nobody has measured.
        (dataclasses.replace(CPU, accelerator="mps"), {}, 1, None),
    ],
)
def test_an_open_micro_batch_has_as_many_tokens_as_bring_speed_on_the_device(
    machine: Devices, keys: dict[str, object], sequences: int, tokens: int | None
) -> None:
    settings = {"train__micro_batch_size": "null", "train__global_batch_size": 16} | keys
    made = plan(machine, method="full", **settings)
    assert (made.micro_batch_size, made.micro_batch_tokens) == (sequences, tokens)
    assert made.chosen == MicroBatch(sequences=sequences, tokens=tokens, source="usual")
    if "train__optimizer_in_backward" not in keys:
        smaller = MicroBatch(sequences=3, tokens=100, source="memory")
        cut = make_plan(recipe("full", **settings), machine, chosen=smaller)
        assert (cut.micro_batch_size, cut.micro_batch_tokens) == (3, 100)


def test_a_named_micro_batch_is_not_that_of_ftkit() -> None:
    smaller = MicroBatch(sequences=3, tokens=100, source="memory")
    made = make_plan(recipe(train__micro_batch_size=4), CPU, chosen=smaller)
    assert (made.micro_batch_size, made.micro_batch_tokens, made.chosen) == (4, None, None)


@pytest.mark.parametrize(
    ("size", "bound", "sequences"), [("null", 16, 16), ("auto", 16, 16), (6, 6, 6), (64, 16, 16)]
)
def test_a_number_of_tokens_bounds_micro_batches_beside_a_number_of_sequences(
    size: int | str, bound: int, sequences: int
) -> None:
    made = plan(
        train__global_batch_size=16, train__micro_batch_size=size, train__micro_batch_tokens=1000
    )
    assert (made.micro_batch_size, made.micro_batch_tokens) == (bound, 1000)
    assert made.micro_steps is None and made.accumulates
    assert made.sequences_of(100) == min(10, sequences)
    assert made.sequences_of(10) == sequences
    assert made.sequences_of(5000) == 1
    assert made.most_micro_steps(100) == -(-16 // min(10, sequences))


def test_with_a_number_of_tokens_a_step_of_few_sequences_has_one_micro_step() -> None:
    made = plan(train__global_batch_size=1, train__micro_batch_tokens=1000)
    assert (made.micro_steps, made.accumulates, made.notices) == (1, False, ())


def test_a_token_limit_without_effect_has_a_notice() -> None:
    made = plan(
        train__global_batch_size=16, train__micro_batch_size=1, train__micro_batch_tokens=1000
    )
    assert made.micro_steps == 16
    (notice,) = made.notices
    assert "--train.micro_batch_size null" in notice


@pytest.mark.parametrize("key", ["micro_batch_size", "micro_batch_tokens"])
def test_automatic_micro_batches_are_not_planned_without_a_device(key: str) -> None:
    with pytest.raises(UserError, match=f"train.{key} is auto"):
        plan(**{f"train__{key}": "auto"})


# --- Precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "precision"),
    [
        (CPU, "bf16-mixed"),
        (EMULATING_CPU, "32-true"),
        (GPU, "bf16-mixed"),
        (OLD_GPU, "16-mixed"),
    ],
)
def test_the_default_precision_is_what_the_device_is_good_at(
    devices: Devices, precision: str
) -> None:
    made = plan(devices)
    assert (made.precision, made.notices) == (precision, ())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_a_requested_precision_is_kept(precision: str) -> None:
    assert plan(precision=precision).precision == precision


@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
def test_float16_is_refused_on_a_cpu_and_not_on_a_gpu(precision: str) -> None:
    message = refusal(precision=precision)
    instead = f"b{precision.replace('16', 'f16')}"
    assert says(message, f"precision is {precision} ... CUDA ... --precision {instead}")
    emulated = refusal(EMULATING_CPU, precision=precision)
    assert says(emulated, f"precision is {precision} ... CUDA ... --precision 32-true")
    assert plan(GPU, precision="16-mixed").precision == "16-mixed"


@pytest.mark.parametrize(
    ("machine", "strategy", "instead"),
    [
        (FOUR_GPUS, "ddp", "bf16-true"),
        (FOUR_GPUS, "fsdp", "bf16-true"),
        (OLD_GPU, "single", "16-mixed"),
        (OLD_GPU, "fsdp", "32-true"),
    ],
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_training_in_pure_float16_is_refused_with_a_precision_that_works(
    machine: Devices, strategy: str, instead: str, method: Method
) -> None:
    keys = {"strategy": strategy, "method": method}
    message = refusal(machine, precision="16-true", **keys)
    assert says(message, f"precision is 16-true ... {strategy} ... --precision {instead}")
    assert plan(machine, precision=instead, **keys).precision == instead


@pytest.mark.extensions
def test_deepspeed_trains_float16_with_masters_in_float32_of_its_own() -> None:
    assert plan(GPU, precision="16-true", strategy="deepspeed").precision == "16-true"


def test_a_model_computes_answers_in_float16() -> None:
    made = make_plan(recipe(precision="16-true"), GPU, trains=False)
    assert made.precision == "16-true"


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bfloat16_that_is_only_emulated_warns(precision: str) -> None:
    made = plan(OLD_GPU, precision=precision)
    assert made.precision == precision
    assert made.notices[0].startswith("V100 has no bfloat16 hardware")
    made = plan(EMULATING_CPU, precision=precision)
    assert made.precision == precision
    (notice,) = made.notices
    assert says(notice, f"precision is {precision} ... CPU ... --precision 32-true")
    assert plan(EMULATING_CPU, precision="32-true").notices == ()


# --- Devices and strategies ---------------------------------------------------------------------


@pytest.mark.parametrize("devices", [CPU, GPU])
def test_auto_is_one_cpu_or_every_gpu(devices: Devices) -> None:
    made = plan(devices, devices="auto")
    assert (made.devices, made.world_size, made.strategy) == (1, 1, "single")


@pytest.mark.parametrize("strategy", ["auto", "single"])
def test_one_device_needs_no_strategy(strategy: str) -> None:
    made = plan(GPU, strategy=strategy)
    assert (made.strategy, made.accelerator) == ("single", "cuda")


def test_more_devices_than_gpus_are_refused() -> None:
    assert says(
        refusal(GPU, devices=2), "devices is 2 ... 1 GPU ... --devices 1 ... --accelerator cpu"
    )


@pytest.mark.parametrize("method", ["full", "lora"])
def test_auto_on_several_devices_is_ddp_for_lora_and_fsdp_for_full(method: Method) -> None:
    made = plan(FOUR_GPUS, method=method, devices=4)
    assert (made.strategy, made.world_size) == ({"lora": "ddp", "full": "fsdp"}[method], 4)


class TestSeveralGpusWithoutBfloat16:
    """Nothing that is auto leads to a refusal, and a refusal names what works."""

    @pytest.fixture(autouse=True)
    def _with_deepspeed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ftkit.extensions.deepspeed.strategies import DeepSpeedRules

        monkeypatch.setattr(DeepSpeedRules, "is_installed", True)

    @pytest.mark.extensions
    def test_default_settings_of_lora_are_ddp_in_float16(self) -> None:
        made = plan(FOUR_OLD_GPUS, devices=4)
        assert (made.strategy, made.precision, made.notices) == ("ddp", "16-mixed", ())

    @pytest.mark.extensions
    def test_a_full_fine_tune_is_deepspeed_with_everything_on_the_gpus(self) -> None:
        from ftkit.extensions.deepspeed.strategies import DeepSpeedOptions

        made = plan(FOUR_OLD_GPUS, method="full", devices=4)
        assert (made.strategy, made.precision) == ("deepspeed", "16-mixed")
        assert made.options == DeepSpeedOptions(stage=3, offload_optimizer=False)
        (notice,) = made.notices
        assert says(notice, "V100 ... bfloat16 ... fsdp ... 16-mixed ... deepspeed with 16-mixed")

    @pytest.mark.extensions
    @pytest.mark.parametrize(
        ("keys", "installed", "advice"),
        [
            ({}, False, "--strategy deepspeed with its library installed"),
            ({"optimizer": EIGHT_BIT}, True, "--strategy ddp"),
            ({"strategy": "fsdp"}, True, "--strategy deepspeed"),
            ({"strategy.cpu_offload": True}, True, "--strategy deepspeed"),
        ],
        ids=["no DeepSpeed", "an optimizer it cannot take", "fsdp set", "an option of fsdp"],
    )
    def test_it_is_fsdp_in_float32_where_deepspeed_cannot_be(
        self, keys: dict[str, Any], installed: bool, advice: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from ftkit.extensions.deepspeed.strategies import DeepSpeedRules

        monkeypatch.setattr(DeepSpeedRules, "is_installed", installed)
        made = plan(FOUR_OLD_GPUS, method="full", devices=4, **keys)
        assert (made.strategy, made.precision) == ("fsdp", "32-true")
        (notice,) = made.notices
        assert says(notice, f"V100 ... bfloat16 ... slower ... {advice}")

    @pytest.mark.extensions
    def test_the_plan_is_the_same_wherever_it_is_made_again(self) -> None:
        once = plan(FOUR_OLD_GPUS, method="full", devices=4)
        assert make_plan(once.recipe, FOUR_OLD_GPUS) == once

    @pytest.mark.extensions
    @pytest.mark.parametrize("installed", [True, False])
    @pytest.mark.parametrize("optimizer", ["AdamW", EIGHT_BIT])
    def test_explicit_settings_are_refused_with_a_remedy(
        self, installed: bool, optimizer: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from ftkit.extensions.deepspeed.strategies import DeepSpeedRules

        monkeypatch.setattr(DeepSpeedRules, "is_installed", installed)
        keys = {"devices": 4, "strategy": "fsdp", "precision": "16-mixed", "optimizer": optimizer}
        words = re.findall(r"--(\w+) ([\w-]+)", refusal(FOUR_OLD_GPUS, **keys))
        assert [key for key, _ in words] == ["precision", "strategy"]
        for key, value in words:
            assert plan(FOUR_OLD_GPUS, **keys | {key: value}).notices == ()

    @pytest.mark.extensions
    def test_emulated_bfloat16_is_kept_with_advice_that_works(self) -> None:
        keys = {"devices": 4, "strategy": "fsdp", "precision": "bf16-mixed"}
        (notice,) = plan(FOUR_OLD_GPUS, **keys).notices
        assert notice.endswith("Try --precision 32-true.")


@pytest.mark.extensions
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed"])
@pytest.mark.parametrize("devices", [CPU, FOUR_GPUS])
def test_every_strategy_runs_on_cpus_and_gpus(strategy: str, devices: Devices) -> None:
    made = plan(devices, strategy=strategy, devices=2)
    assert (made.strategy, made.world_size) == (strategy, 2)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (
            "fsdp",
            {
                "context": 1,
                "sharding": "FULL_SHARD",
                "cpu_offload": False,
                "prefetch": 0,
                "sync_every_micro_step": True,
            },
        ),
        ("deepspeed", {"stage": 3, "offload_optimizer": True, "offload_parameters": False}),
    ],
)
def test_a_strategy_without_options_has_its_defaults(
    strategy: str, options: dict[str, Any]
) -> None:
    assert dataclasses.asdict(plan(FOUR_GPUS, strategy=strategy, devices=4).options) == options


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"strategy": "fsdp", "strategy.stage": 3},
            "strategy.stage ... fsdp ... sharding, cpu_offload, prefetch, sync_every_micro_step",
        ),
        ({"strategy": "ddp", "strategy.stage": 3}, "strategy.stage ... ddp ... takes context"),
        (
            {"strategy": "deepspeed", "strategy.context": 2},
            "strategy.context is not an option of deepspeed ... takes stage",
        ),
        (
            {"strategy": "deepspeed", "strategy.stage": 4},
            "strategy.stage is 4 ... 1, 2, 3 ... --strategy.stage 1",
        ),
        (
            {"strategy": "deepspeed", "strategy.stage": True},
            "strategy.stage is True ... 1, 2, 3 ... --strategy.stage 1",
        ),
        (
            {"strategy": "fsdp", "strategy.cpu_offload": 1},
            "strategy.cpu_offload is 1 ... true, false ... --strategy.cpu_offload true",
        ),
        (
            {"strategy": "fsdp", "precision": "16-mixed"},
            "precision is 16-mixed ... fsdp ... --precision bf16-mixed, or --strategy deepspeed",
        ),
        (
            {"strategy": "deepspeed", "optimizer": "bitsandbytes.optim.AdamW8bit"},
            "optimizer is bitsandbytes ... DeepSpeed ... --optimizer AdamW, or --strategy fsdp",
        ),
        (
            {"strategy": "deepspeed", "optimizer": "torchao.optim.AdamW8bit"},
            "optimizer is torchao ... DeepSpeed ... --optimizer AdamW, or --strategy fsdp",
        ),
        (
            {"optimizer": "torchao.optim.AdamW4bit", "optimizer.block_size": 33},
            "optimizer.block_size is 33 ... --optimizer.block_size 256",
        ),
        (
            {"optimizer": "torchao.optim.AdamW8bit", "optimizer.amsgrad": True},
            "optimizer.amsgrad is true ... --optimizer.amsgrad false, or --optimizer AdamW",
        ),
        (
            {
                "strategy": "ddp",
                "optimizer": "torchao.optim.AdamW8bit",
                "optimizer.bf16_stochastic_round": True,
            },
            "optimizer.bf16_stochastic_round ... false, or --strategy fsdp",
        ),
        (
            {"strategy": "fsdp", "optimizer": "bitsandbytes.optim.LAMB8bit"},
            "LAMB8bit ... fsdp ... --optimizer bitsandbytes.optim.AdamW8bit, or --strategy ddp",
        ),
        (
            {"strategy": "fsdp", "quantize": "bnb.int8"},
            "quantize is bnb.int8 ... fsdp ... --strategy ddp ... --quantize bnb.nf4-dq",
        ),
        (
            {"strategy": "fsdp", "strategy.sharding": "HYBRID_SHARD"},
            "HYBRID_SHARD ... devices is 2 and num_nodes is 1 ... --strategy.sharding FULL_SHARD",
        ),
        (
            {"method": "full", "strategy": "deepspeed", "optimizer": "Muon"},
            "torch.optim.Muon ... DeepSpeed ... --optimizer AdamW, or --strategy fsdp",
        ),
        (
            {"strategy": "ddp", "optimizer": "Muon"},
            "torch.optim.Muon ... LoRA ... --optimizer AdamW, or ftkit finetune_full",
        ),
        (
            {"strategy": "deepspeed", "quantize": "bnb.int8"},
            "quantize is bnb.int8 ... deepspeed ... --strategy ddp ... --quantize bnb.nf4-dq",
        ),
        (
            {"strategy": "ddp", "optimizer": "deepspeed.ops.adam.DeepSpeedCPUAdam"},
            "DeepSpeedCPUAdam ... ddp ... --optimizer AdamW, or --strategy deepspeed",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_a_strategy_cannot_run_are_refused_with_an_alternative(
    keys: dict[str, Any], message: str
) -> None:
    assert says(refusal(FOUR_GPUS, devices=2, **keys), message)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"strategy.context": 0}, "strategy.context is 0 ... at least 1 ... --strategy.context 2"),
        ({"strategy.context": True}, "strategy.context is True ... --strategy.context 2"),
        ({"strategy.context": 3}, "is 3 ... devices x num_nodes is 4 ... --strategy.context 2"),
        ({"strategy.context": 8}, "is 8 ... devices x num_nodes is 4 ... --strategy.context 4"),
        (
            {"strategy.context": 2, "train.padding_free": False},
            "train.padding_free is false ... --train.padding_free null",
        ),
        (
            {"strategy.context": 2, "compile": True},
            "compile is true ... --compile false, or --strategy.context 1",
        ),
        (
            {
                "strategy": "fsdp",
                "strategy.context": 4,
                "strategy.sharding": "HYBRID_SHARD",
                "num_nodes": 2,
                "devices": 2,
            },
            "HYBRID_SHARD ... devices is 2 ... FULL_SHARD, or --strategy.context 2",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_ranks_that_cannot_share_sequences_are_refused(keys: dict[str, Any], message: str) -> None:
    assert says(refusal(FOUR_GPUS, **{"devices": 4, **keys}), message)


@pytest.mark.extensions
def test_ranks_share_sequences_of_objectives_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"devices": 4, "strategy.context": 2}
    for name in ("sft", "dft", "dpo", "kto", "reward"):
        assert plan(FOUR_GPUS, objective=name, **keys).mesh.data_ranks == 2
    silent = dataclasses.replace(objective_row("dpo"), shares_sequences=False)
    monkeypatch.setattr("ftkit.recipe.context.objective_rules", lambda _: silent)
    message = refusal(FOUR_GPUS, objective="dpo", **keys)
    assert says(message, "strategy.context is 2 ... objective is dpo ... sft ... context 1")


@pytest.mark.parametrize(("context", "largest", "steps"), [(1, 4, 1), (2, 8, 1), (4, 8, 2)])
def test_ranks_that_share_sequences_are_one_rank_of_the_data(
    context: int, largest: int, steps: int
) -> None:
    made = plan(
        FOUR_GPUS,
        strategy="ddp",
        devices=4,
        strategy__context=context,
        train__global_batch_size=16,
        train__micro_batch_size=8,
    )
    assert (made.world_size, made.mesh.data_ranks) == (4, 4 // context)
    assert (made.largest_micro_batch, made.micro_steps) == (largest, steps)


def test_single_on_several_devices_is_a_contradiction() -> None:
    message = refusal(FOUR_GPUS, strategy="single", devices=4)
    assert says(message, "strategy is single ... devices x num_nodes is 4")


@pytest.mark.extensions
def test_an_unknown_strategy_names_those_there_are() -> None:
    assert says(
        refusal(strategy="dpp"),
        "strategy is 'dpp' ... auto, single, ddp, fsdp, deepspeed ... --strategy auto",
    )


# --- Ranges -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "least"),
    {
        "train.global_batch_size": 1,
        "train.micro_batch_size": 1,
        "train.micro_batch_tokens": 1,
        "train.epochs": 1,
        "train.max_steps": 1,
        "train.max_seq_length": 2,
        "train.lr_warmup_steps": 0,
        "train.save_interval": 1,
        "checkpoint.keep_last": 1,
        "checkpoint.keep_every": 1,
        "checkpoint.keep_best": 0,
        "train.log_interval": 1,
        "eval.interval": 0,
        "eval.patience": 1,
        "eval.max_iters": 1,
        "eval.max_new_tokens": 0,
        "eval.exact_match": 0,
        "eval.rouge_l": 0,
        "eval.evaluate_example": 0,
        "devices": 1,
        "num_nodes": 1,
        "seed": 0,
        "lora_r": 1,
    }.items(),
)
def test_whole_numbers_have_a_least_value(key: str, least: int) -> None:
    name = key.replace(".", "__")
    message = refusal(**{name: least - 1})
    assert says(message, f"{key} is {least - 1} ... at least {least} ... --{key}")
    assert plan(**{name: least})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train__max_time": 0}, "train.max_time is 0 ... above 0"),
        (
            {"eval__rouge_l": 8, "eval__max_new_tokens": 0},
            "eval.rouge_l is 8 ... eval.max_new_tokens is 0 ... Try",
        ),
        ({"train__max_time": ".nan"}, "train.max_time is nan ... above 0"),
        ({"train__max_norm": -1}, "train.max_norm is -1 ... above 0"),
        ({"lora_alpha": 0}, "lora_alpha is 0 ... above 0"),
        ({"lora_plus_ratio": 0}, "lora_plus_ratio is 0 ... above 0"),
        ({"lora_plus_ratio": ".inf"}, "lora_plus_ratio is inf ... above 0"),
        ({"lora_targets": "[]"}, "lora_targets is empty"),
        (
            {"lora_variant": "dora", "lora_init": "pissa"},
            "lora_init is pissa ... lora_variant dora",
        ),
        ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef is -0.1 ... finite"),
        ({"router_aux_loss_coef": ".inf"}, "router_aux_loss_coef is inf ... finite"),
        ({"optimizer__lr": -1}, "optimizer.lr is -1 ... at least 0"),
        ({"optimizer__lr": ".nan"}, "optimizer.lr is nan ... at least 0"),
        ({"optimizer__lr": ".inf"}, "optimizer.lr is inf ... at least 0"),
        ({"optimizer__lr": "fast"}, "optimizer.lr is 'fast' ... at least 0"),
        ({"train__min_lr": -1e-5}, "train.min_lr is -1e-05 ... at least 0"),
        ({"train__min_lr": ".nan"}, "train.min_lr is nan ... at least 0"),
        ({"train__min_lr": ".inf"}, "train.min_lr is inf ... at least 0"),
        ({"train__neftune_noise_alpha": 0}, "train.neftune_noise_alpha is 0 ... above 0"),
        ({"train__neftune_noise_alpha": ".inf"}, "train.neftune_noise_alpha is inf ... above 0"),
        ({"train__ema_decay": 0}, "train.ema_decay is 0 ... between 0 and 1"),
        ({"train__ema_decay": 1}, "train.ema_decay is 1 ... between 0 and 1"),
        ({"train__ema_decay": ".nan"}, "train.ema_decay is nan ... between 0 and 1"),
        ({"train__label_smoothing": 1}, "train.label_smoothing is 1 ... [0, 1)"),
        ({"train__lr_warmup_fraction": 1.5}, "train.lr_warmup_fraction is 1.5"),
        ({"train__lr_warmup_fraction": -0.1}, "train.lr_warmup_fraction is -0.1"),
        ({"train__lr_warmup_run_fraction": 1.5}, "train.lr_warmup_run_fraction is 1.5"),
        ({"train__save_interval_epochs": 0.0}, "train.save_interval_epochs is 0"),
        ({"eval__interval_epochs": -1.0}, "eval.interval_epochs is -1"),
        ({"train__epochs": "null"}, "train.epochs ... train.max_steps ... empty"),
        ({"train__max_tokens": 0}, "train.max_tokens is 0"),
        ({"eval__evaluate_example": "last"}, "eval.evaluate_example is 'last'"),
        ({"checkpoint__save_every": "15m"}, "checkpoint.save_every is '15m'"),
        ({"seed": 2**63}, f"seed is {2**63} ... below 2**63"),
        ({"lora_dropout": 1}, "lora_dropout is 1 ... [0, 1)"),
        ({"lora_dropout": -0.1}, "lora_dropout is -0.1 ... [0, 1)"),
        ({"lora_query": "false", "lora_value": "false"}, "No layer is adapted"),
        (
            {"lora_head": "true", "data__add_tokens": "[<a>]"},
            "lora_head is true ... data.add_tokens trains the head itself",
        ),
    ],
)
def test_a_value_out_of_range_says_so_and_suggests_options_that_work(
    keys: dict[str, Any], message: str
) -> None:
    text = refusal(**keys)
    assert says(text, message)
    suggested = re.findall(r"--(\S+) (\S+?)[.,]?(?= |$)", text.rpartition("Try ")[2])
    assert suggested
    assert plan(**keys | {key.replace(".", "__"): value for key, value in suggested})


@pytest.mark.parametrize(
    "key",
    [key for key, kind in key_types("lora").items() if accepted_types(kind) in ([int], [float])],
)
def test_a_number_suggested_in_place_of_a_word_can_be_used(key: str) -> None:
    name = key.replace(".", "__")
    value = refusal(**{name: "[]"}).rpartition(f"Try --{key} ")[2].removesuffix(".")
    assert value and plan(**{name: value})


@pytest.mark.parametrize("value", ["first", "random", 0, 3])
def test_the_example_is_the_first_a_random_one_or_an_index(value: str | int) -> None:
    assert plan(eval__evaluate_example=value)


def test_patience_that_cannot_end_a_run_suggests_an_interval_that_can() -> None:
    (notice,) = check_validations(Eval(patience=3), 40, 100, takes_best=False)
    assert says(notice, "eval.patience 3 ... 100 steps")
    suggested = int(notice.rpartition("--eval.interval ")[2].removesuffix("."))
    settings = Eval(patience=3, interval=suggested)
    assert check_validations(settings, settings.interval, 100, takes_best=False) == []


@pytest.mark.extensions
def test_the_best_checkpoint_can_only_be_the_result_if_one_is_validated() -> None:
    assert check_validations(Eval(), 100, 100, takes_best=True) == []
    unvalidated = Eval(interval=100, final_validation=False)
    assert check_validations(unvalidated, 100, 101, takes_best=True) == []
    with pytest.raises(UserError, match=key_words("none of the 100 steps")):
        check_validations(unvalidated, 100, 100, takes_best=True)
    best = {"checkpoint__result": "best"}
    assert "checkpoint.save is false" in refusal(**best, checkpoint__save="false")
    assert "Try --out_dir on a disk" in refusal(**best, num_nodes=2, out_dir="s3://bucket/run")


def test_an_interval_of_zero_never_validates() -> None:
    assert plan(eval__interval=0).recipe.eval.interval == 0


# --- Updates in the backward pass ---------------------------------------------------------------

IN_BACKWARD = {"train__optimizer_in_backward": True, "train__global_batch_size": 4}


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("machine", "keys", "words"),
    [
        (CPU, {"devices": 2, "strategy": "ddp"}, "ddp ... gradients ... fsdp"),
        (CPU, {"devices": 2, "strategy": "deepspeed"}, "deepspeed ... slices ... fsdp"),
        (
            CPU,
            {"devices": 2, "strategy": "fsdp", "strategy__cpu_offload": True},
            "fsdp ... host memory ... --strategy.cpu_offload false",
        ),
        (CPU, {"train__max_norm": 1}, "train.max_norm is 1 ... --train.max_norm null"),
        (
            CPU,
            {"train__micro_batch_size": "null", "train__micro_batch_tokens": 900},
            "several micro-batches ... --train.micro_batch_tokens null",
        ),
        (CPU, {"train__micro_batch_size": 2}, "2 micro-batches ... --train.micro_batch_size 4"),
        (OLD_GPU, {"precision": "16-mixed"}, "16-mixed ... --precision"),
    ],
)
def test_updates_in_the_backward_pass_are_refused_where_all_gradients_come_first(
    machine: Devices, keys: dict[str, object], words: str
) -> None:
    whole = {"train__micro_batch_size": 4, "train__max_norm": "null"}
    message = refusal(machine, **IN_BACKWARD | whole | keys)
    key = "train.optimizer_in_backward"
    assert says(message, words, f"{key} is true ... --{key} false")


@pytest.mark.parametrize("keys", [{}, {"devices": 2, "strategy": "fsdp"}])
def test_updates_in_the_backward_pass_take_one_micro_step(keys: dict[str, object]) -> None:
    settings = IN_BACKWARD | {"train__micro_batch_size": 4} | keys
    assert plan(CPU, **settings).micro_steps == 1
    evaluated = recipe(**settings | {"train__micro_batch_size": 1})
    assert make_plan(evaluated, CPU, trains=False).micro_steps == (4 if not keys else 2)


# --- Settings that exclude each other -----------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("machine", "keys", "message"),
    [
        (
            CPU,
            {"train__micro_batch_tokens": 1000, "train__padding_free": False},
            "train.micro_batch_tokens is 1000 ... train.padding_free is false",
        ),
        (
            CPU,
            {"eval__patience": 3, "eval__interval": 0},
            "eval.patience is 3 ... eval.interval is 0",
        ),
        (GPU, {"memory__offload_activations": True}, "memory.offload_activations is true"),
        (CPU, {"kernels": "liger"}, "kernels is liger ... CUDA"),
        (GPU, {"kernels": "liger", "compile": "true"}, "kernels is liger ... compile is true"),
        (GPU, {"kernels": "liger", "train__label_smoothing": 0.1}, "kernels is liger"),
        (GPU, {"objective": "dft", "train__label_smoothing": 0.1}, "objective is dft ... sft"),
        (CPU, {"objective": "distill"}, "objective is distill ... --teacher"),
        (CPU, {"teacher": "large"}, "teacher is large ... sft ... --objective distill"),
        (GPU, {"objective": "orpo", "reference": "a/b"}, "reference is a/b ... orpo ... dpo"),
        (CPU, {"compile": "true", "strategy": "deepspeed"}, "compile is true ... deepspeed"),
        (
            FOUR_GPUS,
            DISTILLED | {"quantize": "bnb.int8"},
            "memory.shard_model_beside is true ... quantize is bnb.int8",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused_with_options_that_work(
    machine: Devices, keys: dict[str, Any], message: str
) -> None:
    text = refusal(machine, **keys)
    assert says(text, message)
    suggested = re.findall(r"--(\S+) (\S+?)[.,]?(?= |$)", text.rpartition("Try ")[2])
    assert suggested
    for key, value in suggested:
        assert plan(machine, **keys | {key.replace(".", "__"): value})


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("machine", "keys", "message"),
    [
        (CPU, {"method": "lora", "float8": True}, "float8 is true ... LoRA ... finetune_full"),
        (CPU, {"method": "lora", "qat__weights": "int4"}, "qat.weights is int4 ... --quantize"),
        (CPU, {"float8": True, "qat__weights": "int4"}, "float8 is true ... qat.weights is int4"),
        (CPU, {"qat__activations": "int8"}, "qat.activations is int8 ... --qat.weights int4"),
        (CPU, {"float8": True, "strategy": "deepspeed"}, "float8 is true ... deepspeed"),
        (CPU, {"qat__weights": "int2", "strategy": "deepspeed"}, "qat.weights is int2 ... fsdp"),
        (
            dataclasses.replace(GPU, float8_native=False),
            {"float8": True},
            "float8 is true ... A100 ... 8.9",
        ),
        (GPU, {"float8": True, "precision": "32-true"}, "float8 is true ... precision is 32-true"),
        (
            Devices(accelerator="xpu", count=1),
            {"qat__weights": "int4"},
            "qat.weights is int4 ... xpu",
        ),
    ],
)
def test_rounded_products_that_are_not_possible_are_refused_with_options_that_work(
    machine: Devices, keys: dict[str, Any], message: str
) -> None:
    keys = {"method": "full"} | keys
    text = refusal(machine, **keys)
    assert says(text, message)
    suggested = re.findall(r"--(\S+) (\S+?)[.,]?(?= |$)", text.rpartition("Try ")[2])
    for key, value in suggested:
        # Another accelerator is another machine.
        here = CPU if key == "accelerator" else machine
        assert plan(here, **keys | {key.replace(".", "__"): value})


@pytest.mark.extensions
@pytest.mark.parametrize("key", ["float8", "qat__weights"])
def test_rounded_products_need_torchao(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    text = refusal(CPU, method="full", **{key: "true" if key == "float8" else "int4"})
    assert says(text, "torchao is not installed", "pip install 'ftkit[torchao]'")


def test_on_cpus_a_notice_says_that_offloading_has_no_effect() -> None:
    keys = {"memory__offload_activations": True, "memory__activation_checkpointing": 2}
    assert any(
        "offload_activations has no effect" in notice for notice in plan(CPU, **keys).notices
    )
    assert not any("offload" in notice for notice in plan(GPU, **keys).notices)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("keys", "shards", "sharded"),
    [
        ({}, 4, "weights of the teacher"),
        (
            {
                "strategy": "deepspeed",
                "strategy__stage": 2,
                "strategy__offload_optimizer": False,
            },
            4,
            "ZeRO-2: optimizer state, gradients; weights of the teacher",
        ),
        ({"memory__shard_model_beside": False}, 1, "nothing"),
    ],
)
def test_a_model_beside_is_sharded_where_the_trained_one_is_whole(
    keys: dict[str, object], shards: int, sharded: str
) -> None:
    made = plan(FOUR_GPUS, **DISTILLED | keys)
    assert (made.shards, made.shards_beside, made.sharding) == (1, shards, sharded)
    assert not made.notices


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("keys", "shards", "why"),
    [
        ({"devices": 1}, 1, "one rank"),
        ({"strategy": "fsdp"}, 4, "fsdp shards that model"),
        ({"strategy": "deepspeed"}, 4, "deepspeed shards that model"),
        ({"objective": "sft", "teacher": "null"}, 1, "no frozen model"),
        ({"objective": "kto", "teacher": "null"}, 1, "no frozen model"),
    ],
)
def test_a_notice_says_where_there_is_nothing_more_to_shard(
    keys: dict[str, object], shards: int, why: str
) -> None:
    made = plan(FOUR_GPUS, **DISTILLED | {"quantize": "bnb.nf4"} | keys)
    assert made.shards_beside == shards and "weights of" not in made.sharding
    (notice,) = made.notices
    assert says(notice, f"memory.shard_model_beside has no effect ... {why}")


# --- Kernels ------------------------------------------------------------------------------------


def test_kernels_for_cuda_run_on_gpus() -> None:
    assert plan(GPU, kernels="liger").recipe.kernels == "liger"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "kernels is liger ... Liger-Kernel is not installed"),
        ("0.8.4", "Liger-Kernel 0.8.4 is installed ... private"),
        ("0.9.0", "Liger-Kernel 0.9.0 is installed ... private"),
        ("0.8.5", "Triton is not installed"),
    ],
)
def test_kernels_that_are_missing_or_unknown_are_refused(
    version: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(_: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr("ftkit.recipe.kernels.metadata.version", installed)
    monkeypatch.setattr("ftkit.recipe.kernels.importlib.util.find_spec", lambda _: None)
    install = f"pip install '{LIGER}', or --kernels torch"
    with pytest.raises(UserError, match=key_words(f"{said} ... {install}")):
        check_kernels_installed("liger", "cuda", compiles=False)


def test_the_extra_installs_kernels_that_are_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["liger"] == [LIGER]


def test_without_a_compiler_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=key_words("no-such-compiler ... --compile false")):
        check_kernels_installed("auto", "cpu", compiles=True)
    check_kernels_installed("auto", "cpu", compiles=False)
