"""Models that `ftkit merge` and `ftkit export` write, and their logits in three libraries."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import litgpt
import torch
from adapters import TOKENS, logits
from litgpt.utils import check_valid_checkpoint_dir, lazy_load
from torch import Tensor

from ftkit.cli.app import run
from ftkit.evaluation.loading import load_result
from ftkit.evaluation.result import find_result


def peft_in_process() -> AbstractContextManager[object]:
    """Have PEFT compute in this process: a child would import all libraries anew."""
    from ftkit.extensions.publish import peft_reading  # which a core alone lacks

    def answer(exchange: IO[bytes], _: object) -> int:
        peft_reading.replace_by_logits(exchange)
        return 0

    return patch.object(peft_reading, "_ask_child", answer)


def merge(name: object, out: Path, *words: object) -> Path:
    with peft_in_process():
        assert run(["merge", str(name), "--out", str(out), *map(str, words)]) == 0
    return out


@torch.no_grad()
def transformers_logits(directory: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found: Tensor = model.eval()(TOKENS).logits
    return found


def own_logits(name: object, **settings: Any) -> Tensor:
    result = find_result(str(name))
    settings = {"quantize": result.quantize} | settings
    loaded = load_result(result, device=torch.device("cpu"), dtype=torch.float32, **settings)
    return logits(loaded.model)


def assert_equal(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def export(name: object, form: str, out: Path, *words: object) -> Path:
    assert run(["export", str(name), "--format", form, "--out", str(out), *map(str, words)]) == 0
    return out


@torch.no_grad()
def litgpt_logits(directory: Path) -> Tensor:
    """As LitGPT itself loads a checkpoint: its own check, settings, loader and model."""
    check_valid_checkpoint_dir(directory, raise_error=True)
    model = litgpt.GPT(litgpt.Config.from_file(directory / "model_config.yaml"))
    state = lazy_load(directory / "lit_model.pth")
    model.load_state_dict(state.get("model", state), strict=True)
    found: Tensor = model.float().eval()(TOKENS)
    return found
