"""--sweep KEY=A,B: every combination, whatever the values are."""

import pytest
from messages import message_of

from ftkit.recipe.sweep import variations


def test_every_combination_is_a_variation_the_last_key_varies_fastest() -> None:
    assert variations([]) == [()]
    assert variations(["train.micro_batch_size=1,2", "--precision=32-true,bf16-true"]) == [
        (("train.micro_batch_size", "1"), ("precision", "32-true")),
        (("train.micro_batch_size", "1"), ("precision", "bf16-true")),
        (("train.micro_batch_size", "2"), ("precision", "32-true")),
        (("train.micro_batch_size", "2"), ("precision", "bf16-true")),
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lora_targets=[q_proj, v_proj],[o_proj]", ["[q_proj, v_proj]", "[o_proj]"]),
        ("optimizer={class_path: SGD, init_args: {lr: 1}},AdamW",
         ["{class_path: SGD, init_args: {lr: 1}}", "AdamW"]),
        ("out='a,b',c", ["'a,b'", "c"]),
        ("out='[',c", ["'['", "c"]),
        ("data.json_path=a=b.json, c.json", ["a=b.json", "c.json"]),
    ],
)  # fmt: skip
def test_a_comma_in_brackets_or_quotes_belongs_to_its_value(text: str, values: list[str]) -> None:
    assert [value for ((_, value),) in variations([text])] == values


@pytest.mark.parametrize(
    ("sweeps", "advice"),
    [
        (["train.micro_batch_size"], "--sweep train.micro_batch_size=1,2,4"),
        (["=1,2"], "--sweep train.micro_batch_size=1,2,4"),
        (["seed=1,,2"], "--sweep train.micro_batch_size=1,2,4"),
        (["seed=1,2,1"], "--sweep seed=1,2."),
        (["seed=1", "seed=2"], "--sweep seed=1,2."),
    ],
)
def test_a_sweep_without_different_values_is_refused_with_a_remedy(
    sweeps: list[str], advice: str
) -> None:
    assert advice in message_of(variations, sweeps)
