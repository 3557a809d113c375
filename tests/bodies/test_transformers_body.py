"""The oracle is transformers: what its models compute, ftkit's bodies of them compute."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers_models import (
    MODELS,
    MORE_MODELS,
    VOCABULARY,
    make_transformers_model,
    transformers_model,
)

from ftkit.architectures.transformers_architecture import TransformersArchitecture
from ftkit.config.recipe import Recipe
from ftkit.lora.names import our_name
from ftkit.model.language_model import LanguageModel, outline
from ftkit.model.load_weights import fill
from ftkit.model.sharding import Whole
from ftkit.pretrained.base_model import BaseModel, open_base, weights
from ftkit.pretrained.save import save_hf

LENGTHS = (9, 14, 3)
CPU = torch.device("cpu")
ALL = [*MODELS, *(pytest.param(model, marks=pytest.mark.matrix) for model in MORE_MODELS)]
Directory = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """A tiny model, made once."""
    made: dict[str, Path] = {}

    def directory(model: str) -> Path:
        if model not in made:
            made[model] = make_transformers_model(tmp_path_factory.mktemp("model"), model)
        return made[model]

    return directory


def opened(directory: Path) -> tuple[BaseModel, LanguageModel]:
    base = open_base(str(directory), "transformers")
    model = outline(base, Recipe(checkpoint_dir=str(directory)), torch.float32)
    fill(
        model,
        base,
        sharding=Whole(),
        device=CPU,
        rope_length=64,
        seed=0,
        progress=lambda *_: None,
    )
    return base, model.eval()


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def expected_logits(directory: Path) -> Tensor:
    model = transformers_model(directory)
    with torch.no_grad():
        found = [model(sequence[None]).logits[0] for sequence in sequences()]
    return torch.cat(found).float()


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def padded_logits(model: LanguageModel) -> Tensor:
    tokens = torch.nn.utils.rnn.pad_sequence(sequences(), batch_first=True)
    real = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(sequence) for sequence in sequences()], batch_first=True
    )
    with torch.no_grad():
        logits: Tensor = model(tokens, real.flatten().nonzero()[:, 0])
    return logits


@pytest.mark.parametrize("model", ALL)
def test_logits_are_those_of_transformers_padded_and_in_a_row(
    directory_of: Directory, model: str
) -> None:
    expected = expected_logits(directory_of(model))
    _, ours = opened(directory_of(model))
    assert_close(padded_logits(ours), expected)
    assert isinstance(ours.architecture, TransformersArchitecture)
    if ours.architecture.takes_rows:
        row = torch.cat(sequences())[None]
        for kernel in ("cpu", "sdpa"):
            ours.kernel = kernel
            with torch.no_grad():
                found = ours(row, torch.arange(row.size(1)), sequence_lengths=LENGTHS)
            assert_close(found, expected)


@pytest.mark.parametrize("model", ALL)
def test_logits_of_tokens_that_follow_others_are_those_of_whole_sequences(
    directory_of: Directory, model: str
) -> None:
    _, ours = opened(directory_of(model))
    expected = expected_logits(directory_of(model)).split(LENGTHS)
    ours.body.start_cache(len(LENGTHS), max(LENGTHS))
    prompts = torch.nn.utils.rnn.pad_sequence([s[:-2] for s in sequences()], batch_first=True)
    ends = torch.tensor([len(s) - 3 for s in sequences()])
    rows = torch.arange(len(LENGTHS))
    with torch.no_grad():
        places = torch.arange(prompts.size(1)).expand_as(prompts)
        found = [ours(prompts, ends + rows * prompts.size(1), positions=places)]
        for back in (2, 1):
            newest = torch.stack([s[-back] for s in sequences()])[:, None]
            found.append(ours(newest, rows, positions=(ends + 3 - back)[:, None]))
    ours.body.end_cache()
    for step, logits in enumerate(found):
        assert_close(logits, torch.stack([one[step - 3] for one in expected]))


@pytest.mark.parametrize("model", ALL)
def test_a_step_has_the_gradients_of_transformers(directory_of: Directory, model: str) -> None:
    base, ours = opened(directory_of(model))
    theirs = transformers_model(directory_of(model))
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
    directory_of: Directory, model: str, tmp_path: Path
) -> None:
    base = open_base(str(directory_of(model)), "transformers")
    save_hf(base, weights(base), tmp_path / "saved")
    before, after = (
        load_file(directory / "model.safetensors")
        for directory in (directory_of(model), tmp_path / "saved")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert_close(expected_logits(tmp_path / "saved"), expected_logits(directory_of(model)))


@pytest.mark.parametrize("model", ALL)
def test_no_token_sees_those_that_follow(directory_of: Directory, model: str) -> None:
    _, ours = opened(directory_of(model))
    tokens = torch.stack([sequences()[1], sequences()[1]])
    tokens[1, -3:] = 7
    with torch.no_grad():
        logits = ours(tokens, torch.arange(tokens.numel())).unflatten(0, (2, -1))[:, :-3]
    assert_close(logits[0], logits[1])


@pytest.mark.parametrize("model", ["opt", "phimoe", "mixtral"])
def test_training_computes_what_inference_does(directory_of: Directory, model: str) -> None:
    _, ours = opened(directory_of(model))
    expected = padded_logits(ours)
    assert torch.equal(padded_logits(ours.train()), expected)
