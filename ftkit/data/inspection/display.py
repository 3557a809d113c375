"""Display of an inspection: as text for terminals and logs, and as an HTML page."""

import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, get_args

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.rule import Rule
from rich.text import Text

from ftkit.data.inspection.inspection import (
    Answer,
    Bar,
    Finding,
    Inspection,
    Lengths,
    ShownSample,
    SourceNumbers,
    SplitNumbers,
)
from ftkit.data.records.media import ShownMedium
from ftkit.utils.console.formatting import Pictured, percent_text, shortened
from ftkit.utils.console.html import GOOD, escaped, labelled, pictured, styled, whole_page
from ftkit.utils.console.terminal import labelled_grid
from ftkit.version import __version__

MOST_TOKENS = 1500
"""Tokens of a sample in a text; longer samples lose their middle."""
_BAR_WIDTH = 40
_EXAMPLE_WIDTH = 120
_LABEL_WIDTH = 14
_MOST_LABELS = 8
"""Width of the labels of bars."""
_TRAINED, _MARK, _BETWEEN = "bold green underline", "magenta", "dim"


class InspectionText:
    """Renders an inspection in a terminal; trained tokens are coloured and in brackets."""

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seen, ascii_only = self._inspection, options.ascii_only
        yield _rule(f"data for {visible(seen.base_model)}")
        for source in seen.sources:
            yield labelled_grid(_visible_rows(_source_rows(source)))
            yield ""
        yield _rule("lengths in tokens")
        yield labelled_grid(_length_rows(seen))
        yield from _bars(seen.lengths, options.max_width, ascii_only)
        yield ""
        yield _rule("duplicates")
        yield labelled_grid(_visible_rows(_duplicate_rows(seen)))
        if seen.samples:
            yield ""
            yield _rule("samples")
            yield _legend(ascii_only, any(map(_weights_of, seen.samples)))
        for sample in seen.samples:
            yield ""
            yield Text(_sample_title(sample, seen), "cyan")
            yield from _token_lines(sample, options.max_width, ascii_only)
        yield ""
        yield _rule("findings")  # last: there a terminal shows them
        yield from _findings(seen.findings)


def _source_rows(source: SourceNumbers) -> Iterator[tuple[str, str]]:
    """Rows about a source, as label and value."""
    yield "source", source.where
    yield "records", source.records or source.shape
    if unused := source.unused.text:
        yield "not used", unused
    yield "template", source.template
    trained = f"{_TRAINED_WORDS[source.train_on]} (train_on {source.train_on})"
    yield "trained", "tokens by their weights" if source.shape == "tokens" else trained
    for name, split in (("train", source.train), ("validation", source.val)):
        yield name, _used_words(split)
        for left_out in split.left_out:
            yield "", f"{left_out.records:,} left out: {left_out.reason}"
            if left_out.example:
                yield "", f"such as {shortened(visible(left_out.example), _EXAMPLE_WIDTH)}"
        if split.samples:
            yield "", _token_words(split)
        for numbers in split.media:
            yield "", numbers.text
        if split.labels:
            yield "", _label_words(split.labels)
    if source.per_epoch != source.train.samples:
        yield "epoch", f"takes {source.per_epoch:,} of its samples"


_TRAINED_WORDS = {
    "assistant": "every turn of the assistant",
    "last": "only the last answer",
    "all": "every token",
}


def _length_rows(seen: Inspection) -> Iterator[tuple[str, str]]:
    """Rows about lengths and max_seq_length, as label and value."""
    lengths = seen.lengths
    yield (
        "train",
        (
            f"half have at most {lengths.median:,}, 90 % {lengths.p90:,}, 99 % {lengths.p99:,}; "
            f"the shortest {lengths.shortest:,}, the longest {lengths.longest:,}"
        ),
    )
    limit = f"train.max_seq_length {seen.max_seq_length:,}"
    if not lengths.over:
        spare = f"; {lengths.longest:,} would be enough"
        yield "limit", f"{limit} holds all" + spare * (lengths.longest < seen.max_seq_length)
        return
    share = percent_text(lengths.over / lengths.samples)
    whole = f"{lengths.longest:,} would hold all"
    if lengths.longest > seen.model_context:
        whole += f", but the model takes {seen.model_context:,} at most"
    yield "limit", f"{limit} is too short for {lengths.over:,} ({share}); {whole}"


