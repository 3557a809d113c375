"""The oracle is transformers: tiny random models of every family, written by it and read back."""

import dataclasses
import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import litgpt
import pytest
import torch
import transformers
from computed import filled
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
from litgpt.utils import save_config
from litgpt_models import litgpt_architecture, litgpt_part
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ftkit.errors import UserError
from ftkit.models.language_model import outline
from ftkit.models.pretrained import base_model, random_weights
from ftkit.models.pretrained.base_model import (
    BaseModel,
    checked_length,
    fingerprint,
    open_without_weights,
    parameter_shapes,
    read_blueprint,
    save_without_weights,
    weights,
)
from ftkit.models.pretrained.model_files import weight_files
from ftkit.models.pretrained.random_weights import random_numbers, random_weight
from ftkit.models.pretrained.save import save_hf
from ftkit.recipe.implementations import layout_in
from ftkit.recipe.recipe import Recipe
from ftkit.utils import embedded

VOCABULARY = 67
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama grouped queries": {"num_key_value_heads": 2},
    "llama one key head": {"num_key_value_heads": 1},
    "llama tied": {"tie_word_embeddings": True},
    "llama llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "llama linear rope": {
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
    },
    "llama attention bias": {"attention_bias": True},
    "llama attention and mlp bias": {"attention_bias": True, "mlp_bias": True},
    "llama head size": {"head_dim": 12, "num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "mistral window": {"num_key_value_heads": 2, "sliding_window": 24},
    "qwen2": {"num_key_value_heads": 2},
    "qwen2 tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen2 window": {
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen3 attention bias": {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
    "gemma": {"num_key_value_heads": 1, "head_dim": 16},
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "phi3": {"num_key_value_heads": 2},
    "phi3 window": {"sliding_window": 24},
    "phi3 partial rotary": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        }
    },
    "gpt_neox": {},
    "gpt_neox sequential": {"use_parallel_residual": False, "rotary_pct": 1.0},
}
FUSED = ("phi3", "gpt_neox")

MakeModel = Callable[..., Path]


def open_base(checkpoint_dir: str) -> BaseModel:
    """As LitGPT computes it, which these tests are about."""
    return base_model.open_base(checkpoint_dir, "litgpt")


def family(model: str) -> str:
    return model.split()[0]


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory, tokenizer_json: str) -> MakeModel:
    """Writes a tiny model with transformers, once per set of arguments."""
    made: dict[str, Path] = {}

    def make(model: str, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
        key = f"{model} {dtype} {shard}"
        if key not in made:
            torch.manual_seed(0)
            settings = SIZES | MODELS[model]
            config = transformers.AutoConfig.for_model(family(model), **settings)
            hf = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in hf.parameters():
                    noise = torch.randn_like(parameter) * 0.2
                    parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
            directory = tmp_path_factory.mktemp("models") / model.replace(" ", "-")
            hf.to(dtype).save_pretrained(directory, max_shard_size=shard)
            if (
                "rotary_pct" in settings
            ):  # transformers 5.3 reads it from here and does not write it
                edit_json(directory / "config.json", rotary_pct=settings["rotary_pct"])
            (directory / "tokenizer.json").write_text(tokenizer_json)
            # Not the class of the family, which would expect its vocabulary.
            special = {"bos_token": "<s>", "eos_token": "</s>"}
            special["tokenizer_class"] = "PreTrainedTokenizerFast"
            (directory / "tokenizer_config.json").write_text(json.dumps(special))
            made[key] = directory
        return made[key]

    return make


@pytest.fixture
def copy_model(tmp_path: Path, make_model: MakeModel) -> Callable[[str], Path]:
    """A copy to be damaged."""

    def copy(model: str) -> Path:
        directory = tmp_path / "model"
        directory.mkdir()
        for file in make_model(model).iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        return directory

    return copy


def tokens(length: int = 24) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


def transformers_logits(directory: Path) -> Tensor:
    softcapped = "gemma2" in directory.name  # SDPA cannot do it, LitGPT does without it then
    attention = "eager" if softcapped else "sdpa"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation=attention
    )
    with torch.no_grad():
        logits: Tensor = model.eval()(tokens()).logits.float()
    return logits


def fused(base: BaseModel) -> dict[str, Tensor]:
    """The weights under the names of `litgpt.GPT`."""
    state = dict(weights(base))
    if base.tied:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    for name in [name for name in state if ".attn.qkv.q_proj." in name]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[name.replace("q_proj.", "")] = torch.cat(parts)
    return state


def config_of(base: BaseModel) -> litgpt.Config:
    architecture: Any = base.architecture
    assert architecture.implementation == "litgpt"
    return architecture.config


def litgpt_model(base: BaseModel) -> litgpt.GPT:
    model = litgpt.GPT(config_of(base))
    model.load_state_dict(fused(base))
    return model.eval()


def litgpt_logits(base: BaseModel) -> Tensor:
    with torch.no_grad():
        return litgpt_model(base)(tokens())


def difference(left: Tensor, right: Tensor) -> float:
    assert left.std() > 0.1, "the comparison would show nothing"
    return (left - right).abs().max().item()


def edit_json(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) | values
    kept = {key: value for key, value in content.items() if value is not ...}
    file.write_text(json.dumps(kept))


