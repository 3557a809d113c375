"""Meter of the sources of a data set: the samples of each so far, and its validation losses."""

import dataclasses
from collections.abc import Mapping, Sequence

from ftkit.report.report import Source


class SourceMeter:
    """What is known of each source, where there are several; empty where there is one."""

    def __init__(self, names: Sequence[str], before: Mapping[str, Source]) -> None:
        """Begin.

        Args:
            names: of the sources.
            before: of an earlier session.
        """
        self.sources = {name: before.get(name, Source()) for name in names if len(names) > 1}
        """By name."""

    def prepare(self, counts: Mapping[str, Source]) -> None:
        """Take the counts of the data, and what an epoch takes of each source."""
        for name, source in self.sources.items():
            self.sources[name] = dataclasses.replace(
                source, data=counts[name].data, samples_per_epoch=counts[name].samples_per_epoch
            )

    def add(self, samples: Sequence[int]) -> None:
        """Count the samples of a step, of each source."""
        for (name, source), count in zip(list(self.sources.items()), samples, strict=True):
            self.sources[name] = dataclasses.replace(source, samples=source.samples + count)

    def validate(self, losses: Sequence[float | None], *, is_first: bool) -> None:
        """Take the losses of a validation, of each source; None: it had no sample of it."""
        for (name, source), loss in zip(list(self.sources.items()), losses, strict=True):
            if loss is None:
                continue
            best = source.validation_best
            self.sources[name] = dataclasses.replace(
                source,
                validation_first=loss if is_first else source.validation_first,
                validation_last=loss,
                validation_best=loss if best is None else min(best, loss),
            )

    @property
    def samples(self) -> list[int]:
        """Of each source so far."""
        return [source.samples for source in self.sources.values()]
