"""Weights published in 4 or 8 bits are read as the library that wrote them reads them.

Files hold what each library wrote, and read, on a CPU. Other layouts are packed here as they are
published, number by number, and what they have to give is computed from the numbers before.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command import Command
from four_bits import numbers_of
from fp8_models import STYLES, in_fp8
from runs import WITHOUT_EVALUATION, options
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import make_data
from torch import Tensor
from transformers_models import NEWEST, make_transformers_model

from ftkit.errors import UserError
from ftkit.extensions.packed_weights.reading import unpacked
from ftkit.models.pretrained.base_model import open_base, weights
from ftkit.models.pretrained.stored_forms import stored_form
from ftkit.models.pretrained.weight_files import stored_tensors

OUT, IN = 48, 64
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


class Packed(NamedTuple):
    """A weight as it is published."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weight: Tensor
    """What it stands for, in float32."""
    name: str = "x.weight"


def drawn(*shape: int, high: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape) + high))


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) + 0.5


def words(numbers: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Pack the last dimension into int32, number by number."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    rows = numbers.reshape(-1, numbers.size(-1)).tolist()
    packed = [
        [
            sum(row[start + place] << (bits * i) for i, place in enumerate(order))
            for start in range(0, len(row), per_word)
        ]
        for row in rows
    ]
    signed = [[word - 2**32 if word >= 2**31 else word for word in row] for row in packed]
    return torch.tensor(signed, dtype=torch.int32).view(*numbers.shape[:-1], -1)


def nibbles(numbers: Tensor) -> Tensor:
    """Two 4-bit numbers in a byte, the first one in its lower half."""
    return (numbers[..., ::2] + 16 * numbers[..., 1::2]).to(torch.uint8)


def floats(numbers: Tensor) -> Tensor:
    """The 4-bit floats of numbers from 0 to 15."""
    table = E2M1 + [-value for value in E2M1]
    return torch.tensor([table[i] for i in numbers.flatten().tolist()]).view(numbers.shape)


def spread(factors: Tensor, rows: int, columns: int) -> Tensor:
    """[OUT, IN] of a scale for each block, by index."""
    return torch.tensor(
        [[float(factors[i // rows, j // columns]) for j in range(IN)] for i in range(OUT)]
    )


def fp8(block: tuple[int, int] | None, *shape: int, end: str, **config: Any) -> Packed:
    numbers = (drawn(OUT, IN, high=1000).float() / 100 - 5).to(torch.float8_e4m3fn)
    of_blocks = scales(*shape)
    rows, columns = block or (OUT // max(1, shape[0]), IN // shape[-1])
    whole = of_blocks.reshape(shape[0], -1) if len(shape) == 2 else of_blocks.reshape(1, 1)
    weight = numbers.float() * spread(whole, rows, columns)
    return Packed(config, {"x.weight": numbers, f"x.weight{end}": of_blocks}, weight)


def mxfp4() -> Packed:
    numbers, exponents = drawn(2, OUT, IN, high=16), drawn(2, OUT, IN // 32, high=20) + 117
    factors = (exponents - 127).double().exp2().repeat_interleave(32, -1)
    tensors = {
        "x.experts.down_proj_blocks": nibbles(numbers).view(2, OUT, IN // 32, 16),
        "x.experts.down_proj_scales": exponents.to(torch.uint8),
    }
    weight = (floats(numbers) * factors).float().transpose(1, 2)
    return Packed({"quant_method": "mxfp4"}, tensors, weight, "x.experts.down_proj")


def nvfp4(library: str) -> Packed:
    numbers = drawn(OUT, IN, high=16)
    of_blocks = (scales(OUT, IN // 16) * 8).to(torch.float8_e4m3fn)
    if library == "modelopt":
        config, ends, of_all = (
            {"quant_method": library, "quant_algo": "NVFP4"},
            ("", "_scale_2"),
            0.01,
        )
    else:
        config = {"quant_method": library, "format": "nvfp4-pack-quantized"}
        ends, of_all = ("_packed", "_global_scale"), 100.0
    factor = of_all if library == "modelopt" else 1 / of_all
    tensors = {
        f"x.weight{ends[0]}": nibbles(numbers),
        "x.weight_scale": of_blocks,
        f"x.weight{ends[1]}": torch.tensor([of_all]),
        "x.input_scale": torch.tensor(1.0),
    }
    return Packed(config, tensors, floats(numbers) * spread(of_blocks, 1, 16) * factor)


def gptq(bits: int, *, mixed: bool = False, version: str = "gptq") -> Packed:
    numbers, of_groups = drawn(OUT, IN, high=2**bits), scales(4, OUT).half()
    # From 1: the first version stores one less.
    zeros = drawn(4, OUT, high=2**bits - 1) + 1
    groups = torch.arange(IN) // 16
    if mixed:
        groups = groups[torch.randperm(IN, generator=torch.Generator().manual_seed(0))]
    tensors = {
        "x.qweight": words(numbers, bits).t().contiguous(),
        "x.qzeros": words(zeros - int(version == "gptq"), bits),
        "x.scales": of_groups,
        "x.g_idx": groups.int(),
    }
    weight = (numbers - zeros[groups].t()) * of_groups.float()[groups].t()
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}
    return Packed(config, tensors, weight)


def awq() -> Packed:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    numbers, zeros, of_groups = (
        drawn(OUT, IN, high=16),
        drawn(4, OUT, high=16),
        scales(4, OUT).half(),
    )
    tensors = {
        "x.qweight": words(numbers.t(), 4, order),
        "x.qzeros": words(zeros, 4, order),
        "x.scales": of_groups,
    }
    groups = torch.arange(IN) // 16
    weight = (numbers - zeros[groups].t()) * of_groups.float()[groups].t()
    return Packed({"quant_method": "awq", "bits": 4, "version": "gemm"}, tensors, weight)


def integers(bits: int) -> Packed:
    numbers, of_groups = drawn(OUT, IN, high=2**bits), scales(OUT, 2)
    tensors = {
        "x.weight_packed": words(numbers, bits),
        "x.weight_scale": of_groups,
        "x.weight_shape": torch.tensor([OUT, IN]),
    }
    weight = (numbers - 2 ** (bits - 1)) * spread(of_groups, 1, 32)
    return Packed(
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}, tensors, weight
    )


FP8 = {"quant_method": "fp8", "weight_block_size": [20, 24]}
FLOATS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
FORMS: dict[str, Callable[[], Packed]] = {
    "FP8 in blocks that do not fill the last ones": lambda: fp8(
        (20, 24), 3, 3, end="_scale_inv", **FP8
    ),
    "FP8 with one scale": lambda: fp8((OUT, IN), end="_scale_inv", quant_method="fp8"),
    "FP8 by rows": lambda: fp8((1, IN), OUT, 1, end="_scale", **FLOATS),
    "FP8 of ModelOpt": lambda: fp8(
        (OUT, IN), end="_scale", quant_method="modelopt", quant_algo="FP8"
    ),
    "MXFP4": mxfp4,
    "NVFP4 of ModelOpt": lambda: nvfp4("modelopt"),
    "NVFP4 of compressed-tensors": lambda: nvfp4("compressed-tensors"),
    "GPTQ in 4 bits": lambda: gptq(4),
    "GPTQ in 8 bits": lambda: gptq(8),
    "GPTQ in 2 bits": lambda: gptq(2),
    "GPTQ in the order of activations": lambda: gptq(4, mixed=True),
    "GPTQ, second version": lambda: gptq(4, version="gptq_v2"),
    "AWQ": awq,
    "integers of 1 bit": lambda: integers(1),
    "integers of 4 bits": lambda: integers(4),
    "integers of 8 bits": lambda: integers(8),
}


def read(packed: Packed, directory: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """Read the one weight that tensors in a file stand for."""
    file = directory / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in packed.tensors.items()}, file)
    form = stored_form({"quantization_config": packed.config}, "a model")
    assert form is not None
    ((name, found),) = unpacked(stored_tensors([file], lambda _: True), form, dtype).items()
    weight = found.read()
    assert (name, weight.shape, weight.dtype) == (packed.name, found.shape, found.dtype)
    return weight


@pytest.mark.parametrize("form", FORMS)
def test_a_form_gives_the_numbers_that_it_stands_for(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = FORMS[form]()
    found = read(packed, tmp_path)
    # GPTQ's and AWQ's scales are float16, and so are their weights.
    expected = packed.weight.to(found.dtype)
    torch.testing.assert_close(
        found, expected, rtol=1e-6 if found.dtype == torch.float32 else 0, atol=0
    )
    for constant in ("_PIECE", "_PIECE_ON_HOST"):
        monkeypatch.setattr(f"ftkit.extensions.packed_weights.reading.{constant}", 3 * OUT)
    torch.testing.assert_close(read(packed, tmp_path), found, rtol=0, atol=0)


BY_LIBRARIES = Path(__file__).with_name("packed_by_libraries.safetensors")
"""What `scripts/make_packed_weights` has written."""
with safe_open(BY_LIBRARIES, "pt") as kept:
    CONFIGS: dict[str, dict[str, Any]] = json.loads(kept.metadata()["configs"])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_weight_that_a_library_wrote_is_what_the_library_reads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        key.removeprefix(f"{name}/"): value
        for key, value in load_file(BY_LIBRARIES).items()
        if key.startswith(f"{name}/")
    }
    expected = tensors.pop("unpacked")
    packed = Packed(CONFIGS[name], tensors, expected)
    assert torch.equal(read(packed, tmp_path, expected.dtype), expected)
    for constant in ("_PIECE", "_PIECE_ON_HOST"):
        monkeypatch.setattr(f"ftkit.extensions.packed_weights.reading.{constant}", 3 * OUT)
    assert torch.equal(read(packed, tmp_path, expected.dtype), expected)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_each_float_of_8_bits_is_the_number_that_torch_takes_it_for(
    kind: torch.dtype, tmp_path: Path
) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 256).view(kind)
    tensors = {"x.weight": every, "x.weight_scale_inv": torch.ones(1, 1)}
    found = read(Packed({"quant_method": "fp8"}, tensors, every.float()), tmp_path)
    torch.testing.assert_close(found, every.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", ["FP8 with one scale", "FP8 by rows", "MXFP4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_has_the_number_format_of_the_model(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    packed = FORMS[form]()
    assert torch.equal(read(packed, tmp_path, dtype), packed.weight.to(dtype))


def test_transformers_reads_the_same_numbers(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed = fp8((24, 32), 2, 2, end="_scale_inv", quant_method="fp8", weight_block_size=[24, 32])
    numbers, factors = packed.tensors.values()
    theirs = Fp8Dequantize(None)._dequantize_one(numbers, factors, torch.bfloat16)
    assert torch.equal(read(packed, tmp_path, torch.bfloat16), theirs)
    codes, exponents = drawn(OUT, IN, high=16), (drawn(OUT, IN // 32, high=20) - 10).float().exp2()
    numbers, factors = nibbles(codes).view(torch.int8), exponents.to(torch.float8_e8m0fnu)
    tensors = {"x.weight": numbers, "x.scale": factors}
    packed = Packed({"quant_method": "fp8", "expert_dtype": "fp4"}, tensors, numbers.float())
    theirs = Fp8Dequantize(None)._dequantize_one(numbers, factors, torch.bfloat16)
    assert torch.equal(read(packed, tmp_path, torch.bfloat16), theirs)
    packed = mxfp4()
    theirs = convert_moe_packed_tensors(*packed.tensors.values(), dtype=torch.bfloat16)
    assert torch.equal(read(packed, tmp_path, torch.bfloat16), theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
        {"load_in_8bit": True},
    ],
    ids=["nf4", "fp4, scales quantised too", "int8"],
)
def test_bitsandbytes_weights_are_what_the_library_computes_with(
    options: dict[str, Any], tiny_base: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(**options)
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tiny_base, quantization_config=settings, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    theirs.save_pretrained(tmp_path)
    form = stored_form(json.loads((tmp_path / "config.json").read_text()), "a model")
    assert form is not None
    stored = stored_tensors([tmp_path / "model.safetensors"], lambda _: True)
    found = unpacked(stored, form, torch.bfloat16)
    plain = load_file(tiny_base / "model.safetensors")
    assert found.keys() == plain.keys()
    quantised = 0
    for name, tensor in found.items():
        layer = theirs.get_submodule(name.rpartition(".")[0])
        assert tensor.shape == plain[name].shape and tensor.dtype == torch.bfloat16
        weight = layer.weight
        expected = weight.detach()
        if type(layer).__name__ == "Linear4bit":
            expected = numbers_of(weight.data, weight.quant_state)
        elif type(layer).__name__ == "Linear8bitLt":
            expected = (weight.CB.float() * (weight.SCB[:, None].float() / 127)).bfloat16()
        quantised += expected.data_ptr() != weight.data_ptr()
        torch.testing.assert_close(tensor.read(), expected, rtol=0, atol=0)
    assert quantised == 14, "linear layers of two blocks"


def losses(out: Path) -> list[str]:
    return [row["loss"] for row in csv.DictReader((out / "metrics.csv").open())]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["finetune", "finetune --quantize bnb.nf4", "finetune_full"])
def test_training_is_that_of_the_plain_model(
    method: str, tiny_base: Path, tmp_path: Path, ftkit: Command
) -> None:
    data = make_data(tmp_path / "data.json")
    for model in in_fp8(tiny_base, tmp_path):
        done = ftkit(
            *method.split(), "--checkpoint_dir", model, "--data", "JSON", "--data.path", data,
            "--train.max_steps", 2, "--accelerator", "cpu", "--precision", "bf16-true",
            "--out_dir", tmp_path / f"out-{model.name}",
            "--train.global_batch_size", 4, "--train.micro_batch_size", 2,
            *options(**WITHOUT_EVALUATION), within_s=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    first, second = (tmp_path / f"out-{name}" for name in ("packed", "plain"))
    assert losses(first) == losses(second) != []
    settings = first / "final" / "config.json"
    if method == "finetune_full":
        assert "quantization_config" not in json.loads(settings.read_text())


@pytest.mark.parametrize(
    ("kind", "style"),
    [
        ("qwen3_moe", "rows"),
        ("deepseek_v3", "DeepSeek V3"),
        *(("llama", style) for style in STYLES),
    ],
)
def test_each_weight_is_that_of_the_plain_model(kind: str, style: str, tmp_path: Path) -> None:
    """Also of experts, whose matrices are put together from files that hold them one by one."""
    base = make_transformers_model(tmp_path / "base", kind)
    packed, plain = (open_base(str(place)) for place in in_fp8(base, tmp_path, style))
    assert packed.form is not None and plain.form is None
    for (name, tensor), (other, expected) in zip(weights(packed), weights(plain), strict=True):
        assert name == other and torch.equal(tensor.float(), expected.float())


@pytest.mark.skipif("deepseek_v4" not in NEWEST, reason="needs a newer transformers")
def test_deepseek_v4_is_read_with_experts_in_fp4(tmp_path: Path) -> None:
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 32}
    base = make_transformers_model(tmp_path / "base", "deepseek_v4", **sizes)
    packed, plain = (open_base(str(place)) for place in in_fp8(base, tmp_path, "DeepSeek V4"))
    stored = load_file(tmp_path / "packed" / "model.safetensors").values()
    assert {torch.int8, torch.float8_e4m3fn} <= {tensor.dtype for tensor in stored}
    assert packed.form is not None and not packed.form.can_stay
    for (name, tensor), (other, expected) in zip(weights(packed), weights(plain), strict=True):
        assert name == other and torch.equal(tensor.float(), expected.float())


def test_a_weight_without_its_scales_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    packed, _ = in_fp8(tiny_base, tmp_path)
    tensors = load_file(packed / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("_scale_inv"))
    del tensors[lost]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(UserError, match=f"FP8 weights, but {lost.removesuffix('_scale_inv')} of"):
        open_base(str(packed))
