"""The memory of a recipe is predicted without weights, downloads or a GPU."""

import dataclasses
import functools
import io
import json
import math
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from messages import key_words, says
from tiny import make_labelled, make_llama, make_pairs, make_records, make_tokenizer
from transformers_models import make_transformers_model

from ftkit.cli.app import run
from ftkit.data.dataset import load_data, load_sets
from ftkit.errors import UserError
from ftkit.models.pretrained.base_model import read_blueprint
from ftkit.planning.gpus import GPUS, HOST, Gpu, find_gpu
from ftkit.planning.predict import Planned, certain_micro_batch, plan_files
from ftkit.planning.sequence_length import Longest, SequenceLength, sequence_length
from ftkit.planning.simulate import largest_micro_batch, simulate, with_layers
from ftkit.planning.suggest import Change, changes_that_fit
from ftkit.planning.table import plan_table, show_changes, side_by_side
from ftkit.recipe import devices
from ftkit.recipe.devices import Cuda, Devices, VisibleGpu
from ftkit.recipe.parsing import Override, read_recipe
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe_keys import LORA_KEYS
from ftkit.strategies.schedule import make_schedule
from ftkit.utils.console.terminal import plain_text
from ftkit.utils.hardware import HostLimit

MODEL = "random:pythia-14m"


@functools.cache
def shallow() -> str:
    """The settings of pythia-14m with two of its six layers, which are simulated in half the time.

    Embedding and head, which are most of it, are as large.
    """
    from transformers import GPTNeoXConfig

    directory = Path(os.environ["FTKIT_CACHE_DIR"], "pythia")
    GPTNeoXConfig(
        architectures=["GPTNeoXForCausalLM"],
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50304,
        max_position_embeddings=512,
    ).save_pretrained(directory)
    make_tokenizer(directory)
    return str(directory)


def planned(model: str | None = None, gpu: str = "h200", **keys: object) -> Planned:
    values = {"checkpoint_dir": model or shallow(), "train.max_seq_length": 64} | {
        key.replace("__", "."): value for key, value in keys.items()
    }
    overrides = [(key, json.dumps(value)) for key, value in values.items()]
    command = "finetune" if LORA_KEYS & values.keys() else "finetune_full"
    return _planned_once(tuple(overrides), command, gpu)


@functools.cache
def _planned_once(overrides: tuple[Override, ...], command: str, gpu: str) -> Planned:
    """Many tests compare with the same plans, and each is simulated in half a second."""
    return plan_files((), overrides, command=command, gpu=find_gpu(gpu))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"memory__activation_checkpointing": 2, "memory__offload_activations": True},
        *(
            pytest.param(keys, marks=pytest.mark.matrix)
            for keys in (
                {"devices": 4, "strategy": "fsdp", "precision": "bf16-true"},
                {"precision": "bf16-mixed", "memory__activation_checkpointing": True},
                {"precision": "bf16-mixed", "memory__activation_checkpointing": 2},
                {"memory__activation_checkpointing": True, "memory__offload_activations": True},
                {"quantize": "bnb.nf4-dq", "lora_mlp": True},
            )
        ),
    ],
)
def test_memory_grows_by_the_same_amount_with_every_layer(
    keys: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = with_layers(read_blueprint(MODEL), 9)
    batch = largest_micro_batch(2, 64)
    made = planned(MODEL, **keys).plan
    extended = simulate(base, made, batch, accumulates=False)
    monkeypatch.setattr("ftkit.planning.simulate.LEAST_DEPTH", 9)
    whole = simulate(base, made, batch, accumulates=False)
    highest = max(whole.peaks.values(), key=lambda peak: peak.total_bytes)
    found = max(extended.peaks.values(), key=lambda peak: peak.total_bytes)
    assert extended.sizes == whole.sizes
    assert extended.hosted_bytes == whole.hosted_bytes
    assert found.bytes == highest.bytes


@pytest.mark.extensions
def test_a_hub_name_is_planned_without_a_download() -> None:
    base = read_blueprint("openlm-research/open_llama_7b")
    assert base.architecture.layers == 32 and not base.has_weights and not base.tied
    assert read_blueprint("meta-llama/Llama-3.2-1B").tied


def test_settings_are_enough_of_a_directory(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4).save_pretrained(
        tmp_path
    )
    assert read_blueprint(str(tmp_path)).architecture.layers == 3
    assert read_blueprint("embedded:quickstart").name == "quickstart"


def write_mixtral(directory: Path) -> str:
    """The settings of Mixtral-8x7B, which transformers computes."""
    from transformers import MixtralConfig

    MixtralConfig(architectures=["MixtralForCausalLM"]).save_pretrained(directory)
    return str(directory)


@pytest.mark.matrix
def test_experts_are_planned_in_every_implementation_and_number_format(tmp_path: Path) -> None:
    gib = 2**30
    for model in ("random:Mixtral-8x7B-v0.1", write_mixtral(tmp_path)):
        for keys, low, high in (
            ({}, 86.9, 87.1),
            ({"quantize": "bnb.nf4"}, 24, 25.5),
            ({"quantize": "bnb.nf4-dq"}, 22, 24),
        ):
            made = planned(model, precision="bf16-true", lora_query=True, **keys)
            assert made.memory is not None
            assert low < made.memory.breakdown_bytes["parameters"] / gib < high
            assert made.memory.parameters == pytest.approx(46.7e9, rel=1e-3)


@pytest.mark.extensions
def test_a_plan_says_what_is_adapted_and_what_that_costs() -> None:
    each: tuple[dict[str, object], ...] = ({}, {"lora_query": True})
    default, named = (planned(MODEL, lora_dropout=0, **keys) for keys in each)
    shown, of_named = (plain_text(plan_table(found), 200) for found in (default, named))
    assert says(shown, "adapter ... all linear layers, rank 16, alpha 32")
    assert says(of_named, "adapter ... query, value, rank 8, alpha 16")
    # Six layers of width 128, query, key and value in one, with an MLP four times as wide.
    assert named.memory.trained_parameters == 6 * 8 * (128 + 384)
    attention, mlp = (128 + 384) + (128 + 128), 2 * (128 + 512)
    assert default.memory.trained_parameters == 6 * 16 * (attention + mlp)
    assert default.memory.peak_bytes > named.memory.peak_bytes


@pytest.mark.slow
def test_a_plan_names_experts_that_are_not_adapted(tmp_path: Path) -> None:
    """The run does so, too; here before anything is downloaded."""
    keys = {"lora_dropout": 0, "train__max_seq_length": 16}
    model = str(make_transformers_model(tmp_path, "qwen3_moe"))
    shown = plain_text(plan_table(planned(model, **keys)), 200)
    assert says(shown, "left out ... does not adapt the experts ... --lora_experts true")
    assert planned(model, **keys, lora_query=True).left_out is None
    assert planned(model, **keys, lora_experts=True).left_out is None


@pytest.mark.extensions
def test_an_unknown_model_is_an_error_that_names_similar_ones() -> None:
    with pytest.raises(UserError, match=r"Did you mean openlm-research/open_llama_7b"):
        read_blueprint("openlm-research/open_lama_7b")


@pytest.mark.extensions
def test_a_plan_suggests_a_name_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models/llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError) as error:
        run(["plan", "models/lama"])
    assert says(str(error.value), "Did you mean ... models/llama")
    assert str(error.value).count("Did you mean") == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_recorded_steps_keep_gradients_and_the_memory_of_their_passes(ranks: int) -> None:
    keys: dict[str, object] = {"train__global_batch_size": 4 * ranks, "train__micro_batch_size": 4}
    keys |= {} if ranks == 1 else {"devices": ranks, "strategy": "ddp"}
    plain, recorded, elsewhere = (
        planned(**keys, **more).memory
        for more in (
            {},
            {"train__record_steps": True},
            {"train__record_steps": True, "compile": True},
        )
    )
    gradients = recorded.breakdown_bytes["gradients"]
    # The buckets of ddp are there from the first step on, too.
    more = gradients if ranks == 1 else 0
    assert recorded.peak_bytes == plain.peak_bytes + more and gradients
    of_passes = recorded.breakdown_bytes["activations"]
    assert recorded.high_bytes > plain.high_bytes + more + of_passes
    assert elsewhere.high_bytes == plain.high_bytes, "nothing is recorded"


