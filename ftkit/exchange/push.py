"""`ftkit push`: a result and its model card, onto the Hugging Face hub."""

import json
from collections.abc import Mapping
from pathlib import Path

from ftkit.errors import UserError
from ftkit.evaluation.result import Result, find_result
from ftkit.exchange.model_card import card_files, with_name
from ftkit.models.pretrained.hub import CARD, hub_name, read_json
from ftkit.models.pretrained.upload import upload
from ftkit.recipe.options import PushOptions
from ftkit.recipe.peft_adapter import CONFIG as ADAPTER_CONFIG

_BASE = "base_model_name_or_path"
"""Key by which an adapter names its base model."""


def push(options: PushOptions) -> int:
    """Put a result onto the hub, all of it in one commit; the exit code.

    Args:
        options: which, where to, and who may see it.

    Raises:
        UserError: it cannot be used by others as it is, or the hub refuses it.
    """
    place = Path(options.result).expanduser()
    kind: str
    if any(place.glob("*.gguf")) and not (place / "config.json").is_file():
        kind, files = "GGUF file", _files_in(place)
        if CARD in files:
            text = (place / CARD).read_text(encoding="utf-8")
            files[CARD] = with_name(text, options.repo_id, None).encode()
    else:
        result = find_result(options.result)
        kind, files = result.kind, _files_of(result, options)
    url, is_public = upload(
        files,
        options.repo_id,
        public=options.public,
        message=options.message or f"{kind}, trained with ftkit",
        token=options.access_token,
    )
    published = {"url": url, "public": is_public}
    seen = "for everybody to see" if is_public else "private"
    print(json.dumps(published) if options.format == "json" else f"{url} has it, {seen}")
    return 0


def _files_in(directory: Path) -> dict[str, Path | bytes]:
    return {
        file.name: file
        for file in sorted(directory.iterdir())
        if file.is_file() and not file.name.startswith(".")
    }


def _files_of(result: Result, options: PushOptions) -> dict[str, Path | bytes]:
    """The files of an adapter or a model, as others are to have them."""
    _require_result(result, options)
    files = _files_in(result.directory)
    base = _base_on_hub(result, options) if result.kind == "adapter" else None
    if base is not None:
        # The file here names a directory of this machine.
        settings = read_json(result.directory / ADAPTER_CONFIG) | {_BASE: base}
        files[ADAPTER_CONFIG] = (json.dumps(settings, indent=2) + "\n").encode()
    return {**files, **_card(result, options.repo_id, base)}


def _require_result(result: Result, options: PushOptions) -> None:
    """Refuse what is not a result, or not one that others can read."""
    if result.kind == "checkpoint":
        raise UserError(
            f"{result.name} is a checkpoint of a full fine-tune, in shards that only ftkit reads. "
            f"Try ftkit export {result.name} --format hf --out out/hf, then ftkit push out/hf "
            f"{options.repo_id}."
        )
    is_base = result.name.startswith("embedded:") or hub_name(result.name) is not None
    if result.kind == "model" and result.recipe is None and is_base:
        raise UserError(
            f"{result.name} is a base model without training. Name a run, such as "
            "out/finetune/lora, or the output of ftkit merge or ftkit export."
        )


def _base_on_hub(result: Result, options: PushOptions) -> str:
    """ORG/NAME from which others take the base model."""
    known = options.base or (hub_name(result.base) if result.base else None)
    if known is None:
        raise UserError(
            f"{result.name} is an adapter of {result.base}, which others cannot load. Give its "
            "name on the hub with --base ORG/NAME, or make one model of both with ftkit merge "
            f"{result.name} --out out/merged, and push that."
        )
    return known


def _card(result: Result, repo_id: str, base: str | None) -> Mapping[str, bytes]:
    """The model card by its name, with the name that the result gets."""
    file = result.directory / CARD
    if file.is_file():
        text = file.read_text(encoding="utf-8")
    else:  # of a run of an earlier version
        found = card_files(result, None, "adapter" if result.kind == "adapter" else "hf")
        if not found:
            return {}
        text = found[CARD].decode()
    return {CARD: with_name(text, repo_id, base).encode()}
