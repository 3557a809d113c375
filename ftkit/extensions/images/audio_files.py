"""Files of audio: checked by their headers, decoded to one channel, and resampled.

Only WAV and FLAC are read, and what a header says is checked before anything is decoded.
"""

import importlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftkit.errors import UserError
from ftkit.extensions.images.found_files import BrokenMedium, FilesOf

_CODINGS = ("PCM_U8", "PCM_S8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
"""Codings of samples that are read, as soundfile names them."""
_MOST_CHANNELS = 16
_RATES = (4_000, 384_000)
"""Samples per second, at least and at most."""
_UNKNOWN_BYTES, _UNKNOWN_FRAMES = 2**32 - 1, 2**40
"""What files have for sizes that were not known when they were begun; the latter and more."""


class Header(NamedTuple):
    """What the header of a file of audio says."""

    frames: int
    """Samples of each channel."""
    rate: int
    """Samples of a channel per second."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.frames / self.rate

    def resampled(self, rate: int) -> int:
        """Samples at another rate."""
        return round(self.frames * rate / self.rate)


def check_header(content: bytes) -> Header:
    """Read the header of an audio file, and refuse other files.

    Raises:
        BrokenMedium: it is no audio, or of a format that is not read.
        UserError: a library is missing.
    """
    with _opened(content) as file:
        return Header(file.frames, file.samplerate)


def decode(content: bytes, rate: int) -> NDArray[np.float32]:
    """Decode audio to one channel, the mean of all, and resample it.

    Args:
        content: of its file.
        rate: samples per second.

    Returns:
        [samples], as many as `Header.resampled` says.

    Raises:
        BrokenMedium: it is none, or damaged.
        UserError: a library is missing.
    """
    with _opened(content) as file:
        header = Header(file.frames, file.samplerate)
        try:
            samples = file.read(dtype="float32", always_2d=True)
        # Decoders raise what they meet in damaged files.
        except Exception as error:
            raise BrokenMedium(_damage(error)) from None
    if len(samples) != header.frames:
        raise BrokenMedium(f"is damaged (it has {len(samples):,} of {header.frames:,} samples)")
    if not np.isfinite(samples).all():
        raise BrokenMedium("has samples that are no numbers")
    mono = samples.mean(axis=1)
    count = header.resampled(rate)
    if header.rate != rate:
        mono = _library("soxr").resample(mono, header.rate, rate)
    # The library may round in another way.
    return np.pad(mono[:count], (0, count - len(mono[:count])))


@contextmanager
def _opened(content: bytes) -> Iterator[Any]:
    soundfile = _library("soundfile")
    if not content:
        raise BrokenMedium("is empty")
    is_wave = content[:4] == b"RIFF" and content[8:12] == b"WAVE"
    # By their first bytes, so that no decoder of another format is given anything.
    if not is_wave and content[:4] != b"fLaC":
        raise BrokenMedium("is neither WAV nor FLAC")
    said = int.from_bytes(content[4:8], "little")
    if is_wave and said != _UNKNOWN_BYTES and said + 8 > len(content):
        raise BrokenMedium(f"is cut off ({len(content):,} of {said + 8:,} bytes)")
    try:
        file = soundfile.SoundFile(io.BytesIO(content))
    except Exception as error:  # whatever a decoder meets in a damaged header
        raise BrokenMedium(_damage(error)) from None
    with file:
        if file.subtype not in _CODINGS:
            raise BrokenMedium(f"is coded as {file.subtype}, but none of {', '.join(_CODINGS)}")
        if file.channels > _MOST_CHANNELS:
            raise BrokenMedium(f"has {file.channels} channels, but may have {_MOST_CHANNELS}")
        least, most = _RATES
        if not least <= file.samplerate <= most:
            raise BrokenMedium(
                f"has {file.samplerate:,} samples per second, but may have {least:,} to {most:,}"
            )
        if not 0 < file.frames < _UNKNOWN_FRAMES:
            raise BrokenMedium(
                "has no samples" if not file.frames else "does not say how long it is"
            )
        yield file


def _damage(error: Exception) -> str:
    # Without the object that soundfile was given, which it names beside the reason.
    return f"is damaged ({getattr(error, 'error_string', error)})"


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        # The wheel of soundfile for any platform has no libsndfile.
        remedy = (
            "pip install 'ftkit[audio]'"
            if isinstance(error, ImportError)
            else "pip install --force-reinstall soundfile, or apt install libsndfile1"
        )
        raise UserError(
            f"Audio is read with soundfile and soxr, but {name} cannot be imported ({error}).\n"
            f"Try {remedy}."
        ) from None


FILES = FilesOf("audio", check_header)
"""How records have audio."""
reference = FILES.reference
"""Gives what canonical records hold of audio."""
