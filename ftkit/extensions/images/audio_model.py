"""How one base model takes audio: by its feature extractor."""

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftkit.data.records.media import Look
from ftkit.extensions.images.audio_files import FILES, Header, check_header, decode
from ftkit.extensions.images.families import HEARING
from ftkit.extensions.images.found_files import BrokenMedium, read_file
from ftkit.extensions.images.media_model import MediaModel
from ftkit.extensions.images.towers import Inputs
from ftkit.strategies.step_memory import MediaSize


class AudioModel(MediaModel):
    """Settings and feature extractor of a base model that hears.

    Audio is padded to the longest that the model takes, so each costs its tower the same.
    """

    files = FILES
    families = HEARING
    token_keys = ("audio_token_id", "audio_token_index")

    @classmethod
    def of(cls, directory: Path, tokenizer: Any, options: Mapping[str, Any]) -> "AudioModel":
        return _read_once(directory, tokenizer)

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoFeatureExtractor

        return AutoFeatureExtractor.from_pretrained(
            self._directory, trust_remote_code=False, local_files_only=True
        )

    @property
    def tower_config(self) -> Any:
        return self.configured.audio_config

    @property
    def _rate(self) -> int:
        return int(self._processor.sampling_rate)

    def inputs(self, content: bytes, tokens: int) -> Inputs:
        self._check(check_header(content))
        return self._processed(decode(content, self._rate))

    def _processed(self, samples: NDArray[np.float32]) -> Inputs:
        found = self._processor(
            samples, sampling_rate=self._rate, padding="max_length", return_tensors="pt"
        )
        frames = self._frames(len(samples))
        return {"input_features": found["input_features"], "frames": frames}

    def _frames(self, samples: int) -> int:
        return -(-samples // int(self._processor.hop_length))

    @cached_property
    def any_inputs(self) -> Inputs:
        return self._processed(np.zeros(self._processor.n_samples, dtype=np.float32))

    def inputs_of_size(self, size: int, tokens: int) -> Inputs:
        return self.family.sized(self._settings, self.any_inputs, tokens)

    def tokens_of(self, media: MediaSize) -> list[int]:
        # All cost the same, however many tokens they have; together they have room in the samples.
        most = self.family.text(self._settings, self.any_inputs).count(self.token)
        return [min(most, sum(media.lengths) // len(media.sizes))] * len(media.sizes)

    def text_of(self, content: bytes, *, is_alone: bool) -> tuple[str, int]:
        found = self._text_of(check_header(content))
        decode(content, self._rate)  # it may be damaged
        return found

    def text_by_header(self, file: str, *, is_alone: bool) -> tuple[str, int]:
        try:
            return self._text_of(check_header(read_file(Path(file))))
        except BrokenMedium:
            return "", 0

    def _text_of(self, header: Header) -> tuple[str, int]:
        self._check(header)
        inputs = {"frames": self._frames(header.resampled(self._rate))}
        text = self.family.text(self._settings, inputs)
        if not text:
            raise BrokenMedium(f"lasts {header.seconds:.3f} s, too short for one token")
        return text, int(self.tower_config.max_source_positions)

    def _check(self, header: Header) -> None:
        # Transformers would cut it without a word.
        if header.resampled(self._rate) > self._processor.n_samples:
            most = self._processor.n_samples / self._rate
            raise BrokenMedium(
                f"lasts {header.seconds:,.1f} s, but the model takes {most:g} s at most"
            )


@cache
def _read_once(directory: Path, tokenizer: Any) -> AudioModel:
    return AudioModel(directory, tokenizer.token_text)


settings_of = AudioModel.settings_of
"""Gives what of a base model decides how audio becomes tokens and tensors."""


def look(file: str, digest: str) -> Look:
    """Return the length of audio, as it is shown to people.

    Args:
        file: of the audio.
        digest: of what it held when samples were made.

    Raises:
        UserError: it holds something else, or is not there.
    """
    header = check_header(FILES.content(file, digest))
    return Look(f"{header.seconds:.1f} s at {header.rate:,} Hz", "")