@pytest.mark.slow
def test_quantised_weights_are_planned_where_the_gpu_has_no_bfloat16(tmp_path: Path) -> None:
    """Their products are in float16: so is autocast, which takes no other 16-bit numbers."""
    model = make_transformers_model(tmp_path, "gemma3_text")
    found = planned(str(model), gpu="t4", precision="16-mixed", quantize="bnb.nf4", lora_r=4)
    assert found.fits


@pytest.mark.extensions
def test_a_device_is_large_enough_too_small_or_too_close_to_say() -> None:
    memory = planned(devices=2, strategy="fsdp", strategy__cpu_offload=True).memory
    low, high = memory.low_bytes, memory.high_bytes

    def fits(memory_bytes: int, swap_bytes: int = 0, host_bytes: int | None = None) -> bool | None:
        there = Gpu(
            name="", memory_bytes=memory_bytes, swap_bytes=swap_bytes, host_bytes=host_bytes
        )
        return memory.fits(there, low)

    assert fits(high) is True
    assert fits(low - 1) is False
    assert fits((low + high) // 2) is None
    assert fits(low - 1, swap_bytes=high) is None, "swap saves a run, and makes it slow"
    assert 0 < memory.host_low_bytes < memory.host_bytes
    assert fits(high, host_bytes=memory.host_bytes) is True
    assert fits(high, host_bytes=memory.host_low_bytes) is None
    assert fits(high, host_bytes=memory.host_low_bytes - 1) is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "part", "factor"),
    [
        ({"optimizer": "bitsandbytes.optim.AdamW8bit"}, "optimizer_state", 0.52),
        ({"memory__activation_checkpointing": True}, "activations", 0.95),
        pytest.param(
            {"memory__activation_checkpointing": 2}, "activations", 0.98, marks=pytest.mark.matrix
        ),
        ({"train__optimizer_in_backward": True, "train__global_batch_size": 2}, "gradients", 0.0),
        pytest.param({"train__micro_batch_size": 1}, "activations", 0.6, marks=pytest.mark.matrix),
        ({"devices": 2, "strategy": "fsdp"}, "parameters", 0.55),
        ({"devices": 2, "strategy": "deepspeed"}, "optimizer_state", 0.0),
    ],
)
def test_each_setting_saves_memory_in_its_category(
    changes: dict[str, object], part: str, factor: float
) -> None:
    usual = {"precision": "bf16-true", "train__micro_batch_size": 2}
    before = planned(MODEL, **usual).memory.breakdown_bytes
    after = planned(MODEL, **usual | changes).memory.breakdown_bytes
    assert after[part] <= factor * before[part]  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "share"),
    [
        ("NAdam", 1.0),
        ("bitsandbytes.optim.AdEMAMix", 1.5),
        ("bitsandbytes.optim.Lion", 0.5),
        ("Adafactor", 0.0),
    ],
)
def test_the_state_of_each_kind_of_optimizer_is_counted(optimizer: str, share: float) -> None:
    of_adamw = planned(precision="32-true").memory.breakdown_bytes["optimizer_state"]
    made = planned(precision="32-true", optimizer=optimizer).memory.breakdown_bytes
    assert made["optimizer_state"] / of_adamw == pytest.approx(share, abs=0.03)


@pytest.mark.slow
def test_micro_batch_tokens_are_planned_as_a_row_of_that_length_or_of_the_longest() -> None:
    def of_tokens(tokens: int) -> Planned:
        return planned(train__micro_batch_tokens=tokens)

    found = of_tokens(3 * 63)
    assert found.memory == planned(train__micro_batch_size=3).memory
    alone = of_tokens(10)
    assert alone.memory == planned(train__micro_batch_size=1).memory
    values = found.as_dict()
    assert (values["micro_batch_tokens"], values["micro_steps_per_step"]) == (189, 6)
    shown = plain_text(side_by_side([found, alone], 200), 200)
    assert "16/189t" in shown and "16/10t" in shown


@pytest.mark.slow
def test_a_plan_says_how_many_micro_steps_a_step_has_at_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--checkpoint_dir", shallow(), "--train.max_seq_length", "64"]
    run(["plan", *words, "--train.micro_batch_tokens", "190"])
    shown = " ".join(capsys.readouterr().out.split())
    assert says(shown, "16 sequences ... 6 micro-steps of 190 tokens on 1 rank ... 1,008 tokens")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["micro_batch_size", "micro_batch_tokens"])
