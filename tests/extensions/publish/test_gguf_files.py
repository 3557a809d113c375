"""ftkit export --format gguf: files that the package gguf, transformers and ftkit read back."""

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from adapters import ALL, MAKERS, VARIANTS, build, lora_recipe, train
from adapters import export as save_peft
from conversions import assert_equal, export, merge, own_logits
from gguf_models import MODELS, TEMPLATE, make_gguf_model
from llama_cpp import (
    EXPLAINED,
    converted,
    converted_adapter,
    differences,
    metadata_of,
    needs_llama_cpp,
)
from messages import message_of, says
from results import Ended
from safetensors.torch import load_file, save_file
from seeing_models import save_model
from tiny import make_llama
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.extensions.gguf.header import read_header
from ftkit.extensions.gguf.tokenizer import tokenizer_files
from ftkit.extensions.publish.gguf import kquants
from ftkit.extensions.publish.gguf import model as gguf_model
from ftkit.models.pretrained.base_model import open_base
from ftkit.models.pretrained.places import find_or_download

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOKENS = torch.arange(3, 43).view(2, 20) * 7 % 330
READ_BY_TRANSFORMERS = {
    "smollm2": {},
    "mistral": {},
    "qwen2": {},
    "gemma2": {"query_pre_attn_scalar": 32},
}
"""Settings that are not in the files: of the others, transformers does not read the factors and
biases of llama, the size of heads of qwen3, and longrope."""


READ_BY_FTKIT = {"llama", "smollm2", "mistral", "mistral_small", "qwen2", "qwen3", "gemma2", "wide"}
"""All others are families that are written alone, or have positions that are not read."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each of `MODELS`."""
    root = tmp_path_factory.mktemp("models")
    # Readers conclude something from names such as mistral or 7.
    named = zip(MODELS, ascii_lowercase, strict=False)
    return {name: make_gguf_model(root / letter, name) for name, letter in named}


def mistake(*words: object) -> str:
    return message_of(run, ["export", *map(str, words), "--format", "gguf"])


def write(name: object, out: Path, numbers: str = "f32", *words: object) -> Path:
    """The file that an export writes."""
    export(name, "gguf", out, "--quantization", numbers, *words)
    (file,) = out.glob("*.gguf")
    return file


def numbers_in(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a file as float32, by llama.cpp's names."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(file).tensors
    }


@torch.no_grad()
def logits(directory: Path, **options: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **options
    )
    found: Tensor = model.eval()(TOKENS).logits
    return found


# --- Models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_model_read_back_from_float32_has_its_logits(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    file = write(models[name], tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {file.name, "Modelfile"}
    expected = logits(models[name])
    if (settings := READ_BY_TRANSFORMERS.get(name)) is not None:
        assert_equal(logits(file.parent, gguf_file=file.name, **settings), expected)
    if name in READ_BY_FTKIT:
        back = find_or_download(str(file), root=tmp_path / "checkpoints")
        assert_equal(logits(back), expected)
        found, own = (load_file(path / "model.safetensors") for path in (back, models[name]))
        shifted = "norm" if name == "gemma2" else "none"
        assert found.keys() == own.keys()
        assert all(torch.equal(found[key], own[key]) for key in own if shifted not in key)
    metadata = metadata_of(file)
    assert metadata["tokenizer.chat_template"] == TEMPLATE
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    assert metadata["tokenizer.ggml.add_bos_token"] is (MODELS[name][1] == "pieces")
    assert len(metadata["tokenizer.ggml.tokens"]) == 400
    assert metadata["general.size_label"].endswith("M" if name == "wide" else "K")


@pytest.mark.parametrize(("kind", "family"), [("llava", "llama"), ("internvl", "qwen2")])
def test_of_a_model_that_sees_the_language_model_is_written(
    kind: str, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(kind, tmp_path / "a")
    file = write(tmp_path / "a", tmp_path / "out")
    assert "convert_hf_to_gguf.py --mmproj" in capsys.readouterr().out
    assert metadata_of(file)["general.architecture"] == family
    back = find_or_download(str(file), root=tmp_path / "checkpoints")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "a", dtype=torch.float32).eval()
    tokens = torch.arange(40, 80).view(2, 20)
    with torch.no_grad():
        expected = whole(input_ids=tokens).logits
        found = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()(tokens)
    assert_equal(found.logits, expected)