def _duplicate_rows(seen: Inspection) -> Iterator[tuple[str, str]]:
    """Rows about duplicates, as label and value."""
    found = seen.duplicates
    train = sum(source.train.samples for source in seen.sources)
    val = sum(source.val.samples for source in seen.sources)
    yield "train", f"{found.train:,} of {train:,} samples repeat another one"
    for text in found.train_examples:
        yield "", f"such as {shortened(visible(text), _EXAMPLE_WIDTH)}"
    yield (
        "validation",
        (
            f"{found.val_in_train:,} of {val:,} samples are in train too, {found.val:,} repeat "
            "another one"
        ),
    )
    for text in found.val_in_train_examples:
        yield "", f"such as {shortened(visible(text), _EXAMPLE_WIDTH)}"


def _sample_title(sample: ShownSample, seen: Inspection) -> str:
    """Title of a sample: its number, its source and its trained tokens."""
    source = f" of {visible(sample.source)}" if len(seen.sources) > 1 else ""
    noun = "pair" if sample.answer in get_args(Answer) else "sample"
    name = sample.answer or sample.label
    answer = f", {visible(name)}" if name else ""
    return (
        f"training {noun} {sample.number:,}{source}{answer}: {len(sample.ids):,} tokens, "
        f"{sum(sample.trained):,} trained"
    )


def _shared_words(sample: ShownSample) -> str:
    """Words in place of the prompt that is shown above."""
    return f"... {sample.shared:,} tokens of the prompt, as above ..."


def _range_of(bar: Bar) -> str:
    """Range of lengths of a bar."""
    return f"{bar.first:,}-{bar.last:,}" if bar.last > bar.first else f"{bar.first:,}"


def _counted(bar: Bar) -> str:
    """Samples of a bar, and how many of them are too long."""
    return f"{bar.samples:,}" + f" ({bar.over:,} too long)" * bool(bar.over)


def visible(text: str) -> str:
    r"""Return a text with its invisible characters written out, such as \t and \u200b."""
    return "".join(_visible(character) for character in text)


