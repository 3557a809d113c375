"""Weight decay without norms and biases: the parameters of transformers' Trainer, and no others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import says
from transformers import Trainer
from transformers_models import make_transformers_model, transformers_model

from ftkit.errors import UserError
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.lora.targets import names_of, our_name
from ftkit.models.pretrained.base_model import open_base
from ftkit.recipe.parsing import read_recipe
from ftkit.strategies.optimizers import (
    OptimizerInBackward,
    make_optimizer,
    norms_and_biases,
    resolve_optimizer,
)

RATE, DECAY = 0.5, 0.1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def outlined(directory: Path, method: Any, **keys: Any) -> tuple[LanguageModel, Any]:
    pairs = {"checkpoint_dir": str(directory)} | {k.replace("__", "."): v for k, v in keys.items()}
    recipe = read_recipe([], list(pairs.items()), method=method)
    model = outline(open_base(str(directory), recipe.implementation), recipe, torch.float32)
    return model, recipe


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("llama", "litgpt"),
        ("qwen2 window", "litgpt"),  # biases of query, key and value
        ("qwen3", "litgpt"),  # norms of heads
        ("qwen3", "transformers"),
        ("gemma2", "litgpt"),
        ("phi", "transformers"),  # a bias in every layer
        ("gpt2", "transformers"),  # torch's LayerNorm, under names without "norm"
        ("gpt_oss", "transformers"),  # biases of experts, which are matrices
    ],
)
def test_the_parameters_without_decay_are_those_of_the_trainer(
    name: str, implementation: str, models: Path
) -> None:
    directory = models / f"{name}-{implementation}"
    make_transformers_model(directory, name)
    theirs = transformers_model(directory)
    trainer: Any = Trainer.get_decay_parameter_names
    expected = {name for name, _ in theirs.named_parameters()} - set(trainer(None, theirs))
    model, recipe = outlined(directory, "full", model_implementation=implementation)
    base = open_base(str(directory), recipe.implementation)
    spared = {id(parameter) for parameter in norms_and_biases(model)}
    found: set[str] = set()
    for ours, parameter in model.named_parameters():
        if id(parameter) in spared:
            module, _, kind = our_name(ours).rpartition(".")
            found.update(f"{name}.{kind}" for name in names_of(base, module))
    assert found == expected


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("full", {"optimizer": "AdamW"}),
        ("full", {"optimizer": "SGD"}),
        ("full", {"optimizer": "Muon"}),
        ("full", {"optimizer": "bitsandbytes.optim.AdamW8bit"}),
        ("full", {"optimizer": "AdamW", "train.optimizer_in_backward": "true"}),
        (
            "lora",
            {
                "optimizer": "AdamW",
                "lora_plus_ratio": "4",
                "lora_modules_to_save": "[norm, lm_head]",
            },
        ),
    ],
)
def test_a_step_without_gradients_shrinks_all_else(
    method: Any, keys: dict[str, str], models: Path
) -> None:
    """So no other parameter is taken out, whatever groups the optimizer has beside these."""
    if not (directory := models / "qwen2").exists():
        make_transformers_model(directory, "qwen2 window")
    given = {"optimizer.lr": str(RATE), "optimizer.weight_decay": str(DECAY)}
    given["train.decay_norms_and_biases"] = "false"
    model, recipe = outlined(directory, method, **(keys | given))
    model.to_empty(device="cpu")
    kind, arguments = resolve_optimizer(recipe.optimizer, may_fuse=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = make_optimizer(
        recipe.optimizer,
        model,
        kind,
        arguments,
        lora_plus_ratio=getattr(recipe, "lora_plus_ratio", None),
        decays_norms_and_biases=recipe.train.decay_norms_and_biases,
    )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if recipe.train.optimizer_in_backward:
        in_backward = OptimizerInBackward(optimizer)
        torch.stack([0 * p.sum() for p in trained.values()]).sum().backward()
        assert in_backward.take_norm() == 0
    else:
        for parameter in trained.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    is_spared = {name: "norm" in name or "bias" in name or "ln_f" in name for name in trained}
    assert {True, False} == set(is_spared.values())
    for name, parameter in trained.items():
        rate = RATE * 4 if "lora_B" in name and "lora_plus_ratio" in keys else RATE
        kept = 1.0 if is_spared[name] else 1 - rate * DECAY
        torch.testing.assert_close(parameter, torch.full_like(parameter, kept), msg=name)


def test_an_optimizer_without_weight_decay_has_nothing_to_leave_out(models: Path) -> None:
    if not (directory := models / "qwen2").exists():
        make_transformers_model(directory, "qwen2 window")
    model, recipe = outlined(directory, "full", optimizer="Rprop")
    kind, arguments = resolve_optimizer(recipe.optimizer, may_fuse=True)
    with pytest.raises(UserError) as caught:
        make_optimizer(recipe.optimizer, model, kind, arguments, decays_norms_and_biases=False)
    assert says(str(caught.value), "train.decay_norms_and_biases ... Rprop ... weight_decay")
