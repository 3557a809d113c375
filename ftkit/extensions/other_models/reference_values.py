"""Log-probabilities under a reference model, which is not there in training: kept in files.

A value belongs to a sequence of a set of samples. Values that were not needed so far are NaN, so a
computation can go on where it was interrupted, and a longer run computes only what is new.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ftkit.data.samples.layout import IntArray
from ftkit.data.samples.sample_set import Samples, SampleSet
from ftkit.strategies.distributed import broadcast_floats
from ftkit.utils.files import cache_root
from ftkit.utils.safetensors_files import save_tensors

# Raised when older files in the cache must not be used any more.
_CACHE_FORMAT = 1
_CHECKSUM = "sha256"

FloatArray = npt.NDArray[np.float64]


class ReferenceValues:
    """Log-probabilities in nats of the sequences of several sets of samples; NaN: not known."""

    def __init__(self, sets: Iterable[SampleSet]) -> None:
        """Begin without values."""
        # By fingerprint: the same answers in another file, or in another mixture, have the same.
        self._sets = {one.fingerprint: one for one in sets}
        self._values = {
            name: np.full((len(one), one.per_sample), np.nan) for name, one in self._sets.items()
        }

    def of(self, samples: Samples) -> FloatArray:
        """Values of samples, [samples, per_sample], whose sets are among these."""
        found = np.empty((len(samples), samples.per_sample))
        for of_set, places, values in self._located(samples, np.arange(len(samples))):
            found[of_set] = values[places]
        return found

    def put(self, samples: Samples, numbers: IntArray, values: FloatArray) -> None:
        """Set the values of some samples.

        Args:
            samples: of which sets are among these.
            numbers: of the samples.
            values: [numbers, per_sample].
        """
        for of_set, places, own in self._located(samples, numbers):
            own[places] = values[of_set]

    def _located(
        self, samples: Samples, numbers: IntArray
    ) -> Iterator[tuple[npt.NDArray[np.bool_], IntArray, FloatArray]]:
        """Yield for each set which of the samples it has, their places in it, and its values."""
        sources, places = samples.sources[numbers], samples.places[numbers]
        for source, one in enumerate(samples.sets):
            of_set = sources == source
            yield of_set, places[of_set], self._values[one.fingerprint]

    def missing(self, samples: Samples, numbers: IntArray) -> IntArray:
        """Which of some samples have a sequence without a value."""
        return numbers[np.isnan(self.of(samples)[numbers]).any(1)]

    def add(self, values: Mapping[str, FloatArray]) -> None:
        """Take values from a file for sequences that have none; those of other sets are ignored."""
        # What a run has trained with stays: a value that was computed again on other hardware may
        # differ in its last digits.
        for name, found in values.items():
            own = self._values.get(name)
            if own is not None and own.shape == found.shape:
                own[:] = np.where(np.isnan(own), found, own)

    def share(self) -> None:
        """Give all ranks the values of rank 0; every rank calls this."""
        for name, values in self._values.items():
            self._values[name] = broadcast_floats(values)

    def items(self) -> Iterable[tuple[str, FloatArray]]:
        """Fingerprint and values of each set."""
        return self._values.items()


def write_values(values: ReferenceValues, file: Path) -> None:
    """Write the values of all sets to a file of a checkpoint: a tensor for each, by fingerprint.

    Raises:
        OSError: it cannot be written.
    """
    save_tensors({name: torch.from_numpy(found) for name, found in values.items()}, file, {})


def read_values(file: Path) -> dict[str, FloatArray]:
    """Read what `write_values` wrote; {} if there is no such file.

    Raises:
        OSError, SafetensorError: it cannot be read.
    """
    if not file.is_file():
        return {}
    return {name: tensor.numpy() for name, tensor in load_file(file).items()}


class ReferenceCache:
    """Values that were computed before, on this machine: a file for each model and set."""

    def __init__(self, model: Mapping[str, object]) -> None:
        """Open the cache for a model.

        Args:
            model: what its numbers depend on: fingerprint, precision, ...
        """
        self._model = model
        self._directory = cache_root() / "reference"

    def load_into(self, values: ReferenceValues) -> None:
        """Add what is known; a damaged file counts as none."""
        for name, _ in list(values.items()):
            with suppress(OSError, ValueError, SafetensorError):
                values.add({name: self._read(self._file(name))})

    def keep(self, values: ReferenceValues) -> None:
        """Write all values that are known, beside those that other runs have written since.

        Raises:
            OSError: the cache cannot be written.
        """
        self.load_into(values)
        self._directory.mkdir(parents=True, exist_ok=True)
        for name, found in values.items():
            file = self._file(name)
            # Renamed once it is whole: other runs may read or write it at the same time.
            partial = file.with_name(f".{file.name}.{os.getpid()}")
            tensors = {"log_probabilities": torch.from_numpy(found)}
            save_tensors(tensors, partial, {_CHECKSUM: _digest(found)})
            partial.replace(file)

    def _file(self, set_name: str) -> Path:
        key = {**self._model, "set": set_name, "format": _CACHE_FORMAT}
        address = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        return self._directory / f"{address}.safetensors"

    def _read(self, file: Path) -> FloatArray:
        with safe_open(file, framework="np") as opened:
            values: FloatArray = opened.get_tensor("log_probabilities")
            if opened.metadata()[_CHECKSUM] != _digest(values):
                raise ValueError(f"{file} does not match its checksum")
        return values


def _digest(values: FloatArray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, dtype="<f8").data).hexdigest()
