"""Directories of torch.distributed.checkpoint: tensors in chunks, and `.metadata` that finds them.

`.metadata` is a pickle of objects, which `unpickling` reads without making any; each chunk lies
somewhere in a file as torch.save wrote it, and goes through torch's restricted loader.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.extensions.foreign_checkpoints.state import (
    ForeignRun,
    ForeignState,
    ParameterGroup,
    TrainedModel,
    note_scalar,
    plain_names,
)
from ftkit.extensions.foreign_checkpoints.unpickling import Inert, load_metadata, load_torch_bytes
from ftkit.models.pretrained.weight_files import WeightTensor
from ftkit.utils.damaged_files import reading

DCP_METADATA = ".metadata"
_EXPECTED = (
    "what torch.distributed.checkpoint has written, in which chunks fill each tensor exactly"
)
_STATE, _GROUPS = "state", "param_groups"
Place = tuple[Any, ...]
"""Keys that led to a value in the state that was saved."""


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor, or a whole value, in a file."""

    file: Path
    start: int
    length: int
    corner: tuple[int, ...]
    sizes: tuple[int, ...]

    def read(self) -> Any:
        """Load the object that torch.save wrote there."""
        with reading(self.file, _EXPECTED), self.file.open("rb") as stream:
            stream.seek(self.start)
            content = stream.read(self.length)
        return load_torch_bytes(content, self.file)


class DistributedFiles:
    """Content of a directory of torch.distributed.checkpoint, by the keys it was saved under."""

    def __init__(self, directory: Path) -> None:
        """Read `.metadata`.

        Raises:
            UserError: it is missing, damaged or unsafe, or names files outside the directory.
        """
        self._directory = directory
        metadata = load_metadata(directory / DCP_METADATA)
        self.tensors: dict[Place, WeightTensor] = {}
        """Tensors by their place."""
        self._values: dict[Place, _Chunk] = {}
        with reading(directory / DCP_METADATA, _EXPECTED, advice="Copy the checkpoint again."):
            self._read(metadata, self._chunks(metadata))

    def _chunks(self, metadata: Inert) -> dict[str, dict[tuple[int, ...], _Chunk]]:
        """Chunks by the name of their tensor or value, and by their corner in it."""
        chunks: dict[str, dict[tuple[int, ...], _Chunk]] = {}
        sizes: dict[str, int] = {}
        for index, info in metadata["storage_data"].items():
            if info["transform_descriptors"]:
                raise UserError(
                    f"{self._directory} is compressed ({info['transform_descriptors']}), which "
                    "ftkit does not read. Save it without."
                )
            name = str(info["relative_path"])
            # A name with a path in it could read any file of this machine.
            if Path(name).name != name:
                raise UserError(
                    f"{self._directory / DCP_METADATA} names the file {name!r}, which is not in "
                    "the same directory. Give a checkpoint as its program wrote it."
                )
            file = self._directory / name
            if name not in sizes:
                # Once for each file: it holds many chunks.
                with reading(file, _EXPECTED, advice="Copy the whole checkpoint."):
                    sizes[name] = file.stat().st_size
            start, length = _whole_numbers((info["offset"], info["length"]))
            if start + length > sizes[name]:
                raise UserError(
                    f"{file} has {sizes[name]:,} bytes, but {DCP_METADATA} says that {length:,} "
                    f"bytes of {index['fqn']} begin at {start:,}. Copy the whole checkpoint."
                )
            # Without an offset it is a whole tensor or value, not a chunk.
            corner = () if index["offset"] is None else _whole_numbers(index["offset"])
            of_name = chunks.setdefault(index["fqn"], {})
            if corner in of_name:
                raise ValueError(f"{index['fqn']} has two chunks at {list(corner)}")
            of_name[corner] = _Chunk(file, start, length, corner, ())
        _check_apart([chunk for of_name in chunks.values() for chunk in of_name.values()])
        return chunks

    def _read(
        self, metadata: Inert, chunks: Mapping[str, Mapping[tuple[int, ...], _Chunk]]
    ) -> None:
        places = metadata["planner_data"] or {}
        for name, entry in metadata["state_dict_metadata"].items():
            # Where the planner kept no keys, dots separate them in the name.
            place = tuple(places.get(name) or name.split("."))
            # A value that is no tensor has no size in its metadata.
            if entry["size"] is None:
                (self._values[place],) = chunks[name].values()
                continue
            shape = torch.Size(_whole_numbers(entry["size"]))
            # TensorProperties pickles its fields as a tuple, and the number format is the first.
            dtype = entry["properties"].state[0]
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"the properties of {name} begin with {type(dtype).__name__}")
            boxes = []
            for box in entry["chunks"]:
                corner, sizes = _whole_numbers(box["offsets"]), _whole_numbers(box["sizes"])
                of_name = chunks[name]
                known = of_name.get(corner) or of_name.get(())  # of tensors that are not shards
                if known is None:
                    raise ValueError(f"{name} has no chunk at {list(corner)}")
                if math.prod(sizes) * dtype.itemsize > known.length:
                    raise ValueError(
                        f"{name} has {known.length:,} bytes for a chunk of {list(sizes)}"
                    )
                boxes.append(_Chunk(known.file, known.start, known.length, corner, sizes))
            _check_tiling(name, shape, [(box.corner, box.sizes) for box in boxes])
            read = partial(self._joined, name, shape, dtype, boxes)
            self.tensors[place] = WeightTensor(shape, dtype, read)

    def values(self) -> Iterator[tuple[Place, Any]]:
        """Values other than tensors, by place."""
        for place, chunk in self._values.items():
            yield place, chunk.read()

    def _joined(self, name: str, shape: torch.Size, dtype: torch.dtype, boxes: Any) -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for box in boxes:
            part = box.read()
            if (
                not isinstance(part, Tensor)
                or tuple(part.shape) != box.sizes
                or part.dtype != dtype
            ):
                raise UserError(
                    f"{box.file} holds something else than the part of {name} that {DCP_METADATA} "
                    f"says ({dtype}, {list(box.sizes)}). Copy the checkpoint again."
                )
            where = tuple(
                slice(first, first + size)
                for first, size in zip(box.corner, box.sizes, strict=True)
            )
            whole[where] = part
        return whole


