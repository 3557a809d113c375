"""Bodies of transformers' models compute what transformers computes."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from computed import (
    LENGTHS,
    assert_close,
    cached_logits,
    filled,
    logits_by,
    opened,
    padded_logits,
    row_logits,
    sequences,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers.core_model_loading import Chunk, WeightConverter
from transformers_models import (
    MODELS,
    MORE_MODELS,
    NEWEST,
    make_transformers_model,
    settings_of,
    transformers_model,
)

from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.architectures.transformers_reading import read_transformers_architecture
from ftkit.models.language_model import LanguageModel, outline, outline_plain
from ftkit.models.lora.targets import our_name
from ftkit.models.pretrained.base_model import BaseModel, open_base, storage_of, weights
from ftkit.models.pretrained.save import save_hf
from ftkit.recipe.recipe import Recipe

ALL = [
    *MODELS,
    *(pytest.param(model, marks=pytest.mark.slow) for model in NEWEST),
    *(pytest.param(model, marks=pytest.mark.matrix) for model in MORE_MODELS),
]


class Tiny:
    """A tiny model of transformers; each of its parts is made once for all tests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @functools.cached_property
    def expected_logits(self) -> Tensor:
        return expected_logits(self.directory)

    @functools.cached_property
    def ours(self) -> tuple[BaseModel, LanguageModel]:
        return opened(self.directory)


Models = Callable[[str], Tiny]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    @functools.cache
    def made(model: str) -> Tiny:
        return Tiny(make_transformers_model(tmp_path_factory.mktemp("model"), model))

    return made


def expected_logits(directory: Path) -> Tensor:
    return logits_by(transformers_model(directory), sequences())


@pytest.mark.parametrize("model", ALL)
def test_logits_are_those_of_transformers_padded_and_in_a_row(tiny: Models, model: str) -> None:
    expected = tiny(model).expected_logits
    _, ours = tiny(model).ours
    assert_close(padded_logits(ours, sequences()), expected)
    assert isinstance(ours.architecture, TransformersArchitecture)
    if ours.architecture.takes_rows:
        for kernel in ("cpu", "sdpa"):
            ours.kernel = kernel
            assert_close(row_logits(ours, sequences()), expected)


@pytest.mark.parametrize("model", ALL)
def test_logits_of_tokens_that_follow_others_are_those_of_whole_sequences(
    tiny: Models, model: str
) -> None:
    _, ours = tiny(model).ours
    expected = tiny(model).expected_logits.split(LENGTHS)
    for step, logits in enumerate(cached_logits(ours, sequences())):
        assert_close(logits, torch.stack([one[step - 3] for one in expected]))


@pytest.mark.parametrize("model", ALL)
def test_layers_that_are_loaded_one_by_one_have_the_same_logits(tiny: Models, model: str) -> None:
    base, _ = tiny(model).ours
    merge = pytest.importorskip("ftkit.extensions.publish.merge")
    found = merge.logits_of(
        outline_plain(base, torch.float32, tied=False),
        merge.base_reader(base),
        [sequence.tolist() for sequence in sequences()],
    )
    assert_close(found, tiny(model).expected_logits)


@pytest.mark.parametrize("model", ALL)
def test_a_step_has_the_gradients_of_transformers(tiny: Models, model: str) -> None:
    base, ours = tiny(model).ours
    theirs = transformers_model(tiny(model).directory)
    tokens = torch.stack([sequences()[1], sequences()[1].flip(0)])
    total = ours(tokens[:, :-1], torch.arange(tokens[:, 1:].numel()), tokens[:, 1:].flatten())
    total.backward()
    logits = theirs(tokens[:, :-1]).logits.float()
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )
    expected.backward()
    assert_close(total, expected)
    named = dict(theirs.named_parameters())
    architecture = base.architecture
    assert isinstance(architecture, TransformersArchitecture)
    naming = architecture.naming_in("hf")
    assert naming is not None
    compared = 0
    for name, parameter in ours.named_parameters():
        name = our_name(name)
        other = named.get(naming.theirs(name))
        if other is not None and other.grad is not None and parameter.grad is not None:
            gradient = other.grad.t() if name in architecture.transposed else other.grad
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared > len(named) / 2


