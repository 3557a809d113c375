"""Callbacks: called at the events of a run. They may keep state, and may request a stop.

Patience is one, and plugins define others (`ftkit.Callback`). What needs more than the events stays
where it is: the recorder measures from before the first event to after the last, also when training
fails, and system metrics are sampled in a thread of it; loggers also get scores of tasks, and are
ended on a failure; averages (EMA) are sharded as the weights are, in memory and in checkpoints, and
counted in a plan; NEFTune works inside the forward pass.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from ftkit.errors import UserError
from ftkit.recipe.recipe import Recipe
from ftkit.runs.report.meters import StepRecord
from ftkit.strategies.distributed import broadcast_text, max_over_ranks, rank, world_size
from ftkit.training.callback_rows import CALLBACKS
from ftkit.training.journal import Journal
from ftkit.training.setup import Setup
from ftkit.utils.console.formatting import loss_text
from ftkit.utils.safetensors_files import save_tensors

FILE_NAME = "callbacks.safetensors"
"""File of a checkpoint with the state of callbacks: tensors as KEY of CALLBACK, everything else as
JSON in the header."""
_VALUES, _ARRAYS = "values", "arrays"
"""Keys of the header: JSON values, and which tensors are numpy arrays, by callback."""
_JSON_TYPES = (type(None), bool, int, float, str)


class RunView:
    """The run of a callback: its settings, position and model, and requests to log or to stop."""

    def __init__(
        self, setup: Setup, journal: Journal, log: Callable[[dict[str, float], int], None]
    ) -> None:
        """Wrap a run that is set up; `log` sends values of a step to its loggers."""
        self._setup, self._journal, self._log = setup, journal, log
        self.stop_reason: str | None = None
        """Reason of the first stop that a callback on this rank requested."""

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self._setup.recipe

    @property
    def out_dir(self) -> Path:
        """Directory of the run."""
        return self._setup.directory.path

    @property
    def rank(self) -> int:
        """Number of this process among all; callbacks are called on each."""
        return rank()

    @property
    def world_size(self) -> int:
        """Number of processes on all machines."""
        return world_size()

    @property
    def step(self) -> int:
        """Optimizer steps done, over all sessions."""
        return self._journal.recorder.steps

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self._setup.order.total_steps

    @property
    def model(self) -> torch.nn.Module:
        """The model; fsdp and deepspeed keep only a part of each parameter on a rank."""
        return self._setup.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; each step sets the learning rates of its groups."""
        return self._setup.strategy.optimizer

    def log(self, values: dict[str, float]) -> None:
        """Send values of this step to the loggers; rank 0 does it."""
        self._log(values, self.step)

    def message(self, text: str) -> None:
        """Show a line, and write it to run.log; rank 0 does it."""
        self._journal.display.message(text)

    def warn(self, text: str) -> None:
        """Show a warning, and add it to the report."""
        self._journal.warn(text)

    def stop(self, reason: str) -> None:
        """End training after this step, as if it were the last one: it is evaluated and saved.

        All ranks end if one requests it.

        Args:
            reason: becomes the exit reason of the run.
        """
        if self.stop_reason is None:
            self.stop_reason = reason


class Callback:
    """Called at the events of a run, on every rank, in the order of definition.

    Every method does nothing unless it is overridden. One that communicates between ranks has to be
    called on all of them, so it must not depend on what differs between ranks.
    """

    def on_begin(self, run: RunView) -> None:
        """Called before the first step of each session, after `load_state_dict`."""

    def on_step(self, run: RunView, record: StepRecord) -> None:
        """Called after each step.

        Args:
            run: the run.
            record: measurements of the step; losses and counts are of all ranks.
        """

    def on_validation(self, run: RunView, values: Mapping[str, float]) -> None:
        """Called after each validation.

        Args:
            run: the run.
            values: the loss under `loss`, further terms of the objective under their names, and the
                loss on each source and set under loss/NAME; equal on all ranks.
        """

    def on_save(self, run: RunView) -> None:
        """Called after each save; the files may still be being written."""

    def on_end(self, run: RunView) -> None:
        """Called at the end of a session, after its last evaluation; not if training fails."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, equal on all ranks: rank 0 writes it.

        Values are small: JSON values, tensors or numpy arrays. The next session may have other
        ranks and another strategy.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of a checkpoint, as `state_dict` gave it; tensors lie on the CPU."""


