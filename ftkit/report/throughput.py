"""The speed of a run over its measured window."""

from ftkit.report.report import Throughput


class ThroughputMeter:
    """Speed over the window: all training steps without the first few.

    The first steps also compile kernels, fill caches and allocate memory, so up to skip_steps of
    them are left out, but never more than a quarter of the steps: a run of 12 or more steps leaves
    out 3, one of 4 to 7 leaves out 1, and one of fewer than 4 steps counts them all.
    ``Throughput.window_steps`` says how many were counted.
    """

    def __init__(self, skip_steps: int = 3) -> None:
        self.skip_steps = skip_steps
        self._first: list[tuple[float, int, int]] = []
        self._steps = 0
        self._sums = (0.0, 0, 0)

    def add(self, *, duration_s: float, tokens: int, samples: int) -> None:
        """Count one step.

        Args:
            duration_s: time of the step, without validation and saving.
            tokens: real tokens of the step, over all ranks.
            samples: samples of the step, over all ranks.
        """
        step = (duration_s, tokens, samples)
        self._steps += 1
        if len(self._first) < self.skip_steps:
            self._first.append(step)
        self._sums = _plus(self._sums, step)

    @property
    def skipped_steps(self) -> int:
        """Steps left out of the window so far."""
        return min(self.skip_steps, self._steps // 4)

    def result(self, world_size: int) -> Throughput | None:
        """The speed over the window, or None before the first step.

        Args:
            world_size: ranks that share the tokens.
        """
        window_s, tokens, samples = self._sums
        for duration_s, step_tokens, step_samples in self._first[: self.skipped_steps]:
            window_s -= duration_s
            tokens -= step_tokens
            samples -= step_samples
        window_steps = self._steps - self.skipped_steps
        if window_steps == 0 or window_s <= 0:
            return None
        return Throughput(
            tokens_per_s=tokens / window_s,
            samples_per_s=samples / window_s,
            steps_per_s=window_steps / window_s,
            window_steps=window_steps,
            window_s=window_s,
            tokens_per_s_per_device=tokens / window_s / world_size,
        )


def _plus(a: tuple[float, int, int], b: tuple[float, int, int]) -> tuple[float, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]
