"""Micro-steps that are recorded once as CUDA graphs and replayed, by train.record_steps.

Launching the kernels of a short micro-step takes the host longer than the device needs for them; a
graph is launched at once. It repeats shapes, addresses and numbers of the host as they were, so:
micro-batches are filled up to few shapes; what changes lies in tensors that each replay overwrites;
and gradients lie where they are, zeroed instead of freed.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ftkit.data.samples.layout import FILLER
from ftkit.data.samples.sample_set import Samples
from ftkit.data.samples.sampler import StepOrder
from ftkit.data.samples.shapes import MOST_LENGTHS, choose_lengths
from ftkit.models.bodies.attention import FixedRow
from ftkit.models.language_model import trainable
from ftkit.objectives.objective import EXCHANGE, Batch, ignores_padding
from ftkit.recipe.recorded import why_unrecorded
from ftkit.runs.report import report
from ftkit.strategies.strategy import Strategy
from ftkit.training.setup import Setup
from ftkit.utils.accelerators.use import pinned

_STEPS_LOOKED_AT = 100
"""Shapes are chosen for the micro-batches of so many steps to come; larger ones are not filled."""
_RECORDED_AT = 3
"""Micro-batch of a shape that is recorded: libraries prepare kernels in the first ones."""
_SHAPE = "shape"
"""Key of a micro-batch that was filled up."""


class Shape(NamedTuple):
    """Sizes to which a micro-batch is filled up."""

    lines: int
    """Of input_ids: 1 if sequences lie in a row, else the number of sequences."""
    width: int
    """Positions of a line."""
    sequences: int
    """Of samples, and those that only fill it up."""
    labels: int
    """Label tokens, with those that only fill it up."""


def why_not(setup: Setup) -> str | None:
    """Return why no step of a run is recorded, in words; None: they may be."""
    if (reason := why_unrecorded(setup.plan)) is not None:
        return reason
    architecture = setup.base.architecture
    for applies, reason in (
        (architecture.expert_share < 1, "the host may read how many tokens an expert has"),
        (setup.data.train.media_reader is not None, "media have many shapes"),
        (not setup.order.sees_ahead, "sizes of streamed samples are not known ahead"),
        (not ignores_padding(setup.objective), "an objective of a plugin may count fillers"),
        (setup.attention == "sdpa per sequence", "attention runs sequence by sequence"),
    ):
        if applies:
            return reason
    return None


def shapes_ahead(order: StepOrder, samples: Samples, *, in_row: bool) -> list[Shape]:
    """Choose shapes for the micro-batches of the next steps, so that few positions are fillers.

    Args:
        order: of the steps on this rank.
        samples: the training data.
        in_row: whether sequences lie in a row; else each is padded.

    Returns:
        At most eight, by ascending width. Each has room for all micro-batches seen that are nearest
        to its width.
    """
    widths = samples.lengths if in_row else samples.longest
    label_counts, each = samples.label_counts, samples.per_sample
    seen = []
    for step in range(
        order.start_step, min(order.start_step + _STEPS_LOOKED_AT, order.total_steps)
    ):
        for numbers in order.micro_batches(step):
            real = [number for number in numbers if number != FILLER]
            of_real = widths[real]
            width = max(1, int(of_real.sum() if in_row else of_real.max(initial=0)))
            seen.append((width, len(numbers) * each, int(label_counts[real].sum())))
    found, sequences, labels = np.array(seen, dtype=np.int64).T
    lengths = choose_lengths([found])
    nearest = np.searchsorted(lengths, found)
    shapes = []
    for place, length in enumerate(lengths):
        if not (own := nearest == place).any():
            continue
        count = sequences[own]
        if in_row:  # fillers are sequences too, none longer than the longest sample
            count = count + -(-(length - found[own]) // int(samples.longest.max()))
        most = -(-int(count.max()) // each) * each
        shapes.append(Shape(1 if in_row else most, length, most, int(labels[own].max())))
    return shapes


def filled(batch: Batch, shape: Shape, longest: int) -> Batch | None:
    """Fill a micro-batch up to a shape; None: it does not fit.

    Fillers have no label, belong to no sample, and are counted as padding.

    Args:
        batch: on the host.
        shape: its sizes afterwards.
        longest: tokens of the longest sequence that there may be.
    """
    lines, width = batch["input_ids"].shape
    lengths, in_row = batch["lengths"], batch["sequence_lengths"] is not None
    missing = shape.labels - len(batch["labels"])
    tail = shape.width - width
    pieces = -(-tail // longest) if in_row else 0
    more = shape.sequences - len(lengths)
    if min(missing, tail, shape.lines - lines, more - pieces) < 0:
        return None

    def longer(name: str, value: float = 0) -> Tensor:
        return F.pad(batch[name], (0, missing), value=value)

    def of_sequences(name: str) -> Tensor:
        return F.pad(batch[name], (0, more))

    indices = batch["label_indices"]
    made = batch | {
        _SHAPE: shape,
        "label_indices": F.pad(indices // width * shape.width + indices % width, (0, missing)),
        "labels": longer("labels"),
        # Of no sequence, and at the first place, whose token sees nothing but itself.
        "label_sequences": longer("label_sequences", shape.sequences),
        "weights": F.pad(batch.get("weights", torch.ones(len(indices))), (0, missing)),
        "is_real_sequence": of_sequences("is_real_sequence"),
        "numbers": (*batch["numbers"], *(FILLER,) * more),
        "padded_tokens": shape.lines * shape.width,
    }
    if "targets" in batch:
        made["targets"] = F.pad(batch["targets"], (0, 0, 0, more))
    for name in ("input_ids", "is_real"):
        made[name] = F.pad(batch[name], (0, tail, 0, shape.lines - lines))
    if in_row:
        # The kernel computes no token beyond the bound of lengths, so a tail may be several
        # sequences; the others are empty.
        cut = [min(longest, tail - start) for start in range(0, tail, longest)]
        lengths = (*lengths, *cut, *(0,) * (more - pieces))
        made["sequence_lengths"] = lengths
        made["starts"] = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
        made["places"] = torch.cat([torch.arange(length) for length in lengths])
    else:
        lengths = (*lengths, *(1,) * more)
    made["lengths"] = lengths
    return made


@dataclass(frozen=True)
class _Recording:
    """A graph with the memory that it reads and writes beside the model's."""

    graph: Any
    """`torch.cuda.CUDAGraph`."""
    inputs: list[Tensor]
    parameters: list[nn.Parameter]
    """Those to whose gradients it adds: of the others, none comes into being."""


