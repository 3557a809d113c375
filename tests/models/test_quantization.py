"""Promise P1 with a quantised base model or 8-bit optimizers, and what quantisation saves."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from adapters import logits
from bitsandbytes.autograd import _functions
from bitsandbytes.functional import quantize_4bit
from four_bits import numbers_of
from losses import load, loss_of
from rank_jobs import (
    DEEPSPEED,
    HAS_DEEPSPEED,
    NO_EVALUATION,
    Case,
    Outcome,
    Run,
    assert_same_maths,
    make_run,
    needs_deepspeed,
)
from tiny import make_data, make_llama
from transformers_models import make_transformers_model

from ftkit.models.bodies.experts import packed_in
from ftkit.models.flops import flops_per_token, parameter_count
from ftkit.models.language_model import LanguageModel, outline, trainable
from ftkit.models.load_weights import Sharding, Whole, fill
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.models.quantization import EightBit, FourBit, rounded_of_each
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe import LoraRecipe, Quantization
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.report import read_report
from ftkit.strategies.fully_shard import FullyShard
from ftkit.strategies.local_rows import over_local_rows

FOUR_BIT: list[Quantization] = ["bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq"]
KINDS: list[Quantization] = [*FOUR_BIT, "bnb.int8"]
IN_16_BITS: list[tuple[Quantization, str]] = [
    (kind, precision) for kind in KINDS[::4] for precision in ("bf16-mixed", "bf16-true")
]
"""One kind for each class of quantised layers."""
EIGHT_BIT_OPTIMIZERS = ["AdamW8bit", "Lion8bit"]
ONE_CODE = 1e-3
"""What a weight may differ where a value of 8 bits, halfway between two codes, fell the other way;
measured: 3e-4 in one of a thousand weights, under ddp as under fsdp; a step is 3e-3."""


VALIDATED = (
    *NO_EVALUATION,
    ("eval.initial_validation", True),
    ("eval.final_validation", True),
)


def qlora(strategy: str, kind: str, precision: str = "32-true", **settings: Any) -> Case:
    """It validates where it has begun and at its end, and answers nothing."""
    return Case(strategy, "lora", precision, (("quantize", kind), *VALIDATED, *settings.items()))


def eight_bit(strategy: str, optimizer: str) -> Case:
    """In micro-batches of 2: those of 4 bring one number of 25,600 between two codes."""
    changes: tuple[tuple[str, object], ...] = (
        *NO_EVALUATION,
        ("optimizer", f"bitsandbytes.optim.{optimizer}"),
        ("train.micro_batch_size", 2),
    )
    if optimizer == "RMSprop8bit":  # its first step is that of the others times 1 / sqrt(1 - 0.99)
        changes += (("optimizer.lr", 3e-4),)
    return Case(strategy, "full", "32-true", changes)


PLAIN = Case("single", "lora", changes=NO_EVALUATION)
EVALUATED = qlora(
    "single", "bnb.nf4", **{"eval.interval": 2, "eval.max_new_tokens": 3, "eval.exact_match": 2}
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def single(run: Run) -> dict[Case, Outcome]:
    return run(1, [PLAIN, EVALUATED, *(qlora("single", kind) for kind in KINDS)])


@pytest.fixture(scope="module")
def single_rounding(run: Run) -> dict[Case, Outcome]:
    """In 16 bits, and with state of 8 bits."""
    cases = [qlora("single", kind, precision) for kind, precision in IN_16_BITS]
    cases += [eight_bit("single", optimizer) for optimizer in EIGHT_BIT_OPTIMIZERS]
    return run(1, cases)


GATHERED = qlora("fsdp", "bnb.nf4-dq", **{"strategy.sharding": "SHARD_GRAD_OP", "eval.interval": 4})
"""Parameters stay gathered between an evaluation and what follows it."""
STRATEGIES = ["ddp", "fsdp", DEEPSPEED]


@pytest.fixture(scope="module")
def two_ranks(run: Run) -> dict[Case, Outcome]:
    strategies = ["ddp", "fsdp", *(["deepspeed"] if HAS_DEEPSPEED else [])]
    cases = [qlora(strategy, "bnb.nf4-dq") for strategy in strategies]
    return run(2, [*cases, qlora("ddp", "bnb.int8"), GATHERED])


@pytest.fixture(scope="module")
def two_ranks_rounding(run: Run) -> dict[Case, Outcome]:
    """In 16 bits, and with state of 8 bits."""
    strategies = ["ddp", "fsdp", *(["deepspeed"] if HAS_DEEPSPEED else [])]
    cases = [qlora(strategy, "bnb.nf4", "bf16-mixed") for strategy in strategies]
    cases += [eight_bit(strategy, o) for o in EIGHT_BIT_OPTIMIZERS for strategy in ("ddp", "fsdp")]
    return run(2, cases)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_base_model_learns_nearly_as_the_whole_one(
    single: dict[Case, Outcome], kind: Quantization
) -> None:
    assert_learns_nearly_as_whole(single[qlora("single", kind)], single)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "precision"), IN_16_BITS)
def test_in_16_bits_too(
    single: dict[Case, Outcome],
    single_rounding: dict[Case, Outcome],
    kind: Quantization,
    precision: str,
) -> None:
    assert_learns_nearly_as_whole(single_rounding[qlora("single", kind, precision)], single)


def assert_same_learning(found: Outcome, expected: Outcome) -> None:
    assert_same_maths(found, expected, validations=0)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    assert len(found.validation_losses) == 2


def assert_learns_nearly_as_whole(outcome: Outcome, single: dict[Case, Outcome]) -> None:
    losses = outcome.losses
    assert losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(single[PLAIN].losses, rel=5e-3)
    assert losses != single[PLAIN].losses


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_learn_on_a_quantised_base_what_one_learns(
    two_ranks: dict[Case, Outcome], single: dict[Case, Outcome], strategy: str
) -> None:
    found, expected = (
        two_ranks[qlora(strategy, "bnb.nf4-dq")],
        single[qlora("single", "bnb.nf4-dq")],
    )
    assert_same_learning(found, expected)


@pytest.mark.slow
def test_parameters_that_stay_gathered_train_and_save_the_same(
    two_ranks: dict[Case, Outcome], single: dict[Case, Outcome]
) -> None:
    found, expected = two_ranks[GATHERED], single[qlora("single", "bnb.nf4-dq")]
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    weights = found.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_two_ranks_learn_on_an_8_bit_base_what_one_learns(
    two_ranks: dict[Case, Outcome], single: dict[Case, Outcome]
) -> None:
    assert_same_learning(two_ranks[qlora("ddp", "bnb.int8")], single[qlora("single", "bnb.int8")])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_precision_on_a_quantised_base_differs_by_its_rounding_only(
    two_ranks_rounding: dict[Case, Outcome],
    single_rounding: dict[Case, Outcome],
    strategy: str,
) -> None:
    found = two_ranks_rounding[qlora(strategy, "bnb.nf4", "bf16-mixed")].losses
    expected = single_rounding[qlora("single", "bnb.nf4", "bf16-mixed")].losses
    assert found == pytest.approx(expected, rel=3e-3)


@pytest.mark.matrix
@needs_deepspeed
def test_every_option_of_deepspeed_learns_on_a_quantised_base_the_same(
    run: Run, single: dict[Case, Outcome]
) -> None:
    options: list[dict[str, Any]] = [
        {"stage": 1},
        {"stage": 2},
        {"stage": 2, "offload_optimizer": False},
        {"stage": 3, "offload_optimizer": False},
        {"stage": 3, "offload_parameters": True},
    ]
    cases = [
        qlora("deepspeed", "bnb.nf4-dq", **{f"strategy.{k}": v for k, v in chosen.items()})
        for chosen in options
    ]
    for outcome in run(2, cases).values():
        assert_same_learning(outcome, single[qlora("single", "bnb.nf4-dq")])


@pytest.mark.matrix
def test_three_ranks_learn_on_a_quantised_base_what_one_learns(
    run: Run, single: dict[Case, Outcome]
) -> None:
    strategies = ["ddp", "fsdp", *(["deepspeed"] if HAS_DEEPSPEED else [])]
    outcomes = run(3, [qlora(strategy, "bnb.nf4-dq") for strategy in strategies])
    for outcome in outcomes.values():
        assert_same_learning(outcome, single[qlora("single", "bnb.nf4-dq")])


@pytest.mark.slow
def test_evaluating_between_steps_never_changes_training(single: dict[Case, Outcome]) -> None:
    expected = single[qlora("single", "bnb.nf4")]
    assert len(read_validations(single[EVALUATED])) > 3
    assert single[EVALUATED].losses == expected.losses


def read_validations(outcome: Outcome) -> list[str]:
    return (outcome.out_dir / "validation.csv").read_text().splitlines()


@pytest.mark.slow
def test_the_adapter_of_a_quantised_base_fits_the_whole_model(
    single: dict[Case, Outcome], base_dir: Path, tmp_path: Path
) -> None:
    """In PEFT: on the same dequantised weights with the run's loss, on the exact ones nearly."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    outcome = single[qlora("single", "bnb.nf4-dq")]
    samples = load(base_dir, make_data(tmp_path / "records.json")).val
    everything = range(len(samples))
    losses = []
    for quantised in (True, False):
        model = AutoModelForCausalLM.from_pretrained(base_dir)
        for layer in model.model.layers.modules():
            if quantised and isinstance(layer, nn.Linear):
                layer.weight.data = numbers_of(
                    *quantize_4bit(layer.weight.data, compress_statistics=True, quant_type="nf4")
                )
        adapted = PeftModel.from_pretrained(model, outcome.out_dir / "final").eval()
        losses.append(loss_of(adapted, samples, everything))
    assert losses[0] == pytest.approx(outcome.validation_losses[-1], rel=1e-5)
    assert losses[1] == pytest.approx(outcome.validation_losses[-1], rel=5e-3)
    heads = [t for name, t in outcome.weights().items() if "lm_head.lora_B" in name]
    assert len(heads) == 1 and heads[0].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_report_counts_numbers_and_not_bytes(
    single: dict[Case, Outcome], kind: Quantization
) -> None:
    found, expected = (
        read_report(RunDirectory(single[case].out_dir).rank(0).report).resolved
        for case in (qlora("single", kind), PLAIN)
    )
    assert found is not None and expected is not None
    assert found.parameters == expected.parameters
    assert found.trainable_parameters == expected.trainable_parameters
    assert found.quantize == kind


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def base(base_dir: Path) -> BaseModel:
    return open_base(str(base_dir))


