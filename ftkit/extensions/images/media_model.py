"""How one base model takes media of a kind: its settings, and what the media become."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from ftkit.data.records.media import media_row
from ftkit.errors import UserError
from ftkit.extensions.images.families import Family, MediaSettings
from ftkit.extensions.images.found_files import FilesOf
from ftkit.extensions.images.towers import Inputs
from ftkit.strategies.step_memory import MediaSize

_SETTINGS = ("preprocessor_config.json", "processor_config.json")


class MediaModel(ABC):
    """Settings of a base model that takes media of one kind, and what processes them."""

    files: ClassVar[FilesOf]
    """How records have such media."""
    families: ClassVar[Sequence[Family]]
    """Families that take them."""
    not_given: ClassVar[Mapping[str, str]] = {}
    """Why models of some other types are given none."""
    token_keys: ClassVar[Sequence[str]]
    """Keys of config.json of which one has the token that stands for a part of a medium."""

    def __init__(self, directory: Path, token_text: Any) -> None:
        """Read the settings.

        Args:
            directory: of the base model.
            token_text: function that gives the text of a token.

        Raises:
            UserError: ftkit cannot give such media to this model.
        """
        media = media_row(self.kind).noun
        if find_spec("transformers.vision_utils") is None:
            raise UserError(
                f"The records have {media}, which need a newer transformers than "
                f"{version('transformers')}.\nTry pip install 'transformers>=5.24'."
            )
        self._directory = directory
        self.config = content_of_json(directory / "config.json")
        kind = str(self.config.get("model_type"))
        family = self.family_of(kind)
        if family is None:
            known = ", ".join(name for one in self.families for name in one.types)
            why = f": {self.not_given[kind]}" if kind in self.not_given else " so far"
            raise UserError(
                f"The records have {media}, but {kind} models are not given any{why}. ftkit gives "
                f"them to {known}.\nChoose such a model, or remove the records with {media}."
            )
        if not any((directory / name).is_file() for name in _SETTINGS):
            raise UserError(
                f"{directory} has no preprocessor_config.json, which says how {media} are read.\n"
                "Download the model again."
            )
        self.family: Family = family
        self.token_id = next(int(self.config[key]) for key in self.token_keys if key in self.config)
        self.token = str(token_text(self.token_id))
        """Text of the token that stands for a part of a medium."""
        self._token_text = token_text
        of_text = self.config.get("text_config") or {}
        by_settings = of_text.get("use_bidirectional_attention") == "vision"  # Gemma 4
        self.has_blocks = family.sees_itself or family.has_prefix or by_settings
        """Whether some tokens also see later ones: of a medium, or of a prompt."""
        self.mark = family.mark.format(token=self.token)

    @classmethod
    @abstractmethod
    def of(cls, directory: Path, tokenizer: Any, options: Mapping[str, Any]) -> Self:
        """Return the settings of a base model, read once.

        Args:
            directory: of the base model.
            tokenizer: of it.
            options: of its data; those of such media are taken.

        Raises:
            UserError: ftkit cannot give such media to this model.
        """

    @property
    def kind(self) -> str:
        """Name of the kind of media."""
        return self.files.kind

    @classmethod
    def family_of(cls, model_type: str) -> Family | None:
        """Return the family of a type of models; None: ftkit gives it no such media."""
        return next((one for one in cls.families if model_type in one.types), None)

    @classmethod
    def settings_of(cls, directory: Path) -> dict[str, Any] | None:
        """Return what decides the tokens of media and their tensors, as JSON values.

        Args:
            directory: of the base model.

        Returns:
            None: ftkit gives it no such media.
        """
        config = content_of_json(directory / "config.json")
        if cls.family_of(str(config.get("model_type"))) is None:
            return None
        found = {name: content_of_json(directory / name) for name in _SETTINGS}
        return {"model": config, "processor": found}

    @property
    def settings(self) -> dict[str, Any]:
        """As `settings_of`, of this model."""
        return self.settings_of(self._directory) or {}

    @cached_property
    @abstractmethod
    def _processor(self) -> Any:
        """Transformers' processor of such media."""

    @cached_property
    def _settings(self) -> MediaSettings:
        of_files = content_of_json(self._directory / "processor_config.json")
        processor = self._processor.to_dict() | of_files
        return MediaSettings(self.config, processor, self.token, self._token_text)

    @cached_property
    def configured(self) -> Any:
        """Settings of the model with what config.json leaves out."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(
            self._directory, trust_remote_code=False, local_files_only=True
        )

    @abstractmethod
    def text_of(self, content: bytes, *, is_alone: bool) -> tuple[str, int]:
        """The text that a medium becomes, and what it costs to encode.

        Args:
            content: of its file.
            is_alone: whether it is the only one of its sample.

        Raises:
            BrokenMedium: it cannot be decoded, or the model does not take it.
        """

    @abstractmethod
    def text_by_header(self, file: str, *, is_alone: bool) -> tuple[str, int]:
        """As `text_of`, without decoding it; nothing for a file that cannot be read."""

    @abstractmethod
    def inputs(self, content: bytes, tokens: int) -> Inputs:
        """Decode and process a medium.

        Args:
            content: of its file.
            tokens: that it has in its sample.

        Raises:
            BrokenMedium: it cannot be decoded, or the model does not take it.
        """

    @property
    @abstractmethod
    def tower_config(self) -> Any:
        """Settings of the tower."""

    def read(self, inputs: Inputs) -> Inputs:
        """Return what the tower is given of the inputs of a medium."""
        return self.family.read(self.tower_config, inputs)

    @cached_property
    @abstractmethod
    def any_inputs(self) -> Inputs:
        """As `inputs`, of a medium that holds nothing."""

    @cached_property
    def blank(self) -> Inputs:
        """What the tower is given of a medium that holds nothing."""
        return self.read(self.any_inputs)

    @abstractmethod
    def inputs_of_size(self, size: int, tokens: int) -> Inputs:
        """As `inputs`, of a medium of which only this is known; the values do not matter.

        Args:
            size: what it costs to encode.
            tokens: that it has, as `tokens_of` gives them.
        """

    @abstractmethod
    def tokens_of(self, media: MediaSize) -> list[int]:
        """Tokens of each of some media, or a number that is not lower."""

    def positions(self, ids: torch.Tensor, inputs: list[Inputs]) -> torch.Tensor:
        """[3, tokens], positions of the tokens of a sequence along time, height and width.

        Args:
            ids: [tokens].
            inputs: of the media of the sequence.
        """
        # Not abstract: only families with `axes` are asked, and none of audio has them.
        raise NotImplementedError("only of families whose positions have axes")


def content_of_json(file: Path) -> dict[str, Any]:
    """Content of a file of settings; nothing: it is not there."""
    if not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
