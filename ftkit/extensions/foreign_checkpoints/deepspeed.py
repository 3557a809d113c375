"""Checkpoints of DeepSpeed under ZeRO 1 to 3, of any number of ranks, GPT-NeoX's among them.

Every rank has written its part of masters and optimizer state, flat. Under ZeRO 1 and 2 the
parameters of a group lie one after another, and each rank has a range of the whole; under ZeRO 3
each parameter is cut into as many equal parts as there are ranks, the last one padded, and a rank
has its parts one after another. So every parameter is put together from ranges of all files, which
are mapped into memory and read when it is needed.

GPT-NeoX counts the layers of its pipeline: 0 is the embedding, 1 a function, the blocks follow,
then another function, the last norm and the head. In a Llama it joins query, key and value head by
head, and the up and the gate projection one after the other
(tools/ckpts/convert_neox_to_hf.py in EleutherAI/gpt-neox).
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.extensions.foreign_checkpoints.neox import configured_keys
from ftkit.extensions.foreign_checkpoints.state import (
    ForeignRun,
    ForeignState,
    ForeignTensors,
    ParameterGroup,
    TrainedModel,
    plain_names,
)
from ftkit.extensions.foreign_checkpoints.unpickling import (
    IN_DEEPSPEED,
    IN_LIGHTNING,
    held,
    load_torch_file,
    mapping_in,
)
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.pretrained.weight_files import WeightTensor
from ftkit.utils.damaged_files import reading

_PLACED = re.compile(r"(?:module\.)?(?:sequential\.)?(\d+)\.(.+)")
_TIED = re.compile(r"(?:module\.)?tied_modules\.embed\.word_embeddings\.weight")
_FIRST = 2
"""Place of the first block."""
_OF_NEOX = {
    "mlp.linear1": "mlp.dense_h_to_4h",
    "mlp.linear2": "mlp.dense_4h_to_h",
}
"""New names of layers in transformers' GPTNeoX; the others have the same in both."""
_OF_LLAMA = {
    "attention.dense": "self_attn.o_proj",
    "mlp.linear2": "mlp.down_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w3": "mlp.up_proj",
    "mlp.w2": "mlp.down_proj",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
}
_QKV, _GATED = "attention.query_key_value", "mlp.linear1"
_LLAMAS = ("llama", "mistral")
_Split = Callable[[Tensor], Tensor]


def is_neox(names: Iterable[str]) -> bool:
    """Return whether parameters are named by their places in a pipeline of GPT-NeoX."""
    return any(
        _TIED.fullmatch(name)
        or ((found := _PLACED.fullmatch(name)) and found[2] == "word_embeddings.weight")
        for name in names
    )