def _visible_rows(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Make the values of rows visible; they may hold anything."""
    return ((label, visible(value)) for label, value in rows)


def _visible(character: str) -> str:
    # Control and format characters, surrogates, private and unassigned ones, separators of lines.
    if unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode()


def _rule(title: str) -> Rule:
    return Rule(Text(title, "bold"), characters="-", align="left", style="dim")


def _label_words(labels: Mapping[str, int]) -> str:
    """Samples by their label, the most frequent ones alone."""
    first = [f"{count:,} {visible(label)}" for label, count in labels.items()][:_MOST_LABELS]
    more = f" and {len(labels) - len(first):,} other labels" if len(labels) > len(first) else ""
    return f"samples by label: {', '.join(first)}{more}"


def _used_words(split: SplitNumbers) -> str:
    words = f"{split.used:,} of {split.records:,} records used, {split.samples:,} samples"
    lost = {
        "cut off": split.truncated,
        "left out (longer than max_seq_length)": split.dropped,
        "left out (fewer tokens than data.min_tokens)": split.short,
        "cut into several": split.split,
        "split by turn": split.split_by_turn,
    }
    return words + "".join(f", {count:,} {what}" for what, count in lost.items() if count)


def _token_words(split: SplitNumbers) -> str:
    share = percent_text(split.trained_tokens / split.tokens) if split.tokens else ""
    words = f"{split.tokens:,} tokens, {split.trained_tokens:,} of them trained ({share})"
    if weights := split.weights:
        words += (
            f" with weights from {weights.least:g} to {weights.most:g}, mean {weights.mean:.3g}"
        )
    return words + (f"; {split.lost_tokens:,} more are lost" if split.lost_tokens else "")


def _bars(lengths: Lengths, width: int, ascii_only: bool) -> Iterator[RenderableType]:
    """Lines of a histogram; samples that are too long are drawn in another pattern."""
    full, over = ("#", "x") if ascii_only else ("█", "░")
    # 16 characters for the counts beside the bar.
    room = max(min(_BAR_WIDTH, width - _LABEL_WIDTH - 16), 5)
    most = max(bar.samples for bar in lengths.bars)
    for bar in lengths.bars:
        whole = _drawn(bar.samples, most, room)
        # What is too long is part of the bar, at its end.
        shaded = _drawn(bar.over, most, room)
        yield Text.assemble(
            (f"{_range_of(bar):>{_LABEL_WIDTH}} ", "cyan"),
            (full * (whole - shaded), "green"),
            (over * shaded, "red"),
            f"{' ' * bool(bar.samples)}{_counted(bar)}",
        )


def _drawn(samples: int, most: int, room: int) -> int:
    """Width of a bar in characters, at least one if it has samples."""
    return max(round(samples / most * room), 1) if samples else 0


def _findings(findings: list[Finding]) -> Iterator[RenderableType]:
    if not findings:
        yield Text("No problems found.", "green")
    for finding in findings:
        style = "bold yellow" if finding.severity == "warning" else "bold"
        yield Text.assemble(
            (f"{finding.severity}: ", style), f"{visible(finding.text)} {visible(finding.advice)}"
        )


def _legend(ascii_only: bool, weighted: bool) -> Text:
    opening, closing, between = _signs(ascii_only)
    example = f"{opening}{_weight_mark(0.5)}with weight 0.5{closing} "
    return Text.assemble(
        (opening, _TRAINED), ("trained", _TRAINED), (closing, _TRAINED), " ",
        (example * weighted, _TRAINED), "not trained ",
        ("<mark>", _MARK), "  ", (between, _BETWEEN), " between tokens",
    )  # fmt: skip


def _weights_of(sample: ShownSample) -> set[float]:
    """Weights of a sample that are shown."""
    return {*sample.weights} - {0.0, 1.0}


def _weight_mark(weight: float) -> str:
    """Mark before tokens of a weight; empty if it is 1."""
    return "" if weight == 1 else f"{weight:g}: "


def _signs(ascii_only: bool) -> tuple[str, str, str]:
    """Signs before and after what is trained, and between tokens."""
    return ("[[", "]]", "|") if ascii_only else ("⟦", "⟧", "·")


def _token_lines(sample: ShownSample, width: int, ascii_only: bool) -> Iterator[Text]:
    """The tokens of a sample, in lines that end where those of the sample do, or are full."""
    line = _line()
    for text, style, ends_line in _pieces(sample, ascii_only):
        # In cells of the terminal: wide characters take two.
        size = cell_len(text)
        # A token that does not fit begins the next line; one that is wider than a line is broken.
        if line.cell_len + size > width >= size and line.plain:
            yield line
            line = _line()
        rest = text
        while cell_len(rest) > width - line.cell_len:
            part = _fitting(rest, width - line.cell_len)
            yield line.append(part, style)
            line, rest = _line(), rest[len(part) :]
        line.append(rest, style)
        if ends_line:
            yield line
            line = _line()
    if line.plain:
        yield line


def _line() -> Text:
    return Text(no_wrap=True, overflow="fold")


def _fitting(text: str, room: int) -> str:
    """Longest beginning that fits into a width, of at least one character."""
    size = 0
    for count, character in enumerate(text):
        size += cell_len(character)
        if size > room:
            # At least one character, or a wide one in a narrow terminal would never be written.
            return text[: max(count, 1)]
    return text


class _Unit(NamedTuple):
    """What is shown at once: a token, or all tokens of a medium."""

    first: int
    """Number of the first token."""
    text: str
    weight: float
    special: bool
    medium: ShownMedium | None = None


def _units(sample: ShownSample) -> list[_Unit]:
    """The tokens of a sample behind those that are shared, those of a medium as one."""
    media = {medium.first: medium for medium in sample.media}
    units, at = list[_Unit](), sample.shared
    while at < len(sample.ids):
        medium = media.get(at)
        if medium is None:
            units.append(_Unit(at, sample.texts[at], sample.weights[at], sample.special[at]))
            at += 1
        else:
            units.append(_Unit(at, medium.words, 0.0, True, medium))
            at = medium.end
    return units


def _pieces(sample: ShownSample, ascii_only: bool) -> Iterator[tuple[str, str, bool]]:
    """Pieces of text, their styles, and whether a line of the sample ends behind them."""
    opening, closing, between = _signs(ascii_only)
    end_of_line = "\\n" if ascii_only else "↵"
    units = _units(sample)
    # More of the beginning: it shows the template.
    left_out = range(MOST_TOKENS * 2 // 3, len(units) - MOST_TOKENS // 3)
    if sample.shared:
        yield _shared_words(sample), _BETWEEN, True
    for i, (_, text, weight, special, _) in enumerate(units):
        if i in left_out:
            if i == left_out.start:
                count = units[left_out.stop].first - units[i].first
                yield f" ... {count:,} tokens ... ", _BETWEEN, True
            continue
        # Brackets around neighbours of one weight, not around each token.
        if weight and not (i and units[i - 1].weight == weight):
            yield opening + _weight_mark(weight), _TRAINED, False
        style = _TRAINED if weight else _MARK if special else ""
        *whole, last = text.split("\n")
        if whole and not last:  # the line ends behind what separates it from the next token
            last = whole.pop() + "\n"
        for line in whole:
            yield visible(line) + end_of_line, style, True
        yield visible(last.removesuffix("\n")) + end_of_line * last.endswith("\n"), style, False
        goes_on = i + 1 < len(units) and units[i + 1].weight == weight
        ends = i + 1 == len(units) or last.endswith("\n")
        if weight and not goes_on:
            yield closing, _TRAINED, ends
        else:
            yield between * goes_on, _BETWEEN, ends


# --- HTML -----------------------------------------------------------------------------------------

# Styles stand in the elements, because the output cell of a notebook has no style sheet. 33 is an
# opacity of 20 %; clone closes the frame where a line breaks.
_TRAINED_CSS = (
    f"background:{GOOD}33;border-bottom:2px solid {GOOD};padding:0 1px;"
    "-webkit-box-decoration-break:clone;box-decoration-break:clone"
)
_TOKEN_CSS = "border-right:1px solid #8886"
_MARK_CSS = f"{_TOKEN_CSS};color:#b356ab;font-weight:bold"
_OVER_CSS = "repeating-linear-gradient(45deg,#d1493f 0 4px,transparent 4px 8px)"
_PAGE_CSS = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem; color: #222; background: #fff; }
h1 { font-size: 1.3rem; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #161616; } }
"""


def inspection_page(seen: Inspection) -> str:
    """Render a self-contained HTML page, in ASCII so that any stream can encode it."""
    end = f'<p style="opacity:0.7">Made by ftkit {__version__}.</p>'
    title = f"ftkit data: {visible(seen.base_model)}"
    page = whole_page(title, inspection_fragment(seen) + end, _PAGE_CSS)
    return page.encode("ascii", "xmlcharrefreplace").decode()


def inspection_fragment(seen: Inspection) -> str:
    """Render an inspection as HTML for the cell of a notebook."""
    parts = [
        *(labelled(_visible_rows(_source_rows(source))) for source in seen.sources),
        _html_title("Findings"),
        _html_findings(seen.findings),
        _html_title("Lengths in tokens"),
        labelled(_length_rows(seen)),
        _html_bars(seen.lengths.bars),
        _html_title("Duplicates"),
        labelled(_visible_rows(_duplicate_rows(seen))),
    ]
    if seen.samples:
        trained, mark = (
            f'<span style="{_TRAINED_CSS}">trained</span>',
            _html_token("mark", _MARK_CSS),
        )
        legend = f"<div>{trained} not trained {mark}; a line after each token</div>"
        parts += [_html_title("Samples"), legend]
    samples = [
        '<div style="margin:0.8em 0 0.2em;opacity:0.7">'
        f"{escaped(_sample_title(sample, seen))}</div>{_html_sample(sample)}"
        for sample in seen.samples
    ]
    return f'<div style="max-width:60em">{"".join([*parts, *samples])}</div>'


def _html_title(title: str) -> str:
    return f'<div style="font-weight:bold;margin:1em 0 0.2em">{escaped(title)}</div>'


def _html_findings(findings: list[Finding]) -> str:
    if not findings:
        return styled("No problems found.", "green")
    styles = {"warning": "bold yellow", "notice": "bold"}
    return "".join(
        f'<div style="margin:0.3em 0">{styled(finding.severity, styles[finding.severity])} '
        f"{escaped(visible(finding.text))} <b>{escaped(visible(finding.advice))}</b></div>"
        for finding in findings
    )


def _html_bars(bars: list[Bar]) -> str:
    """A table of bars; samples that are too long are hatched."""
    most = max(bar.samples for bar in bars)
    rows = "".join(
        '<tr style="background:none"><td style="text-align:right;padding:0 0.6em 0 0;border:none;'
        f'white-space:nowrap;opacity:0.7">{_range_of(bar)}</td>'
        '<td style="width:100%;padding:0;border:none;text-align:left"><div style="display:flex;'
        f'align-items:center">{_html_bar(bar.samples - bar.over, most, GOOD)}'
        f"{_html_bar(bar.over, most, _OVER_CSS)}"
        '<span style="padding-left:0.4em;white-space:nowrap">'
        f"{_counted(bar)}</span></div></td></tr>"
        for bar in bars
    )
    # Jupyter's tables are "fixed", which leaves no room to the labels.
    style = "border:none;width:100%;max-width:40em;table-layout:auto"
    return f'<table style="{style}"><tbody>{rows}</tbody></table>'


def _html_bar(samples: int, most: int, background: str) -> str:
    """A bar of a histogram, narrow enough for a number beside the longest."""
    if not samples:
        return ""
    # At most 60 % of the width, to leave room for the number. A bar with samples is always visible.
    share = max(60 * samples / most, 0.5)
    return f'<div style="height:0.9em;width:{share:.1f}%;background:{background}"></div>'


def _html_sample(sample: ShownSample) -> str:
    return (
        '<div style="font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;'
        'max-height:30em;overflow-y:auto;border:1px solid #8886;padding:0.4em 0.6em">'
        f"{''.join(_html_tokens(sample))}</div>"
    )


def _html_tokens(sample: ShownSample) -> Iterator[str]:
    """Tokens with their ids as tooltips; neighbours of one weight share a frame."""
    if sample.shared:
        yield f'<span style="opacity:0.7">{_shared_words(sample)}</span>\n'
    before = 0.0
    for first, text, weight, special, medium in _units(sample):
        if before and before != weight:
            yield "</span>"
        if weight and before != weight:
            yield f'<span style="{_TRAINED_CSS}">'
            yield f"<sup>{_weight_mark(weight)}</sup>" if weight != 1 else ""
        before = weight
        if medium is not None and medium.picture:
            yield _html_picture(medium)
        else:
            yield _html_token(text, _MARK_CSS if special else _TOKEN_CSS, sample.ids[first])
    if before:
        yield "</span>"


def _html_picture(medium: ShownMedium) -> str:
    """A small picture in the place of its tokens, with its description below."""
    shown = Pictured(visible(medium.words), medium.picture)
    return pictured(shown, f"{_MARK_CSS};border:none")


def _html_token(text: str, style: str, token: int | None = None) -> str:
    # Escaped last: the records of others must not become code of the page.
    shown = "↵\n".join(escaped(visible(line)) for line in text.split("\n"))
    number = "" if token is None else f' title="{token}"'
    return f'<span style="{style}"{number}>{shown}</span>'
