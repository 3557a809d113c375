"""Where the name of a base model leads, without any hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from litgpt.config import configs
from messages import message_of, says

from ftkit.errors import UserError
from ftkit.models.pretrained.model_names import nearest_names
from ftkit.models.pretrained.places import fetch_settings, find_here, find_or_download
from ftkit.recipe.hubs import HUBS
from ftkit.utils import embedded


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory, for a machine without the extension."""
    monkeypatch.setattr(HUBS, "_of_extensions", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_index_that_lists_nothing_is_refused(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors.index.json"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(UserError, match="does not list the weight files"):
        find_or_download(str(tmp_path))


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="is a file, not a directory"):
        find_or_download(str(tmp_path / "model.safetensors"))


def test_the_embedded_model_is_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "path", lambda name: tmp_path / name)
    assert find_or_download("embedded:quickstart") == tmp_path / "quickstart/model"
    with pytest.raises(UserError, match="Embedded in ftkit: embedded:quickstart"):
        find_or_download("embedded:other")


@pytest.mark.extensions
@pytest.mark.parametrize("config", configs[::20], ids=lambda config: config["name"])
def test_models_are_found_by_any_of_their_names(config: dict[str, Any]) -> None:
    hub_name = f"{config['hf_config']['org']}/{config['hf_config']['name']}"
    copy = f"somebody/{config['hf_config']['name']}"
    for name in (config["name"], config["hf_config"]["name"].upper(), hub_name, copy):
        assert hub_name in nearest_names(name)


def refused(name: str) -> str:
    return message_of(find_or_download, name)


def settings_refused(name: str) -> str:
    fetch_settings.cache_clear()
    failure = fetch_settings(name)
    fetch_settings.cache_clear()
    return str(failure)


@pytest.mark.parametrize("asks", [refused, settings_refused])
@pytest.mark.parametrize("name", ["org/name", "org/name@v1", "checkpoints/org/name"])
def test_a_name_that_only_a_hub_knows_needs_the_extension(
    asks: Callable[[str], str], name: str, no_hub: Path
) -> None:
    there = name.removeprefix("checkpoints/")
    assert says(asks(name), f"checkpoint_dir is {there} ... extension hub, which is missing")
    assert not any(no_hub.iterdir())


def test_a_download_is_used_without_the_extension(no_hub: Path) -> None:
    directory = no_hub / "checkpoints/org/name"
    directory.mkdir(parents=True)
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / file).write_text("{}")
    assert find_here("org/name") == Path("checkpoints/org/name")
    assert find_or_download("org/name") == Path("checkpoints/org/name")
    assert fetch_settings("org/name") is None


@pytest.mark.parametrize("name", ["no/such/directory", "nothing", "other:org/name"])
def test_a_path_that_does_not_exist_gets_no_advice_to_ask_a_hub(name: str, no_hub: Path) -> None:
    message = refused(name)
    assert says(message, f"checkpoint_dir {name} does not exist ... embedded:quickstart")
    assert "hub" not in message
