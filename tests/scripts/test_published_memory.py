"""The rows of published memory figures, and the programs that made them, at tiny size."""

import dataclasses
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import litgpt.data  # noqa: F401  # sets variables of the environment, which tests must not
import pytest
from command import ROOT

TINY = (
    "llama",
    {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
)
TINY_MIXTURE = ("mixtral", TINY[1] | {"num_local_experts": 4})


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    from published_memory import models, programs, rows

    monkeypatch.setitem(models._SHAPES, "tiny", TINY)
    monkeypatch.setitem(models._SHAPES, "tiny mixture", TINY_MIXTURE)
    yield SimpleNamespace(**vars(programs) | {"Row": rows.Row, "all_rows": rows.rows})
    for name in list(sys.modules):
        if name.partition(".")[0] == "published_memory":
            del sys.modules[name]


def bytes_of(
    published: Any, program: str, model: str = "tiny", tokens: int = 64, **settings: Any
) -> int:
    row = published.Row(
        program=program,
        name="tiny",
        model=model,
        sequences=2,
        tokens=tokens,
        published_bytes=1,
        source="",
        settings=settings,
    )
    found: int = published.simulate(row)
    return found


def test_every_row_names_its_source_and_a_program_and_stands_once(published: Any) -> None:
    rows = published.all_rows()
    assert len(rows) >= 25
    assert len({(row.program, row.name) for row in rows}) == len(rows)
    for row in rows:
        assert row.program in published.PROGRAMS
        assert row.source and row.published_bytes > 1e9
        assert dataclasses.asdict(row)["measure"] in ("allocated", "reserved")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "less", "more"),
    [
        (
            "litgpt-lora",
            {"rank": 4, "dropout": 0.1, "micro_batches": 2},
            {"rank": 4, "dropout": 0.1, "micro_batches": 2, "layers": "all"},
        ),
        pytest.param(
            "litgpt-full", {"micro_batches": 1}, {"micro_batches": 2}, marks=pytest.mark.matrix
        ),
        pytest.param(
            "transformers-trainer",
            {"mode": "qlora"},
            {"mode": "qlora-float32"},
            marks=pytest.mark.matrix,
        ),
        ("transformers-trainer", {"mode": "lora"}, {"mode": "full"}),
        (
            "transformers-peft",
            {"method": "LoraConfig", "config": {"r": 4, "target_modules": ["q_proj"]}},
            {"method": None, "config": {}},
        ),
        pytest.param(
            "torchtune", {"rank": 4, "quantize": True}, {"rank": 4}, marks=pytest.mark.matrix
        ),
        pytest.param("torchtune", {"in_backward": True}, {}, marks=pytest.mark.matrix),
        ("torchtune", {"offload": True, "rank": 4}, {"rank": 4}),
        ("torchtune", {}, {"checkpointing": False}),
    ],
)
def test_a_setting_that_saves_memory_saves_it(
    published: Any, program: str, less: dict[str, Any], more: dict[str, Any]
) -> None:
    model = "pythia-14m" if program.startswith("litgpt") else "tiny"
    # Many tokens, so that what is offloaded is more than what waits for its copy.
    tokens = 512 if "offload" in less else 64
    needed = [bytes_of(published, program, model, tokens, **given) for given in (less, more)]
    assert needed[0] < needed[1]


@pytest.mark.slow
def test_a_mixture_of_experts_is_simulated_with_quantised_experts(published: Any) -> None:
    shape: Any = TINY[1]
    experts = 4 * 3 * shape["hidden_size"] * shape["intermediate_size"]
    weights = shape["num_hidden_layers"] * experts
    dense = bytes_of(published, "transformers-trainer", mode="qlora")
    mixture = bytes_of(published, "transformers-trainer", "tiny mixture", mode="qlora")
    assert mixture - dense < weights  # half a byte for each, and the scales
