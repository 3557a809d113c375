"""Checkpoints stored in a form that ftkit does not read are refused by its name."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import Command
from tiny import make_data, make_llama

from ftkit.errors import UserError
from ftkit.models.pretrained.base_model import open_base, read_blueprint
from ftkit.models.pretrained.places import find_here

COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
CONFIGS: list[tuple[dict[str, Any], str, str]] = [
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ", "bnb.nf4"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ", "bnb.nf4"),
    ({"quant_method": "fbgemm_fp8"}, r"FP8 \(FBGEMM\)", "bnb.int8"),
    ({"quant_method": "compressed-tensors", "format": "pack"}, "compressed-tensors", "bnb.nf4"),
    # Words that earlier versions packed otherwise, weights that fit rotated inputs, sparse ones.
    *(
        (COMPRESSED | more, "compressed-tensors", "bnb.nf4")
        for more in (
            {"config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 3}}}},
            {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
        )
    ),
    ({"quant_method": "aqlm"}, "AQLM", "bnb.nf4"),
    ({"quant_method": "auto-round"}, "AutoRound", "bnb.nf4"),
    ({"quant_method": "intel/auto-round"}, "AutoRound", "bnb.nf4"),
    ({"quant_method": "bitnet"}, "BitNet", "bnb.nf4"),
    ({"quant_method": "eetq"}, "EETQ", "bnb.int8"),
    ({"quant_method": "fp_quant"}, "FP-Quant", "bnb.nf4"),
    ({"quant_method": "higgs"}, "HIGGS", "bnb.nf4"),
    ({"quant_method": "hqq"}, "HQQ", "bnb.nf4"),
    (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        r"ModelOpt \(NVFP4 or FP8\)",
        "bnb.nf4",
    ),
    ({"quant_method": "quanto"}, "Quanto", "bnb.nf4"),
    ({"quant_method": "quark"}, "Quark", "bnb.nf4"),
    ({"quant_method": "sinq"}, "SINQ", "bnb.nf4"),
    ({"quant_method": "spqr"}, "SpQR", "bnb.nf4"),
    ({"quant_method": "torchao"}, "torchao", "bnb.nf4"),
    ({"quant_method": "vptq"}, "VPTQ", "bnb.nf4"),
    ({"quant_method": "of-next-year"}, "of-next-year", "bnb.nf4"),
    ({"bits": 4}, "quantised", "bnb.nf4"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "model")


def edit(model: Path, **settings: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(("quantization", "title", "instead"), CONFIGS)
@pytest.mark.parametrize("opened", [open_base, find_here, read_blueprint])
def test_each_method_is_named_with_what_to_use_instead(
    quantization: dict[str, Any], title: str, instead: str, opened: Any, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    (model / "model.safetensors").touch()
    words = f"{model} holds {title} weights.*does not read.*original model"
    message = f"{words}.*--quantize {instead} if memory"
    with pytest.raises(UserError, match=message):
        opened(str(model))


@pytest.mark.parametrize(
    ("file", "title"),
    [
        ("quantize_config.json", "GPTQ"),
        ("quant_config.json", "AWQ"),
        ("hf_quant_config.json", "ModelOpt"),
    ],
)
def test_what_a_quantiser_has_written_beside_an_older_config_tells_it(
    file: str, title: str, model: Path
) -> None:
    (model / file).write_text('{"bits": 4}')
    with pytest.raises(UserError, match=f"holds {title}"):
        open_base(str(model))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("nothing", [None, {}])
def test_a_config_that_names_no_quantisation_is_no_obstacle(
    key: str, nothing: object, model: Path
) -> None:
    edit(model, **{key: nothing})
    assert open_base(str(model)).form is None


@pytest.mark.extensions
@pytest.mark.parametrize(
    "command", ["finetune", "finetune_full", "plan", "data", "generate", "evaluate", "export"]
)
def test_every_command_refuses_it_before_anything_begins(
    command: str, model: Path, tmp_path: Path, ftkit: Command
) -> None:
    edit(model, quantization_config={"quant_method": "gptq", "bits": 3})
    data = make_data(tmp_path / "data.json")
    keys = ["--checkpoint_dir", model, "--data", "JSON", "--data.path", data]
    words: dict[str, list[object]] = {
        "generate": [model, "--prompt", "red"],
        "evaluate": [model, "--data", "JSON", "--data.path", data],
        "export": [model, "--format", "litgpt", "--out", "out"],
    }
    done = ftkit(command, *words.get(command, keys), cold=command == "export")
    assert done.returncode == 2, done.stderr
    assert "holds GPTQ weights" in done.stderr and "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"model", "data.json"}