def test_auto_takes_the_memory_that_is_free_here(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [("checkpoint_dir", shallow()), ("train.max_seq_length", "64"), (f"train.{key}", "auto")]
    found = plan_files((), keys)
    assert found.gpu and found.gpu.name == HOST and found.fits
    assert found.micro_batch.full == (16 if key == "micro_batch_size" else 16 * 63)
    one = plan_files((), [*keys[:2], ("train.micro_batch_size", "1")])
    less = (one.memory.high_bytes + found.memory.high_bytes) // 2
    monkeypatch.setattr("ftkit.planning.gpus.available_host_bytes", lambda ranks: less)
    smaller = plan_files((), keys)
    assert smaller.fits and smaller.micro_batch.full < found.micro_batch.full


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "method"),
    [
        ([MODEL], "lora"),
        pytest.param(["finetune_full", MODEL], "full", marks=pytest.mark.matrix),
        pytest.param(["finetune", MODEL], "lora", marks=pytest.mark.matrix),
        (["full.yaml"], "full"),
        (["full.yaml", "--lora_r", "4"], "lora"),
        (["finetune", "full.yaml"], "lora"),
        (["lora.yaml"], "lora"),
    ],
)
def test_the_command_decides_the_method_and_else_the_recipe(
    words: list[str],
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full.yaml").write_text(f"checkpoint_dir: {MODEL}\ntrain: {{max_seq_length: 64}}")
    Path("lora.yaml").write_text(f"checkpoint_dir: {MODEL}\nquantize: bnb.nf4")
    assert run(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"plan: {method} on {MODEL}")
    is_guess = method == "full" and words[0] == "full.yaml"
    assert ("ftkit plan finetune plans LoRA" in " ".join(shown.split())) == is_guess
    following = "finetune" if method == "lora" else "finetune_full"
    assert f"\nnext:\n  ftkit {following} " in shown


def test_a_sweep_names_the_commands_of_its_runs_itself(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("runs: []")
    with pytest.raises(UserError, match=key_words("sweep ... runs")):
        run(["plan", "finetune", str(sweep)])


def test_a_mistake_in_one_of_several_plans_names_it_and_all_keys_of_it(tmp_path: Path) -> None:
    (tmp_path / "lora.yaml").write_text(f"{{checkpoint_dir: {MODEL}, lora_r: 4, lora_alpha: 8}}")
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("runs: [{name: everything, command: finetune_full, config: lora.yaml}]")
    with pytest.raises(UserError, match=key_words("everything", "lora_r", "lora_alpha")):
        run(["plan", str(sweep), str(tmp_path / "lora.yaml")])


@pytest.mark.slow
def test_without_a_gpu_a_plan_is_for_the_cpu_and_its_host_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ftkit.recipe.devices.Path.exists", lambda _: False)
    words = ["plan", shallow(), "--train.max_seq_length", "64", "--devices", "2"]
    assert run(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "devices 2 x CPU, ddp" in shown and "of host memory for each rank" in shown
    limit = HostLimit(memory_bytes=2**20, swap_bytes=0)
    monkeypatch.setattr("ftkit.planning.gpus.host_limit", lambda ranks: limit)
    assert run(words) == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not fit" in shown and says(shown, "of the 1.0 MiB of host memory")


@pytest.mark.extensions
@pytest.mark.parametrize("keys", [["--kernels", "liger"], ["--accelerator", "cuda"]])
def test_a_recipe_that_cannot_run_here_is_refused_with_how_to_plan_it_elsewhere(
    keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.recipe.devices._asked_once", lambda: Cuda(torch="2", error="none"))
    words = [shallow(), "--train.max_seq_length", "64", *keys]
    monkeypatch.setattr("ftkit.recipe.kernels.has_liger", lambda: True)
    with pytest.raises(UserError, match=r"(?s)CUDA|cuda.*--gpu a100-80gb"):
        run(["plan", *words])
    assert run(["plan", *words, "--gpu", "80GiB"]) == 0


@pytest.mark.slow
def test_a_smaller_micro_batch_is_the_first_advice() -> None:
    keys: dict[str, object] = {"precision": "bf16-true", "train__micro_batch_tokens": 1000}
    high_bytes = planned(**keys).memory.high_bytes
    size = f"{high_bytes // 2**20 - 1}MiB"

    def attempt(changed: Sequence[Override]) -> Planned:
        return planned(gpu=size, **keys | {key: json.loads(value) for key, value in changed})

    (change,) = changes_that_fit(planned(gpu=size, **keys), attempt, most=1)[:1]
    assert change.title == "smaller micro-batch, same global batch" and change.planned.fits
    ((key, tokens),) = change.overrides
    assert key == "train.micro_batch_tokens" and 63 < int(tokens) < 1000 and int(tokens) % 128 == 0


@pytest.mark.slow
def test_a_plan_says_in_which_form_a_base_is_published_and_what_becomes_of_it(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ftkit.extensions.packed_weights")
    settings = json.loads((make_llama(tmp_path) / "config.json").read_text())
    settings |= {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256}
    settings |= {"num_hidden_layers": 3, "dtype": "bfloat16"}
    form = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    kept = form | {"modules_to_not_convert": ["mlp"]}
    found = {}
    for name, quantization in (("all", form), ("attention", kept)):
        place = tmp_path / name
        place.mkdir()
        file = place / "config.json"
        file.write_text(json.dumps(settings | {"quantization_config": quantization}))
        for quantize, words in (
            (None, "in FP8, unpacked"),
            ("stored", "in FP8, kept"),
            ("bnb.nf4", "in FP8, packed again as bnb.nf4"),
        ):
            keys = {"precision": "bf16-true", "lora_query": True, "quantize": quantize}
            keys["train__micro_batch_size"] = 1
            made = found[name, quantize] = planned(str(place), **keys)
            assert says(plain_text(plan_table(made), 200), f"published ... {words}")
            assert made.as_dict()["published"] == "FP8"
    held = {key: made.memory.breakdown_bytes["parameters"] for key, made in found.items()}
    assert held["all", "bnb.nf4"] < held["all", "stored"] < held["attention", "stored"]
    assert held["attention", "stored"] < held["attention", None] == held["all", None]
    assert planned(precision="bf16-true").published is None
    # What does not fit unpacked, fits as it is.
    stored = found["all", "stored"]
    size = f"{stored.memory.high_bytes // 2**20 + 1}MiB"

    def attempt(changed: Sequence[Override]) -> Planned:
        if changed and changed[0][0] != "quantize":
            raise UserError("not this one")
        keys["quantize"] = dict(changed).get("quantize")
        return planned(str(tmp_path / "all"), size, **keys)

    change = next(c for c in changes_that_fit(attempt(()), attempt) if c.planned.fits)
    assert change.overrides == (("quantize", "stored"),)


@pytest.mark.slow
def test_offloaded_tensors_are_in_host_memory() -> None:
    device = planned(devices=2, strategy="fsdp").memory
    host = planned(devices=2, strategy="fsdp", strategy__cpu_offload=True).memory
    assert host.peak_bytes < device.peak_bytes
    assert host.host_bytes - device.host_bytes == sum(host.offloaded_bytes.values()) > 0


@pytest.mark.slow
def test_copies_of_a_model_on_several_nodes_need_what_the_ranks_of_one_node_need() -> None:
    keys = {"devices": 2, "strategy": "fsdp", "train__micro_batch_size": 1}
    one = planned(**keys).memory
    both = planned(**keys, num_nodes=2, strategy__sharding="HYBRID_SHARD").memory
    assert both.breakdown_bytes == one.breakdown_bytes


@pytest.mark.slow
def test_inputs_of_checkpointed_blocks_are_in_host_memory_instead() -> None:
    """There are 6 blocks, 128 wide; 4 sequences of 63 positions, in page-locked memory.

    The inputs of the last two blocks stay on the device too.
    """
    keys = {"memory__activation_checkpointing": True, "train__micro_batch_size": 4}
    device = planned(MODEL, precision="32-true", **keys).memory
    host = planned(MODEL, precision="32-true", **keys, memory__offload_activations=True).memory
    one = 4 * 63 * 128 * 4
    assert host.offloaded_bytes == {"activations": 6 * 2 ** math.ceil(math.log2(one))}
    saved = device.breakdown_bytes["activations"] - host.breakdown_bytes["activations"]
    assert device.moment == host.moment and saved == (6 - 2) * one
    assert host.host_bytes - device.host_bytes == host.offloaded_bytes["activations"]


@pytest.mark.slow
def test_rows_in_page_locked_host_memory_take_powers_of_two() -> None:
    keys = {"devices": 3, "strategy": "fsdp", "strategy__cpu_offload": True}
    memory = planned(**keys, precision="32-true").memory
    rows_bytes = memory.trained_parameters * 4 / 3
    embedding_bytes = 50304 * 128 * 4 / 3
    # A third of the embedding, and of the head, is a little more than 8 MiB.
    rounded_bytes = rows_bytes + 2 * (2**24 - embedding_bytes)
    for kind in ("parameters", "gradients"):
        assert memory.offloaded_bytes[kind] == pytest.approx(rounded_bytes, rel=0.05)
    assert memory.offloaded_bytes["optimizer_state"] == pytest.approx(2 * rows_bytes, rel=0.01)


@pytest.mark.slow
def test_steps_are_known_where_the_data_is(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    file.write_text(json.dumps(make_records(60)))
    found = planned(
        data="JSON", data__json_path=str(file), data__val_split_fraction=0.2, train__epochs=2
    )
    assert (found.samples, found.steps) == (48, 6)
    assert planned().steps is None
    assert planned(train__max_steps=7).steps == 7


@pytest.mark.slow
def test_a_plan_says_what_the_reference_of_pairs_costs(tmp_path: Path) -> None:
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(make_pairs(20)))
    keys: dict[str, object] = {
        "objective": "dpo",
        "data": "JSON",
        "data__json_path": str(file),
        "data__val_split_fraction": 0.2,
        "train__global_batch_size": 5,
        "train__max_steps": 2,
        "train__epochs": None,
    }
    full = planned(**keys)
    assert full.reference is not None and not full.reference.in_every_step
    assert full.reference.sequences == 2 * 5 * 2, "of the pairs that two steps take"
    assert full.reference.kept_bytes == 16 * 2 * 8
    assert says(plain_text(plan_table(full), 200), "reference ... before the first step ... 33.3 %")
    assert full.reference.other_bytes is None
    other = planned(**keys, lora_query=True, reference="random:pythia-31m", precision="bf16-true")
    assert other.reference is not None and other.reference.other_bytes is not None
    assert 2 * 30e6 < other.reference.other_bytes < 2 * 32e6
    assert says(plain_text(plan_table(other), 200), "reference ... pythia-31m ... of weights")
    assert other.reference.more_fraction > full.reference.more_fraction
    below = planned(**keys, lora_query=True)
    assert below.reference is not None and below.reference.in_every_step
    assert below.as_dict()["reference"]["sequences"] is None
    assert below.reference.more_fraction == pytest.approx(0.5, abs=0.01)
    assert says(plain_text(plan_table(below), 200), "reference ... one more forward pass")
    assert planned().reference is None


@pytest.mark.slow
def test_a_plan_counts_the_passes_of_kto_on_mismatched_sequences(tmp_path: Path) -> None:
    file = tmp_path / "labelled.json"
    records = [
        {"prompt": "name colours", "completion": "red", "label": bool(number % 2)}
        for number in range(20)
    ]
    file.write_text(json.dumps(records))
    found = planned(objective="kto", data="JSON", data__json_path=str(file), lora_query=True)
    assert found.reference is not None and found.reference.in_every_step
    # Three passes, each of which takes half of what a step of LoRA does.
    assert found.reference.more_fraction == pytest.approx(1.5, abs=0.02)
    assert says(plain_text(plan_table(found), 200), "reference ... two more ... one of the model")


@pytest.mark.slow
def test_a_plan_says_what_a_teacher_costs() -> None:
    keys: dict[str, object] = {"objective": "distill", "lora_query": True, "precision": "bf16-true"}
    found = planned(**keys, teacher=shallow(), gpu="600MiB")
    teacher = found.beside
    assert teacher is not None and (teacher.key, teacher.name) == ("teacher", found.base_model)
    assert teacher.parameters == found.memory.parameters - found.memory.trained_parameters
    assert teacher.rank_bytes == 2 * teacher.parameters
    # There are two of them.
    in_peak = found.memory.breakdown_bytes["parameters"]
    assert in_peak == pytest.approx(2 * teacher.rank_bytes, rel=0.03)
    assert teacher.more_fraction == pytest.approx(0.5, abs=0.02)
    shown = plain_text(plan_table(found), 200)
    assert found.fits is False and says(shown, "does not fit ... of it for ... the teacher")
    assert says(shown, f"pythia, {teacher.parameters:,} parameters", "more operations")
    assert found.as_dict()["beside"]["rank_bytes"] == teacher.rank_bytes


@pytest.mark.slow
def test_a_plan_counts_a_share_of_a_teacher_that_is_sharded_beside_a_whole_student() -> None:
    keys: dict[str, object] = {"objective": "distill", "lora_query": True, "precision": "bf16-true"}
    keys |= {"teacher": "random:pythia-410m", "devices": 4, "strategy": "ddp"}
    whole, sharded = planned(**keys), planned(**keys, memory__shard_model_beside=True)
    assert whole.beside is not None and sharded.beside is not None
    assert sharded.beside.rank_bytes * 4 == whole.beside.rank_bytes
    saved = whole.beside.rank_bytes - sharded.beside.rank_bytes
    in_peak = [one.memory.breakdown_bytes["parameters"] for one in (whole, sharded)]
    assert in_peak[0] - in_peak[1] == pytest.approx(saved, rel=0.01)
    assert whole.memory.peak_bytes - sharded.memory.peak_bytes > saved / 2

    size = f"{(whole.least_bytes + sharded.memory.high_bytes) // 2**21}MiB"
    whole, sharded = (dataclasses.replace(one, gpu=find_gpu(size)) for one in (whole, sharded))
    assert whole.fits is False and sharded.fits

    def attempt(changed: Sequence[Override]) -> Planned:
        if [key for key, _ in changed] != ["memory.shard_model_beside"]:
            raise UserError("not this one")
        return sharded

    (only,) = changes_that_fit(whole, attempt, most=1)
    assert only.overrides == (("memory.shard_model_beside", "true"),)


@pytest.mark.slow
def test_a_plan_says_what_a_reference_in_every_step_costs(tmp_path: Path) -> None:
    file = tmp_path / "labelled.json"
    file.write_text(json.dumps(make_labelled(20)))
    data = {"data": "JSON", "data__json_path": str(file), "precision": "bf16-true"}
    found = planned(objective="kto", reference=shallow(), gpu="200MiB", **data)
    beside = found.beside
    assert beside is not None and (beside.key, beside.name) == ("reference", found.base_model)
    assert beside.parameters == found.memory.parameters
    assert beside.rank_bytes == 2 * beside.parameters
    in_peak = found.memory.breakdown_bytes["parameters"]
    assert in_peak == pytest.approx(2 * beside.rank_bytes, rel=0.03)
    # Three passes, each of which takes a third of what a step takes.
    assert found.reference is None and beside.more_fraction == pytest.approx(1, abs=0.02)
    shown = plain_text(plan_table(found), 200)
    assert found.fits is False and says(shown, "does not fit ... of it for ... the reference")
    assert says(shown, f"reference ... {beside.parameters:,} parameters", "two forward passes")


@pytest.mark.slow
def test_a_plan_says_that_a_reference_does_not_fit(tmp_path: Path) -> None:
    """It has 405 million parameters; the trained model has 14."""
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(make_pairs(20)))
    keys: dict[str, object] = {
        "objective": "dpo",
        "data": "JSON",
        "data__json_path": str(file),
        "lora_r": 8,
        "precision": "32-true",
        "reference": "random:pythia-410m",
    }
    found = planned(**keys, gpu="2GiB")
    assert found.fits is False and found.memory.high_bytes < 2 * 2**30
    assert found.reference is not None
    assert found.least_bytes == found.reference.least_bytes > 4 * 405e6
    shown = plain_text(plan_table(found), 200)
    assert says(shown, "does not fit ... for the reference, before training")
    # A checkpoint has what it computed.
    resumed = planned(**keys, gpu="2GiB", resume="auto")
    assert resumed.reference is not None and resumed.fits


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, "of the environment"])
def test_data_are_read_with_the_access_token_of_the_recipe(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = []

    def read(*arguments: Any, **more: Any) -> SequenceLength:
        tokens.append(os.environ.get("HF_TOKEN"))
        return sequence_length(*arguments, **more)

    monkeypatch.delenv("HF_TOKEN", raising=False)
    if before is not None:
        monkeypatch.setenv("HF_TOKEN", before)
    monkeypatch.setattr("ftkit.planning.predict.sequence_length", read)
    keys = [("checkpoint_dir", shallow()), ("train.max_seq_length", "64")]
    plan_files((), [*keys, ("access_token", "hf_secret")])
    assert tokens == ["hf_secret"]
    assert os.environ.get("HF_TOKEN") == before


def test_a_gpu_is_given_by_name_or_by_size() -> None:
    assert find_gpu("A100-80GB") is GPUS["a100-80gb"]
    assert find_gpu("24GiB").memory_bytes == 24 * 2**30
    with pytest.raises(UserError, match=r"--gpu 24GiB"):
        find_gpu("a1000")


def test_auto_is_the_smallest_gpu_that_programs_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = (
        VisibleGpu(name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory_bytes=79 * 2**30),
        VisibleGpu(name="Tesla V100-SXM2-16GB", capability=(7, 0), memory_bytes=15 * 2**30),
    )
    monkeypatch.setattr("ftkit.planning.gpus.visible_gpus", lambda: shown)
    gpu = find_gpu("auto")
    assert (gpu.name, gpu.memory_bytes) == (shown[1].name, 15 * 2**30)
    assert not (gpu.bf16 or gpu.float8)


def test_auto_without_a_gpu_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_asked_once", lambda: Cuda(torch="2.13.0", error="No driver."))
    with pytest.raises(UserError, match=key_words("--gpu is auto ... No driver ... Name a GPU")):
        find_gpu("auto")


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_offers_a_little_less_than_its_name_says(name: str) -> None:
    sold_gb = {
        "a100-40gb": 40, "a100-80gb": 80, "h100": 80, "h100-nvl": 94, "h200": 141, "gh200": 96,
        "b200": 180, "a10": 24, "a10g": 24, "l4": 24, "l40": 48, "l40s": 48, "a40": 48,
        "a6000": 48, "rtx3090": 24, "rtx4090": 24, "rtx5090": 32, "v100-16gb": 16,
        "v100-32gb": 32, "t4": 16, "v5e": 16, "v5p": 95, "v6e": 32,
    }[name]  # fmt: skip
    offered_gb = GPUS[name].memory_bytes / 2**30
    if GPUS[name].kind == "tpu":  # what its runtime takes is not known
        assert offered_gb == sold_gb
    else:
        assert 0.9 * sold_gb < offered_gb < sold_gb
    assert GPUS[name].bf16 == (not name.startswith(("v100", "t4")))
    without = ("a100", "a10", "a40", "a6000", "rtx3090", "v100", "t4")
    assert GPUS[name].float8 == (not name.startswith(without))


@pytest.mark.slow
def test_float8_is_only_planned_for_gpus_that_have_it() -> None:
    words = ["plan", "finetune_full", "--checkpoint_dir", shallow(), "--train.max_seq_length", "64"]
    words += ["--float8", "true", "--precision", "bf16-true"]
    assert run([*words, "--gpu", "l4"]) == 0
    with pytest.raises(UserError, match=key_words("float8 is true ... a100-40gb")):
        run([*words, "--gpu", "a100-40gb"])


@pytest.mark.slow
def test_json_is_all_that_is_written_and_the_exit_code_says_whether_it_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", shallow(), "--train.max_seq_length", "64", "--format", "json"]
    assert run([*words, "--gpu", "t4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True and found["gpu"] == "t4"
    assert sum(found["breakdown_bytes"].values()) == found["peak_bytes"]
    assert run([*words, "--gpu", "100MiB"]) == 3
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert run(words) == 0
    here = json.loads(capsys.readouterr().out)
    assert here["fits"] is True and (here["gpu"], here["accelerator"]) == (HOST, "cpu")


@pytest.mark.slow
def test_several_plans_are_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--checkpoint_dir", shallow(), "--train.max_seq_length", "64"]
    assert run([*words, "--sweep", "train.micro_batch_size=1,2", "--gpu", "t4"]) == 0
    table = capsys.readouterr().out
    assert "micro_batch_size 1" in table and "micro_batch_size 2" in table
    assert table.count(" fits") == 2
    assert "next:" not in table


@pytest.mark.slow
def test_the_runs_of_a_sweep_are_planned_with_the_keys_for_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(f"checkpoint_dir: {shallow()}\nseed: 2")
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        "runs:\n"
        "  - {name: all, command: finetune_full, config: recipe.yaml, train.micro_batch_size: 2}\n"
        "  - {name: few, command: finetune, config: recipe.yaml, train.max_seq_length: 32,\n"
        "     note: ran elsewhere}\n"
    )
    words = [str(sweep), "--train.max_seq_length", "64"]
    assert run(["plan", *words]) == 0
    assert capsys.readouterr().out.endswith("\nfew: ran elsewhere\n")
    assert run(["plan", *words, "--format", "json"]) == 0
    full, lora = json.loads(capsys.readouterr().out)
    assert (full["note"], lora["note"]) == (None, "ran elsewhere")
    assert (full["name"], full["method"], full["micro_batch_size"]) == ("all", "full", 2)
    assert (lora["name"], lora["method"], lora["max_seq_length"]) == ("few", "lora", 64)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("width", "there", "left_out"),
    [(140, "host", None), (120, "gradients", "host"), (70, "precision", "gradients")],
)
def test_a_table_shows_what_a_terminal_has_room_for(
    width: int, there: str, left_out: str | None
) -> None:
    text = plain_text(side_by_side([planned(gpu="t4"), planned(gpu="v100-32gb")], width), width)
    head, first, second, *rest = text.splitlines()
    assert there in head and first.endswith(" fits") and second.endswith(" fits")
    assert max(map(len, (head, first, second))) <= width
    assert left_out is None or (left_out not in head and left_out in " ".join(rest))


@pytest.mark.slow
def test_a_narrow_plan_keeps_numbers_and_units_together() -> None:
    table = plan_table(planned(gpu="100MiB"))
    _, rows = plain_text(table, 200).split("\n", 1)
    for width in range(40, 84):
        text = plain_text(table, width)
        assert max(map(len, text.splitlines())) <= width
        assert re.search(r"\d *\n +([KMG]iB|B|%)", text) is None
        assert text.partition("\n")[2].split() == rows.split()


@pytest.fixture
def long_data(tmp_path: Path) -> str:
    """Records of which the longest has some thousands of tokens."""
    records = make_records(59)
    records.insert(30, {"instruction": "tell", "input": "", "output": "moon tree " * 2000})
    return data_of(tmp_path / "long", records)


@pytest.fixture
def short_data(tmp_path: Path) -> str:
    return data_of(tmp_path / "short", make_records(60))


def data_of(directory: Path, records: list[dict[str, str]]) -> str:
    directory.mkdir()
    (directory / "train.json").write_text(json.dumps(records))
    (directory / "val.json").write_text(json.dumps(make_records(4)))
    return str(directory)


def of(data: str) -> dict[str, object]:
    return {"data": "JSON", "data__json_path": data}


@pytest.mark.slow
def test_lora_of_a_model_with_a_long_context_fits_where_its_samples_are_short(
    short_data: str,
) -> None:
    found = planned(
        "random:Llama-3.2-1B", "h100", lora_r=8, train__max_seq_length=None, **of(short_data)
    )
    assert found.fits is True and found.max_seq_length == 131_072
    assert found.length.source == "data" and 50 < found.length.tokens < 400
    assert found.tokens_per_step == 16 * (found.length.tokens - 1)
    assert found.as_dict()["longest_sample_tokens"] == found.length.tokens


@pytest.mark.slow
def test_a_plan_is_for_the_longest_sample_that_training_makes(
    long_data: str, short_data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = read_blueprint(MODEL)
    data: Any = {"class_path": "JSON", "init_args": {"json_path": long_data}}
    made = load_data(data, base.tokenizer, 512)
    found = sequence_length(data, base, None)
    assert (found.source, found.tokens) == ("data", 512) == ("data", made.train.lengths.max() + 1)
    words = [
        "plan",
        "--checkpoint_dir",
        shallow(),
        "--data",
        "JSON",
        "--data.json_path",
        short_data,
    ]
    assert run(words) == 0
    assert " tokens: the longest sample" in capsys.readouterr().out


@pytest.mark.extensions
@pytest.mark.parametrize("cached", [False, True])
def test_the_longest_sample_of_several_sources_is_planned_for(
    long_data: str, short_data: str, cached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path))
    base = read_blueprint(MODEL)
    entries = [{"path": short_data, "weight": 2}, {"path": long_data, "samples": 7}]
    data: Any = {"class_path": "JSON", "init_args": {"sources": entries, "seed": int(cached)}}
    if cached:
        load_data(data, base.tokenizer, 512)
        monkeypatch.setattr("ftkit.planning.sequence_length.longest_sample", None)
    found = sequence_length(data, base, None)
    made = load_data(data, base.tokenizer, 512)
    assert (found.source, found.tokens) == ("data", made.train.lengths.max() + 1)
    assert found.train_samples == made.samples_per_epoch
    lengths = made.parts[0].splits["train"].samples.lengths
    assert found.trained.at_least == lengths.max() + 1, "not every epoch has the longest"


@pytest.mark.extensions
@pytest.mark.parametrize("cached", [False, True])
def test_the_longest_sample_of_sets_to_validate_on_is_planned_for(
    long_data: str, short_data: str, cached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path))
    base = read_blueprint(MODEL)
    data: Any = {"class_path": "JSON", "init_args": {"json_path": short_data, "seed": int(cached)}}
    long = f"{long_data}/train.json"
    sets = {"long": long, "elsewhere": "owner/name"}
    alone = sequence_length(data, base, None)
    if cached:
        load_data(data, base.tokenizer, 512)
        load_sets(data, {"long": long}, base.tokenizer, 512)
        monkeypatch.setattr("ftkit.planning.sequence_length.longest_sample", None)
    found = sequence_length(data, base, None, sets)
    assert alone.tokens < 400 < found.tokens == 512
    assert (found.source, found.train_samples) == ("data", alone.train_samples)
    assert found.trained == alone.trained


@pytest.mark.extensions
def test_lengths_of_conversations_are_unknown_without_the_tokenizer(
    tmp_path: Path, tiny_base: Path
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_base / "config.json").read_bytes())
    turns = [{"role": "user", "content": "red?"}, {"role": "assistant", "content": "blue"}]
    chats = tmp_path / "chats.json"
    chats.write_text(json.dumps([{"messages": turns}] * 20))
    length = planned(str(tmp_path), train__max_seq_length=60, **of(str(chats))).length
    assert (length.source, length.tokens) == ("max_seq_length", 60)
    assert length.words.endswith("the tokenizer is not on this machine")


def test_without_the_tokenizer_the_bytes_are_the_bound(
    tmp_path: Path, tiny_base: Path, tiny_data: Path
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_base / "config.json").read_bytes())
    exact, bound = (
        planned(str(base), train__max_seq_length=None, **of(str(tiny_data))).length
        for base in (tiny_base, tmp_path)
    )
    assert (exact.source, bound.source) == ("data", "bytes")
    assert exact.tokens < bound.tokens <= 256
    assert "no tokenizer found" in bound.words


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("model", "given", "tokens", "source"),
    [
        ("random:Llama-3.2-1B", 300, 300, "max_seq_length"),
        ("random:Llama-3.2-1B", None, 2048, "assumed"),
        (MODEL, None, 512, "model_context"),
    ],
)
def test_a_plan_states_the_assumed_length_of_data_that_are_not_local(
    model: str, given: int | None, tokens: int, source: str
) -> None:
    data: Any = {"class_path": "Alpaca2k", "init_args": {}}
    found = sequence_length(data, read_blueprint(model), given)
    assert (found.tokens, found.source) == (tokens, source)
    assert f"{tokens:,} tokens" in found.words and "not known" in found.words
    assert ("--train.max_seq_length N" in found.words) == (source == "assumed")


