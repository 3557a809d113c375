"""Markdown tables and pictures of figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

GIB = 2**30


LONGEST_CELL = 160


def in_a_cell(text: object) -> str:
    """A message of a program, shortened for a cell of a table."""
    said = str(text).replace("|", "/")
    return said if len(said) <= LONGEST_CELL else said[: LONGEST_CELL - 4] + " ..."


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(value: float | None, form: str, *, scale: float = 1) -> str:
    """A number as a cell; empty if it is unknown."""
    return "" if value is None else format(value / scale, form)


def gib(value: float | None) -> str:
    """Bytes as a cell."""
    return number(value, ".2f", scale=GIB)


def draw_bars(
    groups: Mapping[str, Mapping[str, float]], label: str, title: str, picture: Path
) -> None:
    """Draw horizontal bars, a panel for each group.

    Args:
        groups: for each panel, by its title, values by the names of the bars.
        label: of the axis.
        title: of the picture.
        picture: file to write; its suffix determines the format.
    """
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = title  # the same picture from the same figures
    height = sum(0.32 * len(bars) + 0.75 for bars in groups.values())
    figure = Figure(figsize=(8, height + 0.5), layout="constrained")
    ratios = [len(bars) + 2 for bars in groups.values()]
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=ratios, sharex=True)
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    for panel, (group, bars) in zip(panels[:, 0], groups.items(), strict=True):
        colors = [f"C{names.index(name)}" for name in bars]
        drawn = panel.barh(list(bars), list(bars.values()), color=colors)
        panel.bar_label(drawn, fmt="{:,.4g}", padding=3)
        panel.invert_yaxis()
        panel.set_title(group, loc="left", fontsize="medium")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.15)
    panels[-1, 0].set_xlabel(label)
    figure.suptitle(title)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def draw_lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    labels: tuple[str, str],
    title: str,
    picture: Path,
) -> None:
    """Draw lines through points, both axes logarithmic.

    Args:
        series: points by the name of the line.
        labels: of both axes.
        title: of the picture.
        picture: file to write; its suffix determines the format.
    """
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = title
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    for name, points in series.items():
        panel.plot(*zip(*points, strict=True), marker="o", label=name)
    panel.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1], title=title)
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)
