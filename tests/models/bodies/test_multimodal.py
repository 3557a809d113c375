"""Language models of multimodal models compute what the whole model computes on text."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from computed import (
    LENGTHS,
    assert_close,
    cached_logits,
    logits_by,
    opened,
    padded_logits,
    row_logits,
    sequences,
)
from multimodal_models import EACH, make_multimodal_model, multimodal_model
from torch import Tensor

from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.language_model import outline_plain
from ftkit.models.lora.targets import our_name

Directory = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """A tiny model, made once."""
    made: dict[str, Path] = {}

    def directory(model: str) -> Path:
        if model not in made:
            made[model] = make_multimodal_model(tmp_path_factory.mktemp("model"), model)
        return made[model]

    return directory


def texts() -> list[Tensor]:
    """Without the tokens that stand for images."""
    return [sequence.clamp(max=390) for sequence in sequences()]


@pytest.mark.parametrize("model", EACH)
def test_logits_are_those_of_the_whole_model_on_text(directory_of: Directory, model: str) -> None:
    expected = logits_by(multimodal_model(directory_of(model)), texts())
    base, ours = opened(directory_of(model))
    assert_close(padded_logits(ours, texts()), expected)
    assert isinstance(ours.architecture, TransformersArchitecture)
    if ours.architecture.takes_rows:
        for kernel in ("cpu", "sdpa"):
            ours.kernel = kernel
            assert_close(row_logits(ours, texts()), expected)
    merge = pytest.importorskip("ftkit.extensions.publish.merge")
    layer_by_layer = merge.logits_of(
        outline_plain(base, torch.float32, tied=False),
        merge.base_reader(base),
        [sequence.tolist() for sequence in texts()],
    )
    assert_close(layer_by_layer, expected)
    of_each = expected.split(LENGTHS)
    for step, logits in enumerate(cached_logits(ours, texts())):
        assert_close(logits, torch.stack([one[step - 3] for one in of_each]))


@pytest.mark.parametrize("model", EACH)
def test_a_step_has_the_gradients_of_the_whole_model(directory_of: Directory, model: str) -> None:
    base, ours = opened(directory_of(model))
    theirs = multimodal_model(directory_of(model))
    tokens = torch.stack([texts()[1], texts()[1].flip(0)])
    total = ours(tokens[:, :-1], torch.arange(tokens[:, 1:].numel()), tokens[:, 1:].flatten())
    total.backward()
    logits = theirs(input_ids=tokens[:, :-1]).logits.float()
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )
    expected.backward()
    assert_close(total, expected)
    named = dict(theirs.named_parameters())
    naming = base.architecture.naming_in("hf")
    assert naming is not None
    # Gemma 3n embeds text as images too, and takes none of it.
    trained = {name for name, p in named.items() if p.grad is not None and p.grad.any()}
    compared = set()
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None and (other := naming.theirs(our_name(name))) in trained:
            gradient = named[other].grad
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)
            compared.add(other)
    assert compared == trained
