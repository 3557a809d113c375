"""Record what TRL or LLaMA-Factory trains on: run with the Python of that program.

    PYTHON translated_steps.py trl|llama_factory > RECORDED.json

The small configurations of tests/support/translated_examples.py run through the program's own
command, on a CPU; each step records its samples, their tokens, which of them are trained, and its
learning rate.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

import transformers
from translated_examples import EXAMPLES, write_examples


class Recorder:
    """Steps of one run of transformers' Trainer."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.rates: list[float] = []
        self.samples: list[list[list[int]]] = []
        original = transformers.Trainer.training_step
        recorder = self

        def recorded(trainer: Any, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            recorder.see(trainer, inputs)
            return original(trainer, model, inputs, *rest, **more)

        transformers.Trainer.training_step = recorded
        self._original = original

    def see(self, trainer: Any, inputs: Any) -> None:
        """Record a micro-batch."""
        step = trainer.state.global_step
        labels = inputs["labels"] if "labels" in inputs else inputs["completion_mask"]
        is_pair = "labels" not in inputs or "DPO" in type(trainer).__name__
        rows = []
        is_padding = inputs["attention_mask"] == 0
        for ids, marks, padding in zip(inputs["input_ids"], labels, is_padding, strict=True):
            kept = ~padding
            trained = marks[kept] > 0 if "labels" not in inputs else marks[kept] != -100
            rows.append([ids[kept].tolist(), trained.int().tolist()])
        if len(self.sizes) <= step:
            self.sizes.append(0)
            self.rates.append(float(trainer.optimizer.param_groups[0]["lr"]))
        self.sizes[step] += len(rows) // (2 if is_pair else 1)
        self.samples += rows

    def finish(self) -> dict[str, Any]:
        """Steps of the run, and each sample once, whatever their order."""
        transformers.Trainer.training_step = self._original
        different = sorted({json.dumps(sample) for sample in self.samples})
        return {
            "sizes": self.sizes,
            "rates": self.rates,
            "samples": [json.loads(sample) for sample in different],
        }


def run_trl(name: str, values: dict[str, Any]) -> None:
    """Run `trl sft` or `trl dpo`."""
    import yaml
    from trl.scripts import dpo, sft

    Path("their.yml").write_text(yaml.safe_dump(values))
    sys.argv = ["trl", "--config", "their.yml"]
    script = dpo if name == "dpo" else sft
    arguments = script.make_parser().parse_args_and_config(fail_with_unknown_args=False)
    script.main(*arguments)


def run_llama_factory(name: str, values: dict[str, Any]) -> None:
    """Run `llamafactory-cli train`."""
    from llamafactory.train.dpo import workflow as dpo
    from llamafactory.train.sft import workflow as sft
    from llamafactory.train.tuner import run_exp

    for workflow in (sft, dpo):  # after training; needs network and newer libraries
        workflow.create_modelcard_and_push = lambda *_: None
    run_exp(values)


def main() -> None:
    """Entry point of the script."""
    program = sys.argv[1]
    only = sys.argv[2:]
    run = {"trl": run_trl, "llama_factory": run_llama_factory}[program]
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # these programs print to standard output
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        write_examples(Path())
        config = transformers.AutoConfig.from_pretrained("base")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained("base")
        for name, values in EXAMPLES[program].items():
            if only and name not in only:
                continue
            recorder = Recorder()
            run(name, dict(values))
            found[name] = recorder.finish()
        os.chdir("/")
    json.dump(found, output, separators=(",", ":"))
    output.write("\n")


if __name__ == "__main__":
    main()
