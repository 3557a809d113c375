"""Arrays that are made of a corpus once: GPT-NeoX's own files beside it, or those in our cache."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ftkit.data.cache import SampleCache
from ftkit.extensions.neox_data.files import Corpus
from ftkit.extensions.neox_data.index import SampleIndex
from ftkit.utils.damaged_files import reading
from ftkit.utils.files import cache_root, new_directory

_FORMAT = 1
"""Raised when arrays are made otherwise: older ones have other addresses."""
_ENDINGS = ("_packedpi_ac", "_packedpi", "")
"""Endings of names by GPT-NeoX: of today, with allow_chopped false, and before there were others
than packed data."""
_PARTS = ("doc_idx", "sample_idx", "shuffle_idx")

Arrays = Mapping[str, npt.NDArray[Any]]
OnWaiting = Callable[[str, int, int], None]
"""See `ftkit.data.dataset.OnSplitProgress`."""


def kept_arrays(
    address: Mapping[str, Any], make: Callable[[], Arrays], waiting: OnWaiting
) -> Arrays:
    """Map arrays from the cache; those that are not there are made, by one process at a time.

    Args:
        address: all that decides them, as JSON values.
        make: makes them.
        waiting: called while another process makes them.
    """
    text = json.dumps({"format": _FORMAT, **address}, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    directory = cache_root() / "neox" / name
    if (found := _mapped(directory)) is not None:
        return found
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(SampleCache(directory.parent).building(name, waiting))
        # NotImplementedError: filelock 3.16 raises it on file systems without flock.
        except (OSError, NotImplementedError):
            return make()
        if (found := _mapped(directory)) is not None:
            return found  # another process made them while this one waited
        made = make()
        if not made:
            return made
        try:
            with new_directory(directory, overwrite=True) as partial:
                for key, array in made.items():
                    np.save(partial / f"{key}.npy", array, allow_pickle=False)
        except OSError:
            return made
    return _mapped(directory) or made


def _mapped(directory: Path) -> Arrays | None:
    files = sorted(directory.glob("*.npy"))
    # Whatever numpy says of a damaged header: the arrays are made anew.
    with contextlib.suppress(Exception):
        return {file.stem: _load(file) for file in files} or None
    return None


def _load(file: Path) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    return found


def index_of_neox(
    corpus: Corpus,
    name: str,
    documents: range,
    *,
    samples: int | None,
    seq_length: int,
    seed: int,
) -> SampleIndex | None:
    """Map the index that GPT-NeoX itself has kept beside a corpus; None: there is none.

    Args:
        corpus: that it is of.
        name: of the split, as GPT-NeoX calls it: train, valid_0, ...
        documents: that it is of.
        samples: that were needed.
        seq_length: tokens of a sample that the model was given.
        seed: of the generator.

    Raises:
        UserError: it is damaged, or of another corpus.
    """
    begin = f"{corpus.prefix.name}_{name}_indexmap_{samples}ns_{seq_length}sl_{seed}s"
    for ending in _ENDINGS:
        files = [corpus.prefix.with_name(f"{begin}{ending}_{part}.npy") for part in _PARTS]
        if not all(file.is_file() for file in files):
            continue
        advice = "Delete it and the two files beside it; the index is made anew."
        with reading(files[0], "an index that GPT-NeoX has kept", advice=advice):
            found = SampleIndex(*map(_load, files))
            if not found.fits(corpus.sizes, documents):
                raise ValueError(f"it is no index of {corpus.prefix}")
        return found
    return None
