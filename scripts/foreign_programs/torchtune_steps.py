"""Record what torchtune trains on: run with the Python of its environment.

    PYTHON torchtune_steps.py > RECORDED.json

The small configurations of tests/support/translated_examples.py run through torchtune's own
recipes, on a CPU, with a layer in the place of the model: each step records its samples, their
tokens, which of them are trained, and its learning rate.

torchtune 0.6.1 needs torchao up to 0.13.0, since later ones lack `int4_weight_only`: in a new
environment with a CPU build of torch 2.13.0, `pip install --no-deps torchtune==0.6.1
torchao==0.13.0 torchdata==0.11.0 omegaconf antlr4-python3-runtime==4.9.3 kagglehub tiktoken
blobfile`, and datasets, numpy, Pillow, sentencepiece, safetensors, tokenizers and regex.
"""

import base64
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

import torch
from translated_examples import EXAMPLES, write_examples

OTHERS = (
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|image|>",
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
)
"""Tokens that torchtune's tokenizers look for, and that no example has."""


def write_vocabularies(base: Path) -> None:
    """Write the tokenizer of a base model as torchtune's tokenizers read it."""
    from torchtune.models.qwen2._tokenizer import bytes_to_unicode

    given = json.loads((base / "tokenizer.json").read_text("utf-8"))
    model, added = given["model"], given["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    ids |= {"<|begin_of_text|>": ids["<s>"], "<|end_of_text|>": ids["<|im_end|>"]}
    ids |= {text: 1 + max(ids.values()) + i for i, text in enumerate(OTHERS)}
    tokens = [{"content": text, "id": number} for text, number in ids.items()]
    (base / "special_tokens.json").write_text(json.dumps({"added_tokens": tokens}))
    words = {text: number for text, number in model["vocab"].items() if text not in ids}
    (base / "vocab.json").write_text(json.dumps(words))
    (base / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    as_byte = {text: number for number, text in bytes_to_unicode().items()}
    lines = [
        f"{base64.b64encode(bytes(as_byte[one] for one in text)).decode()} {number}"
        for text, number in sorted(words.items(), key=lambda word: word[1])
    ]
    (base / "tokenizer.tiktoken").write_text("\n".join(lines))


def recipe_class(name: str, class_name: str) -> Any:
    """A class of torchtune's recipes, which are files beside its package."""
    import torchtune

    file = Path(torchtune.__file__).parents[1] / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, class_name)


class Layer(torch.nn.Linear):
    """Stands in for the model, which decides nothing that is recorded."""

    def set_num_output_chunks(self, count: int) -> None:
        """Do nothing."""


class Recorder:
    """Steps of a run."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.rates: list[float] = []
        self.samples: set[str] = set()

    def see(self, recipe: Any, batch: dict[str, Any], *, per_sample: int = 1) -> None:
        """Record a micro-batch."""
        if len(self.sizes) <= recipe.global_step:
            self.sizes.append(0)
            self.rates.append(recipe._optimizer.param_groups[0]["lr"])
        rows = zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True)
        places = batch.get("input_pos")
        count = 0
        for i, (ids, labels) in enumerate(rows):
            starts = [0]
            if places is not None:
                starts = (places[i] == 0).nonzero().flatten().tolist()
            for first, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                trained = [int(label != -100) for label in labels[first:end]]
                # Padding carries no loss, and what is behind the last loss is never compared.
                last = len(trained) - trained[::-1].index(1)
                self.samples.add(json.dumps([ids[first : first + last], trained[:last]]))
                count += 1
        self.sizes[recipe.global_step] += count // per_sample


def run(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Train one configuration."""
    from omegaconf import OmegaConf

    recorder = Recorder()
    is_paired = name == "pairs"
    is_full = "lora_rank" not in values["model"]
    if is_paired:
        base = recipe_class("lora_dpo_single_device", "LoRADPORecipeSingleDevice")
    elif is_full:
        base = recipe_class("full_finetune_single_device", "FullFinetuneRecipeSingleDevice")
    else:
        base = recipe_class("lora_finetune_single_device", "LoRAFinetuneRecipeSingleDevice")

    class Recorded(base):  # type: ignore[misc]
        def load_checkpoint(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {"model": {}}

        def _setup_model(self, *_: Any, **__: Any) -> Layer:
            return Layer(1, 1)

        def save_checkpoint(self, *_: Any, **__: Any) -> None:
            pass

        def _loss_step(self, batch: dict[str, Any]) -> torch.Tensor:
            recorder.see(self, batch)
            return self._model(torch.ones(1, 1)).sum()

        def concatenated_forward(self, model: Layer, batch: Any) -> Any:
            tokens, labels = batch
            if torch.is_grad_enabled():  # not that of the reference
                recorder.see(self, {"tokens": tokens, "labels": labels}, per_sample=2)
            sums = model(torch.ones(len(tokens) // 2, 1)).flatten()
            return sums, -sums, sums, sums

    configuration = OmegaConf.create(values)
    recipe = Recorded(configuration)
    recipe.setup(configuration)
    recipe.train()
    recipe.cleanup()
    samples = [json.loads(sample) for sample in sorted(recorder.samples)]
    return {"sizes": recorder.sizes, "rates": recorder.rates, "samples": samples}


def main() -> None:
    """Entry point of the script."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # torchtune prints to standard output
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        write_examples(Path())
        write_vocabularies(Path("base"))
        for name, values in EXAMPLES["torchtune"].items():
            found[name] = run(name, dict(values))
        os.chdir("/")
    json.dump(found, output, separators=(",", ":"))
    output.write("\n")


if __name__ == "__main__":
    main()
