"""The learning-rate schedule: total steps, the rate of each, and the samples they take, by hand."""

import math
from typing import get_args

import pytest
import torch
from transformers import get_inverse_sqrt_schedule, get_scheduler

from ftkit.errors import UserError
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe import LrSchedule, Recipe
from ftkit.strategies.schedule import Schedule, interval_steps, make_schedule, sample_budget


def recipe(**keys: object) -> Recipe:
    """A recipe with these keys; dots are written as two underscores."""
    pairs = [(key.replace("__", "."), str(value)) for key, value in keys.items()]
    return read_recipe([], [("checkpoint_dir", "base"), *pairs], method="lora")


def schedule(samples: int = 100, lr: float = 1e-3, **keys: object) -> tuple[Schedule, list[str]]:
    train = {"train__global_batch_size": 10, "train__epochs": 1, "train__lr_warmup_steps": 0}
    return make_schedule(recipe(**train | keys).train, samples, lr)


@pytest.mark.parametrize(
    ("epochs", "samples", "batch", "max_steps", "steps"),
    [
        (1, 100, 10, "null", 10),
        (1, 101, 10, "null", 11),
        (3, 7, 2, "null", 11),
        (1, 3, 16, "null", 1),
        (5, 16, 16, 3, 3),
        (1, 100, 10, 1000, 10),
        ("null", 100, 10, 25, 25),
        (10, 11, 110, "null", 1),
    ],
)
def test_total_steps_are_the_epochs_rounded_up_once_and_capped(
    epochs: int | str, samples: int, batch: int, max_steps: str | int, steps: int
) -> None:
    keys = {"train__epochs": epochs, "train__global_batch_size": batch}
    assert schedule(samples, **keys, train__max_steps=max_steps)[0].total_steps == steps


def test_rounding_never_adds_a_step() -> None:
    def steps(epochs: int, samples: int, batch: int) -> int:
        keys = {"train__epochs": epochs, "train__global_batch_size": batch}
        return schedule(samples, **keys)[0].total_steps

    for epochs, samples, batch in [(7, 29, 7), (7, 123, 7), (11, 25, 11)]:
        assert math.ceil(epochs * (samples / batch)) == samples + 1, "no longer a trap"
        assert steps(epochs, samples, batch) == samples


@pytest.mark.parametrize(
    ("samples", "batch", "epochs", "max_steps", "budget"),
    [
        (100, 10, 1, "null", 100),
        (101, 10, 1, "null", 101),
        (7, 2, 3, "null", 21),
        (100, 10, 1, 4, 40),
        (100, 10, "null", 25, 250),
    ],
)
def test_a_run_consumes_whole_epochs_or_whole_steps(
    samples: int, batch: int, epochs: int | str, max_steps: str | int, budget: int
) -> None:
    keys = {"global_batch_size": batch, "epochs": epochs, "max_steps": max_steps}
    train = recipe(**{f"train__{key}": value for key, value in keys.items()}).train
    made, _ = make_schedule(train, samples, 1e-3)
    assert sample_budget(train, samples, made) == budget


@pytest.mark.parametrize(
    ("epochs", "max_steps", "batch", "start", "steps", "budget"),
    [
        (1, "null", 10, (4, 40), 11, 101),
        (1, "null", 20, (4, 40), 8, 101),
        (2, "null", 10, (11, 101), 22, 202),
        (1, 6, 20, (4, 40), 6, 80),
        ("null", 6, 20, (4, 40), 6, 80),
        (1, "null", 10, (11, 101), 11, 101),
        (1, 4, 10, (4, 40), 4, 40),
        (1, 3, 10, (4, 40), 4, 40),
        (1, "null", 10, (13, 130), 13, 130),
    ],
)
def test_a_run_that_continues_counts_on_from_its_position(
    epochs: int | str,
    max_steps: str | int,
    batch: int,
    start: tuple[int, ...],
    steps: int,
    budget: int,
) -> None:
    """Data of 101 samples; start: steps done, samples consumed."""
    keys = {"global_batch_size": batch, "epochs": epochs, "max_steps": max_steps}
    train = recipe(**{f"train__{key}": value for key, value in keys.items()}).train
    position = {"start_step": start[0], "start_samples": start[1]}
    made, _ = make_schedule(train, 101, 1e-3, **position)
    assert made.total_steps == steps
    assert sample_budget(train, 101, made, **position) == budget


