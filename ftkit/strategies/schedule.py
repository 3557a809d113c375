"""The learning-rate schedule: the steps of a run, the rate of each, and their samples."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace

from ftkit.recipe.recipe import LrEnds, LrSchedule, LrWarmupCurve, Train

_WARMUP_STEPS = 100
"""Of a warm-up that no key names, in a run of at least ten times as many; as in LitGPT."""
# The default of get_inverse_sqrt_schedule in transformers.
_INVERSE_SQRT_STEPS = 10_000
"""Without a warm-up, the rate falls by the square root of 2 over so many steps."""


@dataclass(frozen=True, kw_only=True)
class CountedSteps:
    """Steps of a run where they are not all of one size, and had to be counted."""

    total: int
    """Of the whole run, those before its start included."""
    per_epoch: int


@dataclass(frozen=True)
class Schedule:
    """Optimizer steps of a run, and the learning rate of each as a share of the full rate."""

    total_steps: int
    warmup_steps: int
    final_share: float
    """Learning rate at the end of a decay, as a share of the full rate; at most 1."""
    kind: LrSchedule = "cosine"
    decay_steps: int = 0
    """Steps at the end of the run over which the rate of wsd falls."""
    ends: LrEnds = "within"
    warmup_curve: LrWarmupCurve = "linear"

    def share(self, step: int) -> float:
        """Share of the full learning rate in a step, counted from 0.

        After the warm-up it follows the curve of its kind, which ends at `final_share` in the last
        step unless the kind does not depend on the length of the run.
        """
        if step < self.warmup_steps:
            # step + 1: the first step already trains, with 1 / warmup_steps of the full rate.
            risen = (step + (self.ends == "within")) / self.warmup_steps
            return risen if self.warmup_curve == "linear" else risen**2
        return self.final_share + (1 - self.final_share) * _CURVES[self.kind](self, step)

    def numbers(self) -> dict[str, float]:
        """All numbers that define the curve of its kind."""
        words = ("kind", "ends", "warmup_curve")
        return {key: value for key, value in asdict(self).items() if key not in words}

    def _cosine(self, step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * self._progress(step)))

    def _linear(self, step: int) -> float:
        return 1 - self._progress(step)

    def _progress(self, step: int) -> float:
        """Share of the steps after the warm-up that is done, in [0, 1]."""
        # - 1: the last step itself has the final rate.
        last_step = self.total_steps - (self.ends == "within")
        decay_steps = max(1, last_step - self.warmup_steps)
        return min(1.0, (step - self.warmup_steps) / decay_steps)

    def _constant(self, step: int) -> float:
        return 1.0

    def _wsd(self, step: int) -> float:
        """Warm-up, stable, decay: the full rate, then a straight line down at the end."""
        stable_until = max(1, self.warmup_steps, self.total_steps - self.decay_steps)
        decay_steps = max(1, self.total_steps - stable_until)
        # step + 1: the first step of the decay is already below the full rate, the last one at the
        # end.
        return 1 - min(1.0, max(0, step + 1 - stable_until) / decay_steps)

    def _inverse_sqrt(self, step: int) -> float:
        scale = self.warmup_steps or _INVERSE_SQRT_STEPS
        return math.sqrt(scale / (scale + step - self.warmup_steps))


_CURVES: dict[LrSchedule, Callable[[Schedule, int], float]] = {
    "cosine": Schedule._cosine,
    "linear": Schedule._linear,
    "constant": Schedule._constant,
    "wsd": Schedule._wsd,
    "inverse_sqrt": Schedule._inverse_sqrt,
}
"""After the warm-up: from 1 at the full rate down to 0 at `final_share`."""


def without_epochs(
    train: Train, max_seq_length: int, *, start_step: int = 0, start_samples: int = 0
) -> Train:
    """Settings of a run over data of which nobody knows how many samples an epoch has.

    It ends by its steps; train.max_tokens says how many these are, all samples being full.

    Args:
        train: section of the recipe.
        max_seq_length: tokens of a sample.
        start_step: optimizer steps already done, if the run continues.
        start_samples: samples that these consumed.
    """
    steps = train.max_steps
    if train.max_tokens is not None:
        # The first token of a sample is only read: it is the last one of another sample.
        samples = math.ceil(train.max_tokens / (max_seq_length - 1)) - start_samples
        of_tokens = start_step + max(0, math.ceil(samples / train.global_batch_size))
        steps = min(of_tokens, steps or of_tokens)
    return replace(train, epochs=None, max_steps=steps)


def make_schedule(
    train: Train,
    samples: int,
    learning_rate: float,
    *,
    start_step: int = 0,
    start_samples: int = 0,
    begun_warmup: int | None = None,
    counted: CountedSteps | None = None,
) -> tuple[Schedule, list[str]]:
    """Compute the schedule of a run, with notices for the user.

    Total steps = start_step + ceil((epochs * samples - start_samples) / global_batch_size),
    capped by max_steps; start_step if the run is already there or beyond.

    Args:
        train: section of the recipe.
        samples: of one epoch; 0: nobody knows, and the recipe has no key that counts epochs.
        learning_rate: the full one.
        start_step: optimizer steps already done, if the run continues.
        start_samples: samples that these consumed.
        begun_warmup: steps of the warm-up so far, if the run continues.
        counted: its steps, if they are not all of one size.
    """
    batch = train.global_batch_size
    total = train.max_steps
    if counted is not None:
        total = counted.total
    elif train.epochs:
        # Only the remaining samples count: before the start, steps may have had another size.
        of_epochs = start_step + math.ceil((train.epochs * samples - start_samples) / batch)
        total = min(of_epochs, total or of_epochs)
    assert total is not None
    # A recipe with fewer steps than are done already: nothing is left to train.
    total = max(total, start_step)
    if train.lr_warmup_fraction is not None:
        # A share of one epoch, whatever the number of epochs.
        per_epoch = samples / batch if counted is None else counted.per_epoch
        warmup = math.ceil(train.lr_warmup_fraction * per_epoch)
    elif train.lr_warmup_run_fraction is not None:
        warmup = math.ceil(train.lr_warmup_run_fraction * total)
    elif train.lr_warmup_steps == "auto":
        warmup = min(_WARMUP_STEPS, total // 10) if begun_warmup is None else begun_warmup
    else:
        warmup = train.lr_warmup_steps or 0
    is_larger = train.global_batch_tokens is None and batch > samples > 0
    notices = _notices(batch, samples, learning_rate, total, is_larger=is_larger)
    if warmup > total:
        notices.append(
            f"The warm-up of {warmup} steps is longer than the run of {total}: the learning rate "
            f"never reaches its full value. Try --train.lr_warmup_steps {max(1, total // 10)}."
        )
    final_share = 1.0
    # A rate of 0 has no share; `_notices` reports it.
    if learning_rate > 0:
        # At most 1: a decay never raises the rate.
        final_share = min(1.0, train.min_lr / learning_rate)
        if train.min_lr > learning_rate and train.lr_schedule != "constant":
            notices.append(
                f"train.min_lr {train.min_lr:g} is above the learning rate {learning_rate:g}: "
                "the rate stays constant after the warm-up."
            )
    notices += _without_effect(train)
    decay = math.ceil(train.lr_decay_fraction * total) if train.lr_schedule == "wsd" else 0
    schedule = Schedule(
        total,
        warmup,
        final_share,
        train.lr_schedule,
        decay,
        train.lr_ends,
        train.lr_warmup_curve,
    )
    return schedule, notices


def interval_steps(steps: int | None, share_of_epoch: float | None, steps_per_epoch: int) -> int:
    """Optimizer steps between two validations or checkpoints; 0: there are none.

    Args:
        steps: as the recipe gives them.
        share_of_epoch: as the recipe gives it, in the place of steps.
        steps_per_epoch: of the run.
    """
    if share_of_epoch is None:
        return steps or 0
    return max(1, math.ceil(share_of_epoch * steps_per_epoch))


def _without_effect(train: Train) -> list[str]:
    """Notices of settings that the kind of schedule ignores."""
    defaults = {field.name: field.default for field in fields(train)}
    unused = {"constant": ["min_lr", "lr_decay_fraction"], "wsd": []}
    return [
        f"train.{key} has no effect: train.lr_schedule is {train.lr_schedule}."
        for key in unused.get(train.lr_schedule, ["lr_decay_fraction"])
        if getattr(train, key) != defaults[key]
    ]


def _notices(
    batch: int, samples: int, learning_rate: float, total: int, *, is_larger: bool
) -> list[str]:
    notices = []
    if learning_rate == 0:
        notices.append(
            "The learning rate is 0: the model would not change. Try --optimizer.lr 2e-4."
        )
    if is_larger:
        notices.append(
            f"train.global_batch_size {batch:,} is more than the {samples:,} samples of an epoch: "
            f"the run has {total:,} step{'s' * (total != 1)}. "
            f"Try --train.global_batch_size {max(1, min(16, samples // 4))}."
        )
    return notices


def sample_budget(
    train: Train,
    samples: int,
    schedule: Schedule,
    *,
    start_step: int = 0,
    start_samples: int = 0,
) -> int:
    """Samples that the whole run consumes; the last step may be smaller than the others.

    Args:
        train: section of the recipe.
        samples: of one epoch.
        schedule: computed for the same start.
        start_step: optimizer steps already done, if the run continues.
        start_samples: samples that these consumed.
    """
    # The last step of an epoch takes samples of the next one too, so that all steps have the same
    # size; only the run's own last step may be smaller.
    wanted = start_samples + (schedule.total_steps - start_step) * train.global_batch_size
    within = min(wanted, train.epochs * samples) if train.epochs else wanted
    return max(within, start_samples)
