"""Callbacks: their state in a checkpoint."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from messages import message_of, says

from ftkit.training import callbacks
from ftkit.training.callbacks import Callback, Callbacks, CallbackState, RunView, read_state


def test_state_of_every_kind_comes_back_as_it_was(tmp_path: Path) -> None:
    states: dict[str, dict[str, Any]] = {
        "First": {
            "text": "ä",
            "numbers": [1, 2.5, float("inf"), None, True],
            "nested": {"a": [{}]},
            "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "none": torch.empty(0),
        },
        "Second": {"array": np.arange(6, dtype=np.float32).reshape(2, 3), "scalar": np.array(3)},
        "Third": {},
    }
    CallbackState(states).write(tmp_path)
    found = read_state(tmp_path)
    assert list(found) == ["First", "Second"]
    assert {k: v for k, v in found["First"].items() if not isinstance(v, torch.Tensor)} == {
        k: v for k, v in states["First"].items() if not isinstance(v, torch.Tensor)
    }
    for name in ("half", "none"):
        torch.testing.assert_close(found["First"][name], states["First"][name], rtol=0, atol=0)
    for name, array in states["Second"].items():
        assert isinstance(found["Second"][name], np.ndarray)
        np.testing.assert_array_equal(found["Second"][name], array)


def test_a_state_is_a_copy(tmp_path: Path) -> None:
    tensor = torch.zeros(2)
    state = CallbackState({"One": {"tensor": tensor}})
    tensor += 1
    state.write(tmp_path)
    assert read_state(tmp_path)["One"]["tensor"].tolist() == [0, 0]


def test_callbacks_without_state_leave_no_file(tmp_path: Path) -> None:
    assert not CallbackState({"One": {}})
    assert read_state(tmp_path) == {}


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, {"a": {1, 2}}, object(), np.float32(1)])
def test_what_a_checkpoint_cannot_hold_is_refused(value: object) -> None:
    text = message_of(CallbackState, {"One": {"key": value}})
    assert says(text, "One ... 'key' ... JSON values ... tensors")


def test_a_state_is_a_dictionary() -> None:
    text = message_of(CallbackState, {"One": None})
    assert says(text, "callback One ... None ... dictionary")


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step() -> None:
    class Forgetful(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

    callbacks = Callbacks({"Forgetful": Forgetful()}, cast(RunView, None))
    assert says(message_of(callbacks.on_begin), "Forgetful ... 'seen' of type set")


def test_states_that_differ_have_other_digests() -> None:
    states: list[dict[str, Any]] = [
        {"a": 1},
        {"a": 2},
        {"b": 1},
        {"a": torch.zeros(2)},
        {"a": torch.tensor([0.0, 1.0])},
        {"a": torch.zeros(2, dtype=torch.int32)},
        {"a": torch.zeros(1, 2)},
        {"a": np.zeros(2, dtype=np.float32)},
    ]
    digests = {CallbackState({"One": state}).digest for state in states}
    assert len(digests) == len(states)
    assert CallbackState({"One": {"a": 1}}).digest in digests


class Counts(Callback):
    """Has a state."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_a_state_goes_to_the_callback_of_its_name(tmp_path: Path) -> None:
    first, second = Counts(), Counts()
    first.count = 3
    Callbacks({"one": first, "other": Callback()}, run=None).capture().write(tmp_path)
    Callbacks({"one": second, "new": Counts()}, run=None).restore(tmp_path)
    assert second.count == 3


def test_a_state_that_differs_between_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "world_size", lambda: 2)
    other = CallbackState({"one": {"count": 1}}).digest

    def max_over_ranks(*own: int) -> list[int]:
        return [max(pair) for pair in zip(own, (other, -other), strict=True)]

    monkeypatch.setattr(callbacks, "max_over_ranks", max_over_ranks)
    counts = Counts()
    text = message_of(Callbacks({"one": counts}, run=None).capture)
    assert says(text, "one ... differs between ranks ... state_dict")
    counts.count = 1
    assert Callbacks({"one": counts}, run=None).capture()
