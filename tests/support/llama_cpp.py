"""llama.cpp's own converters and llama.cpp itself, where they are, and what their files hold.

The converters are in vendor/llama.cpp of the source package of llama-cpp-python, which pip
downloads (--no-deps --no-binary :all:); FTKIT_LLAMA_CPP names that directory.
FTKIT_LLAMA_CPP_PYTHON names the interpreter of an environment where that package is installed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest

VARIABLE = "FTKIT_LLAMA_CPP"
needs_llama_cpp = pytest.mark.skipif(
    not os.environ.get(VARIABLE), reason=f"{VARIABLE} does not name the source of llama.cpp"
)
PYTHON = "FTKIT_LLAMA_CPP_PYTHON"
runs_llama_cpp = pytest.mark.skipif(
    not os.environ.get(PYTHON), reason=f"{PYTHON} does not name a Python with llama.cpp"
)

EXPLAINED = {
    "general.name",  # theirs is made of the directory's
    "gemma4.final_logit_softcapping",  # theirs is not said if none, which llama.cpp takes for 30
    "general.size_label",  # theirs counts the rotary factors too
    "tokenizer.ggml.eot_token_id",  # ours has the token that ended turns in training
    "tokenizer.ggml.unknown_token_id",  # theirs is in files of SentencePiece alone if named
    "tokenizer.ggml.add_eos_token",  # ours is always said
    "tokenizer.ggml.add_sep_token",  # theirs is said of templates for pairs of texts
    "tokenizer.ggml.add_space_prefix",  # ours is said where it is not true, theirs where it is
}
"""Keys of the metadata in which the files may differ."""

_PROGRAM = """
import runpy, sys
program, rule = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.argv[0] = program
sys.path.insert(0, program.rpartition("/")[0])
sys.path.insert(1, program.rpartition("/")[0] + "/gguf-py")
if rule:
    from conversion.base import TextModel
    TextModel.get_vocab_base_pre = lambda self, tokenizer: rule
    from conversion.glm import Glm4Model
    from conversion.phi import Phi3MiniModel
    for family in (Glm4Model, Phi3MiniModel):
        family.set_vocab = TextModel._set_vocab_gpt2
from conversion.base import TextModel
from conversion.gemma import Gemma4Model
Gemma4Model.set_vocab = TextModel._set_vocab_sentencepiece
runpy.run_path(program, run_name="__main__")
"""
"""Their program, with SentencePiece for Gemma 4, whose tokenizer.json no test has.

rule: for the vocabulary of a test, which has no hash that they know, and not the tokens and classes
by which they know those of GLM-4 and Phi-4.
"""

_ANSWER = """
import json, sys
import numpy
from llama_cpp import Llama
file, out, prompt, most, adapter, texts, size = sys.argv[1:]
exact = {"type_k": 0, "type_v": 0, "logits_all": True}  # 0: a cache in float32
model = Llama(file, n_ctx=int(size), verbose=False, lora_path=adapter or None, **exact)
prompt = json.loads(prompt)
model.eval(prompt)
numpy.save(out, model.scores[: len(prompt)])
answer = []
while len(answer) < int(most):
    answer.append(int(model.scores[model.n_tokens - 1].argmax()))
    model.eval(answer[-1:])
tokens = [model.tokenize(text.encode(), add_bos=False) for text in json.loads(texts)]
print(json.dumps({"answer": answer, "tokens": tokens}))
"""


class Answered(NamedTuple):
    """What llama.cpp computes of a file."""

    logits: Any
    """[tokens, vocabulary] float32, of the prompt."""
    answer: list[int]
    """Greedy tokens."""
    tokens: list[list[int]]
    """Of each text, without BOS."""


def answered(
    file: Path,
    prompt: Sequence[int],
    most: int,
    beside: Path,
    adapter: Path | None = None,
    texts: Sequence[str] = (),
    size: int = 256,
) -> Answered:
    """Have llama.cpp compute a file.

    Args:
        file: in GGUF.
        prompt: its tokens.
        most: tokens of the greedy answer.
        beside: an empty place for a file.
        adapter: to add to the model, in GGUF.
        texts: to be cut into tokens.
        size: tokens that llama.cpp prepares for, by which it chooses factors of LongRoPE.
    """
    words = (str(file), str(beside), json.dumps(prompt), str(most), str(adapter or ""))
    command = [os.environ[PYTHON], "-P", "-c", _ANSWER, *words, json.dumps(texts), str(size)]
    # Its llama_cpp is the package, and not this module.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return Answered(np.load(beside), **json.loads(run.stdout.splitlines()[-1]))


def converted(model: Path, file: Path, numbers: str, rule: str = "") -> Path:
    """A GGUF file by convert_hf_to_gguf.py."""
    # Qwen 3.5 has layers that guess a second token, which transformers does not load.
    more = ("--no-mtp",) if rule == "qwen35" else ()
    words = (model, "--outfile", file, "--outtype", numbers, *more)
    return _run("convert_hf_to_gguf.py", rule, *words)


def converted_adapter(adapter: Path, base: Path, file: Path, numbers: str) -> Path:
    """A GGUF file by convert_lora_to_gguf.py."""
    words = (adapter, "--base", base, "--outfile", file, "--outtype", numbers)
    return _run("convert_lora_to_gguf.py", "", *words)


def _run(program: str, rule: str, *words: object) -> Path:
    source = Path(os.environ[VARIABLE]) / program
    command = [sys.executable, "-c", _PROGRAM, str(source), rule, *map(str, words)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return Path(words[words.index("--outfile") + 1])


def metadata_of(file: Path) -> dict[str, Any]:
    """Keys and values of a GGUF file, without those about the file itself."""
    fields = gguf.GGUFReader(file).fields
    return {key: f.contents() for key, f in fields.items() if not key.startswith("GGUF.")}


def differences(ours: Path, theirs: Path) -> dict[str, Any]:
    """Tensors and metadata keys whose values differ in two files."""
    found: dict[str, Any] = {}
    mine, other = metadata_of(ours), metadata_of(theirs)
    for key in sorted(mine.keys() | other.keys()):
        if not _is_same(mine.get(key), other.get(key)):
            found[key] = (mine.get(key), other.get(key))
    tensors, others = ({t.name: t for t in gguf.GGUFReader(f).tensors} for f in (ours, theirs))
    for name in sorted(tensors.keys() | others.keys()):
        a, b = tensors.get(name), others.get(name)
        if a is None or b is None:
            found[name] = "is in one file alone"
        elif a.tensor_type != b.tensor_type or list(a.shape) != list(b.shape):
            found[name] = (a.tensor_type, b.tensor_type, list(a.shape), list(b.shape))
        elif name == "rope_freqs.weight" and np.allclose(a.data, b.data, rtol=1e-6, atol=0):
            pass  # theirs are computed in float32, ours in float64
        elif not np.array_equal(a.data.view(np.uint8), b.data.view(np.uint8)):
            found[name] = "differs"
    return found


def _is_same(mine: Any, other: Any) -> bool:
    if isinstance(mine, float) and isinstance(other, float):
        return bool(np.isclose(mine, other, rtol=1e-6, atol=0))
    return bool(mine == other)