@pytest.mark.parametrize("model", ALL)
def test_a_model_is_written_as_transformers_writes_it(
    tiny: Models, model: str, tmp_path: Path
) -> None:
    base = open_base(str(tiny(model).directory), "transformers")
    save_hf(base, weights(base), tmp_path / "saved")
    before, after = (
        load_file(directory / "model.safetensors")
        for directory in (tiny(model).directory, tmp_path / "saved")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert_close(expected_logits(tmp_path / "saved"), tiny(model).expected_logits)


@pytest.mark.parametrize("model", ALL)
def test_no_token_sees_those_that_follow(tiny: Models, model: str) -> None:
    _, ours = tiny(model).ours
    tokens = torch.stack([sequences()[1], sequences()[1]])
    tokens[1, -3:] = 7
    with torch.no_grad():
        logits = ours(tokens, torch.arange(tokens.numel())).unflatten(0, (2, -1))[:, :-3]
    assert_close(logits[0], logits[1])


@pytest.mark.matrix
@pytest.mark.parametrize("model", [*MODELS, *NEWEST, *MORE_MODELS])
def test_a_step_in_16_bits_has_nearly_the_loss_of_32_bits(tiny: Models, model: str) -> None:
    base, whole = tiny(model).ours
    recipe = Recipe(checkpoint_dir=str(tiny(model).directory))
    half = filled(outline(base, recipe, torch.bfloat16), base)
    tokens = torch.stack([sequences()[1], sequences()[1].flip(0)])
    batch = tokens[:, :-1], torch.arange(tokens[:, 1:].numel()), tokens[:, 1:].flatten()
    found = half(*batch)
    found.backward()
    torch.testing.assert_close(found.detach(), whole(*batch).detach(), rtol=0.02, atol=0)
    gradients = [p.grad for p in half.parameters() if p.requires_grad]
    assert all(one is not None and one.isfinite().all() for one in gradients)


@pytest.mark.parametrize("model", ["opt", "phimoe", "mixtral"])
def test_training_computes_what_inference_does(tiny: Models, model: str) -> None:
    _, ours = opened(tiny(model).directory)
    expected = padded_logits(ours, sequences())
    assert torch.equal(padded_logits(ours.train(), sequences()), expected)


def test_a_parameter_that_no_rule_of_transformers_writes_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = open_base(str(make_transformers_model(tmp_path, "llama")), "transformers")
    tensors = list(weights(base))
    parts = ["self_attn.q_proj.weight", "self_attn.absent.weight"]
    rule = WeightConverter("self_attn.both.weight", parts, operations=[Chunk(dim=0)])
    name = "ftkit.models.pretrained.transformers_storage.get_model_conversion_mapping"
    monkeypatch.setattr(name, lambda *_, **__: [rule])
    storage = storage_of(base.architecture, "hf")
    with pytest.raises(ValueError, match="q_proj"):
        list(storage.written(tensors))


@pytest.mark.parametrize(
    ("model", "name", "initial"),
    [
        ("llama", "model.norm.weight", "ones"),
        ("gemma2", "model.norm.weight", "zeros"),
        ("qwen3_next", "model.norm.weight", "zeros"),
        ("qwen3_next", "model.layers.0.linear_attn.norm.weight", "ones"),
        ("qwen3_next", "model.layers.1.self_attn.q_norm.weight", "zeros"),
    ],
)
def test_norms_of_random_models_begin_as_the_identity(model: str, name: str, initial: str) -> None:
    settings = settings_of(model) | {"model_type": model}
    architecture = read_transformers_architecture(settings, model)
    assert architecture.initial(name, architecture.untied_shapes[name]) == initial


@pytest.mark.skipif("deepseek_v4" not in NEWEST, reason="needs transformers 5.24")
def test_modules_that_a_short_sequence_skips_get_a_gradient_of_0(tiny: Models) -> None:
    """Ranks with longer sequences wait for it, and the optimizer steps them in every strategy."""
    _, ours = tiny("deepseek_v4").ours
    ids = torch.tensor([[5, 6, 7]])
    ours.zero_grad()
    ours(ids, torch.arange(3), ids[0]).backward()
    trained = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in trained.values())
    skipped = [grad for name, grad in trained.items() if ".compressor." in name]
    assert skipped and not any(grad.any() for grad in skipped if grad is not None)
    ours.zero_grad()