def lora_recipe(kind: Quantization | None, base: BaseModel, **keys: Any) -> LoraRecipe:
    keys |= {"checkpoint_dir": str(base.directory), "lora_head": "true"}
    if kind is not None:
        keys["quantize"] = kind
    recipe = read_recipe([], [(key, str(value)) for key, value in keys.items()], method="lora")
    assert isinstance(recipe, LoraRecipe)
    return recipe


def build(
    base: BaseModel, kind: Quantization | None, dtype: torch.dtype, sharding: Sharding | None = None
) -> LanguageModel:
    model = outline(base, lora_recipe(kind, base), dtype)
    fill(
        model,
        base,
        sharding=sharding or Whole(),
        device=torch.device("cpu"),
        rope_length=16,
        seed=0,
        progress=lambda done, total: None,
    )
    return model


def quantised_layers(model: nn.Module) -> dict[str, FourBit | EightBit]:
    return {n: m for n, m in model.named_modules() if isinstance(m, FourBit | EightBit)}


@pytest.mark.extensions
@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_of_the_blocks_are_quantised_and_nothing_else(
    base: BaseModel, kind: Quantization
) -> None:
    model = outline(base, lora_recipe(kind, base), torch.float32, torch.bfloat16)
    layers = quantised_layers(model)
    assert len(layers) == 2 * 7
    assert {layer.compute_dtype for layer in layers.values()} == {torch.bfloat16}
    assert all(name.startswith("body.transformer.h.") for name in layers)
    for name, parameter in model.named_parameters():
        assert parameter.is_meta
        assert parameter.requires_grad == (".lora_" in name)
        if name.removesuffix(".weight") not in layers:
            assert parameter.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_counts_do_not_depend_on_how_weights_are_stored(
    base: BaseModel, kind: Quantization
) -> None:
    plain = outline(base, lora_recipe(None, base), torch.float32)
    quantised = outline(base, lora_recipe(kind, base), torch.float32)
    assert parameter_count(plain) == sum(p.numel() for p in plain.parameters())
    assert parameter_count(quantised) == parameter_count(plain)
    counted = {"attention_length": 10, "label_fraction": 0.5}
    assert flops_per_token(quantised, **counted) == flops_per_token(plain, **counted)


