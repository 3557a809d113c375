"""HTML for notebooks and pages: escaped, without script, for light and dark.

Text has the colour of the page. Colours that mean something stand out from white and from black
alike, and the text says the same.
"""

import base64
import html
from collections.abc import Iterable, Sequence

from ftkit.redaction import shown
from ftkit.utils.console.formatting import Pictured

GOOD = "#0b8457"
_NEUTRAL = "#888888"
_COLORS = {"green": GOOD, "yellow": "#a06a00", "red": "#d1493f"}
# Against the borders and stripes that notebooks give to tables.
_CELL = "padding:0.1em 1.2em 0.1em 0;vertical-align:top;background:none;border:none;"


def whole_page(title: str, body: str, style: str) -> str:
    """A page without script that loads nothing: its pictures are inside of it.

    Args:
        title: of the window, and first heading.
        body: HTML.
        style: its style sheet.
    """
    title = escaped(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>"
        f"{body}</body></html>\n"
    )


# All text in HTML passes here. Cells hold tables and a picture, for which a template engine would
# be one more language.
def escaped(text: str) -> str:
    """Escape a text for HTML, without control characters."""
    return html.escape(shown(text))


def styled(text: str, style: str) -> str:
    """A text in a style of rich, such as `bold red`."""
    color = next((value for word, value in _COLORS.items() if word in style.split()), "inherit")
    weight = "bold" if "bold" in style.split() else "normal"
    return f'<span style="font-weight:{weight};color:{color}">{escaped(text)}</span>'


def block(*parts: str) -> str:
    """Join parts into one, each below the one before."""
    return f'<div style="max-width:60em">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def pictured(text: Pictured, style: str = "") -> str:
    """A text below its picture.

    Args:
        text: with a picture.
        style: CSS of the text.
    """
    words = escaped(text)
    return (
        '<span style="display:inline-block;vertical-align:middle;margin:0.2em;max-width:160px">'
        f'<img src="{escaped(text.picture)}" alt="{words}" title="{words}" '
        'style="display:block;max-width:160px;max-height:160px;margin:0">'
        f'<span style="{style};font-size:0.8em">{words}</span></span>'
    )


def labelled(rows: Iterable[tuple[str, str]]) -> str:
    """A label and a text on each line; lines without a text are left out."""
    cells = "".join(
        f'<tr style="background:none"><td style="{_CELL}text-align:left;white-space:pre;'
        f'opacity:0.7">{escaped(label)}</td>'
        f'<td style="{_CELL}text-align:left;white-space:pre-wrap">{_content(text)}</td></tr>'
        for label, text in rows
        if text
    )
    return f'<table style="border:none;margin:0.3em 0"><tbody>{cells}</tbody></table>'


def _content(text: str) -> str:
    return pictured(text) if isinstance(text, Pictured) and text.picture else escaped(text)


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table with a head for each column.

    Args:
        heads: of the columns.
        rows: cells, which are HTML already.
        right: indices of the columns to align on the right.
    """
    right = frozenset(right)

    def cell(tag: str, i: int, content: str) -> str:
        align = "right" if i in right else "left"
        return f'<{tag} style="{_CELL}text-align:{align};white-space:nowrap">{content}</{tag}>'

    above = "".join(cell("th", i, escaped(head)) for i, head in enumerate(heads))
    lines = "".join(
        f'<tr style="background:none">'
        f"{''.join(cell('td', i, content) for i, content in enumerate(row))}</tr>"
        for row in rows
    )
    return (
        '<div style="overflow-x:auto"><table style="border:none;margin:0.3em 0">'
        f"<thead><tr>{above}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def bar(done: float, total: float) -> str:
    """A progress bar."""
    share = f"{100 * done / total:.0f} %" if total else ""
    return (
        f'<progress value="{done:g}" max="{total:g}" style="width:100%;max-width:30em" '
        f'title="{share}">{share}</progress>'
    )


def as_image(drawing: str, words: str) -> str:
    """A drawing as an image: JupyterLab removes SVG from notebooks that it does not trust.

    Args:
        drawing: SVG. Images do not know the colour of the text, which is replaced by grey.
        words: what is shown instead where there are no images.
    """
    # An SVG inside a page needs no namespace, as an image it does.
    named = drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    content = base64.b64encode(named.replace("currentColor", _NEUTRAL).encode()).decode()
    return (
        f'<img alt="{escaped(words)}" style="max-width:none" '
        f'src="data:image/svg+xml;base64,{content}">'
    )


def curve_picture(
    values: Sequence[float],
    width: int = 480,
    height: int = 90,
    bounds: tuple[float, float] | None = None,
    at: Sequence[float] | None = None,
) -> str:
    """A curve in the colour of the text.

    Args:
        values: from left to right.
        width: in pixels.
        height: in pixels.
        bounds: values at the lower and the upper edge. Default: the least and the largest.
        at: horizontal position of each value, ascending. Default: equally spaced.
    """
    # Two pixels above and below are for the width of the line. Curves may have no extent: `or 1`.
    low, high = bounds or (min(values), max(values))
    at = at or range(len(values))
    across, down = width / ((at[-1] - at[0]) or 1), (height - 4) / ((high - low) or 1)
    points = " ".join(
        f"{(place - at[0]) * across:.1f},{2 + (high - value) * down:.1f}"
        for place, value in zip(at, values, strict=True)
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'style="max-width:100%;color:inherit" role="img"><polyline fill="none" '
        f'stroke="currentColor" stroke-width="1.5" points="{points}"/></svg>'
    )
