"""Plans of ranks that share sequences: what each rank needs, what is refused, what is advised."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from messages import message_of, says
from transformers_models import make_transformers_model

from ftkit.errors import UserError
from ftkit.models.pretrained.base_model import read_blueprint
from ftkit.planning.gpus import find_gpu
from ftkit.planning.media import with_encoder
from ftkit.planning.predict import Planned, plan_files
from ftkit.planning.suggest import changes_that_fit
from ftkit.planning.table import plan_table
from ftkit.recipe.parsing import Override
from ftkit.utils.console.terminal import plain_text

LONG, SHORT = 4097, 65


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The settings of a model whose activations take most of a step."""
    from transformers import LlamaConfig

    directory = tmp_path_factory.mktemp("llama")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=8192,
    ).save_pretrained(directory)
    return str(directory)


def planned(model: str, gpu: str = "h200", **keys: Any) -> Planned:
    values = {
        "checkpoint_dir": model,
        "precision": "bf16-true",
        "devices": 4,
        "strategy": "ddp",
        "train.max_seq_length": LONG,
        "train.micro_batch_size": 1,
        "train.global_batch_size": 4,
    } | {key.replace("__", "."): value for key, value in keys.items()}
    overrides = [(key, json.dumps(value)) for key, value in values.items()]
    return plan_files((), overrides, command="finetune_full", gpu=find_gpu(gpu))


@pytest.mark.slow
def test_activations_are_divided_by_the_ranks_that_share_sequences(llama: str) -> None:
    found = {n: planned(llama, strategy__context=n).memory.breakdown_bytes for n in (1, 2, 4)}
    activations = {n: each["activations"] for n, each in found.items()}
    # The peak of one rank is at another moment; with four, keys are copied.
    assert 1.8 < activations[1] / activations[2] < 2.05
    assert 1.9 < activations[2] / activations[4] < 2.05
    for category in ("parameters", "optimizer_state"):
        assert len({each[category] for each in found.values()}) == 1


@pytest.mark.slow
def test_a_plan_says_how_many_ranks_share_sequences(llama: str) -> None:
    made = planned(llama, strategy__context=2, train__max_seq_length=SHORT)
    assert made.as_dict()["context"] == 2 and made.micro_steps == 2
    assert says(plain_text(plan_table(made), 200), "ddp, sequences over 2 ranks, bf16-true")


@pytest.mark.slow
def test_micro_batches_that_are_auto_or_chosen_are_those_of_the_ranks_that_share_them(
    llama: str,
) -> None:
    keys: dict[str, Any] = {"train__micro_batch_size": None, "train__global_batch_size": 16}
    alone, shared = (planned(llama, strategy__context=n, **keys) for n in (1, 2))
    assert alone.plan.micro_batch_tokens and shared.plan.micro_batch_tokens
    assert shared.plan.micro_batch_tokens == 2 * alone.plan.micro_batch_tokens
    keys["train__micro_batch_size"] = "auto"
    alone, shared = (planned(llama, strategy__context=n, **keys) for n in (1, 2))
    # A step is a micro-batch of each rank of the data, of which there are 4 and 2.
    assert (alone.plan.largest_micro_batch, shared.plan.largest_micro_batch) == (4, 8)
    small = f"{shared.memory.high_bytes * 3 // 4 // 2**20}MiB"
    fewer = planned(llama, small, strategy__context=2, **keys)
    assert fewer.fits and 1 <= fewer.plan.largest_micro_batch < 8


@pytest.mark.slow
def test_fit_advises_to_share_sequences_where_it_is_enough(llama: str) -> None:
    enough = planned(llama, strategy__context=2)
    size = f"{enough.memory.high_bytes // 2**20 + 1}MiB"

    def attempt(overrides: Sequence[Override]) -> Planned:
        # The last resort, shorter samples, is tried whatever else was found.
        if overrides and overrides[0][0] not in ("strategy.context", "train.max_seq_length"):
            raise UserError("not this one")
        return planned(llama, size, **{key: json.loads(value) for key, value in overrides})

    found = changes_that_fit(attempt(()), attempt)
    change = next(one for one in found if "sequences over" in one.title)
    assert change.title == "sequences over 2 ranks" and change.planned.fits
    assert change.overrides == (("strategy.context", "2"),)
    assert sum("sequences over" in one.title for one in found) == 1


@pytest.mark.extensions
@pytest.mark.slow
def test_a_teacher_is_counted_and_has_to_share_sequences_too(tmp_path: Path) -> None:
    made = {
        name: str(
            make_transformers_model(
                tmp_path / name, "llama", num_attention_heads=heads, num_key_value_heads=1
            )
        )
        for name, heads in (("fitting", 4), ("unfitting", 1))
    }
    keys = {
        "objective": "distill",
        "strategy__context": 2,
        "train__max_seq_length": 64,
        "train__global_batch_size": 4,
    }
    found = planned(made["fitting"], teacher=made["fitting"], **keys)
    assert found.beside is not None and found.as_dict()["context"] == 2
    message = message_of(planned, made["fitting"], teacher=made["unfitting"], **keys)
    assert says(
        message, "strategy.context is 2 ... attention of unfitting ... 1 heads ... context 1"
    )


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("bamba", {}, "strategy.context is 2 ... this model ... --strategy.context 1"),
        ("doge", {}, "strategy.context is 2 ... this model ... --strategy.context 1"),
        (
            "qwen3",
            {"devices": 6, "strategy__context": 6},
            "strategy.context is 6 ... 4 heads ... --strategy.context 2",
        ),
    ],
)
def test_models_that_cannot_share_sequences_are_refused(
    family: str, keys: dict[str, object], message: str, tmp_path: Path
) -> None:
    model = str(make_transformers_model(tmp_path / "model", family))
    keys = {"strategy__context": 2, "train__max_seq_length": 16, **keys}
    assert says(message_of(planned, model, **keys), message)


@pytest.mark.extensions
def test_media_are_refused_where_ranks_share_sequences(llama: str) -> None:
    plan = planned(llama, strategy__context=2, train__max_seq_length=SHORT).plan
    message = message_of(with_encoder, read_blueprint(llama), plan, ["image"])
    assert says(message, "images ... strategy.context is 2 ... --strategy.context 1")
