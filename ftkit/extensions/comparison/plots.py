"""Plots of a comparison: losses, memory and throughput, for any number of runs.

Every run has the same colour and dash in all panels. Colour-blind people can distinguish the
colours. Nothing in matplotlib's global state is changed.
"""

import importlib.util
import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ftkit.errors import UserError
from ftkit.extensions.comparison.columns import number_columns
from ftkit.extensions.comparison.runs import ComparedRun
from ftkit.extensions.comparison.table import comparison_as_html
from ftkit.redaction import shown
from ftkit.runs.report.report import ENDED_WELL
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.console.html import whole_page
from ftkit.utils.files import write_durably
from ftkit.version import __version__

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D


ENDINGS = (".png", ".html")
Dash: TypeAlias = Literal["-"] | tuple[float, tuple[float, float]]
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")
"""Colours of Okabe and Ito, without yellow, which is hard to see on white."""
DASHES: tuple[Dash, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
"""Dashes of successive rounds through the colours."""
PART_COLORS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer state": "#009E73",
    "activations": "#E69F00",
    "temporaries": "#D55E00",
    "unattributed": "#777777",
    "other tensors": "#CC79A7",
    "other host memory": "#C8C8C8",
    "reserved, not used": "#E4E4E4",
}
_POINTS = 600
"""Most points of a curve."""
_RAW_POINTS = 25
"""Most steps that are drawn without averaging; above it, a running mean shows the trend."""
_VISIBLE = 1 / 500
"""Smallest share of the highest peak at which a part of memory can be seen."""
_LIMIT_IN_SIGHT = 4.0
"""The device's limit is drawn if it is at most this multiple of the highest peak."""
_FEW = 6
"""Most runs that are drawn with thick lines and all their validations."""
_NAME = 34
"""Longest name of a run in a picture."""
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    # Text as outlines: the browser may not have the font.
    "svg.fonttype": "path",
    "svg.hashsalt": "ftkit",  # ids in the file are otherwise random
}


def check_plot(path: Path) -> None:
    """Check the name of a plot and that matplotlib is there, before anything is read.

    Raises:
        UserError: the name has another ending, or matplotlib is missing.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UserError(
            f"--plot is {str(path)!r}, but must end in .png or .html. "
            f"Try --plot {path.with_suffix('.png')}."
        )
    _require_matplotlib("--plot")


def _require_matplotlib(what: str) -> None:
    """Refuse to draw without matplotlib; the message begins with `what`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"{what} needs matplotlib, which is not installed. It comes with the extra plot: try "
            "pip install 'ftkit[plot]', or pip install matplotlib."
        )


def save_plot(runs: list[ComparedRun], path: Path) -> Path:
    """Draw the runs into a file.

    Args:
        runs: in the order from top to bottom.
        path: NAME.png, or NAME.html: a page with the table, which loads nothing from elsewhere.

    Raises:
        UserError: see `check_plot`; or it cannot be written.
    """
    check_plot(path)
    with _drawing():
        drawn = figure(runs)
        try:
            if path.suffix.lower() == ".png":
                drawn.savefig(path, dpi=150)
            else:
                write_durably(path, _comparison_page(runs, svg(drawn)))
        except OSError as error:
            raise UserError(
                f"--plot {path} cannot be written ({error.strerror}). Try another directory."
            ) from None
    return path


@dataclass(frozen=True)
class Picture:
    """A picture that a notebook shows."""

    png: bytes
    """Content of the PNG file."""

    @classmethod
    def of(cls, runs: list[ComparedRun]) -> "Picture":
        """Draw the runs as `save_plot` does.

        Raises:
            UserError: matplotlib is missing.
        """
        _require_matplotlib("A picture")
        file = io.BytesIO()
        with _drawing():
            figure(runs).savefig(file, format="png", dpi=90)
        return cls(file.getvalue())

    def __repr__(self) -> str:
        return f"<ftkit plot: PNG, {bytes_text(len(self.png))}>"

    def _repr_png_(self) -> bytes:
        return self.png


@contextmanager
def _drawing() -> Iterator[None]:
    """Apply our style inside the block; restore matplotlib's global state after it."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a run may have any name
        yield


def svg(drawn: "Figure") -> str:
    """Return a figure as an SVG element for a page."""
    text = io.StringIO()
    # Without dates and versions the same runs give the same file.
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    drawn.savefig(text, format="svg", metadata=nothing)
    # The XML declaration and document type before it have no place in a page.
    return text.getvalue()[text.getvalue().index("<svg") :]


def _comparison_page(runs: list[ComparedRun], picture: str) -> str:
    """Return a page with the table and the picture; it has no script and refers to nothing."""
    title = f"ftkit: {len(runs)} {'run' if len(runs) == 1 else 'runs'} compared"
    body = (
        f'<div class="picture">{picture}</div><div class="table">{comparison_as_html(runs)}</div>'
        f"<p>Made by ftkit {__version__}. Bold: best of the runs that ended well.</p>"
    )
    return whole_page(title, body, _CSS)


_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem;
  color: #222; background: #fff; }
h1 { font-size: 1.3rem; }
.picture svg { width: 100%; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.5rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
tr.out_of_memory td, tr.failed td, tr.killed td { color: #8a3a00; }
p, li { color: #555; }
"""


