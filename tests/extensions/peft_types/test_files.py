"""Settings of adapters of other types than LoRA, as PEFT's adapter_config.json has them."""

import json
from pathlib import Path
from typing import Any

import pytest
from messages import key_words

from ftkit.errors import UserError
from ftkit.recipe.peft_adapter import adapter_keys, peft_arguments


def adapter(directory: Path, kind: str, **values: Any) -> Path:
    settings = {"peft_type": kind, "target_modules": ["v_proj"], **values}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("VERA", "r", 0), ("VERA", "r", 10**9), ("VERA", "projection_prng_key", "1"),
        ("VERA", "save_projection", 1), ("OFT", "oft_block_size", -1), ("OFT", "r", True),
        ("OFT", "block_share", "no"), ("LOHA", "alpha", 0), ("LOHA", "alpha", 2**17),
        ("LOKR", "decompose_factor", 0.5), ("IA3", "feedforward_modules", "down_proj"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_named(kind: str, key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=key_words(f"adapter_config.json ... {key} is")):
        adapter_keys(adapter(tmp_path, kind, **{key: value}))


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("OFT", "coft", True), ("OFT", "use_cayley_neumann", False), ("VERA", "bias", "all"),
        ("OFT", "num_cayley_neumann_terms", 4), ("LOHA", "use_effective_conv2d", True),
        ("LOKR", "rank_pattern", {"q_proj": 4}), ("VERA", "use_method_of_tomorrow", True),
    ],
)  # fmt: skip
def test_keys_that_change_the_maths_are_refused_by_name(
    kind: str, key: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=key):
        adapter_keys(adapter(tmp_path, kind, **{key: value}))


def test_what_only_another_type_has_does_not_reach_peft(tmp_path: Path) -> None:
    found = adapter(tmp_path, "IA3", coft=[1], alpha=4, init_ia3_weights=True, eps=1e-4)
    assert peft_arguments(found) == ("IA3", {"target_modules": ["v_proj"]})


@pytest.mark.parametrize(
    ("kind", "given", "options"),
    [
        ("VERA", {"r": 4, "vera_dropout": 0.5}, {"r": 4, "projection_prng_key": 0}),
        ("OFT", {"r": 0, "oft_block_size": 8}, {"r": 0, "oft_block_size": 8}),
        ("IA3", {}, {"feedforward_modules": []}),
    ],
)
def test_options_are_those_of_the_file_or_of_peft(
    kind: str, given: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    keys = adapter_keys(adapter(tmp_path, kind, **given))
    assert keys["peft"] == {"class_path": kind.lower(), "init_args": options}
