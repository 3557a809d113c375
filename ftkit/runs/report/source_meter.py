"""Meter of sources of a data set, or of validation sets: samples so far, validation losses."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from ftkit.runs.report.report import Source
from ftkit.utils.json_values import from_json


class SourceMeter:
    """What is known of each source, where there are as many as have a section."""

    def __init__(
        self, names: Sequence[str], before: Mapping[str, Source], *, least: int = 2
    ) -> None:
        """Begin.

        Args:
            names: of the sources.
            before: of an earlier session.
            least: fewer have no section: one source is all of the data.
        """
        told = names if len(names) >= least else ()
        self.sources = {name: before.get(name, Source()) for name in told}
        """By name."""

    @classmethod
    def going_on(cls, names: Sequence[str], carried: Any, *, least: int = 2) -> Self:
        """With what a checkpoint carries of an earlier session, if anything."""
        return cls(names, from_json(dict[str, Source], carried or {}), least=least)

    @property
    def carried(self) -> dict[str, Any]:
        """For `going_on`."""
        return {name: dataclasses.asdict(source) for name, source in self.sources.items()}

    def prepare(self, counts: Mapping[str, Source]) -> None:
        """Take the counts of the data, and what an epoch takes of each source.

        Losses on other validation records, by their counts, are those of the earlier session.
        """
        for name, source in self.sources.items():
            now = counts[name]
            if source.data and source.data.get("val") != now.data.get("val"):
                source = Source(samples=source.samples)
            self.sources[name] = dataclasses.replace(
                source, data=now.data, samples_per_epoch=now.samples_per_epoch
            )

    def add(self, samples: Sequence[int]) -> None:
        """Count the samples of a step, of each source."""
        for (name, source), count in zip(list(self.sources.items()), samples, strict=True):
            self.sources[name] = dataclasses.replace(source, samples=source.samples + count)

    def validate(self, losses: Mapping[str, float | None], *, is_first: bool) -> None:
        """Take the losses of a validation, by names; without one, it had no sample of a source."""
        for name, source in list(self.sources.items()):
            if (loss := losses.get(name)) is None:
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
