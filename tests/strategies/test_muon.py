"""Muon for the matrices of the blocks beside AdamW for the rest, as one optimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_llama

from ftkit.models.language_model import LanguageModel, outline, trainable
from ftkit.models.pretrained.base_model import open_base
from ftkit.recipe.parsing import read_recipe
from ftkit.strategies.optimizers import (
    MuonWithAdamW,
    OptimizerInBackward,
    hidden_matrices,
    make_optimizer,
    resolve_optimizer,
)
from ftkit.strategies.state import bytes_per_number, state_kinds

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base"))


def make(base: Path, **keys: str) -> tuple[LanguageModel, torch.optim.Optimizer, dict[str, Any]]:
    pairs = {"checkpoint_dir": str(base), "optimizer": "Muon", "optimizer.lr": "0.01"} | {
        f"optimizer.{key}": value for key, value in keys.items()
    }
    recipe = read_recipe([], list(pairs.items()), method="full")
    kind, arguments = resolve_optimizer(recipe.optimizer, may_fuse=True)
    model = outline(open_base(str(base)), recipe, torch.float32)
    model.to_empty(device=CPU)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    return model, make_optimizer(recipe.optimizer, model, kind, arguments), arguments


def give_gradients(model: LanguageModel) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in trainable(model):
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.extensions
def test_matrices_of_blocks_are_muons_and_all_else_is_adamws(base: Path) -> None:
    model, optimizer, _ = make(
        base, weight_decay="0.05", ns_steps="4", momentum="0.9", betas="[0.8, 0.95]"
    )
    theirs, _, _ = make(base)
    matrices = hidden_matrices(theirs)
    others = [p for p in trainable(theirs) if all(p is not m for m in matrices)]
    how: dict[str, Any] = {"ns_steps": 4, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    parts = (
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.05, **how),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.05, betas=(0.8, 0.95), fused=True),
    )
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.ndim == 2} > {
        "lm_head",
        "wte",
    }
    assert len(matrices) == 2 * 7
    for _ in range(2):
        for one in (model, theirs):
            give_gradients(one)
        optimizer.step()
        for part in parts:
            part.step()
    for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        assert ours.equal(expected)


def test_the_size_of_its_state_is_known(base: Path) -> None:
    model, optimizer, arguments = make(base)
    give_gradients(model)
    optimizer.step()
    numbers = sum(parameter.numel() for parameter in trainable(model))
    hidden = sum(parameter.numel() for parameter in hidden_matrices(model))
    held = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    kinds = state_kinds(MuonWithAdamW, arguments, CPU)
    assert kinds == {"momentum_buffer": 1, "exp_avg": 1, "exp_avg_sq": 1}
    per_number = bytes_per_number(MuonWithAdamW, arguments, torch.float32, CPU, hidden / numbers)
    assert numbers * per_number == pytest.approx(4 * (numbers + sum(v.numel() for v in held)))


def test_it_updates_in_the_backward_pass_too(base: Path) -> None:
    (model, optimizer, _), (theirs, expected, _) = make(base), make(base)
    in_backward = OptimizerInBackward(optimizer)
    for one in (model, theirs):
        one.body.build_rope_cache(CPU, 8)
        ids = torch.arange(8)[None]
        one(ids, torch.arange(8), torch.arange(8)).backward()
    expected.step()
    assert in_backward.take_norm() > 0
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert ours.equal(other)