def figure(runs: list[ComparedRun]) -> "Figure":
    """Draw losses above, memory and throughput as bars below, in the same order and colours."""
    from matplotlib.figure import Figure

    names = [_name(run) for run in runs]
    with_curve = [i for i, run in enumerate(runs) if run.training.steps]
    alike: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        alike.setdefault(run.loss_of, []).append(i)
    # Inches: a row of the legend for three runs, and a bar for each run.
    above_in = 4.2 * len(alike) + 0.25 * math.ceil(len(with_curve) / 3)
    heights = (above_in, 1.4 + 0.3 * len(runs))
    drawn = Figure(figsize=(12, sum(heights)), layout="constrained")
    above, below = drawn.subfigures(2, 1, height_ratios=heights, squeeze=False)[:, 0]
    # Each half has its own legend below it, which needs a figure of its own.
    lines: dict[int, Line2D] = {}
    panels = above.subplots(len(alike), 2, sharey="row", squeeze=False)
    for (model, members), (by_step, by_time) in zip(alike.items(), panels, strict=True):
        lines |= _draw_losses(by_step, by_time, runs, members)
        if len(alike) > 1:
            by_step.set_ylabel(f"{_cut(model)}\nloss (nats)", parse_math=False)
    _legend(above, [lines[i] for i in with_curve], [names[i] for i in with_curve], 3)
    memory, speed = below.subplots(1, 2, sharey=True)
    _draw_memory(memory, runs)
    _draw_bars(speed, runs, "Throughput", "tokens_per_s")
    handles, labels = memory.get_legend_handles_labels()
    _legend(below, handles, labels, 5)
    # Between dollar signs, which a name may have, matplotlib would read a formula.
    memory.set_yticks(range(len(runs)), names, parse_math=False)
    # Inverted, so that the first run is at the top as in the table.
    memory.set_ylim(len(runs) - 0.4, -0.6)
    for axes in (memory, speed):
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    return drawn


