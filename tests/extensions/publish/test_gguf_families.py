"""Families of GGUF files: names as in gguf's own table, numbers that give the model's logits."""

import json
import re
import shutil
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import gguf
import pytest
import torch
from conversions import assert_equal, export
from gguf_models import MODELS, make_gguf_model
from llama_cpp import answered, metadata_of, runs_llama_cpp
from messages import message_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.extensions.gguf.families import FAMILIES, WRITTEN, named_tensors
from ftkit.extensions.publish.gguf.metadata import complete_settings
from ftkit.models.pretrained.base_model import open_base

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOKENS = torch.arange(3, 43).view(2, 20) * 7 % 330
CUT_DIFFERENTLY = (
    "The quick brown fox (aged 7) didn't jump over 1234567 lazy dogs; it's 3.14, isn't it?",
    "def main(a, b):\n    return a ** b  # twice\n\n\n\tprint('ok!!!')\r\n",
    "Ça va? Größe, naïve café. Привет, мир! 你好 世界。 こんにちは 안녕하세요 مرحبا 🙂🚀",
    "a  b   c    d HTTPServer ABCdef x_y-z/w https://example.org/?q=1&r=2",
)
"""Texts that tokenizers of different kinds cut differently."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each of `MODELS`."""
    root = tmp_path_factory.mktemp("models")
    named = zip(MODELS, ascii_lowercase, strict=False)
    return {name: make_gguf_model(root / letter, name) for name, letter in named}


def settings_of(model: Path) -> dict[str, Any]:
    """All settings of a model, from its config.json."""
    return complete_settings(json.loads((model / "config.json").read_text()), model.name)


def test_there_is_a_model_of_each_family() -> None:
    assert {family for family, _, _ in MODELS.values()} == set(WRITTEN)


@pytest.mark.parametrize("name", MODELS)
def test_names_are_those_of_ggufs_own_table(name: str, models: dict[str, Path]) -> None:
    settings = settings_of(models[name])
    names = gguf_names(settings)
    for ours, named in named_tensors(settings).items():
        theirs = named.theirs
        if named.rule in ("first half", "first columns", "even"):
            theirs = theirs.replace("gate_up_proj", "gate_proj")
        if named.rule in ("second half", "second columns", "odd"):
            theirs = theirs.replace("gate_up_proj", "up_proj")
        # Parameters of experts and sinks have no layer of their own.
        theirs = theirs.replace("dt_bias", "dt_proj.bias")
        if ours.endswith(".scale"):  # of what chooses experts, and of their results
            own = {"router.scale": "router.proj", "router.per_expert_scale": "experts.down_proj"}
            for last, stem in own.items():
                theirs = theirs.replace(last, stem)
        stem = re.sub(r"(\.weight|[._]bias)$", "", theirs)
        end = ".weight"
        if ours.endswith((".bias", ".scale")):
            end = f".{ours.rpartition('.')[2]}"
        elif stem.endswith("A_log"):
            end = ""
        assert f"{names.get_name(stem)}{end}" == ours


