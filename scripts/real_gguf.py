"""GGUF files of a real model: the answers of llama.cpp compared with those of transformers.

llama-cpp-python is compiled into an environment of its own, unless an earlier call has done so:
five minutes on two cores.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

LLAMA_CPP = "llama-cpp-python==0.3.36"
NUMBERS = ("f32", "f16", "q8_0")
ANSWER_TOKENS = 40

_PROGRAM = """
import json, sys
import numpy
from llama_cpp import Llama
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
file, messages, out, most = sys.argv[1:]
exact = {"type_k": 0, "type_v": 0, "logits_all": True}  # 0: a cache in float32
model = Llama(file, n_ctx=512, verbose=False, n_gpu_layers=0, **exact)
text = lambda token: model.detokenize([token], special=True).decode()
template = Jinja2ChatFormatter(
    model.metadata["tokenizer.chat_template"], text(model.token_eos()), text(model.token_bos())
)
prompt = template(messages=json.loads(messages)).prompt
ids = model.tokenize(prompt.encode(), add_bos=False, special=True)
model.eval(ids)
numpy.save(out, model.scores[: len(ids)])
answer = []
while len(answer) < int(most):
    token = int(model.scores[model.n_tokens - 1].argmax())
    answer.append(token)
    if token == model.token_eos():
        break
    model.eval([token])
print(json.dumps({"prompt": prompt, "ids": ids, "answer": answer}))
"""
"""Program for the other environment: applies the file's own template and tokenizer, and answers
greedily."""


def compare(
    models: dict[str, Path],
    messages: list[dict[str, str]],
    scratch: Path,
    ftkit: Callable[..., None],
) -> tuple[list[str], bool]:
    """Return lines of a table, and whether llama.cpp answers as transformers does.

    Args:
        models: directories in Hugging Face's layout, by name.
        messages: a conversation that ends with a question.
        scratch: a directory that exists.
        ftkit: runs a command of ftkit.
    """
    python = environment(scratch / "llama.cpp")
    lines = [
        "| model | file | prompt | greedy answer | logit difference, mean | most | largest logit |",
        "|---|---|---|---|---|---|---|",
    ]
    is_right = True
    for what, model in models.items():
        text, ids, answer, logits = _by_transformers(model, messages)
        for numbers in NUMBERS:
            out = scratch / "gguf" / f"{what}-{numbers}"
            words = ("--quantization", numbers, "--out", out, "--overwrite")
            ftkit("export", model, "--format", "gguf", *words)
            saved = out.with_suffix(".npy")
            command = [python, "-c", _PROGRAM, out / f"model-{numbers}.gguf"]
            command += [json.dumps(messages), saved, str(ANSWER_TOKENS)]
            found = json.loads(subprocess.check_output(command, text=True))
            same_prompt = (found["prompt"], found["ids"]) == (text, ids)
            same = sum(a == b for a, b in zip(found["answer"], answer, strict=False))
            apart = (_saved(saved) - logits).abs() if same_prompt else torch.full((1,), torch.nan)
            lines.append(
                f"| {what} | {numbers} | {'same' if same_prompt else 'different'} | {same} of "
                f"{len(answer)} tokens the same | {apart.mean():.2g} | {apart.max():.2g} | "
                f"{logits.abs().max():.3g} |"
            )
            # Rounded weights may answer otherwise; float32 must not.
            is_right &= same_prompt and (numbers != "f32" or found["answer"] == answer)
    return lines, is_right


def environment(directory: Path) -> Path:
    """Return the Python of an environment with llama.cpp, which is compiled if it is missing."""
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode:
        print("compiling llama.cpp, for some minutes ...", flush=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-binary", "llama-cpp-python"]
        subprocess.run([*pip, LLAMA_CPP], check=True)
    return python


def _by_transformers(
    model: Path, messages: list[dict[str, str]]
) -> tuple[str, list[int], list[int], torch.Tensor]:
    """Return the prompt, its tokens, the greedy answer in float32, and the prompt's logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        prompt = torch.tensor([ids])
        logits = loaded(prompt).logits[0]
        answered = loaded.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=ANSWER_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
    return text, ids, answered[0, len(ids) :].tolist(), logits


def _saved(file: Path) -> torch.Tensor:
    import numpy as np

    return torch.from_numpy(np.load(file))