@pytest.mark.parametrize(
    ("kind", "bytes_per_weight"),
    [
        ("bnb.nf4", 0.5 + 4 / 64),
        ("bnb.fp4", 0.5 + 4 / 64),
        ("bnb.nf4-dq", 0.5 + 1 / 64 + 4 / (64 * 256)),
        ("bnb.fp4-dq", 0.5 + 1 / 64 + 4 / (64 * 256)),
        ("bnb.int8", 1 + 4 / 256),
    ],
)
def test_a_quantised_layer_keeps_its_packed_weight_and_scales_alone(
    tmp_path: Path, kind: Quantization, bytes_per_weight: float
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4}
    base = open_base(str(make_llama(tmp_path / "tiny", **sizes)))
    weights = 256 * 256
    during = []

    def watch(done: int, total: int) -> None:
        if done == total // 2:
            during.append(whole_weights())

    def whole_weights() -> int:
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
        whole = [t for t in tensors if t.dtype == torch.float32 and t.numel() == weights]
        return len({t.untyped_storage().data_ptr() for t in whole if not t.is_meta})

    before = whole_weights()
    model = outline(base, lora_recipe(kind, base), torch.float32, torch.bfloat16)
    cpu = torch.device("cpu")
    fill(model, base, sharding=Whole(), device=cpu, rope_length=16, seed=0, progress=watch)
    assert during == [before + 1], "the one that is being quantised"
    assert whole_weights() == before
    layers = quantised_layers(model)
    assert len(layers) == 14
    for layer in layers.values():
        assert bytes_of(layer) == pytest.approx(weights * bytes_per_weight, rel=0.02)
        assert layer.unpacked(layer.weight).dtype == torch.bfloat16