@pytest.mark.slow
def test_a_run_certainly_does_not_fit_only_if_the_data_are_known(long_data: str) -> None:
    keys = {"train__max_seq_length": 512, "train__micro_batch_size": 16, "precision": "32-true"}
    needed = planned(gpu="100MiB", **keys, **of(long_data)).least_bytes
    size = f"{needed // 2**20 - 1}MiB"
    assert planned(gpu=size, **keys, **of(long_data)).fits is False
    assert planned(gpu=size, **keys).fits is None, "the samples may be shorter"
    assert planned(gpu="200MiB", **keys).fits is False, "the weights alone do not fit"


@pytest.mark.parametrize(
    ("keys", "rows", "positions"),
    [
        ({}, 4, 299),
        ({"train.global_batch_size": 6}, 1, 299),
        ({"train.micro_batch_tokens": 5000}, 1, 299),
        ({"train.max_steps": 15}, 1, 299),
        ({"train.max_steps": 14}, 1, 1),
        ({"train.epochs": 1}, 1, 299),
        ({"train.max_time": 60}, 1, 1),
        ({"resume": "auto"}, 1, 1),
    ],
)
def test_the_certain_micro_batch_follows_from_the_steps_of_the_run(
    keys: dict[str, object], rows: int, positions: int
) -> None:
    batch = {"train.global_batch_size": 4, "train.micro_batch_size": 4, "train.epochs": 2}
    values = {"checkpoint_dir": MODEL} | batch | keys
    overrides = [(key, json.dumps(value)) for key, value in values.items()]
    recipe = read_recipe([], overrides, method="full")
    made = make_plan(recipe, Devices(accelerator="cpu", count=1))
    known = Longest(at_most=300, at_least=300, label_tokens=200, is_exact=True)
    length = SequenceLength(tokens=300, source="data", trained=known, train_samples=60)
    steps = make_schedule(recipe.train, 60, 1e-3)[0].total_steps
    found = certain_micro_batch(made, length, steps)
    assert (found.sequences, found.positions) == (rows, positions)
    assert found.targets == (200 + rows - 1 if positions > 1 else 1)
    unknown = SequenceLength(tokens=300, source="max_seq_length")
    assert certain_micro_batch(made, unknown, steps).positions == 1