def write_litgpt(base: BaseModel, directory: Path, *, nested: bool = False) -> Path:
    """The same model as LitGPT keeps it."""
    directory.mkdir(parents=True)
    state = litgpt_model(base).state_dict()
    torch.save({"model": state} if nested else state, directory / "lit_model.pth")
    save_config(config_of(base), directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((base.tokenizer_directory / name).read_bytes())
    return directory


# Reading Hugging Face directories


@pytest.mark.extensions
@pytest.mark.parametrize("model", MODELS)
def test_every_family_gives_the_logits_of_transformers(model: str, make_model: MakeModel) -> None:
    directory = make_model(model)
    base = open_base(str(directory))
    # Of one key head, the fused product of this test rounds otherwise than three products do.
    is_exact = family(model) == "llama" and model != "llama one key head"
    limit = 0.0 if is_exact else 1e-5
    assert difference(litgpt_logits(base), transformers_logits(directory)) <= limit
    assert (base.name, base.dtype, base.random) == (directory.name, torch.float32, False)
    assert config_of(base).padded_vocab_size == VOCABULARY


@pytest.mark.extensions
@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_given_once_with_its_shape_and_none_for_a_tied_head(
    model: str, make_model: MakeModel
) -> None:
    base = open_base(str(make_model(model)))
    given = [(name, tensor.shape) for name, tensor in weights(base)]
    assert given == list(parameter_shapes(base).items())
    assert ("lm_head.weight" in dict(given)) != base.tied
    assert base.tied == ("tied" in model or "gemma" in model)


@pytest.mark.extensions
def test_shards_and_number_formats_are_read_as_they_are(make_model: MakeModel) -> None:
    whole = open_base(str(make_model("llama", torch.bfloat16)))
    sharded = open_base(str(make_model("llama", torch.bfloat16, shard="10KB")))
    assert sharded.directory is not None and len(list(sharded.directory.glob("*.safetensors"))) > 2
    assert whole.dtype == sharded.dtype == torch.bfloat16
    pairs = zip(weights(whole), weights(sharded), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.extensions
@pytest.mark.parametrize("in_zip", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_pytorch_bin_files_of_any_age_are_read(
    in_zip: bool, shards: int, copy_model: Callable[[str], Path]
) -> None:
    directory = copy_model("llama grouped queries")
    expected = dict(weights(open_base(str(directory))))
    state = load_file(directory / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    (directory / "model.safetensors").unlink()
    names = sorted(state)
    files = (
        [f"pytorch_model-{n}.bin" for n in range(shards)] if shards > 1 else ["pytorch_model.bin"]
    )
    for number, file in enumerate(files):
        part = {name: state[name].clone() for name in names[number::shards]}
        torch.save(part, directory / file, _use_new_zipfile_serialization=in_zip)
    if shards > 1:
        weight_map = {name: files[i % shards] for i, name in enumerate(names)}
        index = directory / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    read = dict(weights(open_base(str(directory))))
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


@pytest.mark.extensions
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's memory map")
@pytest.mark.parametrize("model", ["llama", "phi3"])
def test_tensors_are_views_of_the_mapped_file(model: str, make_model: MakeModel) -> None:
    base = open_base(str(make_model(model)))
    for name, tensor in weights(base):
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in lines if str(base.directory) in line]
        address = tensor.data_ptr()
        assert any(int(low, 16) <= address < int(high, 16) for low, high in spans), name


@pytest.mark.extensions
@pytest.mark.parametrize("in_zip", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(
    in_zip: bool, copy_model: Callable[[str], Path], tmp_path: Path
) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "attacked"),)

    directory = copy_model("llama")
    (directory / "model.safetensors").unlink()
    file = directory / "pytorch_model.bin"
    torch.save({"w": Attack()}, file, _use_new_zipfile_serialization=in_zip)
    with pytest.raises(UserError, match="foreign code"):
        open_base(str(directory))
    assert not (tmp_path / "attacked").exists()


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("model", "old"),
    [
        ("llama", {"rope_theta": 10000.0}),
        (
            "llama llama3 rope",
            {
                "rope_theta": LLAMA3_ROPE["rope_theta"],
                "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"},
            },
        ),
        (
            "llama linear rope",
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 3.0}},
        ),
        ("phi3 partial rotary", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.25}),
    ],
)
def test_rotary_embeddings_are_read_as_older_versions_wrote_them(
    model: str, old: dict[str, Any], make_model: MakeModel, copy_model: Callable[[str], Path]
) -> None:
    directory = copy_model(model)
    edit_json(directory / "config.json", rope_parameters=..., **old)
    new = config_of(open_base(str(make_model(model))))
    assert dataclasses.replace(config_of(open_base(str(directory))), name="", hf_config={}) == (
        dataclasses.replace(new, name="", hf_config={})
    )


@pytest.mark.extensions
@pytest.mark.parametrize("model", ["mistral window", "qwen2 window", "gemma2", "phi3 window"])
def test_a_model_has_no_more_positions_than_its_sliding_window(
    model: str, make_model: MakeModel
) -> None:
    config = config_of(open_base(str(make_model(model))))
    assert (config.block_size, config.sliding_window_size) == (24, None)


