"""The page of an inspection, and the same for a cell of a notebook."""

from collections.abc import Iterator

from ftkit import __version__
from ftkit.data.inspection.inspection import Bar, Finding, Inspection, ShownSample
from ftkit.data.inspection.text import (
    counted,
    duplicate_rows,
    length_rows,
    range_of,
    sample_title,
    source_rows,
    visible,
    visible_rows,
)
from ftkit.utils.console.html import GOOD, escaped, labelled, styled, whole_page

_TRAINED = (
    f"background:{GOOD}33;border-bottom:2px solid {GOOD};padding:0 1px;"
    "-webkit-box-decoration-break:clone;box-decoration-break:clone"
)
_TOKEN = "border-right:1px solid #8886"
_MARK = f"{_TOKEN};color:#b356ab;font-weight:bold"
_OVER = "repeating-linear-gradient(45deg,#d1493f 0 4px,transparent 4px 8px)"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem; color: #222; background: #fff; }
h1 { font-size: 1.3rem; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #161616; } }
"""


def inspection_page(seen: Inspection) -> str:
    """A page that loads nothing from anywhere; ASCII alone, so that any stream takes it."""
    end = f'<p style="opacity:0.7">Made by ftkit {__version__}.</p>'
    found = whole_page(f"ftkit data: {visible(seen.base_model)}", fragment(seen) + end, _STYLE)
    return found.encode("ascii", "xmlcharrefreplace").decode()


def fragment(seen: Inspection) -> str:
    """All of it but the frame of the page, for a cell of a notebook."""
    parts = [
        *(labelled(visible_rows(source_rows(source))) for source in seen.sources),
        _head("Findings"),
        _findings(seen.findings),
        _head("Lengths in tokens"),
        labelled(length_rows(seen)),
        _bars(seen.lengths.bars),
        _head("Duplicates"),
        labelled(visible_rows(duplicate_rows(seen))),
    ]
    if seen.samples:
        legend = f'<span style="{_TRAINED}">trained</span> not trained {_token("mark", _MARK)}'
        parts += [_head("Samples"), f"<div>{legend}; a line after each token</div>"]
    samples = [
        f'<div style="margin:0.8em 0 0.2em;opacity:0.7">{escaped(sample_title(sample, seen))}</div>'
        f"{_sample(sample)}"
        for sample in seen.samples
    ]
    return f'<div style="max-width:60em">{"".join([*parts, *samples])}</div>'


def _head(title: str) -> str:
    return f'<div style="font-weight:bold;margin:1em 0 0.2em">{escaped(title)}</div>'


def _findings(findings: list[Finding]) -> str:
    if not findings:
        return styled("nothing that ruins runs", "green")
    styles = {"warning": "bold yellow", "notice": "bold"}
    return "".join(
        f'<div style="margin:0.3em 0">{styled(finding.severity, styles[finding.severity])} '
        f"{escaped(visible(finding.text))} <b>{escaped(visible(finding.advice))}</b></div>"
        for finding in findings
    )


def _bars(bars: list[Bar]) -> str:
    """A row for each bar: what is too long is hatched."""
    most = max(bar.samples for bar in bars)
    rows = "".join(
        '<tr style="background:none"><td style="text-align:right;padding:0 0.6em 0 0;border:none;'
        f'white-space:nowrap;opacity:0.7">{range_of(bar)}</td>'
        '<td style="width:100%;padding:0;border:none;text-align:left"><div style="display:flex;'
        f'align-items:center">{_bar(bar.samples - bar.over, most, GOOD)}'
        f'{_bar(bar.over, most, _OVER)}<span style="padding-left:0.4em;white-space:nowrap">'
        f"{counted(bar)}</span></div></td></tr>"
        for bar in bars
    )
    # Jupyter's tables are "fixed", which leaves no room to the labels.
    style = "border:none;width:100%;max-width:40em;table-layout:auto"
    return f'<table style="{style}"><tbody>{rows}</tbody></table>'


def _bar(samples: int, most: int, background: str) -> str:
    """Of all room for bars, so much that numbers fit beside the longest."""
    if not samples:
        return ""
    share = max(60 * samples / most, 0.5)
    return f'<div style="height:0.9em;width:{share:.1f}%;background:{background}"></div>'


def _sample(sample: ShownSample) -> str:
    return (
        '<div style="font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;'
        'max-height:30em;overflow-y:auto;border:1px solid #8886;padding:0.4em 0.6em">'
        f"{''.join(_tokens(sample))}</div>"
    )


def _tokens(sample: ShownSample) -> Iterator[str]:
    """Each token by itself, with its number; what is trained together in one frame."""
    was_trained = False
    columns = zip(sample.ids, sample.texts, sample.trained, sample.special, strict=True)
    for token, text, trained, special in columns:
        if was_trained and not trained:
            yield "</span>"
        if trained and not was_trained:
            yield f'<span style="{_TRAINED}">'
        was_trained = trained
        yield _token(text, _MARK if special else _TOKEN, token)
    if was_trained:
        yield "</span>"


def _token(text: str, style: str, token: int | None = None) -> str:
    shown = "↵\n".join(escaped(visible(line)) for line in text.split("\n"))
    number = "" if token is None else f' title="{token}"'
    return f'<span style="{style}"{number}>{shown}</span>'
