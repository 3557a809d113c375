"""Record what TRL, LLaMA-Factory or axolotl trains on: run with the Python of that program.

    PYTHON translated_steps.py trl|llama_factory|axolotl > RECORDED.json

The small configurations of tests/support/translated_examples.py run through the program's own
command, on a CPU; each step records its samples, their tokens, which of them are trained, and its
learning rate.

Not all that axolotl requires is needed on a CPU. In a new environment with a CPU build of torch
2.13.0, `pip install --no-deps axolotl==0.19.0 bitsandbytes==0.50.2 torchao==0.17.0 triton==3.9.0`,
and with their dependencies the versions that it names of transformers, peft, accelerate, datasets,
trl, axolotl-contribs-lgpl, axolotl-contribs-mit, mistral-common, posthog, schedulefree, optimum,
evaluate, addict, fire, art, numba, wandb, python-dotenv. It stays offline with
AXOLOTL_DO_NOT_TRACK=1 and HF_HUB_OFFLINE=1.
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
        if not self.samples and trainer.eval_dataset is not None:
            for record in trainer.eval_dataset:
                marks = [int(label != -100) for label in record["labels"]]
                self.samples.append([record["input_ids"], marks])
        rows = []
        is_padding = inputs["attention_mask"] == 0
        for i, (ids, marks) in enumerate(zip(inputs["input_ids"], labels, strict=True)):
            kept = ~is_padding[i]
            trained = marks[kept] > 0 if "labels" not in inputs else marks[kept] != -100
            starts = [0]
            if "position_ids" in inputs:  # several samples in a row
                starts = (inputs["position_ids"][i][kept] == 0).nonzero().flatten().tolist()
            for first, end in zip(starts, [*starts[1:], int(kept.sum())], strict=True):
                if trained[first:end].any():  # axolotl pads streams without an attention mask
                    rows.append([ids[kept][first:end].tolist(), trained[first:end].int().tolist()])
        if len(self.sizes) <= step:
            self.sizes.append(0)
            self.rates.append(float(trainer.optimizer.param_groups[0]["lr"]))
        self.sizes[step] += len(rows) // (2 if is_pair else 1)
        self.samples += rows

    def finish(self) -> dict[str, Any]:
        """Steps of the run, and each sample of training and validation once, in any order."""
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


def run_axolotl(name: str, values: dict[str, Any]) -> None:
    """Run `axolotl train`."""
    import yaml
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train

    Path("their.yml").write_text(yaml.safe_dump(values))
    do_train(load_cfg("their.yml"), TrainerCliArgs())


def main() -> None:
    """Entry point of the script."""
    program = sys.argv[1]
    only = sys.argv[2:]
    runs = {"trl": run_trl, "llama_factory": run_llama_factory, "axolotl": run_axolotl}
    run = runs[program]
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