def distributed_state(
    directories: Iterable[Path], model: TrainedModel, **progress: Any
) -> ForeignState:
    """The state of training in one or several directories.

    Args:
        directories: with all of it.
        model: that is trained.
        progress: what other files say.

    Raises:
        UserError: there is no state of an optimizer, or one that is not of a torch optimizer.
    """
    tensors: dict[Place, WeightTensor] = {}
    values: dict[Place, Any] = {}
    first, *_ = found = list(directories)
    for directory in found:
        files = DistributedFiles(directory)
        tensors |= files.tensors
        values |= dict(files.values())
    known = [parameter.name for parameter in model.parameters]
    moments: dict[str, dict[str, WeightTensor]] = {}
    scalars: dict[str, float] = {}
    weights: dict[str, WeightTensor] = {}
    for place, tensor in tensors.items():
        if _is_state(place):
            # A tensor without dimensions is a number of all parameters, such as Adam's step.
            if tensor.shape.numel() == 1 and not tensor.shape:
                note_scalar(scalars, place[-1], float(tensor.read()), first)
            else:
                moments.setdefault(place[-1], {})[str(place[-2])] = tensor
        elif _GROUPS not in place:
            weights[str(place[-1])] = tensor
    for place, value in values.items():
        if _is_state(place) and isinstance(value, int | float):
            note_scalar(scalars, place[-1], float(value), first)
    # A model alone is saved in the same format.
    if not moments:
        raise UserError(
            f"{first} has no optimizer state, so a run cannot continue from it. Convert it to a "
            "model and start a new run from that."
        )
    names = plain_names(
        {*weights, *(name for of_kind in moments.values() for name in of_kind)}, known
    )
    # Programs call it differently; without a counter of the program the optimizer's own stands in.
    steps = [value for place, value in values.items() if place[-1] in ("step", "global_step")]
    numbers = [value for value in steps if isinstance(value, int)] or [int(scalars["step"])]
    return ForeignState(
        **{"step": numbers[0]} | progress,
        parameters={names[name]: tensor for name, tensor in weights.items()},
        moments={
            kind: {names[name]: tensor for name, tensor in of_kind.items()}
            for kind, of_kind in moments.items()
        },
        scalars=scalars,
        groups=_groups(tensors, values, known),
    )


