"""Directories of torch.distributed.checkpoint: tensors in chunks, and `.metadata` that finds them.

`.metadata` is a pickle of objects, which `unpickling` reads without making any; each chunk lies
somewhere in a file as torch.save wrote it, and goes through torch's restricted loader.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.foreign.names import plain_names
from ftkit.foreign.state import ForeignRun, ForeignState, ParameterGroup, TrainedModel
from ftkit.foreign.unpickling import Inert, load_metadata, load_torch_bytes
from ftkit.pretrained.weights.files import WeightTensor

DCP_METADATA = ".metadata"
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
        """What torch.save wrote there."""
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.start)
                content = stream.read(self.length)
        except OSError as error:
            raise UserError(
                f"{self.file} cannot be read ({error.strerror}). Copy the whole checkpoint."
            ) from None
        return load_torch_bytes(content, self.file)


class DistributedFiles:
    """What lies in a directory of torch.distributed.checkpoint, by the keys it was saved under."""

    def __init__(self, directory: Path) -> None:
        """Read `.metadata`.

        Raises:
            UserError: it is missing, damaged or unsafe, or names files outside the directory.
        """
        self._directory = directory
        try:
            self._read(load_metadata(directory / DCP_METADATA))
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                f"{directory / DCP_METADATA} is not as torch.distributed.checkpoint writes it "
                f"({type(error).__name__}: {error}). Copy the checkpoint again."
            ) from None

    def _read(self, metadata: Inert) -> None:
        chunks: dict[str, dict[tuple[int, ...], _Chunk]] = {}
        for index, info in metadata["storage_data"].items():
            if info["transform_descriptors"]:
                raise UserError(
                    f"{self._directory} is compressed ({info['transform_descriptors']}), which "
                    "ftkit does not read. Save it without."
                )
            name = str(info["relative_path"])
            if Path(name).name != name:
                raise UserError(
                    f"{self._directory / DCP_METADATA} names the file {name!r}, which does not lie "
                    "beside it. Give a checkpoint as its program has written it."
                )
            corner = tuple(index["offset"] or ())
            chunks.setdefault(index["fqn"], {})[corner] = _Chunk(
                self._directory / name, int(info["offset"]), int(info["length"]), corner, ()
            )
        places = metadata["planner_data"] or {}
        self.tensors: dict[Place, WeightTensor] = {}
        """By place."""
        self._values: dict[Place, _Chunk] = {}
        for name, entry in metadata["state_dict_metadata"].items():
            place = tuple(places.get(name) or name.split("."))
            if entry["size"] is None:
                if name in chunks:
                    (self._values[place],) = chunks[name].values()
                continue
            shape, dtype = torch.Size(entry["size"]), entry["properties"].state[0]
            boxes = []
            for box in entry["chunks"]:
                corner, sizes = tuple(box["offsets"]), tuple(box["sizes"])
                known = chunks[name].get(corner) or chunks[name][()]
                boxes.append(_Chunk(known.file, known.start, known.length, corner, sizes))
            if sum(math.prod(box.sizes) for box in boxes) != shape.numel():
                raise UserError(
                    f"{self._directory} does not hold all of {name}. Copy the whole checkpoint."
                )
            read = partial(self._joined, name, shape, dtype, boxes)
            self.tensors[place] = WeightTensor(shape, dtype, read)

    def values(self) -> Iterator[tuple[Place, Any]]:
        """What is no tensor, by place."""
        for place, chunk in self._values.items():
            yield place, chunk.read()

    def _joined(self, name: str, shape: torch.Size, dtype: torch.dtype, boxes: Any) -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for box in boxes:
            part = box.read()
            if not isinstance(part, Tensor) or tuple(part.shape) != box.sizes:
                raise UserError(
                    f"{box.file} holds something else than the part of {name} that {DCP_METADATA} "
                    "says. Copy the checkpoint again."
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
        progress: what other files tell.

    Raises:
        UserError: there is no state of an optimizer, or of one that is no torch optimizer's.
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
            if tensor.shape.numel() == 1 and not tensor.shape:
                scalars[place[-1]] = float(tensor.read())
            else:
                moments.setdefault(place[-1], {})[str(place[-2])] = tensor
        elif _GROUPS not in place:
            weights[str(place[-1])] = tensor
    for place, value in values.items():
        if _is_state(place) and isinstance(value, int | float):
            scalars[place[-1]] = float(value)
    if not moments:
        raise UserError(
            f"{first} holds no state of an optimizer, so no run can go on from it. Convert it to a "
            "model and start a new run from that."
        )
    names = plain_names(
        {*weights, *(name for of_kind in moments.values() for name in of_kind)}, known
    )
    steps = [value for place, value in values.items() if place[-1] in ("step", "global_step")]
    told = [value for value in steps if isinstance(value, int)] or [int(scalars.get("step", 0))]
    trained = set(known)
    return ForeignState(
        **{"step": told[0]} | progress,
        parameters={names[name]: tensor for name, tensor in weights.items()},
        moments={
            kind: {
                names[name]: tensor for name, tensor in of_kind.items() if names[name] in trained
            }
            for kind, of_kind in moments.items()
        },
        scalars=scalars,
        groups=_groups(tensors, values, known),
    )


def _is_state(place: Place) -> bool:
    return len(place) >= 3 and place[-3] == _STATE


def _groups(
    tensors: Mapping[Place, WeightTensor], values: Mapping[Place, Any], known: list[str]
) -> list[ParameterGroup]:
    """The settings of each group, whether they were saved as one value or one by one."""
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

    def state(self, model: TrainedModel) -> ForeignState:
        return distributed_state([self.directory], model)