class Patience(Callback):
    """Requests a stop when validations no longer lower the best loss: eval.patience."""

    # Without state of its own: a checkpoint has the losses for the report.

    def __init__(self, patience: int, journal: Journal) -> None:
        """Take the limit, and the report that has the losses.

        Args:
            patience: validations in a row without a lower loss.
            journal: its report has the losses.
        """
        self._patience, self._recorder = patience, journal.recorder

    def on_begin(self, run: RunView) -> None:
        self._look(run)  # the session before may have ended before its result

    def on_validation(self, run: RunView, values: Mapping[str, float]) -> None:
        self._look(run)

    def _look(self, run: RunView) -> None:
        loss = self._recorder.report.loss
        # There is a best one: a validation that is not finite ends the run.
        if loss is not None and loss.has_exhausted(self._patience):
            run.stop(
                f"eval.patience of {self._patience} reached: no validation loss below "
                f"{loss_text(loss.validation_best)}, of step {loss.validation_best_step}"
            )


def make_patience(setup: Setup, journal: Journal) -> Patience | None:
    """Make the callback of eval.patience; None: the recipe does not set it."""
    patience = setup.recipe.eval.patience
    return None if patience is None else Patience(patience, journal)


class Callbacks:
    """The callbacks of a run."""

    def __init__(self, callbacks: Mapping[str, Callback], run: RunView) -> None:
        """Take callbacks by name.

        Args:
            callbacks: called in this order.
            run: of all.
        """
        self._callbacks, self._run = dict(callbacks), run

    def on_begin(self) -> None:
        """Call all before the first step of a session.

        Raises:
            UserError: as `capture`.
        """
        for callback in self._callbacks.values():
            callback.on_begin(self._run)
        # A state that cannot be saved shows now, and not with the first checkpoint.
        self.capture()

    def on_step(self, record: StepRecord) -> None:
        """Call all after a step."""
        for callback in self._callbacks.values():
            callback.on_step(self._run, record)

    def on_validation(self, values: Mapping[str, float]) -> None:
        """Call all after a validation."""
        for callback in self._callbacks.values():
            callback.on_validation(self._run, values)

    def on_save(self) -> None:
        """Call all after a save."""
        for callback in self._callbacks.values():
            callback.on_save(self._run)

    def on_end(self) -> None:
        """Call all at the end of a session."""
        for callback in self._callbacks.values():
            callback.on_end(self._run)

    # Stops

    @property
    def stop_request(self) -> int:
        """Above 0 if a callback on this rank requested a stop; the lower the rank, the higher."""
        # So that the largest of all ranks, which is one message, also says whose reason it is.
        return 0 if self._run.stop_reason is None else world_size() - rank()

    def reason(self, most: int) -> str:
        """Reason of the stop that the lowest rank requested; every rank calls this.

        Args:
            most: the largest `stop_request` of all ranks, above 0.
        """
        return broadcast_text(self._run.stop_reason or "", source=world_size() - most)

    # State

    def capture(self) -> "CallbackState":
        """Copy the state of all for a checkpoint; every rank calls this.

        Raises:
            UserError: it holds something that a checkpoint cannot, or differs between ranks.
        """
        state = CallbackState({name: one.state_dict() for name, one in self._callbacks.items()})
        if state and world_size() > 1:
            digest = state.digest
            # The largest and the smallest in one message: equal if all are.
            high, low = max_over_ranks(digest, -digest)
            if high != -low:
                raise UserError(
                    f"The state of callbacks ({', '.join(self._callbacks)}) differs between ranks, "
                    "but rank 0 writes it for all. Return equal values from state_dict."
                )
        return state

    def restore(self, directory: Path) -> None:
        """Give callbacks the state that a checkpoint has of them."""
        for name, state in read_state(directory).items():
            if name in self._callbacks:
                self._callbacks[name].load_state_dict(state)