def _whole_numbers(values: Any) -> tuple[int, ...]:
    """Check that sizes or positions are whole numbers from 0 on."""
    if not isinstance(values, tuple | list) or not all(
        type(value) is int and value >= 0 for value in values
    ):
        raise ValueError(f"a size or position is {values!r:.100}")
    return tuple(values)


def _check_apart(chunks: Iterable[_Chunk]) -> None:
    """Refuse two chunks that share bytes of a file: one of them was never saved."""
    ordered = sorted((chunk.file.name, chunk.start, chunk.length) for chunk in chunks)
    for before, after in pairwise(ordered):
        if before[0] == after[0] and before[1] + before[2] > after[1]:
            raise ValueError(f"two chunks share the bytes of {after[0]} at {after[1]:,}")


def _check_tiling(
    name: str, shape: Sequence[int], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Refuse boxes that do not fill a tensor exactly: inside its bounds, without overlap or gap.

    Each of `boxes` is a corner and the sizes.
    """
    for corner, sizes in boxes:
        if not len(corner) == len(sizes) == len(shape) or any(
            first + size > whole for first, size, whole in zip(corner, sizes, shape, strict=True)
        ):
            raise ValueError(
                f"a chunk of {name} {list(shape)} has {list(sizes)} numbers at {list(corner)}"
            )
    filled = sorted(box for box in boxes if math.prod(box[1]))
    # Boxes inside the bounds that do not overlap and have as many numbers as the tensor leave no
    # gap. In the order of their first rows, a box can only overlap those that reach its own.
    reaching: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for corner, sizes in filled:
        reaching = [box for box in reaching if box[0][:1] and box[0][0] + box[1][0] > corner[0]]
        for other in reaching:
            ranges = zip(corner, sizes, *other, strict=True)
            if all(a < c + d and c < a + b for a, b, c, d in ranges):
                raise ValueError(f"chunks of {name} overlap at {list(corner)}")
        reaching.append((corner, sizes))
    if (held := sum(math.prod(sizes) for _, sizes in filled)) != math.prod(shape):
        raise ValueError(f"chunks of {name} hold {held:,} of {math.prod(shape):,} numbers")


def _is_state(place: Place) -> bool:
    return len(place) >= 3 and place[-3] == _STATE


def _groups(
    tensors: Mapping[Place, WeightTensor], values: Mapping[Place, Any], known: list[str]
) -> list[ParameterGroup]:
    """Settings of each group, saved either as one value or key by key."""
    found: dict[Any, dict[str, Any]] = {}
    for place, value in values.items():
        if place[-1] == _GROUPS and isinstance(value, list):
            for number, group in enumerate(value):
                found.setdefault(number, {}).update(group)
        elif _GROUPS in place[:-1]:
            after = place[place.index(_GROUPS) + 1 :]
            if len(after) == 2:
                found.setdefault(after[0], {})[after[1]] = value
    for place, tensor in tensors.items():
        if _GROUPS in place[:-1] and tensor.shape.numel() == 1:
            after = place[place.index(_GROUPS) + 1 :]
            if len(after) == 2:
                found.setdefault(after[0], {})[after[1]] = float(tensor.read())
    groups = [
        ParameterGroup(names=tuple(map(str, settings.get("params") or ())), settings=settings)
        for settings in found.values()
    ]
    return groups or [ParameterGroup(names=tuple(known), settings={})]


class DistributedRun(ForeignRun):
    """A directory of torch.distributed.checkpoint."""

    program = "torch.distributed.checkpoint"

    def _state(self, model: TrainedModel) -> ForeignState:
        return distributed_state([self.directory], model)
