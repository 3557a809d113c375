"""The interval between checkpoints that loses the least time, by what a save costs.

Saving often costs the time of the saves, saving seldom the steps that are done again after a loss.
Young (1974) found where the two are in balance, Daly (2006) with more terms.
"""

import math
from collections.abc import Sequence
from statistics import median

FIRST_S = 60.0
"""Until a save has been measured."""


def best_interval_s(save_s: float, between_losses_s: float) -> float:
    """Seconds of training between two saves.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22 (2006), 303-312, equation 37. Its first term is
    J. W. Young's, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17 (1974), 530-531.

    Args:
        save_s: time that training stands still for a save; above 0.
        between_losses_s: mean time between two losses; above 0.
    """
    if save_s >= 2 * between_losses_s:
        return between_losses_s
    share = save_s / (2 * between_losses_s)
    first_order_s = math.sqrt(2 * save_s * between_losses_s)
    return first_order_s * (1 + math.sqrt(share) / 3 + share / 9) - save_s


def usual_save_s(saves_s: Sequence[float]) -> float:
    """What a save costs, of those so far; the first one takes its memory besides.

    Args:
        saves_s: of each; at least one.
    """
    return median(saves_s[1:] or saves_s)


def mean_between_losses_s(expected_s: float, training_s: float, losses: int) -> float:
    """Mean time between two losses, by what was expected and what the run has seen.

    What was expected counts like one loss in so much time.

    Args:
        expected_s: time between two losses before anything is known.
        training_s: of the run so far.
        losses: of the run so far.
    """
    return (expected_s + training_s) / (1 + losses)
