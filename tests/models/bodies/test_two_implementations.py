"""Families that LitGPT's model and transformers' both compute learn the same with either.

LoRA starts from one adapter, which PEFT has made: the first values that ftkit draws for a matrix
and the masks of its dropout follow from its name, and the two implementations name it differently.
Where transformers fuses layers, LitGPT's model has them apart, each with matrices of its own: such
an adapter is of another shape. These families adapt the layers that correspond.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rank_jobs import LORA, NO_EVALUATION, Case, Outcome, Run, make_run
from safetensors.torch import load_file
from transformers_models import make_transformers_model

from ftkit.models.architectures.architecture import Implementation
from ftkit.models.pretrained.base_model import open_base

pytestmark = pytest.mark.slow

STEPS = 8
IMPLEMENTATIONS: tuple[Implementation, ...] = ("litgpt", "transformers")
_FULL = {"sliding_window": None}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama tied", {}),
    "mistral": ("mistral window", _FULL),
    "qwen2": ("qwen2 window", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 512}),
    "phi3": ("phi3", {}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
}
"""With attention to their whole context: a model of tests, and what is different from that."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_NOT_FUSED = {"phi3": ("o_proj", "down_proj"), "gpt_neox": ("dense_h_to_4h", "dense_4h_to_h")}
ADAPTED: dict[tuple[str, str], Sequence[str]] = {
    (family, name): layers
    for family in FAMILIES
    for name, layers in (
        (("few", _NOT_FUSED[family]),)
        if family in _NOT_FUSED
        else (("few", ("q_proj", "v_proj")), ("all", (*_ATTENTION, *_MLP)))
    )
}
"""Families, and layers that LoRA adapts."""
ALL = (*((family, "full") for family in FAMILIES), *ADAPTED)
FEW = (("llama tied", "full"), ("gemma2", "full"), ("gemma2", "all"), ("phi3", "full"))
OTHERS = tuple(one for one in ALL if one not in FEW)


Pairs = dict[tuple[str, str], dict[Implementation, Outcome]]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return train(tmp_path_factory, FEW)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return train(tmp_path_factory, OTHERS)


@pytest.fixture
def trained(family: str, method: str, request: pytest.FixtureRequest) -> Pairs:
    found: Pairs = request.getfixturevalue("few" if (family, method) in FEW else "others")
    return found


def train(tmp_path_factory: pytest.TempPathFactory, which: Sequence[tuple[str, str]]) -> Pairs:
    """The runs of both implementations, by family and method, all in one process."""
    run: Run = make_run(tmp_path_factory)

    @functools.cache
    def base_of(family: str) -> Path:
        model, changes = FAMILIES[family]
        return make_transformers_model(tmp_path_factory.mktemp("model"), model, **changes)

    def case(family: str, method: str, implementation: Implementation) -> Case:
        changes: list[tuple[str, Any]] = [
            *NO_EVALUATION,
            ("checkpoint_dir", str(base_of(family))),
            ("model_implementation", implementation),
            ("train.max_steps", STEPS),
            # A bias of keys has next to no gradient: what rounding leaves of it, Adam would turn
            # into steps of 1e-5 below its usual eps of 1e-8.
            ("optimizer.eps", 1e-6),
        ]
        if method == "full":
            return Case("single", "full", changes=tuple(changes))
        directory = tmp_path_factory.mktemp("adapter")
        adapter = make_adapter(base_of(family), ADAPTED[family, method], directory)
        changes += [
            ("adapter", str(adapter)),
            ("lora_dropout", 0),
            *((switch, False) for switch in LORA),
        ]
        return Case("single", "lora", changes=tuple(changes))

    cases = {
        (*one, implementation): case(*one, implementation)
        for one in which
        for implementation in IMPLEMENTATIONS
    }
    found = run(1, list(cases.values()))
    return {one: {name: found[cases[*one, name]] for name in IMPLEMENTATIONS} for one in which}


def make_adapter(base: Path, layers: Sequence[str], directory: Path) -> Path:
    """An adapter of PEFT's whose matrices are all random."""
    from peft import LoraConfig, get_peft_model

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=4, target_modules=list(layers), init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapted: Any = get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.02)
    adapted.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_litgpts_model_is_taken_where_both_are_there(family: str, tmp_path: Path) -> None:
    model, changes = FAMILIES[family]
    base = open_base(str(make_transformers_model(tmp_path, model, **changes)))
    assert base.architecture.implementation == "litgpt"
    assert base.architecture.window is None


@pytest.mark.parametrize(
    ("family", "method"),
    [*FEW, *(pytest.param(*one, marks=pytest.mark.matrix) for one in OTHERS)],
)
def test_both_implementations_learn_the_same(trained: Pairs, family: str, method: str) -> None:
    ours, theirs = (trained[family, method][name] for name in IMPLEMENTATIONS)
    assert len(ours.losses) == STEPS
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-5)
    norms = [float(row["grad_norm"] or 0) for row in ours.rows]
    assert [row["grad_norm"] for row in theirs.rows] == pytest.approx(norms, rel=1e-4)
    (file,) = (file.name for file in (ours.out_dir / "final").glob("*.safetensors"))
    found, expected = (load_file(one.out_dir / "final" / file) for one in (theirs, ours))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