@pytest.mark.slow
def test_shorter_samples_are_the_last_advice_and_warn_of_their_effect(long_data: str) -> None:
    keys = {"train__max_seq_length": 512, "train__micro_batch_size": 1, "precision": "32-true"}
    usual = planned(**keys, **of(long_data))
    least = planned(**keys | {"train__max_seq_length": 160}, **of(long_data))
    size = f"{least.memory.high_bytes // 2**20 + 1}MiB"
    original = planned(gpu=size, **keys, **of(long_data))
    assert usual.memory.high_bytes > find_gpu(size).memory_bytes

    def attempt(changed: Sequence[Override]) -> Planned:
        if [key for key, _ in changed] != ["train.max_seq_length"]:
            raise UserError("not this one")
        return planned(gpu=size, **keys | {"train__max_seq_length": int(changed[0][1])})

    (only,) = changes_that_fit(original, attempt)
    assert only.overrides == (("train.max_seq_length", "128"),) and only.planned.fits
    assert only.title == "samples cut to 128 tokens, which changes training"


@pytest.mark.slow
def test_fit_names_updates_in_the_backward_pass_where_they_are_enough() -> None:
    one: dict[str, object] = {
        "precision": "bf16-true",
        "train__global_batch_size": 1,
        "train__micro_batch_size": 1,
        "train__max_seq_length": 8,
    }
    updated = planned(**one, train__optimizer_in_backward=True).memory
    original = planned(**one, gpu=f"{updated.high_bytes // 2**20 + 1}MiB")

    def attempt(overrides: Sequence[Override]) -> Planned:
        assert original.gpu
        changes = {key.replace(".", "__"): json.loads(value) for key, value in overrides}
        return planned(**one | changes, gpu=f"{original.gpu.memory_bytes // 2**20}MiB")

    (first,) = changes_that_fit(original, attempt, most=1)
    assert first.title == "updates in the backward pass"
    assert first.planned.plan.recipe.train.optimizer_in_backward