@pytest.mark.extensions
@pytest.mark.parametrize(("window", "limit"), [(24, 24), (63, 63), (64, None), (65, None)])
def test_a_window_as_long_as_the_context_limits_nothing(
    window: int, limit: int | None, copy_model: Callable[[str], Path]
) -> None:
    directory = copy_model("mistral window")
    edit_json(directory / "config.json", sliding_window=window, max_position_embeddings=64)
    assert open_base(str(directory)).architecture.window == limit
    whole = base_model.open_base(str(directory)).architecture
    assert whole.implementation == ("litgpt" if limit is None else "transformers")


@pytest.mark.extensions
@pytest.mark.parametrize("model", ["mistral window", "gemma2"])
def test_a_window_of_litgpts_layout_limits_the_positions_too(
    model: str, make_model: MakeModel, tmp_path: Path
) -> None:
    directory = make_model(model)
    original = open_base(str(directory))
    every_other = {"sliding_window_indices": [1, 0, 1]} if model == "gemma2" else {}
    config = dataclasses.replace(
        config_of(original), block_size=64, sliding_window_size=24, **every_other
    )
    architecture = litgpt_architecture(
        config, litgpt_part("families").family_of_settings(original.settings)
    )
    with_window = dataclasses.replace(original, architecture=architecture)
    lit = open_base(str(write_litgpt(with_window, tmp_path / "lit")))
    assert lit.architecture.context_length == 24
    assert fingerprint(lit) == fingerprint(original)
    (logits, operations), (_, plain) = (counted_logits(base) for base in (lit, original))
    assert difference(logits, transformers_logits(directory)) <= 1e-5
    assert operations == plain


def counted_logits(base: BaseModel) -> tuple[Tensor, int]:
    """Of the model that is trained, [batch, sequence, vocabulary]; and the operations for them."""

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), options: Any = None
        ) -> Any:
            self.count += 1
            return function(*arguments, **(options or {}))

    model = outline(base, Recipe(checkpoint_dir=""), torch.float32)
    filled(model, base, rope_length=base.architecture.context_length)
    ids = tokens()
    with torch.no_grad(), Counter() as counter:
        logits: Tensor = model(ids, torch.arange(ids.numel()))
    return logits.view(*ids.shape, -1), counter.count


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("name", "positions"), [("Mistral-7B-v0.1", 4096), ("Gemma-2-2b", 4096), ("Gemma-3-1b-it", 512)]
)
def test_random_weights_and_plans_have_the_positions_of_the_window(
    name: str, positions: int, quickstart: Path
) -> None:
    assert open_base(f"random:{name}").architecture.context_length == positions
    assert read_blueprint(name, "litgpt").architecture.context_length == positions


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("model", "limit"),
    [
        ("mistral window", "has a sliding window of 24 positions, within which ftkit trains"),
        ("gemma2", "has a sliding window of 24 positions, within which ftkit trains"),
        ("mistral", "was built for at most 64 positions"),
        ("llama", "was built for at most 64 positions"),
    ],
)
def test_what_limits_the_length_of_sequences_is_said(
    model: str, limit: str, make_model: MakeModel
) -> None:
    base = open_base(str(make_model(model)))
    longest = base.architecture.context_length
    assert checked_length(base, longest) == checked_length(base, None) == longest
    with pytest.raises(UserError, match=limit) as error:
        checked_length(base, longest + 1)
    assert str(error.value).endswith(f"Try --train.max_seq_length {longest}.")


@pytest.mark.extensions
@pytest.mark.parametrize("name", ["Gemma-2b", "OLMo-1B-hf", "my Gemma OLMo"])
def test_the_name_of_the_directory_never_changes_the_model(
    name: str, copy_model: Callable[[str], Path]
) -> None:
    directory = copy_model("llama")
    renamed = directory.rename(directory.parent / name)
    base = open_base(str(renamed))
    assert base.name == name
    assert difference(litgpt_logits(base), transformers_logits(renamed)) == 0.0


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "falcon"}, "model_type 'falcon'.*llama.*Try --model_implementation auto."),
        ({"model_type": ...}, "model_type None"),
        ({"quantization_config": {"bits": 4}}, "--quantize"),
        ({"hidden_size": ...}, "has no 'hidden_size'"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "config.json is damaged"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "dynamic"}}, "rope_type is 'dynamic'"),
        ({"num_hidden_layers": 4}, r"lack model.layers.3.*input_layernorm.weight"),
        ({"num_hidden_layers": 2}, r"hold model.layers.2"),
        ({"vocab_size": 68}, r"weight in .* has shape \[67, 32\].*settings say \[68, 32\]"),
        ({"attention_bias": True}, "lack model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused_by_name(
    values: dict[str, Any], message: str, copy_model: Callable[[str], Path]
) -> None:
    directory = copy_model("llama")
    edit_json(directory / "config.json", **values)
    with pytest.raises(UserError, match=f"(?s){message}"):
        open_base(str(directory))


@pytest.mark.extensions
def test_a_damaged_file_is_named(copy_model: Callable[[str], Path]) -> None:
    directory = copy_model("llama")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"{file} is damaged"):
        open_base(str(directory))


