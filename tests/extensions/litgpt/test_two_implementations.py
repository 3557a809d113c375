"""Families that LitGPT's model and transformers' both compute learn the same with either.

Where transformers fuses layers, LitGPT's model has them apart, each with matrices of its own: an
adapter of them is of another shape. These families adapt the layers that correspond.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import LORA, NO_EVALUATION, Case, Outcome, Run, make_run
from safetensors.torch import load_file
from transformers_models import make_transformers_model

from ftkit.models.architectures.architecture import Implementation
from ftkit.models.pretrained.base_model import open_base, parameter_shapes
from ftkit.recipe.implementations import ImplementationRow
from ftkit.recipe.recipe import ALL_LINEAR

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
NOT_FUSED = {"phi3": "[o_proj,down_proj]", "gpt_neox": "[dense_h_to_4h,dense_4h_to_h]"}
"""Families that have fused layers, and layers of theirs that are not."""
_NOT_OF_LORA = [(key, None) for key in ("lora_r", "lora_alpha", "lora_dropout")]
METHODS: dict[str, list[tuple[str, Any]]] = {
    "full": [],
    "from scratch": [("train.from_scratch", True)],
    "lora": [("lora_dropout", 0.05)],
    "dora": [("lora_dropout", 0.05), ("lora_variant", "dora")],
    "vera": [("peft", "vera"), ("peft.vera_dropout", 0.05), *_NOT_OF_LORA],
    "loha": [("peft", "loha"), *_NOT_OF_LORA],
}
"""What is learned, and the keys for it."""
OF_WHOLE = ("full", "from scratch")
ALL = tuple(
    (family, method)
    for family in FAMILIES
    for method in METHODS
    if family == "llama" or method in (*OF_WHOLE, "lora")
)
FEW = (("llama", "lora"), ("gemma2", "full"), ("gemma2", "lora"), ("gpt_neox", "from scratch"))
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
            ("train.neftune_noise_alpha", 5.0),
            # A bias of keys has next to no gradient: what rounding leaves of it, Adam would turn
            # into steps of 1e-5 below its usual eps of 1e-8.
            ("optimizer.eps", 1e-6),
            *METHODS[method],
        ]
        if method in OF_WHOLE:
            return Case("single", "full", changes=tuple(changes))
        changes += [
            ("lora_targets", NOT_FUSED.get(family, ALL_LINEAR)),
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


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_installed_decides_between_equals_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, changes = FAMILIES[family]
    made = str(make_transformers_model(tmp_path, model, **changes))
    with_litgpt = open_base(made).architecture
    assert with_litgpt.window is None
    monkeypatch.setattr(ImplementationRow, "is_installed", False)
    without = open_base(made).architecture
    assert without.implementation == "transformers"
    is_fused = family in NOT_FUSED
    assert with_litgpt.implementation == ("transformers" if is_fused else "litgpt")
    # Parts of fused layers are in one of the two alone.
    named = {with_litgpt.seed_name(name) for name in with_litgpt.untied_shapes}
    assert named == {without.seed_name(name) for name in without.untied_shapes}


@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_are_the_same_in_both(family: str, tmp_path: Path) -> None:
    model, changes = FAMILIES[family]
    made = str(make_transformers_model(tmp_path, model, **changes))
    ours, theirs = (open_base(made, one) for one in IMPLEMENTATIONS)
    expected = dict(theirs.architecture.drawn(theirs.settings, 1))
    found = dict(ours.architecture.drawn(ours.settings, 1))
    assert found.keys() >= parameter_shapes(ours).keys()
    for name, values in found.items():
        assert values.shape == ours.architecture.untied_shapes[name]
        if (known := expected.get(ours.architecture.seed_name(name))) is not None:
            assert torch.equal(values, known), name
    assert sum(map(torch.numel, found.values())) == sum(map(torch.numel, expected.values()))


@pytest.mark.parametrize(
    ("family", "method"),
    [*FEW, *(pytest.param(*one, marks=pytest.mark.matrix) for one in OTHERS)],
)
@pytest.mark.slow
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