class NeoxNames:
    """Mapping from GPT-NeoX's parameters to those of transformers."""

    def __init__(self, base: BaseModel) -> None:
        """Prepare for a base model in Hugging Face's layout.

        Raises:
            UserError: it is of a family that GPT-NeoX does not train, or not known.
        """
        settings = base.settings or {}
        self._family = str(settings.get("model_type"))
        if self._family not in ("gpt_neox", *_LLAMAS):
            raise UserError(
                f"checkpoint_dir {base.name} is of the family {self._family}, but models of "
                "GPT-NeoX that can be read are gpt_neox, llama or mistral. Give the model that its "
                "tools/ckpts/convert_neox_to_hf.py makes of the checkpoint."
            )
        self._base = base.name
        self._layers = int(settings["num_hidden_layers"])
        self._heads = int(settings["num_attention_heads"])
        self._shared = int(settings.get("num_key_value_heads") or self._heads)
        self._of_head = int(settings["hidden_size"]) // self._heads

    def held(self, tensors: ForeignTensors) -> dict[str, WeightTensor]:
        """Tensors by transformers' names; joined matrices are split.

        Raises:
            UserError: a tensor has no place in the model.
        """
        found: dict[str, WeightTensor] = {}
        for name, tensor in tensors.items():
            for theirs, split in self._parts(name).items():
                found[theirs] = tensor if split is None else _part_of(tensor, split)
        return found

    def names(self, name: str) -> list[str]:
        """Names in transformers of the matrices that a parameter holds."""
        return list(self._parts(name))

    def _parts(self, name: str) -> Mapping[str, _Split | None]:
        is_llama = self._family in _LLAMAS
        body, last = ("model", "norm") if is_llama else ("gpt_neox", "final_layer_norm")
        embedding = f"{body}.embed_{'tokens' if is_llama else 'in'}.weight"
        if _TIED.fullmatch(name):
            return {embedding: None}
        placed = _PLACED.fullmatch(name)
        place, inside = (int(placed[1]), placed[2]) if placed else (-1, name)
        # GPT-NeoX calls the weight of an RMSNorm its scale.
        layer, _, kind = inside.replace(".scale", ".weight").rpartition(".")
        # After the last block, at place layers + 2, comes a function, then the norm and the head.
        whole = {
            (0, "word_embeddings"): embedding,
            (self._layers + 3, "norm"): f"{body}.{last}.{kind}",
            (self._layers + 4, "final_linear"): f"{'lm_head' if is_llama else 'embed_out'}.{kind}",
        }
        if (place, layer) in whole:
            return {whole[place, layer]: None}
        if _FIRST <= place < _FIRST + self._layers:
            block = f"{body}.layers.{place - _FIRST}"
            if not is_llama:
                return {f"{block}.{_OF_NEOX.get(layer, layer)}.{kind}": None}
            if layer == _QKV:
                return {
                    f"{block}.self_attn.{part}_proj.{kind}": partial(self._of_heads, number)
                    for number, part in enumerate("qkv")
                }
            if layer == _GATED:
                return {
                    f"{block}.mlp.{part}_proj.{kind}": partial(_half, number)
                    for number, part in enumerate(("up", "gate"))
                }
            if layer in _OF_LLAMA:
                return {f"{block}.{_OF_LLAMA[layer]}.{kind}": None}
        raise UserError(
            f"The checkpoint holds {name}, for which {self._base} ({self._layers} layers) has no "
            "place. Give the model that tools/ckpts/convert_neox_to_hf.py of GPT-NeoX makes of it, "
            "as --checkpoint_dir."
        )

    def _of_heads(self, number: int, joined: Tensor) -> Tensor:
        """Query (0), key (1) or value (2) rows of a matrix that joins them head by head.

        Where heads share keys and values, each has its share of those rows.
        """
        shared = self._of_head * self._shared // self._heads
        sizes = [self._of_head, shared, shared]
        by_head = joined.view(self._heads, sum(sizes), *joined.shape[1:])
        return by_head.split(sizes, dim=1)[number].flatten(0, 1)


def _half(number: int, joined: Tensor) -> Tensor:
    return joined.chunk(2)[number]


def _part_of(tensor: WeightTensor, split: _Split) -> WeightTensor:
    # On the meta device: the shape is needed before any numbers are read.
    shape = split(torch.empty(tensor.shape, device="meta")).shape
    return WeightTensor(shape, tensor.dtype, lambda: split(tensor.read()))


_NEWEST_TAG = "latest"
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
# ZeRO 3 cuts the model, so that each rank writes a file of its own: the second name.
_MODEL = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_CLASSES = IN_DEEPSPEED + IN_LIGHTNING
"""Lightning's own strategy has DeepSpeed write what Lightning keeps beside the model."""
_MASTER = "master"
"""Kind under which the parameters themselves stand beside those of optimizer state."""


