"""Where a run goes on: with the implementation that its checkpoint names, and no other."""

from pathlib import Path

import pytest
from checkpoints import some_metadata
from messages import message_of, says
from transformers_models import make_transformers_model

from ftkit.checkpoint.metadata import BaseIdentity
from ftkit.models.architectures.architecture import Implementation
from ftkit.models.pretrained.base_model import fingerprint, open_base, save_without_weights
from ftkit.recipe.implementations import ImplementationRow
from ftkit.training.start import StartingPoint, open_base_model

OTHER: dict[Implementation, Implementation] = {
    "litgpt": "transformers",
    "transformers": "litgpt",
}
"""Of two implementations."""


def begun_with(base: Path, implementation: Implementation) -> StartingPoint:
    known = fingerprint(open_base(str(base), implementation))
    return StartingPoint(metadata=some_metadata(7, base=BaseIdentity(name="b", fingerprint=known)))


@pytest.mark.extensions
@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("implementation", OTHER)
@pytest.mark.parametrize("has_weights", [True, False], ids=["base", "what a checkpoint has of it"])
def test_a_run_keeps_its_implementation(
    family: str, implementation: Implementation, has_weights: bool, tmp_path: Path
) -> None:
    made = make_transformers_model(tmp_path / "made", family)
    start, place = begun_with(made, implementation), made
    if not has_weights:
        place = tmp_path / "kept"
        place.mkdir()
        save_without_weights(open_base(str(made), implementation), place)
    for named in (None, implementation):
        found = open_base_model(str(place), start, named)
        assert found.architecture.implementation == implementation
    other = OTHER[implementation]
    message = message_of(open_base_model, str(place), start, other)
    assert says(message, other, implementation, f"--model_implementation {implementation}")


@pytest.mark.extensions
def test_a_run_of_litgpts_needs_it_wherever_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_transformers_model(tmp_path, "phi3")
    start = begun_with(made, "litgpt")
    monkeypatch.setattr(ImplementationRow, "is_installed", False)
    message = message_of(open_base_model, str(made), start, None)
    assert says(message, "LitGPT is not installed", "pip install --no-deps litgpt")


def test_a_run_that_names_no_seeds_keeps_those_of_its_implementation() -> None:
    assert StartingPoint().seed_names == "model"
    assert StartingPoint(metadata=some_metadata(7)).seed_names == "implementation"
    assert StartingPoint(metadata=some_metadata(7, seed_names="model")).seed_names == "model"
