"""The interval between checkpoints: the one that loses the least time."""

import math

import pytest

from ftkit.training.checkpointing import best_interval_s, mean_between_losses_s, usual_save_s

HOUR_S = 3600.0


def lost_fraction(interval_s: float, save_s: float, between_losses_s: float) -> float:
    """Time beyond that of the steps themselves, where losses come at random (Daly, equation 20)."""
    attempts = math.expm1((interval_s + save_s) / between_losses_s)
    return between_losses_s * attempts / interval_s - 1


@pytest.mark.parametrize("save_s", [0.05, 2.0, 60.0, 600.0])
@pytest.mark.parametrize("between_losses_s", [HOUR_S, 24 * HOUR_S])
def test_no_other_interval_loses_less(save_s: float, between_losses_s: float) -> None:
    best = best_interval_s(save_s, between_losses_s)
    least = lost_fraction(best, save_s, between_losses_s)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert lost_fraction(best * factor, save_s, between_losses_s) > least


def test_the_interval_of_cheap_saves_is_youngs() -> None:
    assert best_interval_s(1.0, 24 * HOUR_S) == pytest.approx(math.sqrt(2 * 24 * HOUR_S), rel=0.01)


def test_the_interval_never_exceeds_the_time_between_losses() -> None:
    assert best_interval_s(3 * HOUR_S, HOUR_S) == HOUR_S


def test_the_first_save_counts_only_while_it_is_the_only_one() -> None:
    assert usual_save_s([0.7]) == 0.7
    assert usual_save_s([0.7, 0.06, 0.05, 0.9]) == 0.06


def test_losses_of_machines_outweigh_the_expectation() -> None:
    assert mean_between_losses_s(24 * HOUR_S, 0.0, 0) == 24 * HOUR_S
    assert mean_between_losses_s(24 * HOUR_S, 100 * HOUR_S, 99) == 1.24 * HOUR_S
    assert mean_between_losses_s(24 * HOUR_S, 1000 * HOUR_S, 0) == 1024 * HOUR_S