def gguf_names(settings: dict[str, Any]) -> gguf.TensorNameMap:
    """gguf's table of a family."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = FAMILIES[settings["model_type"]].architecture
    return gguf.get_tensor_name_map(numbers[architecture], settings["num_hidden_layers"])


@pytest.mark.parametrize("name", MODELS)
def test_weights_in_a_file_give_the_logits_of_the_model(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    export(models[name], "gguf", tmp_path / "out", "--quantization", "f32")
    file = tmp_path / "out" / "model-f32.gguf"
    made = AutoModelForCausalLM.from_pretrained(
        models[name], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = made(TOKENS).logits
        load_from(file, made, settings_of(models[name]))
        found = made(TOKENS).logits
    assert_equal(found, expected)
    assert metadata_of(file)["general.architecture"] == FAMILIES[MODELS[name][0]].architecture


def with_large_gates(model: Path, place: Path) -> Path:
    """A copy of a model whose GELU computes numbers far from 0 alone.

    llama.cpp looks GELU up in a table of float16, between -10 and 10: ggml/src/ggml-cpu/vec.h. A
    step of that is wider than what is compared; elsewhere GELU is the number, or 0.
    """
    shutil.copytree(model, place)
    weights = load_file(place / "model.safetensors")
    for name, values in weights.items():
        if name.endswith(("mlp.gate_proj.weight", "per_layer_input_gate.weight")):
            values *= 1e5
        if name.endswith("experts.gate_up_proj"):
            values[:, : values.shape[1] // 2] *= 1e5
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    return place


def of_transformers(made: Any, most: int) -> tuple[torch.Tensor, list[int]]:
    """Logits of a prompt, and the tokens of the greedy answer."""
    with torch.no_grad():
        prompt = TOKENS[:1]
        logits: torch.Tensor = made(input_ids=prompt).logits[0]
        ids = prompt[0].tolist()
        for _ in range(most):
            ids.append(int(made(torch.tensor([ids])).logits[0, -1].argmax()))
    return logits, ids[prompt.shape[1] :]


@runs_llama_cpp
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_a_file_as_transformers_computes_the_model(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model, most = models[name], 16
    if name.startswith("gemma"):
        model = with_large_gates(model, tmp_path / "copy")
    export(model, "gguf", tmp_path / "out", "--quantization", "f32")
    file = tmp_path / "out" / "model-f32.gguf"
    made = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    logits, answer = of_transformers(made, most)
    found = answered(file, TOKENS[0].tolist(), most, tmp_path / "logits.npy", texts=CUT_DIFFERENTLY)
    apart = (torch.from_numpy(found.logits) - logits).abs().max()
    print(f"{name}: logits at most {apart:.2g} apart")
    assert apart < 1e-4
    assert found.answer == answer
    cut = open_base(str(model)).tokenizer.processor
    assert found.tokens == [
        cut.encode(text, add_special_tokens=False).ids for text in CUT_DIFFERENTLY
    ]


@runs_llama_cpp
def test_llama_cpp_truncates_the_bounds_of_yarn_whatever_the_model_says(
    models: dict[str, Path], tmp_path: Path
) -> None:
    place = shutil.copytree(models["gpt_oss"], tmp_path / "copy")
    config = json.loads((place / "config.json").read_text())
    assert config["rope_parameters"].get("truncate", True)
    logits, _ = of_transformers(AutoModelForCausalLM.from_pretrained(place).eval(), 0)
    config["rope_parameters"]["truncate"] = False  # as gpt-oss has it
    (place / "config.json").write_text(json.dumps(config))
    own, _ = of_transformers(AutoModelForCausalLM.from_pretrained(place).eval(), 0)
    export(place, "gguf", tmp_path / "out", "--quantization", "f32")
    file = tmp_path / "out" / "model-f32.gguf"
    found = answered(file, TOKENS[0].tolist(), 0, tmp_path / "logits.npy")
    assert (torch.from_numpy(found.logits) - logits).abs().max() < 1e-4
    assert (torch.from_numpy(found.logits) - own).abs().max() > 0.1


@runs_llama_cpp
def test_llama_cpp_stretches_positions_beyond_the_first_length_of_longrope(
    models: dict[str, Path], tmp_path: Path
) -> None:
    export(models["phi3"], "gguf", tmp_path / "out", "--quantization", "f32")
    made = AutoModelForCausalLM.from_pretrained(
        models["phi3"], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompt = torch.arange(3, 303) * 7 % 330
    with torch.no_grad():
        logits = made(prompt[None]).logits[0]
    file = tmp_path / "out" / "model-f32.gguf"
    found = answered(file, prompt.tolist(), 0, tmp_path / "logits.npy", size=512)
    apart = (torch.from_numpy(found.logits) - logits).abs().max()
    print(f"phi3, stretched: logits at most {apart:.2g} apart")
    assert apart < 1e-4


@runs_llama_cpp
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_llama_cpp_adds_an_adapter_as_peft_adds_it(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    made = AutoModelForCausalLM.from_pretrained(
        models[name], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    without = made(TOKENS[:1]).logits[0].detach()
    adapted = get_peft_model(made, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear"))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    logits, _ = of_transformers(adapted, 0)
    assert (logits - without).abs().max() > 0.1
    words = ("--quantization", "f32", "--checkpoint_dir", models[name])
    export(models[name], "gguf", tmp_path / "base", *words[:2])
    export(tmp_path / "adapter", "gguf", tmp_path / "out", *words)
    found = answered(
        tmp_path / "base" / "model-f32.gguf",
        TOKENS[0].tolist(),
        0,
        tmp_path / "logits.npy",
        tmp_path / "out" / "adapter-f32.gguf",
    )
    apart = (torch.from_numpy(found.logits) - logits).abs().max()
    print(f"{name}, adapted: logits at most {apart:.2g} apart")
    assert apart < 1e-4


# llama.cpp rounds what goes into a matrix, too: to float16 or bfloat16, or to blocks of 8 bits.
APART = {
    "f16": 0.004,  # measured: 0.0019
    "bf16": 0.03,  # 0.015
    "q8_0": 0.15,  # 0.072
    "q6_k": 0.13,  # 0.063
    "q5_k_m": 0.15,  # 0.072
    "q4_k_m": 0.15,  # 0.072
}
"""Of the largest logit."""


@runs_llama_cpp
@pytest.mark.parametrize("numbers", APART)
def test_llama_cpp_computes_packed_weights_nearly_as_transformers_computes_their_numbers(
    numbers: str, models: dict[str, Path], tmp_path: Path
) -> None:
    export(models["wide"], "gguf", tmp_path / "out", "--quantization", numbers)
    (file,) = (tmp_path / "out").glob("*.gguf")
    made = AutoModelForCausalLM.from_pretrained(
        models["wide"], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    load_from(file, made, settings_of(models["wide"]))
    logits, _ = of_transformers(made, 0)
    found = answered(file, TOKENS[0].tolist(), 0, tmp_path / "logits.npy")
    apart = (torch.from_numpy(found.logits) - logits).abs().max() / logits.abs().max()
    print(f"{numbers}: logits at most {apart:.2g} of the largest apart")
    assert apart < APART[numbers]


def load_from(file: Path, made: Any, settings: dict[str, Any]) -> None:
    """Give a model of transformers the weights of a file, by gguf's own names."""
    numbers = {
        tensor.name: torch.from_numpy(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()
        )
        for tensor in gguf.GGUFReader(file).tensors
    }
    names, family = gguf_names(settings), settings["model_type"]

    def of(theirs: str, end: str = ".weight") -> torch.Tensor:
        found: torch.Tensor = numbers.pop(f"{names.get_name(theirs)}{end}")
        return found

    loaded: dict[str, torch.Tensor] = {}
    # Zeros first: what is not loaded would show.
    for name, value in made.state_dict().items():
        stem, _, last = name.rpartition(".")
        if name == "lm_head.weight" and settings["tie_word_embeddings"]:
            values = loaded["model.embed_tokens.weight"]
        elif last in ("sinks", "layer_scalar"):
            values = of(name)
        elif name.endswith("router.scale"):
            values = of(f"{stem}.proj", ".scale")
        elif last == "per_expert_scale":
            values = of(name.replace("router.per_expert_scale", "experts.down_proj"), ".scale")
        elif last == "gate_up_proj" and family == "gemma4_text":
            values = of(name)
        elif last == "gate_up_proj" and family == "qwen3_moe":
            values = torch.cat([of(f"{stem}.gate_proj"), of(f"{stem}.up_proj")], dim=1)
        elif last == "gate_up_proj" and family == "llama4_text":
            values = torch.cat([of(f"{stem}.gate_proj"), of(f"{stem}.up_proj")], dim=1)
            values = values.transpose(1, 2)
        elif last.startswith("gate_up_proj"):  # of gpt-oss: columns of both alternate
            end = ".bias" if last.endswith("bias") else ".weight"
            both = torch.stack([of(f"{stem}.gate_proj", end), of(f"{stem}.up_proj", end)], dim=2)
            values = both.flatten(1, 2)
            values = values if end == ".bias" else values.transpose(1, 2)
        elif last == "down_proj_bias":
            values = of(f"{stem}.down_proj", ".bias")
        elif last == "down_proj" and "experts" in stem:
            values = of(name)
            values = values.transpose(1, 2) if family in ("gpt_oss", "llama4_text") else values
        elif last == "A_log":
            values = (-of(name, "")).log()
        elif last == "dt_bias":
            values = of(f"{stem}.dt_proj", ".bias")
        else:
            values = of(stem, f".{last}")
        if family in ("llama", "mistral", "granite") and stem.endswith(("q_proj", "k_proj")):
            pairs = values.reshape(-1, settings["head_dim"] // 2, 2, *values.shape[1:])
            values = pairs.transpose(1, 2).reshape(values.shape)
        if "linear_attn" in stem and not stem.endswith("norm"):
            values = grouped(values, settings, "out_proj" in stem).view_as(value)
        if has_one_more(family, stem):
            values = values - 1
        assert values.shape == value.shape, name
        loaded[name] = values
    made.load_state_dict({name: torch.zeros_like(value) for name, value in loaded.items()})
    made.load_state_dict(loaded)
    assert {name for name in numbers if not name.startswith("rope_")} == set()


def grouped(values: torch.Tensor, settings: dict[str, Any], of_columns: bool) -> torch.Tensor:
    """Value heads of a linear attention behind each other that have the same key."""
    if of_columns:
        return grouped(values.T, settings, False).T
    heads, keys = settings["linear_num_value_heads"], settings["linear_num_key_heads"]
    size = settings["linear_value_head_dim"] if len(values) > heads else 1
    order = [
        (each * keys + key) * size + number
        for key in range(keys)
        for each in range(heads // keys)
        for number in range(size)
    ]
    before = len(values) - len(order)
    return values[[*range(before), *(before + number for number in order)]]


def has_one_more(family: str, stem: str) -> bool:
    """Whether the numbers of a norm in a file are one more than those of the model."""
    is_gated = stem.endswith("linear_attn.norm")
    known = ("gemma2", "gemma3_text", "qwen3_5_text")
    return family in known and stem.endswith("norm") and not is_gated


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gemma3", {"query_pre_attn_scalar": 16}, "has query_pre_attn_scalar 16, not 32"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "has attn_logit_softcapping 50.0, not None"),
        ("qwen3_moe", {"norm_topk_prob": False}, "has norm_topk_prob False, not True"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "has swiglu_limit 5.0, not 7.0"),
        ("glm4", {"hidden_act": "gelu"}, "has the activation gelu, not silu"),
        ("granite", {"hidden_act": "gelu"}, "has the activation gelu, not silu"),
        ("llama4", {"attention_chunk_size": 64}, "has attention_chunk_size 64, not 8192"),
        ("llama4", {"use_qk_norm": False}, "has use_qk_norm False, not True"),
        (
            "llama4",
            {"no_rope_layers": [1, 1, 1, 1, 1]},
            "has no_rope_layers [1, 1, 1, 1, 1], not [1, 1, 1, 0, 1]",
        ),
    ],
)
def test_settings_that_llama_cpp_does_not_read_are_refused_where_they_differ(
    name: str, changes: dict[str, Any], expected: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model = tmp_path / "copy"
    model.mkdir()
    for file in models[name].iterdir():
        (model / file.name).symlink_to(file)
    (model / "config.json").unlink()
    config = json.loads((models[name] / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    words = ["export", str(model), "--format", "gguf", "--out", str(tmp_path / "out")]
    assert expected in message_of(run, words)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("qwen3_5", {"linear_value_head_dim": 8}, "linear_value_head_dim 8, not linear_key_head"),
        (
            "qwen3_5",
            {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            "has mrope_section \\[1, 1, 2\\] for 4 rotated pairs of heads of 32",
        ),
        ("qwen3_5", {"head_dim": 16}, "has mrope_section \\[11, 11, 10\\] for 2 rotated pairs"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "attends to later tokens"),
        ("gemma4", {"num_kv_shared_layers": 3}, "shares keys of layers that end with"),
        ("gemma4", {"vocab_size_per_layer_input": 200}, "has inputs of layers for 200 tokens"),
        ("gemma4_experts", {"layer_types": ["full_attention"] * 3}, "has no layer with a window"),
        ("llama4", {"moe_layers": [1]}, "has moe_layers \\[1\\], not \\[1, 3\\]"),
    ],
)
def test_settings_that_change_shapes_are_refused_where_they_differ(
    name: str, changes: dict[str, Any], expected: str, models: dict[str, Path]
) -> None:
    config = json.loads((models[name] / "config.json").read_text())
    with pytest.raises(UserError, match=expected):
        complete_settings(config | changes, "it")


def test_layers_with_windows_are_listed_where_llama_cpp_expects_others(
    models: dict[str, Path], tmp_path: Path
) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    export(models["gemma3"], "gguf", tmp_path / "usual")
    (file,) = (tmp_path / "usual").glob("*.gguf")
    assert key not in metadata_of(file)
    config = json.loads((models["gemma3"] / "config.json").read_text())
    kinds = ["full_attention", *config["layer_types"][1:]]
    settings = settings_of(models["gemma3"]) | {"layer_types": kinds}
    from ftkit.extensions.publish.gguf.metadata import model_metadata

    assert model_metadata(settings)[key] == [kind == "sliding_attention" for kind in kinds]