@pytest.mark.parametrize("warmup", [1, 2, 5])
def test_the_warm_up_rises_linearly_and_its_first_step_already_trains(warmup: int) -> None:
    made, _ = schedule(train__lr_warmup_steps=warmup)
    shares = [made.share(step) for step in range(warmup)]
    assert shares == pytest.approx([(step + 1) / warmup for step in range(warmup)])


@pytest.mark.parametrize("warmup", [0, 1, 4, 8])
def test_after_the_warm_up_a_cosine_falls_from_the_full_rate_to_min_lr(warmup: int) -> None:
    made, _ = schedule(lr=1e-3, train__lr_warmup_steps=warmup, train__min_lr=1e-4)
    rates = [1e-3 * made.share(step) for step in range(warmup, made.total_steps)]
    steps = len(rates) - 1
    expected = [1e-4 + 9e-4 * (1 + math.cos(math.pi * i / steps)) / 2 for i in range(steps + 1)]
    assert rates == pytest.approx(expected)
    assert rates[-1] == pytest.approx(1e-4)


def shares(kind: str, steps: int = 10, warmup: int = 0, **keys: object) -> list[float]:
    """Schedule of a run whose rate falls to a tenth."""
    every = {"train__lr_schedule": kind, "train__lr_warmup_steps": warmup, "train__min_lr": 1e-4}
    made, notices = schedule(10 * steps, **every | keys)
    assert (made.total_steps, notices) == (steps, [])
    return [made.share(step) for step in range(steps)]


def test_linear_falls_along_a_line_from_the_full_rate_to_min_lr() -> None:
    line = [1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1]
    assert shares("linear", warmup=3) == pytest.approx([1 / 3, 2 / 3, 1, *line])


def test_constant_stays_at_the_full_rate_and_says_that_min_lr_has_no_effect() -> None:
    assert shares("constant", warmup=2, train__min_lr=6e-5) == [0.5, *[1.0] * 9]
    keys = {"train__lr_schedule": "constant", "train__lr_decay_fraction": 0.5}
    made, notices = schedule(lr=1e-5, **keys, train__min_lr=1e-4)
    assert {made.share(step) for step in range(10)} == {1}
    assert notices == [
        "train.min_lr has no effect: train.lr_schedule is constant.",
        "train.lr_decay_fraction has no effect: train.lr_schedule is constant.",
    ]


def test_wsd_stays_at_the_full_rate_and_falls_along_a_line_at_the_end() -> None:
    found = shares("wsd", warmup=2, train__lr_decay_fraction=0.3)
    assert found == pytest.approx([0.5, *[1] * 6, 0.7, 0.4, 0.1])
    assert shares("wsd") == pytest.approx([*[1] * 9, 0.1])
    assert shares("wsd", train__lr_decay_fraction=1) == pytest.approx(shares("linear"))
    late = shares("wsd", warmup=9, train__lr_decay_fraction=0.5)
    assert late == pytest.approx([*[(step + 1) / 9 for step in range(9)], 0.1])


def test_a_wsd_run_that_becomes_longer_has_changed_nothing_before_its_decay() -> None:
    assert shares("wsd", 40, warmup=2)[:18] == shares("wsd", 20, warmup=2)[:18]
    assert shares("wsd", 40)[18:20] == [1, 1]


