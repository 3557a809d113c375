"""Bad records: rows that are no records, by kind, with place and example."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ftkit.data.records.media import MediaFile
from ftkit.data.records.record import Misfit
from ftkit.errors import UserError

SKIP = "skip_bad_records"
"""Option of data that leaves out bad records."""
_MOST_KINDS = 20
_MOST_PLACES = 5
_BEGINNING = 200
"""Characters of a record that are shown to identify it."""
_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|(?<!\w)-?\d[\w.,]*(?<![.,])")
"""What differs between records of one kind: texts and numbers."""


_PLACE = re.compile(r"^[a-z ]+\.\.\., ")
"""Place within a record, as "column ..., "."""


class BadData(UserError):
    """Data with bad records, which may be left out."""


@dataclass(kw_only=True)
class BadKind:
    """Bad records with the same reason."""

    reason: str
    message: str
    """Place, reason and remedy of the first."""
    example: str
    """Beginning of the first."""
    count: int = 0
    places: list[str] = field(default_factory=list)
    """Where the first ones are."""
    files: list[MediaFile] = field(default_factory=list)
    """Files that they name and that cannot be used."""

    @property
    def where(self) -> str:
        """Places of the first ones, as "a.jsonl, line 3, 8, 9 and 12 more"."""
        head, *others = self.places
        unit = head.rstrip("0123456789")
        shown = ", ".join([head, *(place.removeprefix(unit) for place in others)])
        more = self.count - len(self.places)
        return shown + (f" and {more:,} more" if more else "")


class BadRecords:
    """The bad records of a data set or a split, by kind."""

    def __init__(self, kinds: Iterable[BadKind] = ()) -> None:
        """Join the kinds of several splits."""
        self._kinds: dict[str, BadKind] = {}
        for kind in kinds:
            known = self._kinds.setdefault(
                kind.reason,
                BadKind(reason=kind.reason, message=kind.message, example=kind.example),
            )
            known.count += kind.count
            known.places = [*known.places, *kind.places][:_MOST_PLACES]
            known.files += kind.files

    @property
    def kinds(self) -> tuple[BadKind, ...]:
        """The kinds, in the order of their first records."""
        return tuple(self._kinds.values())

    @property
    def count(self) -> int:
        """Number of all bad records."""
        return sum(kind.count for kind in self._kinds.values())

    def add(self, place: str, message: str, value: Any, file: MediaFile | None = None) -> None:
        """Count a bad record.

        Args:
            place: where it is.
            message: completes a sentence that begins with the place; its remedy is on a line of
                its own.
            value: what was read.
            file: that it names and that cannot be used; None: there is none.
        """
        said, _, _ = message.partition("\n")
        said = said.lstrip(" :,").partition("; ")[0].partition(". ")[0].rstrip(".")
        reason = f"bad record: {_PLACE.sub('', _VALUE.sub('...', said))}"
        if reason not in self._kinds and len(self._kinds) == _MOST_KINDS:
            reason = "bad record: other reasons"
        if (kind := self._kinds.get(reason)) is None:
            is_read = not isinstance(value, Misfit)
            text = json.dumps(value, ensure_ascii=False, default=str) if is_read else value.row
            kind = BadKind(reason=reason, message=f"{place}{message}", example=text[:_BEGINNING])
            self._kinds[reason] = kind
        kind.count += 1
        if len(kind.places) < _MOST_PLACES:
            kind.places.append(place)
        if file is not None:
            kind.files.append(file)

    def refusal(self, records: int, *, may_skip: bool) -> UserError:
        """The error that lists every kind: a BadData if the others could be used.

        Args:
            records: number of all records, with the bad ones.
            may_skip: whether to leave them out would be a remedy.
        """
        works = f"leave {'it' if self.count == 1 else 'them'} out: --data.{SKIP} true."
        if self.count == 1:
            (kind,) = self.kinds
            said, works = kind.message, f" Or {works}"
        else:
            said = f"{self.count:,} of {records:,} records are bad:"
            for kind in self.kinds:
                others = f" ({kind.count:,} records: {kind.where})" if kind.count > 1 else ""
                said += f"\n  {' '.join(kind.message.splitlines())}{others}"
            works = f"\nCorrect them, or {works}"
        return BadData(said + works) if may_skip else UserError(said)
