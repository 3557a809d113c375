"""A loss curve in a terminal, drawn with the dots of Braille characters or with stars."""

import math
from collections.abc import Sequence
from itertools import pairwise

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a Braille character by row and column, from U+2800 on."""
_LOGARITHMIC_FROM = 20.0
"""Ratio of highest to lowest value from which the scale is logarithmic."""


# Our own code: the library for it has no types.
def curve(
    values: Sequence[float], width: int, height: int, *, ascii_only: bool = False
) -> list[str]:
    """The lines of a curve, with its highest and lowest value to the left of it.

    Args:
        values: at equal distances, finite; of more than there is room for, means are drawn.
        width: of the whole, in characters.
        height: in lines, at least 2.
        ascii_only: the terminal has no Braille.
    """
    if not values:
        return []
    across, down = (1, 1) if ascii_only else (2, 4)
    labels = list(dict.fromkeys((_label(max(values)), _label(min(values)))))
    margin = max(map(len, labels)) + 1
    columns = max(width - margin, 1) * across
    scaled = _levels(_resampled(values, columns), min(values), max(values), height * down - 1)
    dots = [[False] * columns for _ in range(height * down)]
    for x, (before, level) in enumerate(pairwise([scaled[0], *scaled])):
        # Upright parts start beside the last dot, so that a steep curve has no gaps.
        first, last = sorted((level, before + (level > before) - (level < before)))
        for y in range(first, last + 1):
            dots[y][x] = True
    lines = []
    for row in range(height):
        label = labels[-1] if row == height - 1 else labels[0] if row == 0 < len(labels) - 1 else ""
        cells = dots[row * down : (row + 1) * down]
        drawn = "".join(
            _character([line[x : x + across] for line in cells], ascii_only)
            for x in range(0, columns, across)
        )
        lines.append(f"{label:>{margin - 1}} {drawn}".rstrip())
    return lines


def _label(value: float) -> str:
    return f"{value:.4g}"


def means(values: Sequence[float], count: int) -> list[float]:
    """Reduce values to at most `count`, by means of neighbours."""
    if len(values) <= count:
        return list(values)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _resampled(values: Sequence[float], count: int) -> list[float]:
    """Exactly `count` values: means of more, straight lines between fewer."""
    if len(values) > count:
        return means(values, count)
    if len(values) == 1:
        return [values[0]]
    found = []
    for i in range(count):
        position = i * (len(values) - 1) / max(count - 1, 1)
        left = min(int(position), len(values) - 2)
        share = position - left
        found.append(values[left] * (1 - share) + values[left + 1] * share)
    return found


def _levels(values: list[float], low: float, high: float, most: int) -> list[int]:
    """Distance of each value from the top, in dots."""
    if low > 0 and high / low > _LOGARITHMIC_FROM:
        # Means of neighbours may be rounded below the lowest value.
        values, low, high = [math.log(max(v, low)) for v in values], math.log(low), math.log(high)
    if high == low:
        return [most] * len(values)
    return [round((high - value) / (high - low) * most) for value in values]


def _character(cells: list[list[bool]], ascii_only: bool) -> str:
    if ascii_only:
        return "*" if cells[0][0] else " "
    bits = sum(
        _DOTS[y][x] for y, line in enumerate(cells) for x, is_set in enumerate(line) if is_set
    )
    return chr(0x2800 + bits) if bits else " "
