"""The registry of adapter types, with one of another package."""

import dataclasses

import pytest

from ftkit.recipe.adapter_types import ADAPTER_TYPES, LORA, is_adapter


def test_parameters_of_a_type_of_another_package_are_known_once_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora = ADAPTER_TYPES.get(LORA)
    assert lora is not None
    theirs = dataclasses.replace(lora, name="boft", parameters=("boft_",))
    assert is_adapter("layer.lora_A.default") and not is_adapter("layer.boft_R.default")
    monkeypatch.setitem(ADAPTER_TYPES.opened, "boft", theirs)
    assert is_adapter("layer.boft_R.default") and not is_adapter("layer.weight")