@pytest.mark.extensions
def test_a_head_that_contradicts_tied_settings_is_refused(
    copy_model: Callable[[str], Path],
) -> None:
    directory = copy_model("llama")
    edit_json(directory / "config.json", tie_word_embeddings=True)
    with pytest.raises(UserError, match="Set tie_word_embeddings in it to false"):
        weights(open_base(str(directory)))


# LitGPT directories and random weights


@pytest.mark.extensions
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("model", ["llama attention and mlp bias", "gemma2", "gpt_neox"])
def test_a_litgpt_directory_gives_the_same_weights(
    model: str, nested: bool, make_model: MakeModel, tmp_path: Path
) -> None:
    base = open_base(str(make_model(model)))
    lit = open_base(str(write_litgpt(base, tmp_path / "lit", nested=nested)))
    assert lit.architecture.class_name == base.architecture.class_name
    assert difference(litgpt_logits(lit), litgpt_logits(base)) == 0.0


@pytest.mark.extensions
def test_litgpts_own_conversion_is_read_and_its_tied_head_recognised(
    copy_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copy_model("llama tied")
    original = open_base(str(directory))
    names, expected = list(parameter_shapes(original)), litgpt_logits(original)
    convert_hf_checkpoint(checkpoint_dir=directory, model_name="tiny-llama-1.1b")
    save_config(config_of(original), directory)
    lit = open_base(str(directory))
    assert lit.tied and [name for name, _ in weights(lit)] == names
    assert difference(litgpt_logits(lit), expected) == 0.0


@pytest.mark.extensions
def test_a_head_that_litgpt_has_untied_stays_untied(make_model: MakeModel, tmp_path: Path) -> None:
    base = open_base(str(make_model("llama tied")))
    directory = write_litgpt(base, tmp_path / "lit")
    (directory / "config.json").write_bytes((base.directory / "config.json").read_bytes())  # type: ignore[operator]
    assert open_base(str(directory)).tied
    state = torch.load(directory / "lit_model.pth")
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    torch.save(state, directory / "lit_model.pth")
    lit = open_base(str(directory))
    assert not lit.tied and torch.equal(
        dict(weights(lit))["lm_head.weight"], state["lm_head.weight"]
    )


@pytest.mark.extensions
def test_settings_of_two_models_in_one_directory_are_refused(
    make_model: MakeModel, tmp_path: Path
) -> None:
    base = open_base(str(make_model("llama")))
    directory = write_litgpt(base, tmp_path / "lit")
    (directory / "config.json").write_bytes((base.directory / "config.json").read_bytes())  # type: ignore[operator]
    edit_json(directory / "config.json", num_hidden_layers=2)
    with pytest.raises(UserError, match="two models: n_layer is 3 in"):
        open_base(str(directory))
    (directory / "model_config.yaml").write_text("n_layers: 3\n")
    told = r"model configuration of this LitGPT version.*ftkit export ORIGINAL --format litgpt"
    with pytest.raises(UserError, match=f"(?s){told}"):
        open_base(str(directory))


# What a checkpoint keeps of its base model


SAME = ("name", "architecture", "tied", "dtype", "layout", "settings", "random")


def assert_same_but_weights(one: BaseModel, other: BaseModel) -> None:
    for field in SAME:
        assert getattr(one, field) == getattr(other, field), field
    text = "w3 w4 w5"
    assert torch.equal(one.tokenizer.encode(text), other.tokenizer.encode(text))
    special = [(t.bos_id, t.eos_id, t.use_bos) for t in (one.tokenizer, other.tokenizer)]
    assert special[0] == special[1]


def companions(base: BaseModel, directory: Path) -> Path:
    directory.mkdir()
    save_without_weights(base, directory)
    return directory


LAYOUTS = ("huggingface", "litgpt", "litgpt with config.json")


def in_layout(layout: str, base: BaseModel, directory: Path) -> BaseModel:
    if layout == "huggingface":
        return base
    write_litgpt(base, directory)
    if layout == "litgpt with config.json":
        shutil.copy(base.directory / "config.json", directory)  # type: ignore[operator]
    return open_base(str(directory))


@pytest.mark.extensions
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["llama", "llama tied", "gemma2", "phi3", "gpt_neox"])
def test_a_base_model_is_opened_again_without_its_weights(
    model: str, layout: str, make_model: MakeModel, tmp_path: Path
) -> None:
    base = in_layout(layout, open_base(str(make_model(model, torch.bfloat16))), tmp_path / "lit")
    directory = companions(base, tmp_path / "base")
    assert not any(weight_files(directory)) and layout_in(directory) == "hf"
    outlined = open_without_weights(directory)
    assert_same_but_weights(outlined, base)
    assert parameter_shapes(outlined) == parameter_shapes(base)
    assert not outlined.has_weights and base.has_weights


@pytest.mark.extensions
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["llama", "llama tied"])
def test_a_model_is_written_without_the_weights_it_came_from(
    model: str, layout: str, make_model: MakeModel, tmp_path: Path
) -> None:
    base = in_layout(layout, open_base(str(make_model(model))), tmp_path / "lit")
    directory = companions(base, tmp_path / "base")
    outlined = open_without_weights(directory)
    again = companions(outlined, tmp_path / "again")
    assert {f.name: f.read_bytes() for f in again.iterdir()} == {
        f.name: f.read_bytes() for f in directory.iterdir()
    }
    shutil.rmtree(directory)  # as retention may do while the run goes on
    save_hf(outlined, weights(base), tmp_path / "out")
    save_hf(base, weights(base), tmp_path / "expected")
    written, expected = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("out", "expected")
    )
    assert written == expected


