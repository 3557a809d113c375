"""Questions to results on a CPU, and the answers that they have to give."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from ftkit.evaluation.loading import load_result
from ftkit.evaluation.result import find_result
from ftkit.models.generation import answer_greedily

PROMPT = "what is the colour of red cat"
OWN = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A chat template."""


def expected_answer(
    path: Path,
    text: str,
    quantize: Any = None,
    longest: int = 8,
    stop_ids: Any = (1,),
    bos: bool | None = None,
) -> str:
    loaded = load_result(
        find_result(str(path)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        quantize=quantize,
    )
    tokenizer = loaded.base.tokenizer
    (tokens,) = answer_greedily(
        loaded.model, [tokenizer.encode(text, bos=bos)], stop_ids=stop_ids, max_new_tokens=longest
    )
    return tokenizer.processor.decode(tokens.tolist())


def alpaca(instruction: str, material: str | None = None) -> str:
    head = "Below is an instruction that describes a task"
    if material is None:
        return (
            f"{head}. Write a response that appropriately completes the request.\n\n"
            f"### Instruction:\n{instruction}\n\n### Response:\n"
        )
    return (
        f"{head}, paired with an input that provides further context. Write a response that "
        f"appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
        f"### Input:\n{material}\n\n### Response:\n"
    )


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
