"""A translated file trains what its program trains: token ids, masks, samples and rates of steps.

`recorded` holds what TRL 1.16.0, LLaMA-Factory 0.9.5, axolotl 0.19.0 and torchtune 0.6.1 did with
the same files (`translated_steps.py` and `torchtune_steps.py` in `scripts/foreign_programs`).
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from translated_examples import EXAMPLES, write_examples

from ftkit.data.dataset import load_data
from ftkit.data.samples.cuts import cut_steps
from ftkit.extensions.foreign_recipes.convert import converted
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.objectives import objective_rules
from ftkit.recipe.readers import Terms
from ftkit.strategies.optimizers import base_learning_rate
from ftkit.strategies.schedule import CountedSteps, make_schedule

RECORDED = Path(__file__).parent / "recorded"
CASES = [(program, name) for program, examples in EXAMPLES.items() for name in examples]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("examples")
    write_examples(directory)
    return directory


def ours(values: dict[str, Any], tool: str | None) -> dict[str, Any]:
    """What ftkit trains in each step of the recipe that a file becomes."""
    Path("their.yml").write_text(yaml.safe_dump(values))
    _, recipe = converted("their.yml", Terms(tool=tool))
    tokenizer = Tokenizer(Path(recipe.checkpoint_dir))
    data = load_data(
        recipe.data,
        tokenizer,
        recipe.train.max_seq_length or 512,  # that of the model
        preference=objective_rules(recipe.objective).preference,
    )
    lengths = (data.train.lengths_by_sequence + 1).sum(1)
    cuts = cut_steps(recipe.train, data.epochs(recipe.seed), lengths, start_step=0, start_samples=0)
    counted = None
    if cuts is not None:
        total = len(cuts.positions) - 1
        counted = CountedSteps(total=total, per_epoch=cuts.steps_per_epoch)
    rate = base_learning_rate(recipe.optimizer)
    schedule, _ = make_schedule(recipe.train, data.samples_per_epoch, rate, counted=counted)
    batch, samples = recipe.train.global_batch_size, data.samples_per_epoch
    samples *= recipe.train.epochs or 1
    positions = (
        [min(step * batch, samples) for step in range(schedule.total_steps + 1)]
        if cuts is None
        else cuts.positions
    )
    found = set()
    for split in (data.train, data.val):
        for sample in (one for index in range(len(split)) for one in split.sequences(index)):
            trained = [0] * len(sample.ids)
            for first, end in sample.trained:
                trained[first:end] = [1] * (end - first)
            found.add(json.dumps([sample.ids.tolist(), trained]))
    return {
        "sizes": [int(b - a) for a, b in pairwise(positions)],
        "rates": [rate * schedule.share(step) for step in range(len(positions) - 1)],
        "samples": [json.loads(sample) for sample in sorted(found)],
    }


def masked(samples: list[list[list[int]]]) -> list[list[list[int]]]:
    """What the losses of samples depend on.

    The first token carries no loss, because nothing predicts it, and what follows the last one
    with a loss predicts nothing.
    """
    found = []
    for ids, trained in samples:
        end = len(ids) - trained[::-1].index(1)
        found.append([ids[:end], [0, *trained[1:end]]])
    return sorted(found)


@pytest.mark.parametrize(("program", "name"), CASES)
def test_a_translated_file_trains_what_its_program_trains(
    program: str, name: str, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = json.loads((RECORDED / f"{program}.json").read_text())[name]
    monkeypatch.chdir(there)
    tool = f"trl-{'dpo' if name == 'dpo' else 'sft'}" if program == "trl" else None
    found = ours(EXAMPLES[program][name], tool)
    # axolotl chooses the samples of a row by how well they fill it.
    if name not in ("packed", "pretraining"):
        assert found["sizes"] == theirs["sizes"]
    assert found["rates"] == pytest.approx(theirs["rates"], rel=1e-9, abs=1e-15)
    expected = theirs["samples"]
    # The translation says so: a BOS of its own.
    if program == "axolotl" and name in ("preference", "text_pairs"):
        assert {(ids[0], trained[0]) for ids, trained in expected} == {(1, 0)}
        expected = [[ids[1:], trained[1:]] for ids, trained in expected]
    assert masked(found["samples"]) == masked(expected)