@pytest.mark.extensions
def test_settings_that_no_weights_belong_to_are_not_taken_for_a_model(
    make_model: MakeModel, tmp_path: Path
) -> None:
    base = open_base(str(make_model("llama")))
    outlined = open_without_weights(companions(base, tmp_path / "base"))
    for read in (weights, fingerprint):
        with pytest.raises(UserError, match="holds the settings of llama, but not its weights"):
            read(outlined)
    with pytest.raises(UserError, match="not a complete base model"):
        open_base(str(tmp_path / "base"))


@pytest.mark.extensions
@pytest.mark.parametrize("content", [None, "{}", '{"name": "x", "tied": 1, "dtype": "float32"}'])
def test_without_a_readable_outline_the_settings_are_refused(
    content: str | None, make_model: MakeModel, tmp_path: Path
) -> None:
    directory = companions(open_base(str(make_model("llama"))), tmp_path / "base")
    (directory / "base.json").unlink()
    if content is not None:
        (directory / "base.json").write_text(content)
    with pytest.raises(UserError, match=r"base\.json is missing or damaged"):
        open_without_weights(directory)


@pytest.mark.extensions
def test_random_weights_stay_random(quickstart: Path, tmp_path: Path) -> None:
    base = open_base("random:pythia-14m")
    again = open_without_weights(companions(base, tmp_path / "base"))
    assert_same_but_weights(again, base)
    assert again.random and again.has_weights


# Fingerprints


@pytest.mark.extensions
@pytest.mark.parametrize("model", [name for name in MODELS if "attention bias" not in name])
def test_a_model_and_its_litgpt_copy_have_one_fingerprint(
    model: str, make_model: MakeModel, tmp_path: Path
) -> None:
    base = open_base(str(make_model(model)))
    directory = write_litgpt(base, tmp_path / "copied")
    shutil.copy(base.directory / "config.json", directory)  # type: ignore[operator]  # says whether it is tied
    lit = open_base(str(directory))
    assert lit.naming != base.naming
    assert fingerprint(lit) == fingerprint(base)


