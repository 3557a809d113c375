"""GGUF files as base models: the oracles are what was written, and transformers' own reader."""

import io
import json
import re
import shutil
import struct
import threading
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command
from gguf_files import TEMPLATE, byte_level_tokenizer, patched, write_gguf, write_raw_gguf
from safetensors.torch import load_file
from tiny import LLAMA, TEXT, make_data, make_llama, make_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ftkit.errors import UserError
from ftkit.extensions.gguf import convert as conversion
from ftkit.extensions.gguf import model as gguf_model
from ftkit.extensions.gguf.convert import planned_conversion
from ftkit.extensions.gguf.header import BLOCKS, GgufHeader, GgufTensor, read_header
from ftkit.launch.preflight import rough_model
from ftkit.models.pretrained.base_model import fingerprint, open_base, read_blueprint
from ftkit.models.pretrained.places import find_here, find_or_download
from ftkit.models.pretrained.tokenizer import Tokenizer

SIZES = LLAMA | {"pad_token_id": None}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "llama head size": {"head_dim": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64},
    "phi3": {"pad_token_id": 0},
}
NOT_IN_TRANSFORMERS = ("gemma", "llama biases", "phi3", "qwen3")
"""It reads no gemma, neither the biases of llama nor the size of heads of qwen3, and has a padding
token of its own for phi3."""