class RecordedSteps:
    """Records micro-steps, and replays them."""

    def __init__(
        self,
        strategy: Strategy,
        model: Any,
        shapes: Sequence[Shape],
        longest: int,
        warn: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            strategy: of the run, which is set up.
            model: that is trained.
            shapes: to which micro-batches are filled up, by ascending width.
            longest: tokens of the longest sequence.
            warn: shows why something cannot be recorded.
        """
        self._strategy, self._tokens, self._warn = strategy, model.body.tokens, warn
        self._trained = trainable(model)
        self._shapes, self._longest = list(shapes), longest
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: Counter[Any] = Counter()
        self._recordings: dict[Any, _Recording] = {}
        self._recording_s = 0.0
        self._micro_steps = self._replayed = self._positions = self._fillers = 0

    @property
    def count(self) -> int:
        """Recordings so far."""
        return len(self._recordings)

    @property
    def counts(self) -> report.RecordedSteps:
        """What was recorded and replayed so far."""
        return report.RecordedSteps(
            shapes=self.count,
            recording_s=self._recording_s,
            micro_steps=self._micro_steps,
            replayed=self._replayed,
            filled_fraction=self._fillers / self._positions if self._positions else None,
        )

    def filled(self, batch: Batch) -> Batch:
        """Fill a micro-batch up to the first shape in which it fits; as it is if there is none.

        Args:
            batch: on the host.
        """
        for shape in self._shapes:
            if (made := filled(batch, shape, self._longest)) is not None:
                self._positions += made["padded_tokens"]
                self._fillers += made["padded_tokens"] - batch["padded_tokens"]
                device = self._strategy.device
                return {
                    name: pinned(value, device) if isinstance(value, Tensor) else value
                    for name, value in made.items()
                }
        return batch

    def replays(self, batch: Batch, passes: Callable[[Batch], None]) -> bool:
        """Replay a micro-step, recorded now if it is time; False: it has to be computed.

        Args:
            batch: on the device, perhaps filled up, with the numbers of its tokens.
            passes: the forward and backward pass, which read no other numbers than those of
                tensors that stay where they are.
        """
        self._micro_steps += 1
        inputs = self._inputs(batch)
        key = batch.get(_SHAPE), tuple(inputs)
        self._seen[key] += 1
        due = _SHAPE in batch and self._seen[key] == _RECORDED_AT
        if due and self.count < MOST_LENGTHS and self._fits():
            self._record(key, batch, inputs, passes)
        recording = self._recordings.get(key)
        if recording is None:
            # Else the gradients of these passes would be beside those that stay.
            self._place_gradients(list(self._strategy.fixed_gradients))
            return False
        self._replay(recording, list(inputs.values()))
        self._replayed += 1
        return True

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Tensors of a micro-batch that differ from those of another one."""
        found = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        # Names of divisors are those of amounts, which may be those of other tensors.
        found |= {f"divisors {name}": value for name, value in batch["divisors"].items()}
        return found if self._tokens.hashes is None else found | {"hashes": self._tokens.hashes}

    def _fits(self) -> bool:
        """Whether there is memory for graphs beside passes that are computed; a line says if not.

        Graphs have their memory in common: one that is there already takes little more.
        """
        allocated = torch.cuda.memory_allocated()
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - allocated
        if self.count or free >= 2 * (torch.cuda.max_memory_allocated() - allocated):
            return True
        self._stop("there is too little memory")
        return False

    def _stop(self, reason: str) -> None:
        """Replay what is recorded, and fill up and record nothing else."""
        self._shapes = sorted(shape for shape, _ in self._recordings)
        self._warn(f"train.record_steps: other micro-steps than before run unrecorded: {reason}")

    def _record(
        self,
        key: Any,
        batch: Batch,
        inputs: dict[str, Tensor],
        passes: Callable[[Batch], None],
    ) -> None:
        began = time.monotonic()
        own = {name: value.clone() for name, value in inputs.items()}
        # Without numbers of the host, which would be those of this micro-batch for ever.
        fixed: Batch = {name: own[name] for name in batch if name in own} | {
            "divisors": {name: own[f"divisors {name}"] for name in batch["divisors"]},
            "lengths": range(len(batch["lengths"])),  # it is only counted
            "sequence_lengths": None,
            EXCHANGE: None,
        }
        if "starts" in own:
            fixed["sequence_lengths"] = FixedRow(own["starts"], own["places"], self._longest)
        added: list[nn.Parameter] = []
        handles: list[Any] = []
        graph = torch.cuda.CUDAGraph()
        bare = [parameter for parameter in self._trained if parameter.grad is None]
        try:
            self._place_gradients(self._trained)
            with (
                self._tokens.within(own.get("hashes")),
                # Other threads, such as that of a save, may go on.
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
                # Its cache would hold casts of weights that no replay makes again.
                torch.autocast(self._strategy.device.type, enabled=False, cache_enabled=False),
            ):
                handles += (
                    parameter.register_post_accumulate_grad_hook(added.append)
                    for parameter in self._trained
                )
                passes(fixed)
        except RuntimeError as error:  # memory has run out too
            self._stop(str(error).partition("\n")[0])
        else:
            parameters = list(dict.fromkeys(added))
            self._recordings[key] = _Recording(graph, list(own.values()), parameters)
        finally:
            for handle in handles:
                handle.remove()
            for parameter in bare:  # nothing is computed yet
                parameter.grad = None
            # None of the others is ever written: it would be memory for nothing.
            written = {one for known in self._recordings.values() for one in known.parameters}
            for parameter in {*self._strategy.fixed_gradients} - written:
                del self._strategy.fixed_gradients[parameter]
            self._recording_s += time.monotonic() - began

    @torch.no_grad()
    def _replay(self, recording: _Recording, inputs: Sequence[Tensor]) -> None:
        self._place_gradients(recording.parameters)
        for own, value in zip(recording.inputs, inputs, strict=True):
            own.copy_(value)
        recording.graph.replay()

    @torch.no_grad()
    def _place_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have gradients in the memory that recordings write: of this step so far, or zero."""
        known, cleared = self._strategy.fixed_gradients, []
        for parameter in parameters:
            if parameter not in known:
                known[parameter] = torch.empty_like(parameter)
            fixed = known[parameter]
            if parameter.grad is None:
                cleared.append(fixed)
            elif parameter.grad is not fixed:  # of a micro-step that was computed
                fixed.copy_(parameter.grad)
            parameter.grad = fixed
        if cleared:
            torch._foreach_zero_(cleared)


def recorded_steps(setup: Setup, warn: Callable[[str], None]) -> RecordedSteps | None:
    """Make what records the steps of a run; None: nothing is recorded.

    Args:
        setup: of this rank.
        warn: shows why nothing is recorded.
    """
    if (reason := why_not(setup)) is not None:
        warn(f"train.record_steps is true, but steps run unrecorded: {reason}")
        return None
    samples = setup.data.train
    return RecordedSteps(
        setup.strategy,
        setup.model,
        shapes_ahead(setup.order, samples, in_row=setup.attention == "varlen"),
        int(samples.longest.max()),
        warn,
    )