@pytest.mark.extensions
@pytest.mark.parametrize("model", ["llama grouped queries", "llama tied", "gpt_neox"])
def test_litgpts_own_conversion_keeps_the_fingerprint(
    model: str,
    copy_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = copy_model(model)
    original = open_base(str(directory))
    expected = fingerprint(original)
    monkeypatch.setattr(litgpt.Config, "from_name", lambda name: config_of(original))
    convert_hf_checkpoint(checkpoint_dir=directory, model_name="tiny")
    lit = open_base(str(directory))
    assert lit.naming != original.naming
    assert fingerprint(lit) == expected


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tiny-llama-1.1b", {"model_type": "llama", "max_position_embeddings": 2048}),
        ("Llama-3.2-1B", {"model_type": "llama", "max_position_embeddings": 131072}),
        ("Gemma-2-2b", {"model_type": "gemma2", "max_position_embeddings": 8192}),
        ("Mistral-7B-v0.1", {"model_type": "mistral", "max_position_embeddings": 32768}),
        ("LLaMA-2-7B-32K", {"model_type": "llama", "max_position_embeddings": 32768}),
    ],
)
def test_litgpts_own_settings_are_those_of_config_json(name: str, settings: dict[str, Any]) -> None:
    """What LitGPT says in another way than config.json is still one architecture."""
    lit = litgpt.Config.from_name(name)
    rope = lit.rope_adjustments or {}
    settings |= {
        "vocab_size": lit.padded_vocab_size,
        "num_hidden_layers": lit.n_layer,
        "hidden_size": lit.n_embd,
        "num_attention_heads": lit.n_head,
        "num_key_value_heads": lit.n_query_groups,
        "head_dim": lit.head_size,
        "intermediate_size": lit.intermediate_size,
        "rms_norm_eps": lit.norm_eps,
        "rope_theta": float(lit.rope_base),
    }
    if "low_freq_factor" in rope:
        settings["rope_scaling"] = {
            "rope_type": "llama3",
            "original_max_position_embeddings": rope["original_max_seq_len"],
        } | {key: rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
    if lit.rope_condense_ratio != 1:
        factor = float(lit.rope_condense_ratio)
        settings["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    if lit.post_mlp_norm:
        settings["query_pre_attn_scalar"] = lit.attention_scores_scalar or lit.head_size
    theirs = litgpt_part("families").litgpt_config(settings, "copy")
    assert litgpt_architecture(theirs).identity() == litgpt_architecture(lit).identity()


@pytest.mark.extensions
@pytest.mark.parametrize("model", ["llama grouped queries", "llama tied", "gpt_neox"])
def test_other_values_in_any_one_tensor_are_another_model(
    model: str, copy_model: Callable[[str], Path]
) -> None:
    directory = copy_model(model)
    expected = fingerprint(open_base(str(directory)))
    file = directory / "model.safetensors"
    original = load_file(file)
    found = {expected}
    for name, tensor in original.items():
        save_file(original | {name: tensor + 1e-3}, file, metadata={"format": "pt"})
        found.add(fingerprint(open_base(str(directory))))
    assert len(found) == len(original) + 1


@pytest.mark.extensions
def test_swapped_layers_are_another_model(copy_model: Callable[[str], Path]) -> None:
    directory = copy_model("llama")
    expected = fingerprint(open_base(str(directory)))
    file = directory / "model.safetensors"
    swapped = {
        name.replace("layers.0.", "layers.x.")
        .replace("layers.1.", "layers.0.")
        .replace("layers.x.", "layers.1."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(swapped, file, metadata={"format": "pt"})
    assert fingerprint(open_base(str(directory))) != expected


@pytest.mark.extensions
@pytest.mark.parametrize(
    "values", [{"rms_norm_eps": 1e-3}, {"rope_theta": 5e4}, {"rope_scaling": LLAMA3_ROPE}]
)
def test_settings_that_change_what_is_computed_are_another_model(
    values: dict[str, Any], copy_model: Callable[[str], Path]
) -> None:
    directory = copy_model("llama")
    expected = fingerprint(open_base(str(directory)))
    edit_json(directory / "config.json", rope_parameters=..., **values)
    assert fingerprint(open_base(str(directory))) != expected


@pytest.mark.extensions
def test_the_name_number_format_and_longest_sequence_do_not_change_the_fingerprint(
    make_model: MakeModel, copy_model: Callable[[str], Path], tmp_path: Path
) -> None:
    half = make_model("llama", dtype=torch.bfloat16)
    directory = tmp_path / "renamed"
    shutil.copytree(half, directory)
    file = directory / "model.safetensors"
    wide = {name: tensor.float() for name, tensor in load_file(file).items()}
    save_file(wide, file, metadata={"format": "pt"})
    edit_json(directory / "config.json", max_position_embeddings=32)
    assert fingerprint(open_base(str(directory))) == fingerprint(open_base(str(half)))


@pytest.mark.extensions
def test_random_weights_are_told_apart_by_their_architecture_without_being_drawn(
    quickstart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_weights, "random_weight", None)
    names = ("pythia-14m", "pythia-70m", "SmolLM2-135M")
    found = [fingerprint(open_base(f"random:{name}")) for name in (*names, *names)]
    assert found[:3] == found[3:] and len(set(found)) == 3


@pytest.fixture
def quickstart(tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the embedded model."""
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart/model").symlink_to(make_model("llama"))
    monkeypatch.setattr(embedded, "path", lambda name: tmp_path / name)
    return tmp_path / "quickstart/model"


@pytest.mark.extensions
@pytest.mark.parametrize(
    "name", ["pythia-14m", "SmolLM2-135M", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "CodeGemma-7b-it"]
)
def test_any_architecture_of_litgpt_comes_with_random_weights(name: str, quickstart: Path) -> None:
    base = open_base(f"random:{name}")
    expected = litgpt.Config.from_name(name)
    assert base.random and config_of(base) == expected and base.name == f"random:{expected.name}"
    assert base.tied == ("Gemma" in name)


@pytest.mark.extensions
def test_random_weights_are_the_same_each_time_and_norms_let_pass(quickstart: Path) -> None:
    base = open_base("random:pythia-14m")
    assert all(
        torch.equal(x, y) for (_, x), (_, y) in zip(weights(base), weights(base), strict=True)
    )
    by_name = dict(weights(base))
    assert by_name["transformer.h.0.mlp.fc.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(*[by_name[f"transformer.h.{n}.mlp.fc.weight"] for n in (0, 1)])
    assert by_name["transformer.ln_f.weight"].eq(1).all()
    assert by_name["transformer.ln_f.bias"].eq(0).all()


@pytest.mark.extensions
def test_random_weights_on_a_device_are_views_of_one_table_and_all_differ(quickstart: Path) -> None:
    base = open_base("random:pythia-14m")
    drawn = [t for _, t in weights(base, torch.device("cpu")) if t.dim() > 1]
    assert len({tensor.untyped_storage().data_ptr() for tensor in drawn}) == 1
    for one, other in itertools.combinations(drawn, 2):
        assert one.shape != other.shape or not one.eq(other).any(1).all()


def test_random_weights_of_many_experts_begin_at_different_numbers() -> None:
    numbers = torch.empty(len(random_numbers()), device="meta")
    count, shape = 48 * 128 * 3, torch.Size((768, 2048))  # of Qwen3-30B-A3B in LitGPT's layout
    views = (random_weight(shape, place, numbers) for place in range(count))
    assert len({view.storage_offset() for view in views}) == count


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((4096, 4096), "square"),
        ((262_144, 8960), "a large vocabulary"),
        ((14_848, 59_392), "long rows"),
        ((64, 1, 4), "kernels of a convolution"),
        ((2048, 1024, 1), "kernels of one number"),
        ((8, 512, 512), "few experts"),
        ((256, 4096, 7168), "many experts"),
        ((384, 4096, 7168), "more of them"),
    ],
)
def test_rows_of_a_random_weight_differ_and_its_matrices_are_not_symmetric(
    shape: tuple[int, ...], why: str
) -> None:
    numbers = random_numbers()
    for place in (0, 1, 2, len(numbers) - 1):
        view = random_weight(torch.Size(shape), place, numbers)
        assert view.shape == shape, why
        begins = sum(
            step * torch.arange(size).reshape(-1, *[1] * (len(shape) - 2 - axis))
            for axis, (size, step) in enumerate(zip(shape[:-1], view.stride()[:-1], strict=True))
        )
        assert isinstance(begins, Tensor)
        assert len(begins.unique()) == begins.numel(), f"{why}: rows begin at different numbers"
        side = min(32, *shape[-2:])
        corner = view[..., :side, :side].reshape(-1, side, side)[-1]
        assert side == 1 or not corner.equal(corner.t()), why


@pytest.mark.extensions
def test_random_weights_are_equal_in_a_file_and_on_a_device(
    quickstart: Path, tmp_path: Path
) -> None:
    base = open_base("random:pythia-14m")
    read = dict(weights(base))
    save_file(read, tmp_path / "random.safetensors")  # which refuses tensors that share memory
    written = load_file(tmp_path / "random.safetensors")
    for name, tensor in weights(base, torch.device("cpu")):
        assert torch.equal(written[name], tensor)


@pytest.mark.extensions
def test_random_weights_are_drawn_on_the_host_whatever_the_default_device_is(
    quickstart: Path,
) -> None:
    base = open_base("random:pythia-14m")
    with torch.device("meta"):  # Lightning makes the GPU the default while a model is filled
        assert {tensor.device.type for _, tensor in weights(base)} == {"cpu"}


@pytest.mark.extensions
def test_an_unknown_architecture_is_refused_with_its_nearest_names(quickstart: Path) -> None:
    with pytest.raises(UserError, match="did you mean random:EleutherAI/pythia-14m"):
        open_base("random:pythia-14")


@pytest.mark.extensions
@pytest.mark.parametrize("by", ["name", "path"])
def test_the_embedded_model_has_a_name_of_its_own(by: str, quickstart: Path) -> None:
    asked = "embedded:quickstart" if by == "name" else str(quickstart.resolve())
    assert open_base(asked).name == "quickstart"


# Names


@pytest.mark.extensions
@pytest.mark.parametrize("model", MODELS)
def test_names_go_over_to_hugging_face_one_to_one(model: str, make_model: MakeModel) -> None:
    base = open_base(str(make_model(model)))
    assert base.directory is not None
    theirs = set(load_file(base.directory / "model.safetensors"))  # as transformers wrote it
    naming = base.architecture.naming_in("hf")
    assert naming is not None
    found = [naming.theirs(name) for name in parameter_shapes(base)]
    assert family(model) in FUSED or None not in found
    found = [name for name in found if name is not None]
    assert theirs.issuperset(found)
    assert len(set(found)) == len(found)


@pytest.mark.extensions
def test_modules_and_what_hangs_on_them_are_renamed(make_model: MakeModel) -> None:
    llama, phi = (
        open_base(str(make_model(model))).architecture.naming_in("hf")
        for model in ("llama", "phi3")
    )
    assert llama.theirs("transformer.h.3.attn.qkv.q_proj") == "model.layers.3.self_attn.q_proj"
    assert llama.theirs("transformer.h.11.mlp.fc_1.lora_A.weight") == (
        "model.layers.11.mlp.gate_proj.lora_A.weight"
    )
    assert llama.theirs("lm_head") == "lm_head"
    assert phi.theirs("transformer.h.3.attn.qkv.q_proj") is None


# Writing Hugging Face directories


@pytest.mark.extensions
@pytest.mark.parametrize("model", MODELS)
def test_what_is_written_is_the_same_model_to_transformers(
    model: str, make_model: MakeModel, tmp_path: Path
) -> None:
    base, out = open_base(str(make_model(model))), tmp_path / f"{family(model)}-copy"
    save_hf(base, weights(base), out)
    before, after = transformers_logits(base.directory), transformers_logits(out)
    assert difference(after, before) == 0.0
    again = open_base(str(out))
    assert again.tied == base.tied and again.tokenizer.eos_id == base.tokenizer.eos_id


@pytest.mark.extensions
def test_weights_are_split_into_shards_of_bounded_size(
    make_model: MakeModel, tmp_path: Path
) -> None:
    base = open_base(str(make_model("llama")))
    save_hf(base, weights(base), tmp_path / "out", max_shard_bytes=20_000)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all((tmp_path / "out" / file).stat().st_size < 21_000 for file in files)
    assert (
        difference(transformers_logits(tmp_path / "out"), transformers_logits(base.directory)) == 0
    )


@pytest.mark.extensions
def test_the_number_format_is_that_of_the_tensors_and_config_json_says_so(
    make_model: MakeModel, tmp_path: Path
) -> None:
    base = open_base(str(make_model("llama")))
    tensors = ((name, tensor.bfloat16()) for name, tensor in weights(base))
    save_hf(base, tensors, tmp_path / "out")
    assert open_base(str(tmp_path / "out")).dtype == torch.bfloat16
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.extensions
@pytest.mark.parametrize("was_tied", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_result_is_tied_if_it_has_no_head(
    was_tied: bool, is_tied: bool, make_model: MakeModel, tmp_path: Path
) -> None:
    base = open_base(str(make_model("llama tied" if was_tied else "llama")))
    tensors = {name: tensor for name, tensor in weights(base) if name != "lm_head.weight"}
    if not is_tied:
        tensors["lm_head.weight"] = torch.randn(VOCABULARY, 32)
    save_hf(base, tensors.items(), tmp_path / "out")
    assert open_base(str(tmp_path / "out")).tied == is_tied
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    head = tensors["transformer.wte.weight" if is_tied else "lm_head.weight"]
    assert torch.equal(model.lm_head.weight, head)


@pytest.mark.extensions
def test_the_files_are_those_of_the_base_and_readable_as_its_owner_likes(
    copy_model: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = copy_model("llama")
    edit_json(directory / "config.json", auto_map={"AutoModel": "modeling.Own"}, mark="kept")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    base = open_base(str(directory))
    save_hf(base, weights(base), tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {file.name for file in directory.iterdir()}
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert settings["mark"] == "kept" and "auto_map" not in settings
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}
    assert modes == {0o666 & ~current_umask()}


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.extensions
@pytest.mark.parametrize(
    "model",
    ["llama llama3 rope", "llama linear rope", "llama attention and mlp bias", "qwen2", "qwen3"],
)
def test_a_config_json_is_made_where_a_litgpt_directory_has_none(
    model: str, make_model: MakeModel, tmp_path: Path
) -> None:
    original = open_base(str(make_model(model)))
    lit = open_base(str(write_litgpt(original, tmp_path / "lit")))
    assert not lit.settings
    save_hf(lit, weights(lit), tmp_path / "out")
    expected = transformers_logits(original.directory)
    assert difference(transformers_logits(tmp_path / "out"), expected) == 0.0


@pytest.mark.extensions
def test_families_whose_config_json_cannot_be_made_are_refused_before_any_work(
    make_model: MakeModel, tmp_path: Path
) -> None:
    lit = open_base(str(write_litgpt(open_base(str(make_model("gemma"))), tmp_path / "lit")))
    with pytest.raises(UserError, match="for Hugging Face without its"):
        save_hf(lit, untouchable(), tmp_path / "out")
    unknown = dataclasses.replace(lit, architecture=litgpt_architecture(config_of(lit)))
    with pytest.raises(UserError, match="cannot write for Hugging Face"):
        save_hf(unknown, untouchable(), tmp_path / "out")


def untouchable() -> Iterator[tuple[str, Tensor]]:
    pytest.fail("a tensor was taken")
    yield  # type: ignore[unreachable]


@pytest.mark.extensions
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_nothing_half_written_stays(error: Any, make_model: MakeModel, tmp_path: Path) -> None:
    base = open_base(str(make_model("llama")))

    def broken_off() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(weights(base)):
            if number == 9:
                raise error
            yield pair

    expected = KeyboardInterrupt if error is KeyboardInterrupt else UserError
    with pytest.raises(expected):
        save_hf(base, broken_off(), tmp_path / "out", max_shard_bytes=5_000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extensions
@pytest.mark.parametrize("wrong", ["missing", "twice", "unknown", "shape"])
def test_tensors_of_another_model_are_refused(
    wrong: str, make_model: MakeModel, tmp_path: Path
) -> None:
    base = open_base(str(make_model("llama")))
    pairs = list(weights(base))
    if wrong == "missing":
        pairs = pairs[:-1]
    elif wrong == "twice":
        pairs += pairs[:1]
    elif wrong == "unknown":
        pairs.append(("transformer.extra.weight", torch.zeros(2)))
    else:
        pairs[0] = (pairs[0][0], torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"not given|twice, unknown or"):
        save_hf(base, pairs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.extensions
def test_an_existing_model_is_never_overwritten(make_model: MakeModel, tmp_path: Path) -> None:
    base = open_base(str(make_model("llama")))
    save_hf(base, weights(base), tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        save_hf(base, untouchable(), tmp_path / "out")


def test_every_known_family_is_tested() -> None:
    assert {family(model) for model in MODELS} == set(litgpt_part("families").FAMILIES)


@pytest.mark.extensions
def test_an_old_checkpoint_with_a_stored_tied_head_is_read(
    copy_model: Callable[[str], Path],
) -> None:
    directory = copy_model("llama tied")
    state = load_file(directory / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, directory / "model.safetensors")
    base = open_base(str(directory))
    assert base.tied and "lm_head.weight" not in dict(weights(base))


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("name", "billions"),
    [("Mixtral-8x7B-v0.1", 46.7), ("Qwen/Qwen3-30B-A3B", 30.5), ("qwen3_moe", 15.4)],
)
def test_random_names_are_those_of_both_implementations(name: str, billions: float) -> None:
    base = base_model.open_base(f"random:{name}")
    assert base.architecture.implementation == "transformers"
    count = sum(shape.numel() for shape in base.architecture.parameter_shapes(tied=False).values())
    assert count / 1e9 == pytest.approx(billions, abs=0.05)
    assert base_model.open_base(base.name).architecture == base.architecture


def test_an_unknown_random_name_suggests_model_types() -> None:
    with pytest.raises(UserError, match="random:qwen3_moe"):
        open_base("random:qwen3_moes")
