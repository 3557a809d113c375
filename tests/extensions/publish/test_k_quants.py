"""K-quants of GGUF files: bytes as ggml makes them, formats as llama-quantize chooses them.

What ggml made is in packed_by_ggml, whose README says how.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from conversions import assert_equal, export
from ggml_mixtures import LETTERS, MIXED_MODELS, SIZES, MixedModel
from gguf_models import make_gguf_model
from llama_cpp import metadata_of
from transformers import AutoModelForCausalLM

from ftkit.extensions.publish.gguf import kquants
from ftkit.extensions.publish.gguf.kquants import K_QUANTS, pack
from ftkit.extensions.publish.gguf.mixture import kinds_of
from ftkit.models.pretrained.places import find_or_download

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

KEPT = Path(__file__).parent / "packed_by_ggml"
TOKENS = torch.arange(3, 43).view(2, 20) * 7 % 330


@pytest.fixture(scope="module")
def by_ggml() -> dict[str, np.ndarray]:
    """Matrices, importance and bytes."""
    with np.load(KEPT / "k_quants.npz") as content:
        return dict(content)


@pytest.mark.parametrize("kind", K_QUANTS)
@pytest.mark.parametrize("importance", ["none", "usual", "with zeros"])
def test_blocks_are_those_of_ggml(
    kind: str, importance: str, by_ggml: dict[str, np.ndarray]
) -> None:
    rows = by_ggml["rows"]
    weights = None if importance == "none" else by_ggml[f"importance {importance}"]
    found = np.frombuffer(b"".join(pack(rows, kind, weights)), np.uint8).reshape(len(rows), -1)
    expected = by_ggml[f"{kind} {importance}"].reshape(len(rows), -1)
    different = {
        str(name)
        for name, mine, theirs in zip(by_ggml["names"], found, expected, strict=True)
        if not np.array_equal(mine, theirs)
    }
    assert different == set()


def test_blocks_do_not_depend_on_how_many_are_packed_together(
    by_ggml: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weights = by_ggml["rows"], by_ggml["importance usual"]
    for kind in K_QUANTS:
        whole = b"".join(pack(rows, kind, weights))
        for count in (1, 3):
            monkeypatch.setattr(kquants, "_TASK_BLOCKS", count)
            assert b"".join(pack(rows, kind, weights)) == whole


@pytest.mark.parametrize("model", MIXED_MODELS, ids=lambda model: model.name)
def test_each_tensor_has_the_format_that_llama_quantize_gives_it(model: MixedModel) -> None:
    layers, experts = SIZES[model.size]
    settings = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    expected = json.loads((KEPT / "mixtures.json").read_text())[model.name]
    for numbers in ("q4_k_m", "q5_k_m", "q6_k"):
        kinds = kinds_of(model.shapes, numbers, settings)
        assert list(kinds) == list(model.shapes)
        assert "".join(LETTERS[kind] for kind in kinds.values()) == expected[numbers]


# --- Files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose widths are multiples of 256."""
    return make_gguf_model(tmp_path_factory.mktemp("wide") / "a", "wide")


@pytest.mark.parametrize(
    ("numbers", "file_type", "bound"),
    # Measured: 0.153, 0.261, 0.445, as random weights make errors grow from layer to layer.
    [("q6_k", 18, 0.2), ("q5_k_m", 17, 0.33), ("q4_k_m", 15, 0.55)],
)
def test_logits_are_those_of_the_unpacked_weights_and_near_those_of_the_model(
    numbers: str, file_type: int, bound: float, wide: Path, tmp_path: Path
) -> None:
    export(wide, "gguf", tmp_path / "out", "--quantization", numbers)
    file = tmp_path / "out" / f"model-{numbers}.gguf"
    assert metadata_of(file)["general.file_type"] == file_type
    tensors = gguf.GGUFReader(file).tensors
    kinds = {tensor.name: tensor.tensor_type.name for tensor in tensors}
    assert kinds["token_embd.weight"] == "Q6_K"  # it is also the head
    assert kinds["blk.0.attn_q.weight"] == numbers.upper().removesuffix("_M")
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    # What ftkit reads back are the numbers that the package gguf unpacks.
    back = find_or_download(str(file), root=tmp_path / "checkpoints")
    found = logits(back)
    copy = Path(shutil.copytree(wide, tmp_path / "copy"))
    unpack_into(copy, tensors)
    assert_equal(found, logits(copy))
    exact = logits(wide)
    error = float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    assert 0 < error < bound


def unpack_into(model: Path, tensors: Any) -> None:
    """Replace the weights of a model by those of a file, as float16 where they are packed."""
    from safetensors.torch import save_file

    from ftkit.extensions.gguf.families import named_tensors
    from ftkit.extensions.gguf.model import _halves_after_each_other

    settings = json.loads((model / "config.json").read_text())
    names = named_tensors(settings | {"head_dim": 64})
    weights = {}
    for tensor in tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.split(".")[2:3] in (["attn_q"], ["attn_k"]):
            values = _halves_after_each_other(values, 64)
        half = tensor.tensor_type.name != "F32"
        weights[names[tensor.name].theirs] = torch.from_numpy(values.astype("f2" if half else "f4"))
    save_file(weights, model / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found: torch.Tensor = model.eval()(TOKENS).logits
    return found


def test_progress_is_told_within_a_tensor(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    from ftkit.extensions.publish.gguf import model as gguf_model

    write: Any = gguf_model.write_file

    def watched(*words: Any) -> None:
        *others, _, importance = words
        write(*others, lambda done, total: told.append((done, total)), importance)

    monkeypatch.setattr(gguf_model, "write_file", watched)
    export(wide, "gguf", tmp_path / "out", "--quantization", "q4_k_m")
    assert told[-1][0] == told[-1][1]
    (file,) = (tmp_path / "out").glob("*.gguf")
    assert len(told) > len(gguf.GGUFReader(file).tensors)