@pytest.mark.parametrize(
    ("numbers", "kind", "file_type", "step"),
    [("f16", "F16", 1, 2**-11), ("bf16", "BF16", 32, 2**-8), ("q8_0", "Q8_0", 7, 1 / 127)],
)
def test_matrices_are_in_the_number_format_of_the_option(
    numbers: str,
    kind: str,
    file_type: int,
    step: float,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = numbers_in(write(models["smollm2"], tmp_path / "f32"))
    file = write(models["smollm2"], tmp_path / "out", numbers)
    assert file.name == f"model-{numbers}.gguf"
    assert metadata_of(file)["general.file_type"] == file_type
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    # Rows of 80 numbers are no whole blocks of 32: those are held as float16, as llama.cpp does.
    assert kinds["blk.0.ffn_down.weight"] == ("F16" if numbers == "q8_0" else kind)
    assert kinds["blk.1.attn_q.weight"] == kinds["token_embd.weight"] == kind
    assert kinds["output_norm.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"
    for name, values in numbers_in(file).items():
        assert np.abs(values - exact[name]).max() <= step * np.abs(exact[name]).max(), name
    monkeypatch.setattr(gguf_model, "_CHUNK_NUMBERS", 1)
    in_rows = write(models["smollm2"], tmp_path / "rows", numbers)
    assert in_rows.read_bytes() == file.read_bytes()


def test_numbers_keep_their_stored_format_by_default(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    for name, numbers in (("full", "f32"), ("bf16", "bf16")):
        export(ended[name].out_dir, "gguf", tmp_path / name)
        assert (tmp_path / name / f"model-{numbers}.gguf").is_file()
    export(ended["lora"].out_dir, "gguf", tmp_path / "lora")
    assert (tmp_path / "lora" / "adapter-f32.gguf").is_file()


def test_a_fine_tune_its_checkpoint_and_a_merged_model_go_the_same_way(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    run_ = ended["tied"]
    first = write(run_.out_dir, tmp_path / "final")
    from_checkpoint = numbers_in(write(run_.checkpoint, tmp_path / "checkpoint"))
    assert "output.weight" not in from_checkpoint
    for name, values in numbers_in(first).items():
        assert np.array_equal(values, from_checkpoint[name])
    template = (run_.final / "chat_template.jinja").read_text()
    assert metadata_of(first)["tokenizer.chat_template"] == template
    merged = merge(ended["lora"].out_dir, tmp_path / "merged")
    file = write(merged, tmp_path / "gguf")
    assert_equal(own_logits(file), own_logits(merged))
    assert (file.parent / "Modelfile").read_text().startswith("FROM ./model-f32.gguf\n")


def test_the_result_of_the_quick_start_can_be_written(tmp_path: Path) -> None:
    file = write("embedded:quickstart", tmp_path / "out")
    assert metadata_of(file)["tokenizer.ggml.pre"] == "qwen2"
    back = find_or_download(str(file), root=tmp_path / "checkpoints")
    assert_equal(own_logits(back), own_logits("embedded:quickstart"))


def test_pieces_keep_the_scores_of_their_model_or_get_some_in_the_order_of_merges(
    models: dict[str, Path], tmp_path: Path
) -> None:
    from sentencepiece import SentencePieceProcessor

    model = models["mistral"]
    pieces = SentencePieceProcessor(model_file=str(model / "tokenizer.model"))
    file = write(model, tmp_path / "out")
    metadata = metadata_of(file)
    for number in range(3, 340):
        assert metadata["tokenizer.ggml.tokens"][number] == pieces.id_to_piece(number)
        assert metadata["tokenizer.ggml.scores"][number] == pytest.approx(pieces.get_score(number))
    kinds = metadata["tokenizer.ggml.token_type"]
    assert [kinds[i] for i in (1, 3, 300, 341, 342, 343)] == [3, 6, 1, 3, 4, 5]
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "tokenizer.model").unlink()
    header = read_header(file)
    (copy / "tokenizer.json").write_bytes(tokenizer_files(header)["tokenizer.json"])
    again = metadata_of(write(copy, tmp_path / "again"))
    assert again["tokenizer.ggml.model"] == "llama"
    scores = [again["tokenizer.ggml.scores"][i] for i in range(259, 340)]
    merged = [i for i in range(259, 340) if len(pieces.id_to_piece(i)) > 1]
    assert merged == sorted(merged, key=lambda i: -scores[i - 259])


def test_the_modelfile_has_the_template_in_the_language_of_ollama(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(models["smollm2"], tmp_path / "out")
    role = '{{ if eq .Role "%s" }}<|im_start|>%s\n{{ .Content }}<|im_end|>\n{{ end }}'
    roles = "".join(role % (name, name) for name in ("system", "user", "assistant"))
    turns = "<s>{{ range .Messages }}" + roles + "{{ end }}<|im_start|>assistant\n"
    assert (file.parent / "Modelfile").read_text() == (
        "FROM ./model-f32.gguf\n"
        f'TEMPLATE """{turns}"""\n'
        'PARAMETER stop "</s>"\n'
        'PARAMETER stop "<|im_end|>"\n'
    )
    copy = Path(shutil.copytree(models["smollm2"], tmp_path / "copy"))
    (copy / "chat_template.jinja").write_text("{{ messages | length }}: {{ messages[0].content }}")
    text = (write(copy, tmp_path / "other").parent / "Modelfile").read_text()
    assert "TEMPLATE here" in text and 'TEMPLATE "' not in text
    said = capsys.readouterr().out
    assert said.count("it may need a TEMPLATE first") == 1
    assert "(it may need" in said.partition("/other/Modelfile ")[2]


def test_importance_is_measured_on_the_data_of_a_run_and_used_for_packing(
    models: dict[str, Path], ended: dict[str, Ended], tmp_path: Path
) -> None:
    # The run's model has the same number of tokens.
    run_ = ended["full"].out_dir
    file = write(models["wide"], tmp_path / "out", "q4_k_m", "--imatrix", str(run_))
    plain = write(models["wide"], tmp_path / "plain", "q4_k_m")
    fields = metadata_of(file.parent / "model.imatrix")
    assert fields["general.type"] == "imatrix"
    assert fields["imatrix.datasets"] == [str(run_)] and fields["imatrix.chunk_size"] == 512
    measured = {
        tensor.name: np.array(tensor.data)
        for tensor in gguf.GGUFReader(file.parent / "model.imatrix").tensors
    }
    names = {name.removesuffix(".in_sum2") for name in measured if name.endswith(".in_sum2")}
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    assert names == {f"blk.{layer}.{name}.weight" for layer in range(4) for name in matrices}
    counts = {float(measured[f"{name}.counts"].item()) for name in names}
    assert len(counts) == 1
    # The inputs of these are the same.
    for name in ("attn_k", "attn_v"):
        same = measured["blk.1.attn_q.weight.in_sum2"], measured[f"blk.1.{name}.weight.in_sum2"]
        assert np.array_equal(*same)
    # An input of the first layer has a norm before it, so its mean square is that of the weights.
    norm = load_file(models["wide"] / "model.safetensors")
    weight = norm["model.layers.0.input_layernorm.weight"].numpy()
    means = measured["blk.0.attn_q.weight.in_sum2"].ravel() / counts.pop()
    assert (means / weight**2).mean() == pytest.approx(1, rel=0.02)
    packed, other = (
        {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
        for path in (file, plain)
    )
    rows = norm["model.layers.1.mlp.up_proj.weight"].numpy()
    importance = measured["blk.1.ffn_up.weight.in_sum2"].ravel() / np.float32(
        measured["blk.1.ffn_up.weight.counts"].item()
    )
    expected = b"".join(kquants.pack(rows, "Q4_K", importance))
    assert packed["blk.1.ffn_up.weight"].tobytes() == expected
    assert other["blk.1.ffn_up.weight"].tobytes() != expected


def test_importance_needs_k_quants_and_a_run_with_data(
    models: dict[str, Path], tmp_path: Path
) -> None:
    model, out = models["wide"], ("--out", tmp_path / "out")
    text = mistake(model, "--quantization", "q8_0", "--imatrix", model, *out)
    assert says(text, "--imatrix is ... only K-quants ... --quantization q4_k_m")
    text = mistake(model, "--quantization", "q4_k_m", "--imatrix", model, *out)
    assert says(text, "--imatrix is ... which data ... run")


# --- Adapters -------------------------------------------------------------------------------------


def make_adapter(root: Path, family: str, variant: str) -> tuple[Path, Path]:
    """A base model and a trained adapter of it in PEFT's layout."""
    if family in MAKERS:
        MAKERS[family](root / family)
    else:
        save_model(family, root / family)
    base = open_base(str(root / family))
    recipe = lora_recipe(base, lora_r=4, lora_alpha=12, **ALL | VARIANTS[variant])
    assert base.directory is not None
    adapter = save_peft(train(build(base, recipe)), base, recipe, root / variant)
    return base.directory, adapter


@pytest.mark.parametrize(
    ("family", "variant"), [("llama", "rslora"), ("phi-3", "lora"), ("llava", "lora")]
)
def test_an_adapter_adds_to_its_base_what_merging_adds(
    family: str, variant: str, tmp_path: Path
) -> None:
    base, adapter = make_adapter(tmp_path, family, variant)
    words = ("--checkpoint_dir", str(base))
    before = numbers_in(write(base, tmp_path / "before"))
    after = numbers_in(write(merge(adapter, tmp_path / "merged", *words), tmp_path / "after"))
    file = write(adapter, tmp_path / "out", "f32", *words)
    assert file.name == "adapter-f32.gguf"
    metadata, found = metadata_of(file), numbers_in(file)
    assert metadata["general.type"] == "adapter" and metadata["adapter.type"] == "lora"
    adapted = {name.removesuffix(".lora_a") for name in found if name.endswith(".lora_a")}
    assert len(adapted) == (9 if family == "phi-3" else 15)
    for name, values in before.items():
        if name in adapted:
            a, b = found[f"{name}.lora_a"], found[f"{name}.lora_b"]
            values = values + b @ a * (metadata["adapter.lora.alpha"] / len(a))
        assert np.abs(values - after[name]).max() < 1e-5, name


def test_the_command_for_the_base_of_an_adapter_writes_the_file_that_llama_cpp_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = make_adapter(tmp_path, "llama", "lora")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = None  # as if made elsewhere
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    write(adapter, Path("out"), "f32", "--checkpoint_dir", str(base))
    said = dict(re.findall(r"^([\w. ]+): +(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert run(shlex.split(said["its base"])[1:]) == 0
    model, adapter_file = shlex.split(said["llama.cpp"])[2::2]
    assert metadata_of(Path(model))["general.architecture"] == "llama"
    assert metadata_of(Path(adapter_file))["adapter.type"] == "lora"


def test_an_adapter_whose_base_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = make_adapter(tmp_path, "llama", "lora")
    file = base / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    file.write_text(json.dumps(tokenizer))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    write(adapter, Path("out"), "f32", "--checkpoint_dir", str(base))
    said = capsys.readouterr().out
    assert "ftkit export" not in said and "convert_hf_to_gguf.py" in said


def test_adapters_that_llama_cpp_does_not_support_are_refused_with_a_remedy(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    out = ("--out", tmp_path / "out")
    text = mistake(ended["dora"].out_dir, *out)
    assert "is DoRA" in text and f"Try ftkit merge {ended['dora'].out_dir} --out DIR" in text
    text = mistake(ended["lora"].out_dir, "--quantization", "q4_k_m", *out)
    assert says(text, "--quantization is q4_k_m ... adapter ... Try --quantization q8_0")
    base, adapter = make_adapter(tmp_path, "llama", "lora")
    weights = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.norm.weight"
    save_file(weights | {name: torch.ones(64)}, adapter / "adapter_model.safetensors")
    text = mistake(adapter, "--checkpoint_dir", base, *out)
    assert says(text, f"{name} ... llama.cpp")
    assert not (tmp_path / "out").exists()


# --- What is refused ------------------------------------------------------------------------------


def test_models_that_llama_cpp_computes_differently_are_refused_before_anything_is_written(
    models: dict[str, Path], tmp_path: Path
) -> None:
    changes: list[tuple[str, dict[str, Any], str]] = [
        ("llama", {"hidden_act": "gelu"}, "has the activation gelu"),
        ("qwen2", {"use_sliding_window": True}, "has a sliding window"),
        ("gemma2", {"query_pre_attn_scalar": 16}, "has query_pre_attn_scalar 16, not 32"),
        (
            "smollm2",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
            "stretches its positions by yarn",
        ),
    ]
    for name, settings, expected in changes:
        copy = Path(shutil.copytree(models[name], tmp_path / "copy"))
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | settings))
        assert expected in mistake(copy, "--out", tmp_path / "out")
        shutil.rmtree(copy)
    neox = MAKERS["gpt-neox"](tmp_path / "neox")
    text = mistake(neox, "--out", tmp_path / "out")
    assert says(text, "gpt_neox ... llama, mistral, qwen2")
    save_model("qwen2_vl", tmp_path / "copy")
    text = mistake(tmp_path / "copy", "--out", tmp_path / "out")
    assert says(text, "language model of copy ... qwen2_vl_text ... --mmproj")
    shutil.rmtree(tmp_path / "copy")
    copy = Path(shutil.copytree(models["smollm2"], tmp_path / "copy"))
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = mistake(copy, "--out", tmp_path / "out")
    assert says(text, "tokenizer of copy ... rule")
    shutil.rmtree(copy)
    assert [path.name for path in tmp_path.iterdir()] == ["neox"]


def test_options_disks_and_packages_that_do_not_suit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, out = make_llama(tmp_path / "tiny"), ("--out", tmp_path / "out")
    assert "Try --quantization f16" in mistake(base, "--dtype", "float16", *out)
    assert f"Try --out {tmp_path / 'out'}." in mistake(base, "--out", tmp_path / "out.gguf")
    assert "--quantization is 'q4_0'" in mistake(base, "--quantization", "q4_0", *out)
    with pytest.raises(UserError, match="only GGUF files have it"):
        run(["export", str(base), "--format", "hf", "--quantization", "f16", "--out", "x"])
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    weights["model.embed_tokens.weight"][0, 0] = 1e6
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert "which f16 cannot hold" in mistake(base, "--quantization", "f16", *out)
    assert "not finite" in mistake(base, *out)
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda _: usage)
        assert "the disk has 1.0 MiB free" in mistake(base, *out)
    real = importlib.util.find_spec
    with monkeypatch.context() as bare:
        bare.setattr(
            importlib.util, "find_spec", lambda n, *a: (n != "gguf" and real(n, *a)) or None
        )
        assert "pip install 'ftkit[gguf]'" in mistake(base, *out)
    with monkeypatch.context() as full:
        full.setattr(gguf_model, "_packed", _fail)
        assert says(mistake(base, *out), "No space left")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def _fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_gguf_export_is_replaced_only_with_overwrite(
    models: dict[str, Path], tmp_path: Path
) -> None:
    file = write(models["qwen2"], tmp_path / "out")
    assert "or --overwrite" in mistake(models["qwen2"], "--out", tmp_path / "out")
    assert write(models["qwen2"], tmp_path / "out", "bf16", "--overwrite") != file


# --- Beside llama.cpp's own converters ------------------------------------------------------------


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_files_are_those_of_llama_cpps_converter_but_for_what_is_explained(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    rule = MODELS[name][1]
    for numbers in ("f32", "f16", "bf16", "q8_0"):
        ours = write(models[name], tmp_path / numbers, numbers)
        theirs = converted(
            models[name], tmp_path / "theirs.gguf", numbers, "" if rule == "pieces" else rule
        )
        assert {k: v for k, v in differences(ours, theirs).items() if k not in EXPLAINED} == {}


@needs_llama_cpp
@pytest.mark.slow
def test_adapters_are_those_of_llama_cpps_converter(tmp_path: Path) -> None:
    base, adapter = make_adapter(tmp_path, "llama", "lora")
    ours = write(adapter, tmp_path / "ours", "f16", "--checkpoint_dir", str(base))
    theirs = converted_adapter(adapter, base, tmp_path / "theirs.gguf", "f16")
    assert {k: v for k, v in differences(ours, theirs).items() if k not in EXPLAINED} == {}