def zero_directory(source: Path) -> Path | None:
    """Directory of the DeepSpeed checkpoint at a path; None: there is none.

    Raises:
        UserError: `latest` names one that is not there.
    """
    if not source.is_dir():
        return None
    if any(_OPTIMIZER.fullmatch(file.name) for file in source.iterdir()):
        return source
    if not (source / _NEWEST_TAG).is_file():
        return None
    name = (source / _NEWEST_TAG).read_text(encoding="utf-8", errors="replace").strip()
    # A path in this file could lead out of the checkpoint.
    if Path(name).name != name or not (source / name).is_dir():
        raise UserError(
            f"{source / _NEWEST_TAG} names {name!r}, which does not exist. Copy the whole "
            "checkpoint, or give the directory of another step."
        )
    return source / name


@dataclass(frozen=True)
class _Range:
    """Numbers of a parameter in a flat tensor of a rank."""

    rank: int
    flat: int
    """Index of the flat tensor within the rank."""
    start: int
    numel: int


class ZeroFiles:
    """Files that DeepSpeed's engine has saved."""

    def __init__(self, directory: Path) -> None:
        """Map the files of all ranks into memory.

        Raises:
            UserError: one is missing, damaged, unsafe, or of a model that is cut otherwise.
        """
        self._directory = directory
        found = [file for name in _MODEL if (file := directory / name).is_file()]
        if not found:
            raise UserError(f"{directory} has no {_MODEL[0]}. Copy the whole checkpoint.")
        self._model_file = found[0]
        self._model = load_torch_file(self._model_file, _CLASSES)
        if not isinstance(self._model, dict):
            raise UserError(
                f"{self._model_file} holds a {type(self._model).__name__}, but DeepSpeed writes "
                "values by name there. Copy the whole checkpoint."
            )
        # Tensor parallelism cuts matrices by rows or columns, which the files do not say.
        if self._model.get("mp_world_size", 1) != 1:
            raise UserError(
                f"{directory} was written with tensor or pipeline parallelism "
                f"(mp_world_size {self._model['mp_world_size']}), whose parts ftkit cannot join. "
                "Convert it with the program that wrote it first."
            )
        numbered = {
            int(match[1]): file
            for file in directory.iterdir()
            if (match := _OPTIMIZER.fullmatch(file.name))
        }
        # From the model file: ranks whose files were not copied cannot be counted.
        world = self._model.get("dp_world_size", len(numbered))
        # type(): isinstance would take True for a number.
        if type(world) is not int or world < 1:
            raise UserError(
                f"{self._model_file} says that {world!r:.100} ranks have written the checkpoint "
                "(dp_world_size). Copy the whole checkpoint."
            )
        # As many as there are files, and one: the number in the file may be any.
        missing = [rank for rank in range(min(world, len(numbered) + 1)) if rank not in numbered]
        if missing or len(numbered) != world:
            raise UserError(
                f"{directory} has the optimizer state of {len(numbered)} of {world} ranks"
                f"{f': that of rank {missing[0]} is missing' if missing else ''}. Each rank has "
                "written its own; copy those of all machines."
            )
        self._ranks = [
            mapping_in(
                load_torch_file(numbered[rank], _CLASSES),
                "optimizer_state_dict",
                numbered[rank],
            )
            for rank in range(world)
        ]
        shapes = self._model.get("param_shapes")
        if not isinstance(shapes, list) or not all(map(_are_shapes, shapes)):
            raise UserError(
                f"{self._model_file} has no param_shapes, by which the files of ranks are put "
                "together: it is not one of ZeRO, or of a DeepSpeed too old to write them. Load it "
                "with its own program, and save it once with a newer DeepSpeed."
            )
        self._shapes: list[Mapping[str, torch.Size]] = shapes
        # Only ZeRO 3 writes this key.
        self._is_cut_by_parameter = "fp32_flat_groups" in self._ranks[0]
        self._flat = []
        for rank, state in enumerate(self._ranks):
            with reading(numbered[rank], "what a rank of DeepSpeed has written under ZeRO"):
                self._flat.append(self._flat_of(state))
        self._check_partitions()
        self._settings = self._groups_of(self._ranks[0])

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        found = self._model.get("global_steps")
        if type(found) is not int:
            raise UserError(
                f"{self._model_file} says that {found!r:.100} steps are done (global_steps). Copy "
                "the whole checkpoint."
            )
        return found

    @property
    def samples(self) -> int | None:
        """Samples that they consumed."""
        found = self._model.get("global_samples")
        return int(found) if isinstance(found, int) and found > 0 else None

    @property
    def is_neox(self) -> bool:
        """Whether GPT-NeoX wrote it, by the names of the parameters."""
        return is_neox(name for shapes in self._shapes for name in shapes)

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return len(self._ranks)

    def tensors(self) -> dict[str, dict[str, WeightTensor]]:
        """Tensors by kind and DeepSpeed's name; the parameters themselves under `_MASTER`."""
        places = dict(self._places())
        found: dict[str, dict[str, WeightTensor]] = {}
        for kind in self._flat[0]:
            found[kind] = {}
            for name, (shape, ranges) in places.items():
                dtype = self._flat[0][kind][0].dtype
                read = partial(self._read, kind, name, shape, ranges)
                found[kind][name] = WeightTensor(shape, dtype, read)
        module = self._model.get("module")
        if isinstance(module, dict):  # with what is not trained
            for name, tensor in module.items():
                if isinstance(tensor, Tensor) and tensor.numel():
                    # The masters stay: they are float32. Under ZeRO 3, tensors that are cut are
                    # empty here.
                    found[_MASTER].setdefault(name, held(tensor))
        return found

    def state(self, model: TrainedModel, **progress: Any) -> ForeignState:
        """State of training in ftkit's terms.

        Args:
            model: that is trained.
            progress: values that another file has more exactly.
        """
        kinds = self.tensors()
        # These names are places in a pipeline, and one matrix may hold several of transformers'.
        if self.is_neox:
            of_neox = NeoxNames(model.base)
            kinds = {kind: of_neox.held(tensors) for kind, tensors in kinds.items()}
            named = [[plain for name in of for plain in of_neox.names(name)] for of in self._shapes]
        else:
            names = plain_names(kinds[_MASTER], [parameter.name for parameter in model.parameters])
            kinds = {
                kind: {names[name]: tensor for name, tensor in tensors.items() if name in names}
                for kind, tensors in kinds.items()
            }
            named = [[names.get(name, name) for name in shapes] for shapes in self._shapes]
        masters = kinds.pop(_MASTER)
        groups = [
            ParameterGroup(names=tuple(of_group), settings=settings)
            for of_group, settings in zip(named, self._settings, strict=True)
        ]
        # What another file has more exactly replaces these.
        own: dict[str, Any] = {"step": self.step, "samples": self.samples}
        if self.is_neox:
            own["iteration"] = self._model.get("iteration", self.step)
        return ForeignState(
            **own | progress,
            parameters=masters,
            moments=kinds,
            scalars={"step": self._updates()},
            groups=groups,
            notes=[f"put together from the files of {self.world_size} ranks"],
        )

    def _flat_of(self, state: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """The flat tensors of a rank by kind; [groups] or, under ZeRO 3, [groups of parameters]."""
        masters = state.get(
            "fp32_flat_groups" if self._is_cut_by_parameter else "single_partition_of_fp32_groups"
        )
        states = self._states_of(state)
        if not isinstance(masters, list) or len(states) != len(masters):
            raise self._incomplete("as many optimizer states as groups of parameters")
        found: dict[str, list[Tensor]] = {_MASTER: [tensor.detach() for tensor in masters]}
        for of_group in states:
            for kind, value in of_group.items():
                # Adam's step is a tensor without dimensions: a scalar of the whole group.
                if isinstance(value, Tensor) and value.dim() > 0:
                    found.setdefault(kind, []).append(value)
        if any(len(tensors) != len(masters) for tensors in found.values()):
            raise self._incomplete("as many optimizer states as groups of parameters")
        return found

    def _check_partitions(self) -> None:
        """Refuse flat tensors that are not equal parts of a whole; padding may be missing."""
        for kind, first in self._flat[0].items():
            for number, tensor in enumerate(first):
                of_ranks = [flat.get(kind, []) for flat in self._flat]
                if any(
                    len(tensors) != len(first) or tensors[number].dtype != tensor.dtype
                    for tensors in of_ranks
                ):
                    raise self._incomplete(f"the {kind} of some ranks")
                full = tensor.numel()
                sizes = [tensors[number].numel() for tensors in of_ranks]
                shorter = [rank for rank, size in enumerate(sizes) if size != full]
                # Masters come without the padding, which is at the end of all.
                is_padded = kind == _MASTER and max(sizes) == full
                if shorter and not (is_padded and not any(sizes[shorter[0] + 1 :])):
                    raise self._incomplete(f"equal parts of the {kind}, but {sizes} numbers")

    def _optimizer_of(self, state: Mapping[str, Any]) -> Any:
        key = "optimizer_state_dict" if self._is_cut_by_parameter else "base_optimizer_state"
        return state.get(key)

    def _states_of(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        optimizer = self._optimizer_of(state)
        if isinstance(optimizer, list):  # of an "elastic" checkpoint
            return optimizer
        states = optimizer.get("state") if isinstance(optimizer, dict) else None
        if not isinstance(states, dict):
            raise self._incomplete("the state of its optimizer")
        # torch numbers parameters, and a flat group is one parameter.
        return [states[number] for number in sorted(states)]

    def _groups_of(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        optimizer = self._optimizer_of(state)
        groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
        if not isinstance(groups, list) or len(groups) != len(self._shapes):
            return [{} for _ in self._shapes]
        return groups

    def _updates(self) -> float:
        """Updates of the optimizer, which may be fewer than steps."""
        # Under float16, DeepSpeed skips steps whose gradients overflow: Adam's bias correction
        # counts updates.
        steps = [state["step"] for state in self._states_of(self._ranks[0]) if "step" in state]
        steps += [group["step"] for group in self._settings if "step" in group]
        return float(steps[0]) if steps else float(self.step)

    def _places(self) -> Iterator[tuple[str, tuple[torch.Size, list[_Range]]]]:
        """Shape and ranges of each parameter, by name."""
        if self._is_cut_by_parameter:
            yield from self._cut_by_parameter()
            return
        for number, shapes in enumerate(self._shapes):
            mapped = [_mapping(state, number) for state in self._ranks]
            mappings = [mapping for mapping in mapped if mapping is not None]
            # Of all ranks, or of none: the mapping of one rank does not place the others.
            if len(mappings) == len(mapped):
                yield from self._as_mapped(number, shapes, mappings)
                continue
            yield from self._one_after_another(number, shapes)

    def _as_mapped(
        self, number: int, shapes: Mapping[str, torch.Size], mappings: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, tuple[torch.Size, list[_Range]]]]:
        """Places in a group under ZeRO 1 and 2, from the slice mappings in its files."""
        found: dict[str, list[_Range]] = {}
        last = None
        is_padding = False
        for rank, mapping in enumerate(mappings):
            addresses = {name: (at["start"], at["numel"]) for name, at in mapping.items()}
            position = 0
            for name, (start, numel) in sorted(addresses.items(), key=itemgetter(1)):
                # A parameter goes on at the start of the next rank, and nowhere else.
                follows = name == last or name not in found
                if is_padding or start != position or numel < 0 or not follows:
                    raise self._incomplete(f"{name} in one range of numbers")
                found.setdefault(name, []).append(_Range(rank, number, start, numel))
                position += numel
                last = name
            # Padding ends the whole group: a parameter after it would be misplaced.
            is_padding = is_padding or position != self._flat[rank][_MASTER][number].numel()
        for name, shape in shapes.items():
            ranges = found.get(name, [])
            if sum(where.numel for where in ranges) != shape.numel():
                raise self._incomplete(f"all of {name}")
            yield name, (shape, ranges)

    def _one_after_another(
        self, number: int, shapes: Mapping[str, torch.Size]
    ) -> Iterator[tuple[str, tuple[torch.Size, list[_Range]]]]:
        """Places in a group under ZeRO 1 and 2 without slice mappings: one after another."""
        sizes = [flat[_MASTER][number].numel() for flat in self._flat]
        position = 0
        for name, shape in shapes.items():
            yield name, (shape, _ranges(sizes, position, shape.numel(), number))
            position += shape.numel()

    def _cut_by_parameter(self) -> Iterator[tuple[str, tuple[torch.Size, list[_Range]]]]:
        """Places under ZeRO 3, which cuts each parameter into equal parts."""
        sizes = [tensor.numel() for tensor in self._flat[0][_MASTER]]
        position = 0
        for shapes in self._shapes:
            for name, shape in shapes.items():
                # The last part is padded to this size.
                part = math.ceil(shape.numel() / self.world_size)
                ranges = []
                for rank in range(self.world_size):
                    # `_ranges` counts tensors, which here are the flat ones of a rank.
                    for found in _ranges(sizes, position, part, 0):
                        ranges.append(_Range(rank, found.rank, found.start, found.numel))
                yield name, (shape, ranges)
                position += part

    def _read(self, kind: str, name: str, shape: torch.Size, ranges: Sequence[_Range]) -> Tensor:
        parts = []
        for where in ranges:
            flat = self._flat[where.rank][kind][where.flat].view(-1)
            if where.start + where.numel > flat.numel():
                raise self._incomplete(f"all of {name} ({kind})")
            parts.append(flat[where.start : where.start + where.numel])
        if sum(part.numel() for part in parts) < shape.numel():
            raise self._incomplete(f"all of {name} ({kind})")
        # An empty piece first: torch.cat refuses an empty list, and a parameter may have no
        # numbers.
        values = torch.cat([self._flat[0][kind][0].view(-1)[:0], *parts])
        # Without the padding of the last part.
        return values[: shape.numel()].view(shape)

    def _incomplete(self, what: str) -> UserError:
        return UserError(
            f"{self._directory} does not hold {what}. Copy the checkpoint again, with the files of "
            "all ranks."
        )


def _mapping(state: Mapping[str, Any], number: int) -> Mapping[str, Any] | None:
    """Places of a group's parameters in a rank's flat tensor; None: the file has none."""
    mappings = state.get("param_slice_mappings")
    if not isinstance(mappings, list) or number >= len(mappings):
        return None
    return mappings[number] if isinstance(mappings[number], dict) else None


def _are_shapes(group: Any) -> bool:
    return isinstance(group, dict) and all(
        isinstance(name, str) and isinstance(shape, torch.Size) and min(shape, default=0) >= 0
        for name, shape in group.items()
    )


def _ranges(sizes: Sequence[int], start: int, numel: int, flat: int) -> list[_Range]:
    """Split a range over tensors that lie one after another; `rank` is the number of each."""
    found = []
    before = 0
    for number, size in enumerate(sizes):
        first, last = max(start, before), min(start + numel, before + size)
        if first < last:
            found.append(_Range(number, flat, first - before, last - first))
        before += size
    return found


class DeepSpeedRun(ForeignRun):
    """A checkpoint written by DeepSpeed's engine."""

    program = "DeepSpeed"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        found = zero_directory(directory)
        assert found is not None, "it was looked at before"
        self._zero_directory, self._zero = found, ZeroFiles(found)

    def _recipe_keys(self) -> dict[str, Any]:
        if self._zero.is_neox:
            keys = configured_keys(self._zero_directory, self._zero.world_size)
            if keys:
                return keys
        if self._zero.samples is None or not self._zero.step:
            return {}
        # A fraction means that the batch size has changed during the run: none is taken over.
        batch = self._zero.samples / self._zero.step
        return {"train": {"global_batch_size": int(batch)}} if batch.is_integer() else {}

    def _state(self, model: TrainedModel) -> ForeignState:
        return self._zero.state(model)