def bytes_of(layer: FourBit | EightBit) -> int:
    """Of everything that grows with the layer."""
    tensors = [layer.weight]
    if isinstance(layer, EightBit):
        assert isinstance(layer.state.SCB, torch.Tensor)
        tensors.append(layer.state.SCB)
    else:
        assert layer.quant_state is not None
        tensors.append(layer.quant_state.absmax)
        if layer.quant_state.nested:
            tensors.append(layer.quant_state.state2.absmax)
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.extensions
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_layer_computes_what_its_dequantised_weight_does(
    base: BaseModel, kind: Quantization
) -> None:
    layer = quantised_layers(build(base, kind, torch.float32))["body.transformer.h.1.mlp.proj"]
    x = torch.randn(3, layer.in_features, requires_grad=True)
    layer(x).square().sum().backward()
    found, x.grad = x.grad, None
    expected = x @ layer.unpacked(layer.weight).T
    expected.square().sum().backward()
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["falcon_mamba", "glm_moe_dsa", "jamba", "mamba"])
def test_layers_whose_weights_the_model_reads_are_not_quantised(tmp_path: Path, model: str) -> None:
    base = open_base(str(make_transformers_model(tmp_path / "base", model)))
    quantised, plain = (build(base, kind, torch.float32) for kind in ("bnb.nf4", None))
    layers = quantised_layers(quantised)
    assert layers and not any(name.endswith(("dt_proj", "weights_proj")) for name in layers)
    with torch.no_grad():
        for name, layer in layers.items():
            plain.get_parameter(f"{name}.weight").copy_(layer.unpacked(layer.weight))
        for name, module in quantised.named_modules():
            for kind, packed in packed_in(module).items():
                whole = plain.get_parameter(f"{name}.{kind}")
                whole.copy_(rounded_of_each(whole, "bnb.nf4", transposed=packed.transposed))
        torch.testing.assert_close(logits(quantised), logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_8_bit_layer_rounds_its_weight_alone_on_every_device(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With features as large as those of 7B models, of which bitsandbytes' product loses 5 %.

    That product computes one thing on CPUs and another on GPUs.
    """
    for product in (_functions.MatMul8bitLt, _functions.MatMul8bitFp):
        monkeypatch.setattr(product, "apply", lambda *_: pytest.fail("bitsandbytes multiplies"))
    generator = torch.Generator().manual_seed(0)
    whole = nn.Linear(256, 128)
    layer = EightBit(whole, dtype)
    layer.weight = nn.Parameter(layer.pack(whole.weight.data), requires_grad=False)
    layer.bias = nn.Parameter(whole.bias.detach(), requires_grad=False)
    x = torch.randn(64, 256, generator=generator).to(dtype)
    x[:, :6] *= 60
    assert layer.state.SCB is not None
    weight = layer.weight.double() * layer.state.SCB.double()[:, None] / 127
    expected = x.double() @ weight.T + whole.bias.double()
    error = (layer(x).double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 5e-3}[dtype]


def test_no_layer_lets_bitsandbytes_repack_its_weight(base: BaseModel) -> None:
    model = build(base, "bnb.nf4", torch.float32)
    layers = quantised_layers(model).values()
    before = [layer.weight.clone() for layer in layers]
    with torch.no_grad():
        model.eval()(torch.ones(1, 4, dtype=torch.long), torch.arange(4))
    for layer, weight in zip(layers, before, strict=True):
        assert isinstance(layer, FourBit) and not layer.support_avx512bf16_for_cpu
        assert torch.equal(layer.weight, weight)


@pytest.fixture
def one_of_two_ranks() -> Iterator[Any]:
    """The mesh of rank 1 of two, whose messages go nowhere."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", FOUR_BIT)
def test_fsdp_leaves_a_rank_its_share_of_the_packed_weights(
    base: BaseModel, one_of_two_ranks: Any, kind: Quantization
) -> None:
    whole = dict(build(base, kind, torch.float32).named_parameters())
    recipe = lora_recipe(kind, base, strategy="fsdp", devices=2)
    plan = make_plan(recipe, Devices(accelerator="cpu", count=2))
    model = build(base, kind, torch.float32, FullyShard(plan, one_of_two_ranks))
    layers = quantised_layers(model)
    for name in layers:
        weight: Any = model.get_parameter(f"{name}.weight")
        expected = whole[f"{name}.weight"]
        half = expected.shape[0] // 2
        assert torch.equal(weight.to_local(), expected[half:])
        assert weight.to_local().untyped_storage().nbytes() == half


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", EIGHT_BIT_OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_learn_with_an_8_bit_optimizer_what_one_learns(
    two_ranks_rounding: dict[Case, Outcome],
    single_rounding: dict[Case, Outcome],
    strategy: str,
    optimizer: str,
) -> None:
    expected = single_rounding[eight_bit("single", optimizer)]
    found = two_ranks_rounding[eight_bit(strategy, optimizer)]
    assert_same_maths(found, expected, weights_within=ONE_CODE, validations=0)