def _legend(
    part: "SubFigure", handles: "Sequence[Artist]", labels: Sequence[str], columns: int
) -> None:
    """Add names below all panels, if there is anything to name."""
    if not handles:
        return
    legend = part.legend(
        handles, labels, loc="outside lower center", ncols=min(columns, len(labels)),
        frameon=False, handlelength=3.2,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_losses(
    by_step: "Axes", by_time: "Axes", runs: list[ComparedRun], members: list[int]
) -> "dict[int, Line2D]":
    """Draw a curve for each of the runs with these indices; return their lines in the legend."""
    from matplotlib.lines import Line2D

    drawn = [runs[i] for i in members]
    longest = max((len(run.training.steps) for run in drawn), default=0)
    # The longest run decides for all, so that the curves are equally smooth.
    window = 1 if longest <= _RAW_POINTS else max(2, longest // 20)
    unit_s, unit = _time_unit(
        max((s for run in drawn for s in run.training.seconds[-1:]), default=0)
    )
    thick, validations = (4.5, None) if len(runs) <= _FEW else (2.4, 1)
    lines, every = {}, list[float]()
    for i, run in zip(members, drawn, strict=True):
        color, dash = _look(i)
        # Thick lines lie below thin ones, so that equal curves can all be seen.
        width = thick - (thick - 1.3) * i / max(len(runs) - 1, 1)
        curve = run.training
        chosen = _chosen(len(curve.steps))
        losses = _running_mean(curve.losses, window)
        time_at = dict(zip(curve.steps, curve.seconds, strict=True))
        # Validations are drawn at the time of their step; those without a row, such as step 0, have
        # none.
        points = [(step, loss) for step, loss in run.validation if step in time_at]
        points = points[-validations:] if validations else points
        for axes, xs, point_xs in (
            (by_step, curve.steps, [step for step, _ in points]),
            (
                by_time,
                [seconds / unit_s for seconds in curve.seconds],
                [time_at[step] / unit_s for step, _ in points],
            ),
        ):
            axes.plot(
                [xs[k] for k in chosen], [losses[k] for k in chosen],
                color=color, linestyle=dash, linewidth=width, alpha=0.85,
            )  # fmt: skip
            axes.plot(
                point_xs, [loss for _, loss in points], "o", color=color, markersize=4 + width,
                markeredgecolor="white", markeredgewidth=0.8, zorder=3,
            )  # fmt: skip
        every += losses + [loss for _, loss in points]
        # Lines of the legend; the thinnest curves would be hard to tell apart there.
        lines[i] = Line2D([], [], color=color, linestyle=dash, linewidth=max(width, 2))
    mean = f", mean of {window} steps" if window > 1 else ""
    which = "last validation" if validations else "validation"
    points_are = f"; points: {which}" if any(run.validation for run in drawn) else ""
    by_step.set(title=f"Loss by step{mean}{points_are}", xlabel="step", ylabel="loss (nats)")
    by_time.set(title="Loss by time of training", xlabel=unit)
    # A logarithmic scale has no place for 0.
    positive = [loss for loss in every if loss > 0]
    if positive and max(positive) > 20 * min(positive):
        by_step.set_yscale("log")
        by_step.yaxis.set_major_formatter("{x:g}")
    for axes in (by_step, by_time):
        if not every:
            _say(axes, "no run has done a step")
    return lines


def _draw_memory(axes: "Axes", runs: list[ComparedRun]) -> None:
    """Draw stacked bars, and the limit of each device if it is in sight."""
    parts = [run.memory_parts for run in runs]
    limits = [run.memory_limit_bytes for run in runs]
    peaks = [sum(part.values()) for part in parts]
    unit, name = (2**30, "GiB") if max(peaks, default=0) >= 2**30 else (2**20, "MiB")
    starts = [0.0] * len(runs)
    # Parts too small to be seen would only lengthen the legend.
    visible = _VISIBLE * max(peaks, default=0)
    for part in PART_COLORS:
        if not any(sizes.get(part, 0) > visible for sizes in parts):
            continue
        sizes = [sizes.get(part, 0) / unit for sizes in parts]
        axes.barh(
            range(len(runs)), sizes, left=starts, height=0.72, color=PART_COLORS[part],
            edgecolor="white", linewidth=0.5, label=part,
        )  # fmt: skip
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    in_sight = _LIMIT_IN_SIGHT * max(peaks, default=0)
    # A limit far above the peaks would squeeze the bars; the title names it instead.
    drawn = [limit for limit in limits if limit is not None and limit <= in_sight]
    values = " and ".join(map(bytes_text, sorted(set(drawn))))
    label = f"limit of the device: {values}"
    for i, limit in enumerate(limits):
        if limit in drawn:
            axes.plot(
                [limit / unit] * 2, [i - 0.5, i + 0.5], color="#222222", linewidth=2,
                linestyle=(0, (2, 1)), solid_capstyle="butt", label=label,
            )  # fmt: skip
            # One entry in the legend for all limits.
            label = ""
    for i, (run, peak) in enumerate(zip(runs, peaks, strict=True)):
        text = bytes_text(peak) if peak else "not measured"
        _beside(axes, peak / unit, i, text if run.state in ENDED_WELL else f"{text}, {_state(run)}")
    farthest = max([*peaks, *drawn], default=0) / unit
    # The bars leave room for the text to the right of them.
    axes.set_xlim(0, max(farthest * 1.02, max(peaks, default=0) / unit * 1.45) or 1)
    beyond = sorted({limit for limit in limits if limit is not None and limit > in_sight})
    far = f" (limit: {' and '.join(map(bytes_text, beyond))})" if beyond and any(peaks) else ""
    axes.set(title=f"Peak memory of a rank{far}", xlabel=name)


def _draw_bars(axes: "Axes", runs: list[ComparedRun], title: str, key: str) -> None:
    """Draw a column as bars in the colours of the curves, and how runs ended that failed."""
    (column,) = (column for column in number_columns(runs) if column.key == key)
    sizes = [value or 0.0 for value in column.values]
    for i, (run, size) in enumerate(zip(runs, sizes, strict=True)):
        axes.barh(i, size, height=0.72, color=_look(i)[0], alpha=0.9)
        ended = "" if run.state in ENDED_WELL else _state(run)
        _beside(axes, size, i, ", ".join(filter(None, (column.texts[i], ended))))
    axes.set_xlim(0, max(sizes, default=0) * 1.35 or 1)
    axes.set(title=title, xlabel=column.label)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    # The panel to the left has the names.
    axes.tick_params(labelleft=False)


def _beside(axes: "Axes", x: float, y: float, text: str) -> None:
    axes.annotate(
        text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9,
        color="#222222", bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    )  # fmt: skip


def _say(axes: "Axes", text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#555555")


def _look(i: int) -> tuple[str, Dash]:
    """Colour and dash of a run; up to 21 runs all look different."""
    rounds = i // len(COLORS)
    return COLORS[i % len(COLORS)], DASHES[rounds % len(DASHES)]


def _name(run: ComparedRun) -> str:
    """Name of a run, cut to fit a picture."""
    return _cut(run.name)


def _cut(name: str) -> str:
    """Name of a run or a model, cut to fit a picture."""
    name = shown(name)
    # The end of a path tells most.
    return name if len(name) <= _NAME else f"...{name[-_NAME + 3 :]}"


def _state(run: ComparedRun) -> str:
    return run.state.replace("_", " ")


def _time_unit(longest_s: float) -> tuple[float, str]:
    if longest_s < 180:
        return 1, "seconds"
    return (60, "minutes") if longest_s < 3 * 3600 else (3600, "hours")


def _chosen(count: int) -> list[int]:
    """Indices of the points to draw, including the first and the last."""
    if count <= _POINTS:
        return list(range(count))
    return [round(i * (count - 1) / (_POINTS - 1)) for i in range(_POINTS)]


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those before it, of `window` values at most."""
    sums = [0.0, *accumulate(values)]
    return [
        (sums[i + 1] - sums[max(0, i + 1 - window)]) / min(i + 1, window)
        for i in range(len(values))
    ]