def make_callbacks(
    setup: Setup, journal: Journal, log: Callable[[dict[str, float], int], None]
) -> Callbacks:
    """Make the callbacks of a run: those of the plugin in use, and those that its recipe needs.

    Args:
        setup: of this rank; if it starts from a checkpoint, they get the state that this has.
        journal: for messages and measurements.
        log: sends values of a step to the loggers.

    Raises:
        UserError: one of the plugin cannot be made.
    """
    rows = (*CALLBACKS.held.values(), *CALLBACKS)
    made = {row.name: row.made(setup, journal) for row in rows}
    found = {name: callback for name, callback in made.items() if callback is not None}
    callbacks = Callbacks(found, RunView(setup, journal, log))
    if setup.start.directory is not None:
        callbacks.restore(setup.start.directory)
    return callbacks


class CallbackState:
    """State of callbacks at one moment, as a checkpoint holds it."""

    def __init__(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy states by the name of the callback.

        Raises:
            UserError: a value cannot be in a checkpoint.
        """
        self._tensors: dict[str, torch.Tensor] = {}
        values: dict[str, dict[str, Any]] = {}
        arrays: dict[str, list[str]] = {}
        for name, state in states.items():
            if not isinstance(state, Mapping):
                raise UserError(
                    f"callback {name}: state_dict returns {state!r}, but must return a dictionary. "
                    "Return {} if it keeps nothing."
                )
            for key, value in state.items():
                if isinstance(value, torch.Tensor | np.ndarray):
                    # A copy: the file is written while training goes on.
                    tensor = torch.as_tensor(value).detach().to("cpu", copy=True).contiguous()
                    self._tensors[f"{name}/{key}"] = tensor
                    if isinstance(value, np.ndarray):
                        arrays.setdefault(name, []).append(key)
                elif isinstance(key, str) and _is_json(value):
                    values.setdefault(name, {})[key] = value
                else:
                    raise UserError(
                        f"callback {name}: state_dict has {key!r} of type {type(value).__name__}, "
                        "but a checkpoint holds JSON values (with lists and no tuples), tensors "
                        "and numpy arrays. Return one of these."
                    )
        self._header = {
            _VALUES: json.dumps(values, sort_keys=True),
            _ARRAYS: json.dumps(arrays, sort_keys=True),
        }
        self._is_empty = not (values or self._tensors)

    def __bool__(self) -> bool:
        return not self._is_empty

    @property
    def digest(self) -> int:
        """A checksum of 56 bits, which ranks can exchange as an integer with a sign."""
        found = hashlib.sha256(json.dumps(self._header).encode())
        for name, tensor in sorted(self._tensors.items()):
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return int.from_bytes(found.digest()[:7], "big")

    def write(self, directory: Path) -> Path:
        """Write it to the directory of a checkpoint, and return the file."""
        file = directory / FILE_NAME
        save_tensors(self._tensors, file, self._header)
        return file


def read_state(directory: Path) -> dict[str, dict[str, Any]]:
    """Read the state of callbacks in a checkpoint, by the name of the callback."""
    file = directory / FILE_NAME
    if not file.exists():
        return {}
    with safe_open(file, "pt") as stored:
        header = stored.metadata()
        states: dict[str, dict[str, Any]] = json.loads(header[_VALUES])
        arrays: dict[str, Sequence[str]] = json.loads(header[_ARRAYS])
        for stored_name in stored.keys():  # noqa: SIM118  # not a dict
            name, _, key = stored_name.partition("/")
            tensor = stored.get_tensor(stored_name)
            is_array = key in arrays.get(name, ())
            states.setdefault(name, {})[key] = tensor.numpy() if is_array else tensor
    return states


def _is_json(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    return type(value) in _JSON_TYPES