@pytest.mark.slow
def test_fit_lists_changes_that_fit_with_command_lines_that_plan_the_same(
    capsys: pytest.CaptureFixture[str], long_data: str, tmp_path: Path
) -> None:
    from transformers import LlamaConfig

    # Activations take most of it, also those that the one long sample needs for certain.
    model = str(tmp_path / "llama")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2}
    LlamaConfig(
        architectures=["LlamaForCausalLM"], num_attention_heads=8, vocab_size=32000, **sizes
    ).save_pretrained(model)
    make_tokenizer(Path(model))
    keys = ["finetune_full", "--checkpoint_dir", model]
    keys += ["--train.max_seq_length", "2048", "--precision", "32-true"]
    keys += ["--data", "JSON", "--data.json_path", long_data]
    keys += ["--train.micro_batch_size", "8", "--train.global_batch_size", "8"]
    values: dict[str, object] = {"train__max_seq_length": 2048}
    values |= {"train__micro_batch_size": 8, "train__global_batch_size": 8} | of(long_data)
    needed = planned(model, gpu="100MiB", precision="32-true", **values).least_bytes
    size = f"{needed * 0.95 / 2**20:.0f}MiB"
    assert run(["plan", *keys, "--gpu", size, "--fit", "--format", "json"]) == 3
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert [change["title"] for change in changes][:2] == [
        "smaller micro-batch, same global batch",
        "16-bit numbers",
    ]
    assert all(change["plan"]["fits"] is not False for change in changes)
    for change in changes[:2]:
        program, command, *words = shlex.split(change["command"])
        assert program == "ftkit"
        assert run(["plan", command, *words, "--gpu", size, "--format", "json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["peak_bytes"] == change["plan"]["peak_bytes"]


@pytest.mark.extensions
def test_on_a_narrow_terminal_words_stay_whole_and_commands_can_be_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Narrow(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "40")
    fits = planned(gpu="24GiB")
    command = "ftkit finetune --strategy fsdp --strategy.cpu_offload true"
    title = "parameters and optimizer in host memory"
    change = Change(title=title, overrides=(), planned=fits)
    with redirect_stdout(Narrow()) as shown:
        show_changes(fits, [(change, command)], "table")
    *_, head, rest, copied = shown.getvalue().splitlines()
    assert head == "parameters and optimizer in host memory:"
    assert rest.startswith("needs ") and copied == f"  {command}"


@pytest.mark.slow
def test_several_changes_are_combined_where_one_is_not_enough(long_data: str) -> None:
    base = {"precision": "32-true", "train__micro_batch_size": 1} | of(long_data)
    least = planned(**base, memory__activation_checkpointing=True, lora_r=8, quantize="bnb.nf4-dq")
    gpu = find_gpu(f"{least.memory.high_bytes / 2**20 + 20:.0f}MiB")
    found = planned(gpu=gpu.name, **base)
    assert found.fits is False

    def attempt(changed: Sequence[Override]) -> Planned:
        return plan_files(
            (),
            [
                ("checkpoint_dir", shallow()),
                ("train.max_seq_length", "64"),
                ("precision", "32-true"),
                ("train.micro_batch_size", "1"),
                ("data", "JSON"),
                ("data.json_path", long_data),
                *changed,
            ],
            gpu=gpu,
        )

    changes = changes_that_fit(found, attempt)
    assert changes and changes[-1].planned.fits is not False


@pytest.mark.slow
def test_the_plan_and_its_verdict_come_before_changes_are_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[str] = []

    def tried(*_: object) -> list[Change]:
        before.append(capsys.readouterr().out)
        return []

    monkeypatch.setattr("ftkit.planning.command.changes_that_fit", tried)
    words = ["plan", shallow(), "--train.max_seq_length", "64", "--gpu", "1MiB", "--fit"]
    assert run(words) == 3
    after = capsys.readouterr().out
    assert says(before[0], "does not fit", "steps") and "does not fit" not in after
    assert says(after, "No change")
    run([*words, "--format", "json"])
    assert before[1] == "" and json.loads(capsys.readouterr().out)["changes"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "words", "following"),
    [
        ("80GiB", ("--fit",), "ftkit finetune --lora_r 4 --checkpoint_dir {}"),
        ("1MiB", (), "ftkit plan {} --lora_r 4 --gpu 1MiB --fit"),
    ],
)
def test_a_plan_ends_with_the_next_command(
    gpu: str, words: tuple[str, ...], following: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["plan", MODEL, "--lora_r", "4", "--gpu", gpu, *words])
    assert capsys.readouterr().out.endswith(f"\nnext:\n  {following.format(MODEL)}\n")


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["80GiB", "1MiB"])
def test_the_next_command_keeps_what_was_said_about_a_foreign_file(
    gpu: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "their.yml"
    data = [{"path": "org/data", "type": "alpaca"}]
    keys = {"base_model": MODEL, "datasets": data, "adapter": "lora", "lora_r": 4}
    keys["lora_target_linear"] = True
    file.write_text(json.dumps(keys | {"learning_rate": 1e-3, "lisa_n_layers": 4}))
    said = ["--without", "lisa_n_layers", "--from_devices", "8"]
    run(["plan", str(file), "--gpu", gpu, *said])
    following = capsys.readouterr().out.rpartition("next:\n")[2]
    assert " ".join(said) in following


@pytest.mark.slow
def test_a_quiet_plan_prints_no_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    run(["plan", shallow(), "--train.max_seq_length", "64", "--gpu", "80GiB", "--quiet"])
    assert "next:" not in capsys.readouterr().out


@pytest.mark.slow
def test_fit_needs_one_plan() -> None:
    with pytest.raises(UserError, match="--gpu a100-80gb --fit"):
        run(["plan", "--checkpoint_dir", shallow(), "--fit", "--sweep", "lora_r=4,8"])