@pytest.mark.parametrize("warmup", [0, 4])
def test_inverse_sqrt_is_that_of_transformers_at_the_same_warm_up(warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_inverse_sqrt_schedule(optimizer, num_warmup_steps=warmup)
    (of_step,) = theirs.lr_lambdas
    found = shares("inverse_sqrt", 50, warmup=warmup, train__min_lr=0)
    assert found[warmup:] == pytest.approx([of_step(step) for step in range(warmup, 50)])
    assert shares("inverse_sqrt", 50, warmup=4)[:20] == shares("inverse_sqrt", 20, warmup=4)


@pytest.mark.parametrize("kind", get_args(LrSchedule))
def test_a_run_of_one_step_trains_at_the_full_rate(kind: str) -> None:
    assert schedule(samples=1, train__lr_schedule=kind)[0].share(0) == 1


def test_a_fraction_that_decays_must_be_one() -> None:
    asked = recipe(train__lr_decay_fraction=0)
    with pytest.raises(UserError, match=r"train\.lr_decay_fraction is 0, but must be above 0"):
        make_plan(asked, Devices(accelerator="cpu", count=1))


@pytest.mark.parametrize(
    ("samples", "fraction", "steps"), [(100, 0.1, 1), (100, 0.25, 3), (95, 1, 10), (100, 0, 0)]
)
def test_a_warm_up_fraction_counts_steps_of_one_epoch(
    samples: int, fraction: float, steps: int
) -> None:
    made, _ = schedule(samples, train__epochs=3, train__lr_warmup_fraction=fraction)
    assert made.warmup_steps == steps


@pytest.mark.parametrize(
    ("steps", "fraction", "warmup"), [(100, 0.03, 3), (101, 0.03, 4), (7, 0.1, 1), (7, 0, 0)]
)
def test_a_warm_up_can_be_a_fraction_of_the_whole_run(
    steps: int, fraction: float, warmup: int
) -> None:
    keys = {
        "train__epochs": 2,
        "train__max_steps": steps,
        "train__lr_warmup_run_fraction": fraction,
    }
    assert schedule(10_000, **keys)[0].warmup_steps == warmup


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 10])
def test_a_schedule_that_ends_around_the_run_is_the_one_of_transformers(
    kind: str, warmup: int
) -> None:
    keys = {"train__lr_schedule": kind, "train__lr_warmup_steps": warmup, "train__min_lr": 0}
    made, _ = schedule(train__max_steps=10, train__lr_ends="around", **keys)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=10)
    for step in range(10):
        assert made.share(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    ("ends", "rising"),
    [("within", [1 / 16, 4 / 16, 9 / 16, 1]), ("around", [0, 1 / 16, 4 / 16, 9 / 16])],
)
def test_a_quadratic_warm_up_rises_along_a_parabola(ends: str, rising: list[float]) -> None:
    straight = shares("linear", warmup=4, train__lr_ends=ends)
    found = shares("linear", warmup=4, train__lr_ends=ends, train__lr_warmup_curve="quadratic")
    assert found == [*rising, *straight[4:]]


@pytest.mark.parametrize(
    ("steps", "share", "interval"),
    [(600, None, 600), (None, None, 0), (600, 0.25, 3), (None, 1, 11), (1, 0.01, 1), (1, 2.5, 28)],
)
def test_an_interval_is_a_number_of_steps_or_a_share_of_an_epoch(
    steps: int | None, share: float | None, interval: int
) -> None:
    assert interval_steps(steps, share, 11) == interval


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (9, 0), (10, 1), (199, 19), (1_000, 100), (5_000, 100)]
)
def test_a_warm_up_that_no_key_names_is_a_tenth_of_a_short_run(steps: int, warmup: int) -> None:
    keys = {"train__max_steps": steps, "train__epochs": "null", "train__lr_warmup_steps": "auto"}
    made, notices = schedule(**keys)
    assert made.warmup_steps == warmup and not [text for text in notices if "warm-up" in text]
    assert made == schedule(**keys | {"train__lr_warmup_steps": warmup})[0]


@pytest.mark.parametrize("begun", [0, 2, 100])
def test_a_run_that_continues_keeps_the_warm_up_that_it_began_with(begun: int) -> None:
    train = recipe(train__max_steps=50, train__epochs="null").train
    made, _ = make_schedule(train, 100, 1e-3, start_step=20, begun_warmup=begun)
    assert made.warmup_steps == begun
    named = recipe(train__max_steps=50, train__epochs="null", train__lr_warmup_steps=7).train
    assert make_schedule(named, 100, 1e-3, begun_warmup=begun)[0].warmup_steps == 7


@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_a_warm_up_within_the_run_gives_no_notice(warmup: int) -> None:
    assert schedule(train__lr_warmup_steps=warmup)[1] == []


@pytest.mark.parametrize("samples", [1, 30, 100])
def test_a_warm_up_longer_than_the_run_warns_with_a_change_that_works(samples: int) -> None:
    made, notices = schedule(samples, train__lr_warmup_steps=11)
    (notice,) = (text for text in notices if "warm-up" in text)
    assert made.share(made.total_steps - 1) < 1
    assert f"The warm-up of 11 steps is longer than the run of {made.total_steps}" in notice
    suggested = int(notice.rpartition("--train.lr_warmup_steps ")[2].removesuffix("."))
    assert not [
        text for text in schedule(samples, train__lr_warmup_steps=suggested)[1] if "warm-up" in text
    ]


def test_min_lr_above_the_learning_rate_keeps_the_rate_constant_and_warns() -> None:
    made, (notice,) = schedule(lr=1e-5, train__min_lr=6e-5)
    assert {made.share(step) for step in range(10)} == {1}
    assert "train.min_lr 6e-05 is above the learning rate 1e-05" in notice


def test_a_learning_rate_of_zero_divides_by_nothing() -> None:
    assert schedule(lr=0.0)[0].share(9) == 1