def make_model(directory: Path, model: str) -> Path:
    """A random model of a family, with all numbers different."""
    config = AutoConfig.for_model(model.split()[0], **SIZES | MODELS[model])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in made.parameters():
                noise = torch.randn_like(parameter) * 0.1
                parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    made.save_pretrained(directory)
    make_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def content(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Of a sound file."""
    return write_gguf(llama, tmp_path_factory.mktemp("gguf") / "a.gguf", "Q8_0").read_bytes()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def tokens() -> Tensor:
    return torch.randint(0, 400, (2, 24), generator=torch.Generator().manual_seed(1))


def logits(directory: Path, **options: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **options
    )
    with torch.no_grad():
        found: Tensor = model.eval()(tokens()).logits
    return found


def weights_in(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


# What a conversion holds


@pytest.mark.parametrize("model", MODELS)
def test_a_float32_file_becomes_the_model_it_was_made_of_bit_for_bit(
    model: str, tmp_path: Path, root: Path
) -> None:
    original = make_model(tmp_path / "model", model)
    file = write_gguf(original, tmp_path / "tiny.gguf")
    converted = find_or_download(str(file), root=root)
    found, expected = weights_in(converted), weights_in(original)
    assert found.keys() == expected.keys()
    for name in found:
        exact = "norm" not in name or "gemma" not in model  # one was added, and taken off again
        assert torch.allclose(found[name], expected[name], rtol=0, atol=0 if exact else 1e-6), name
    assert (logits(converted) - logits(original)).abs().max() < 1e-4
    base = open_base(str(file), root=root)
    assert fingerprint(base) == fingerprint(open_base(str(original))) or "gemma" in model


@pytest.mark.parametrize("model", [model for model in MODELS if model not in NOT_IN_TRANSFORMERS])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_numbers_are_those_that_transformers_reads(
    kind: str, model: str, tmp_path: Path, root: Path
) -> None:
    file = write_gguf(make_model(tmp_path / "model", model), tmp_path / "tiny.gguf", kind)
    converted = find_or_download(str(file), root=root)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    ).state_dict()
    found = weights_in(converted)
    assert found
    for name, values in found.items():
        # Of quantised numbers float16 keeps 11 bits, finer than any step between them.
        assert torch.allclose(values.float(), theirs[name], rtol=2**-11, atol=1e-7), name


@pytest.mark.parametrize(
    ("kind", "dtype", "limit"),
    [
        ("F32", torch.float32, 1e-5),
        ("F16", torch.float16, 2e-3),
        ("BF16", torch.bfloat16, 2e-2),
        ("Q8_0", torch.float16, 2e-2),
    ],
)
def test_logits_are_the_models_within_what_its_numbers_were_rounded_by(
    kind: str, dtype: torch.dtype, limit: float, llama: Path, tmp_path: Path, root: Path
) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf", kind)
    converted = find_or_download(str(file), root=root)
    assert (logits(converted) - logits(llama)).abs().max() < limit
    stored = weights_in(converted)
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == dtype
    assert stored["model.norm.weight"].dtype == torch.float32
    assert open_base(str(file), root=root).dtype == dtype


@pytest.mark.parametrize("kind", sorted(set(BLOCKS) - {"F64"}))
def test_every_number_format_has_the_sizes_of_the_package_gguf(kind: str) -> None:
    import gguf

    number, numbers, block_bytes = BLOCKS[kind]
    theirs = gguf.GGMLQuantizationType[kind]
    assert theirs == number
    assert gguf.GGML_QUANT_SIZES[theirs] == (numbers, block_bytes)


def test_large_tensors_are_converted_some_rows_at_a_time(
    llama: Path, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf", "Q8_0")
    whole = weights_in(find_or_download(str(file), root=root))
    monkeypatch.setattr(gguf_model, "_CHUNK_NUMBERS", 1)
    in_parts = weights_in(find_or_download(str(file), root=tmp_path / "other"))
    assert all(torch.equal(in_parts[name], values) for name, values in whole.items())


def test_a_model_larger_than_a_shard_is_written_in_several(
    llama: Path, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_MAX_SHARD_BYTES", 60_000)
    converted = find_or_download(str(write_gguf(llama, tmp_path / "tiny.gguf")), root=root)
    assert len(list(converted.glob("model-*-of-*.safetensors"))) > 2
    assert torch.equal(logits(converted), logits(llama))
    open_base(str(converted))


def test_the_rotary_embedding_of_llama_3_is_found_from_its_factors(
    tmp_path: Path, root: Path
) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    original = make_llama(tmp_path / "model", rope_parameters=rope)
    model = AutoModelForCausalLM.from_pretrained(original)
    plain = 500000.0 ** (-torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    plain_file = write_gguf(original, tmp_path / "tiny.gguf")
    header = read_header(plain_file)
    metadata = {**header.metadata, "llama.rope.scaling.original_context_length": 64}
    metadata |= byte_level_tokenizer(original) | {"general.architecture": None}
    numbers = {name: _values(plain_file, name) for name in header.tensors}
    file = write_raw_gguf(
        tmp_path / "rope.gguf", "llama", metadata, numbers | {"rope_freqs.weight": factors}
    )
    converted = find_or_download(str(file), root=root)
    settings = json.loads((converted / "config.json").read_text())
    assert settings["rope_scaling"] == {k: v for k, v in rope.items() if k != "rope_theta"}
    assert (logits(converted) - logits(original)).abs().max() < 1e-5

    factors[3] *= 1.5
    other = write_raw_gguf(
        tmp_path / "other.gguf", "llama", metadata, numbers | {"rope_freqs.weight": factors}
    )
    with pytest.raises(UserError, match="otherwise than Llama 3"):
        find_or_download(str(other), root=root)


def _values(file: Path, name: str) -> np.ndarray:
    tensor = read_header(file).tensors[name]
    flat = np.fromfile(file, np.float32, tensor.nbytes // 4, offset=tensor.start)
    return flat.reshape(tensor.shape)


# Its tokenizer


TEXTS = [TEXT, "red blue 1234 green's\n\n  cat", "äöü 你好 🙂", "", " <s>dog</s>"]


def test_the_tokenizer_and_the_chat_template_are_those_in_the_file(
    llama: Path, tmp_path: Path, root: Path
) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf", tokenizer__ggml__eot_token_id=5)
    converted = find_or_download(str(file), root=root)
    ours, theirs = Tokenizer(converted), Tokenizer(llama)
    for text in TEXTS:
        assert ours.encode(text).tolist() == theirs.encode(text).tolist()
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert (ours.bos_id, ours.eos_id, ours.use_bos) == (theirs.bos_id, theirs.eos_id, True)
    assert ours.chat_template == TEMPLATE
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": [1, 5]}


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["Ġ1234", "'s"]),
        ("smollm", ["Ġ", "1", "2", "3", "4", "'s"]),
        ("llama-bpe", ["Ġ", "123", "4", "'s"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4", "'s"]),
    ],
)
def test_texts_are_cut_by_the_rule_that_the_file_names(
    rule: str, pieces: list[str], llama: Path, tmp_path: Path, root: Path
) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf", tokenizer__ggml__pre=rule)
    processor = Tokenizer(find_or_download(str(file), root=root)).processor
    found = processor.pre_tokenizer.pre_tokenize_str(" 1234's")
    assert [piece for piece, _ in found] == pieces


def test_a_tokenizer_of_sentencepiece_is_rebuilt_from_its_scores(
    llama: Path, tmp_path: Path, root: Path
) -> None:
    import sentencepiece

    texts = tmp_path / "texts"
    texts.write_text("\n".join([TEXT, "red blue green cat dog sun moon tree"] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(texts),
        model_prefix=str(tmp_path / "spm"),
        model_type="bpe",
        vocab_size=350,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    ids = range(original.vocab_size())

    def kind(i: int) -> int:
        if original.is_unknown(i):
            return 2
        return 3 if original.is_control(i) else 6 if original.is_byte(i) else 1

    file = write_gguf(
        llama,
        tmp_path / "tiny.gguf",
        tokenizer__ggml__model="llama",
        tokenizer__ggml__pre=None,
        tokenizer__ggml__merges=None,
        tokenizer__ggml__tokens=[original.id_to_piece(i) for i in ids],
        tokenizer__ggml__scores=[float(original.get_score(i)) for i in ids],
        tokenizer__ggml__token_type=[kind(i) for i in ids],
        tokenizer__ggml__unknown_token_id=original.unk_id(),
        tokenizer__ggml__bos_token_id=original.bos_id(),
        tokenizer__ggml__eos_token_id=original.eos_id(),
        tokenizer__ggml__add_bos_token=None,
    )
    ours = Tokenizer(find_or_download(str(file), root=root))
    assert ours.use_bos
    for text in ("red blue green", "the colour of a tree ", "Input: ### 12", "你好 🙂"):
        assert ours.encode(text).tolist() == [original.bos_id(), *original.encode(text)]
        assert ours.decode(ours.encode(text, bos=False)) == text


# Converted once


def test_a_second_start_finds_the_conversion_and_a_changed_file_makes_another(
    llama: Path, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf")
    assert find_here(str(file), root=root) is None
    converted = find_or_download(str(file), root=root)
    assert converted.parent.parent == root / "gguf" and converted.name == "tiny"
    assert find_here(str(file), root=root) == converted
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "read_header", None)
        assert find_or_download(str(file), root=root) == converted
        assert find_or_download(str(tmp_path), root=root) == converted
    write_gguf(llama, file, "F16")
    assert find_or_download(str(file), root=root) != converted


def test_of_several_processes_one_converts_and_the_others_wait(
    llama: Path, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf")
    begun, may_end, written = threading.Event(), threading.Event(), []
    write = conversion._write_weights

    def slow(*arguments: Any) -> None:
        written.append(arguments)
        begun.set()
        assert may_end.wait(60)
        write(*arguments)

    monkeypatch.setattr(conversion, "_write_weights", slow)
    monkeypatch.setattr(conversion, "_LOOK_S", 0.01)
    found: list[Path] = []
    workers = [
        threading.Thread(target=lambda: found.append(find_or_download(str(file), root=root)))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    assert begun.wait(60)
    may_end.set()
    for worker in workers:
        worker.join(60)
    assert len(written) == 1
    assert len(found) == 3 and len(set(found)) == 1


def test_a_directory_stands_for_the_only_gguf_file_in_it(
    llama: Path, tmp_path: Path, root: Path
) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    file = write_gguf(llama, directory / "small.gguf")
    converted = find_or_download(str(directory), root=root)
    assert converted == find_or_download(str(file), root=root)
    shutil.copyfile(file, directory / "large.gguf")
    with pytest.raises(UserError, match=r"2 GGUF files: large.gguf, small.gguf. Give one of them"):
        find_or_download(str(directory), root=root)
    shutil.copytree(llama, directory, dirs_exist_ok=True)
    assert find_or_download(str(directory), root=root) == directory


def test_the_licence_beside_a_file_comes_along(llama: Path, tmp_path: Path, root: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    file = write_gguf(llama, directory / "tiny.gguf")
    (directory / "LICENSE.txt").write_bytes(b"terms\r\n")
    converted = find_or_download(str(file), root=root)
    assert (converted / "LICENSE.txt").read_bytes() == b"terms\r\n"


def test_a_plan_needs_the_header_alone(llama: Path, tmp_path: Path, root: Path) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf", "Q8_0")
    base = read_blueprint(str(file), root=root)
    assert not base.has_weights and not root.exists()
    rough = rough_model(str(file), root=root)
    assert rough is not None and (rough.layers, rough.width) == (2, 64)
    opened = open_base(str(file), root=root)
    assert base.architecture.identity() == opened.architecture.identity()
    assert (base.name, base.tied) == (opened.name, opened.tied)


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q6_K", "Q2_K", "IQ4_XS"])
def test_a_tensor_takes_no_more_memory_than_is_planned(kind: str, is_rotated: bool) -> None:
    source = GgufTensor(name="a", shape=(512, 16384), kind=kind, start=0)
    change = partial(gguf_model._halves_after_each_other, head_size=128) if is_rotated else None
    together = 128 if is_rotated else 1
    tensor = gguf_model.ConvertedTensor(
        name="a",
        source=source,
        dtype=gguf_model._PLAIN.get(kind, "F16"),
        change=change,
        rows_together=together,
    )
    file = io.BytesIO(bytes(source.nbytes))
    header = GgufHeader(file=Path("a"), metadata={}, tensors={})
    next(tensor.chunks(header, file))  # which imports the package gguf
    tracemalloc.start()
    for _ in tensor.chunks(header, file):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tensor.memory_bytes / 4 < peak <= tensor.memory_bytes + 2**16


def test_a_plan_knows_the_disk_that_a_conversion_takes(
    llama: Path, tmp_path: Path, root: Path
) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf", "Q8_0")
    planned = planned_conversion(file, root)
    assert not planned.is_made and planned.memory_bytes > 0 and not root.exists()
    assert find_or_download(str(file), root=root) == planned.place
    made = planned_conversion(file, root)
    assert made.is_made and made.memory_bytes == 0
    assert made.disk_bytes == (planned.place / "model.safetensors").stat().st_size
    assert 0 < made.disk_bytes - planned.disk_bytes < 10_000  # the header


# What is refused


CUTS = [0, 1, 3, 4, 7, 8, 15, 16, 23, 24, 25, 31, 32, 100, 1000]


def refused(file: Path, root: Path) -> str:
    with pytest.raises(UserError) as caught:
        find_or_download(str(file), root=root)
    assert caught.value.exit_code == 2
    assert str(file) in str(caught.value)
    assert not root.exists()
    return str(caught.value)


@pytest.mark.parametrize("cut", [*CUTS, 0.3, 0.5, 0.7, 0.9, -32, -1])
def test_a_file_that_is_cut_off_anywhere_is_refused(
    cut: float, content: bytes, tmp_path: Path, root: Path
) -> None:
    end = int(cut * len(content)) if isinstance(cut, float) else cut
    file = tmp_path / "tiny.gguf"
    file.write_bytes(content[:end])
    assert "not a valid GGUF file" in refused(file, root)


HUGE = struct.pack("<Q", 2**62)
TENSOR = "blk.0.attn_q.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: b"GGML" + c[4:], "does not begin with GGUF"),
        (lambda c: c[:4] + struct.pack("<I", 1) + c[8:], "version 1 is not known"),
        (lambda c: c[:4] + struct.pack(">I", 3) + c[8:], "other order of bytes"),
        (lambda c: c[:8] + HUGE + c[16:], "4,611,686,018,427,387,904 tensors"),
        (lambda c: c[:16] + HUGE + c[24:], "4,611,686,018,427,387,904 keys"),
        (lambda c: c[:24] + HUGE + c[32:], "bytes of a key"),
        (lambda c: patched(c, TENSOR, kind=77), "type 77, which is not known"),
        (lambda c: patched(c, TENSOR, kind=4), "type 4, which is not known"),
        (lambda c: patched(c, TENSOR, kind=12), "Q4_K cannot be of shape"),
        (lambda c: patched(c, TENSOR, kind=0), "begins within blk.0.attn_q.weight|but the file at"),
        (lambda c: patched(c, TENSOR, start=2**40), "but the file at"),
        (lambda c: patched(c, TENSOR, start=2**63), "but the file at"),
        (lambda c: patched(c, TENSOR, start=0), "begins within"),
        (lambda c: patched(c, TENSOR, start=33), "no multiple of 32"),
        (lambda c: c.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"), "lacks blk.0.attn_q"),
        (lambda c: c.replace(b"blk.0.attn_q.weight", b"blk.1.attn_q.weight"), "twice"),
        (lambda c: c.replace(b".ggml.tokens", b".ggml.tokenz"), "no list of texts"),
    ],
)
def test_a_header_that_lies_is_refused(
    damage: Callable[[bytes], bytes], message: str, content: bytes, tmp_path: Path, root: Path
) -> None:

    file = tmp_path / "tiny.gguf"
    file.write_bytes(damage(content))
    assert re.search(message, refused(file, root))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "architecture mamba. GGUF files are read for: llama"),
        ({"split__count": 3}, "one of 3 parts.*llama-gguf-split --merge"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__rope__scaling__type": "yarn"}, "stretches its positions by yarn"),
        ({"llama__block_count": 3}, "lacks blk.2.attn_norm.weight"),
        ({"llama__block_count": 1}, "holds blk.1.*not expect in llama"),
        ({"llama__block_count": 2**31}, "layers and"),
        ({"llama__block_count": 0}, "block_count is 0"),
        ({"llama__block_count": "two"}, "not a whole number"),
        ({"llama__feed_forward_length": None}, "feed_forward_length is None"),
        ({"llama__embedding_length": 128}, r"shape \[400, 64\].*settings say \[400, 128\]"),
        ({"llama__rope__dimension_count": 8}, "rotates 8 of the 16"),
        ({"tokenizer__ggml__model": "bert"}, "kind bert"),
        ({"tokenizer__ggml__pre": "falcon"}, "by the rule falcon"),
        ({"tokenizer__ggml__eos_token_id": None}, "no end-of-text token"),
        ({"tokenizer__ggml__eos_token_id": 5000}, "is 5000 of"),
        ({"tokenizer__ggml__merges": ["not tokens of it"]}, "tokenizer is not valid"),
        ({"tokenizer__ggml__tokens": ["a", "a"]}, "a token twice"),
        ({"tokenizer__ggml__token_type": [1]}, "token_type is not a list of"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused_by_name(
    changes: dict[str, Any], message: str, llama: Path, tmp_path: Path, root: Path
) -> None:

    file = write_gguf(llama, tmp_path / "tiny.gguf", **changes)
    assert re.search(message, refused(file, root))


def test_numbers_that_are_none_are_refused_and_nothing_is_left(
    llama: Path, tmp_path: Path, root: Path
) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf")
    tensor = read_header(file).tensors["blk.1.ffn_up.weight"]
    with file.open("r+b") as stream:
        stream.seek(tensor.start)
        stream.write(struct.pack("<f", float("nan")))
    assert "blk.1.ffn_up.weight has a value that is not finite" in refused(file, root)


def test_a_disk_too_small_is_noticed_before_anything_is_written(
    llama: Path, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf")
    monkeypatch.setattr(conversion, "free_disk_bytes", lambda _: 1000)
    assert "but the disk has" in refused(file, root)


def test_without_the_package_gguf_quantised_files_say_how_to_install_it(
    llama: Path, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf", "Q8_0")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install 'ftkit[gguf]'" in refused(file, root)


# The commands


@pytest.mark.slow
def test_commands_take_a_gguf_file_as_they_take_any_model(
    llama: Path, tmp_path: Path, ftkit: Command
) -> None:
    file = write_gguf(llama, tmp_path / "tiny.gguf", "Q8_0")
    data = make_data(tmp_path / "data.json")
    keys = ["--data", "JSON", "--data.path", data, "--train.max_steps", 1, "--accelerator", "cpu"]
    planned = ftkit("plan", "--checkpoint_dir", file, *keys)
    assert planned.returncode == 0, planned.stderr
    words = " ".join(planned.stdout.split())
    assert re.search("conversion once, before the run: .* on the disk, in checkpoints/gguf/", words)
    assert not (tmp_path / "checkpoints").exists()
    run = ftkit("finetune", file, *keys, "--out_dir", "out", "--precision", "32-true")
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("converting") == 1
    planned = ftkit("plan", "--checkpoint_dir", file, *keys)
    assert "conversion made before: " in " ".join(planned.stdout.split())
    answered = ftkit("generate", "out", "--prompt", "red", "--max_new_tokens", 2)
    assert answered.returncode == 0 and "converting" not in answered.stderr, answered.stderr
    of_base = ftkit("generate", file, "--prompt", "red", "--max_new_tokens", 2, "--raw")
    assert of_base.returncode == 0, of_base.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["finetune", "finetune_full", "plan", "generate"])
def test_every_command_refuses_a_damaged_file_with_one_message(
    command: str, content: bytes, tmp_path: Path, ftkit: Command
) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(content[:-1])
    data = make_data(tmp_path / "data.json")
    keys = ["--data", "JSON", "--data.path", data, "--accelerator", "cpu"]
    words = ["--checkpoint_dir", file, *keys]
    if command == "generate":
        words = [file, "--prompt", "red"]
    done = ftkit(command, *words)
    assert done.returncode == 2, done.stderr
    assert "not a valid GGUF file" in done.stderr and "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"tiny.gguf", "data.json"}
