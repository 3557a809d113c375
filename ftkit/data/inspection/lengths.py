"""Lengths of samples: percentiles, and a histogram that fits on a screen."""

import numpy as np
import numpy.typing as npt

from ftkit.data.inspection.inspection import Bar, Lengths

MOST_BARS = 12
_STEPS = (1, 2, 5)
"""Widths of bars are these times a power of ten."""


def lengths_of(tokens: npt.NDArray[np.int32], limit: int) -> Lengths | None:
    """What there is to say of lengths; None: there are none.

    Args:
        tokens: [samples], of each, before anything is done about those that are too long.
        limit: max_seq_length.
    """
    if not len(tokens):
        return None
    median, p90, p99 = (
        int(value) for value in np.percentile(tokens, [50, 90, 99], method="higher")
    )
    return Lengths(
        samples=len(tokens),
        shortest=int(tokens.min()),
        median=median,
        p90=p90,
        p99=p99,
        longest=int(tokens.max()),
        over=int((tokens > limit).sum()),
        bars=_bars(tokens, p99, limit),
    )


def _bars(tokens: npt.NDArray[np.int32], p99: int, limit: int) -> list[Bar]:
    """Bars of one width, up to where all but a hundredth are; the last has all that is longer."""
    longest = int(tokens.max())
    first = int(tokens.min())
    width = _width(p99 - first + 1)
    start = first - (first - 1) % width
    edges = [*range(start, p99 + 1, width), longest + 1]
    if longest - edges[-2] < width:
        edges[-1] = edges[-2] + width
    counts, _ = np.histogram(tokens, edges)
    over, _ = np.histogram(tokens[tokens > limit], edges)
    return [
        Bar(first=edge, last=min(end - 1, longest), samples=int(count), over=int(more))
        for edge, end, count, more in zip(edges, edges[1:], counts, over, strict=False)
    ]


def _width(span: int) -> int:
    """The smallest width with which the bars are not too many."""
    power = 1
    while True:
        for step in _STEPS:
            if span <= step * power * (MOST_BARS - 2):
                return step * power
        power *= 10