@pytest.mark.matrix
def test_other_optimizers_of_bitsandbytes_do_so_too(run: Run) -> None:
    optimizers = ["PagedAdamW8bit", "AdEMAMix8bit", "Adagrad8bit", "RMSprop8bit", "AdamW"]
    single, sharded = (
        run(count, [eight_bit(strategy, optimizer) for optimizer in optimizers])
        for count, strategy in ((1, "single"), (2, "fsdp"))
    )
    for expected, found in zip(single.values(), sharded.values(), strict=True):
        assert_same_maths(found, expected, weights_within=ONE_CODE, validations=0)


@pytest.mark.slow
def test_blocks_of_8_bit_state_that_ranks_cut_differ_by_their_rounding_only(
    run: Run, single_rounding: dict[Case, Outcome]
) -> None:
    """On three ranks the rows of a rank do not begin at multiples of 256 numbers."""
    (outcome,) = run(3, [eight_bit("fsdp", "AdamW8bit")]).values()
    expected = single_rounding[eight_bit("single", "AdamW8bit")]
    assert outcome.losses == pytest.approx(expected.losses, rel=3e-4)


def test_the_size_of_the_whole_parameter_decides_between_8_and_32_bits(
    one_of_two_ranks: Any,
) -> None:
    from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 63, bias=False))
    fully_shard(model, mesh=one_of_two_ranks)
    optimizer = over_local_rows(AdamW8bit)(trainable(model), lr=0.1)  # type: ignore[call-arg]
    for parameter in trainable(model):
        parameter.grad = torch.ones_like(parameter)
    before = [p.to_local().clone() for p in trainable(model)]  # type: ignore[attr-defined]
    optimizer.step()
    large, small = trainable(model)
    assert optimizer.state[large]["state1"].dtype == torch.uint8
    assert optimizer.state[large]["state1"].shape == (32, 64)
    assert optimizer.state[small]["state1"].dtype == torch.float32
    assert len(optimizer.state) == 2
    for parameter, old in zip(trainable(model), before, strict=True):
        torch.testing.assert_close(parameter.to_local(), (old - 0.1), rtol=0, atol=0.02)  # type: ignore[attr-defined]


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 80, 96, 334])
@pytest.mark.parametrize("kind", FOUR_BIT)
def test_a_weight_is_unpacked_with_the_scales_of_its_blocks_wherever_rows_end(
    kind: Quantization, columns: int
) -> None:
    weight = torch.randn(24, columns, generator=torch.Generator().manual_seed(0))
    layer = FourBit(nn.Linear(columns, 24, bias=False, device="meta"), kind[4:], torch.float32)
    packed = layer.pack(weight)
    expected = numbers_of(packed, layer.quant_state)
    torch.testing.assert_close(layer.unpacked(packed), expected)
    x = torch.randn(3, columns)
    torch.testing.assert_close(layer.product(x, packed, None), x @ expected.t())


@pytest.mark.parametrize("shape", [(8, 64), (7, 334), (600, 1000)], ids=str)
@pytest.mark.parametrize("kind", ["nf4", "nf4-dq", "fp4", "fp4-dq"])
def test_weights_are_quantised_as_bitsandbytes_does_it_in_one_piece(
    kind: Quantization, shape: tuple[int, ...]
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    outlined = torch.nn.Linear(shape[1], shape[0], bias=False, device="meta")
    layer = FourBit(outlined, kind, torch.float32)
    packed = layer.pack(weight)
    expected, state = quantize_4bit(
        weight.float(), quant_type=kind[:3], compress_statistics=kind.endswith("-dq")
    )
    assert torch.equal(packed, expected)
    torch.testing.assert_close(layer.unpacked(packed), numbers_of(expected, state))
