"""The text of an inspection, for a terminal of any width and for a log."""

import unicodedata
from collections.abc import Iterable, Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.rule import Rule
from rich.text import Text

from ftkit.data.inspection.inspection import (
    Bar,
    Finding,
    Inspection,
    Lengths,
    ShownSample,
    SourceNumbers,
    SplitNumbers,
)
from ftkit.utils.console.formatting import percent_text, shortened
from ftkit.utils.console.terminal import labelled_grid

MOST_TOKENS = 1500
"""Of a sample that are written in a text; longer ones lose their middle."""
_BAR_WIDTH = 40
_EXAMPLE_WIDTH = 120
_LABEL_WIDTH = 14
"""Of the ranges of lengths."""
_TRAINED, _MARK, _BETWEEN = "bold green underline", "magenta", "dim"


class InspectionText:
    """An inspection as rows, bars and samples; what is trained is in brackets too."""

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seen, ascii_only = self._inspection, options.ascii_only
        yield _rule(f"data for {visible(seen.base_model)}")
        for source in seen.sources:
            yield labelled_grid(visible_rows(source_rows(source)))
            yield ""
        yield _rule("lengths in tokens")
        yield labelled_grid(length_rows(seen))
        yield from _bars(seen.lengths, options.max_width, ascii_only)
        yield ""
        yield _rule("duplicates")
        yield labelled_grid(visible_rows(duplicate_rows(seen)))
        if seen.samples:
            yield ""
            yield _rule("samples")
            yield _legend(ascii_only)
        for sample in seen.samples:
            yield ""
            yield Text(sample_title(sample, seen), "cyan")
            yield from _token_lines(sample, options.max_width, ascii_only)
        yield ""
        yield _rule("findings")  # last: there a terminal shows them
        yield from _findings(seen.findings)


def source_rows(source: SourceNumbers) -> Iterator[tuple[str, str]]:
    """Label and value of what is said of a source."""
    yield "source", source.where
    yield "records", source.records or source.shape
    if unused := source.unused.text:
        yield "not used", unused
    yield "template", source.template
    yield "trained", f"{TRAINED_WORDS[source.train_on]} (train_on {source.train_on})"
    for name, split in (("train", source.train), ("validation", source.val)):
        yield name, _used_words(split)
        for left_out in split.left_out:
            yield "", f"{left_out.records:,} left out: {left_out.reason}"
            if left_out.example:
                yield "", f"such as {shortened(visible(left_out.example), _EXAMPLE_WIDTH)}"
        if split.samples:
            yield "", _token_words(split)
    if source.per_epoch != source.train.samples:
        yield "epoch", f"takes {source.per_epoch:,} of its samples"


TRAINED_WORDS = {
    "assistant": "every turn of the assistant",
    "last": "the last answer alone",
    "all": "every token",
}


def length_rows(seen: Inspection) -> Iterator[tuple[str, str]]:
    """Label and value of what lengths come to, and what that means for max_seq_length."""
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


def duplicate_rows(seen: Inspection) -> Iterator[tuple[str, str]]:
    """Label and value of what is there more than once."""
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


def sample_title(sample: ShownSample, seen: Inspection) -> str:
    """Which sample it is, and how much of it is trained."""
    source = f" of {visible(sample.source)}" if len(seen.sources) > 1 else ""
    return (
        f"training sample {sample.number:,}{source}: {len(sample.ids):,} tokens, "
        f"{sum(sample.trained):,} trained"
    )


def range_of(bar: Bar) -> str:
    """The lengths that a bar counts."""
    return f"{bar.first:,}-{bar.last:,}" if bar.last > bar.first else f"{bar.first:,}"


def counted(bar: Bar) -> str:
    """The samples of a bar, and those that are too long."""
    return f"{bar.samples:,}" + f" ({bar.over:,} too long)" * bool(bar.over)


def visible(text: str) -> str:
    r"""A text with every character that does not show as one written out: \t, \u200b."""
    return "".join(_visible(character) for character in text)


def visible_rows(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Labels and values, of which the latter may hold anything."""
    return ((label, visible(value)) for label, value in rows)


def _visible(character: str) -> str:
    if unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode()


def _rule(title: str) -> Rule:
    return Rule(Text(title, "bold"), characters="-", align="left", style="dim")


def _used_words(split: SplitNumbers) -> str:
    words = f"{split.used:,} of {split.records:,} records used, {split.samples:,} samples"
    told = {
        "cut off": split.truncated,
        "dropped for their length": split.dropped,
        "cut into several": split.split,
        "split by turn": split.split_by_turn,
    }
    return words + "".join(f", {count:,} {what}" for what, count in told.items() if count)


def _token_words(split: SplitNumbers) -> str:
    share = percent_text(split.trained_tokens / split.tokens) if split.tokens else ""
    words = f"{split.tokens:,} tokens, {split.trained_tokens:,} of them trained ({share})"
    return words + (f"; {split.lost_tokens:,} more are lost" if split.lost_tokens else "")


def _bars(lengths: Lengths, width: int, ascii_only: bool) -> Iterator[RenderableType]:
    """A line for each bar: what is too long is drawn in another pattern."""
    full, over = ("#", "x") if ascii_only else ("█", "░")
    room = max(min(_BAR_WIDTH, width - _LABEL_WIDTH - 16), 5)
    most = max(bar.samples for bar in lengths.bars)
    for bar in lengths.bars:
        whole = _drawn(bar.samples, most, room)
        shaded = _drawn(bar.over, most, room)
        yield Text.assemble(
            (f"{range_of(bar):>{_LABEL_WIDTH}} ", "cyan"),
            (full * (whole - shaded), "green"),
            (over * shaded, "red"),
            f"{' ' * bool(bar.samples)}{counted(bar)}",
        )


def _drawn(samples: int, most: int, room: int) -> int:
    """Characters of a bar; none only of nothing."""
    return max(round(samples / most * room), 1) if samples else 0


def _findings(findings: list[Finding]) -> Iterator[RenderableType]:
    if not findings:
        yield Text("nothing that ruins runs", "green")
    for finding in findings:
        style = "bold yellow" if finding.severity == "warning" else "bold"
        yield Text.assemble(
            (f"{finding.severity}: ", style), f"{visible(finding.text)} {visible(finding.advice)}"
        )


def _legend(ascii_only: bool) -> Text:
    opening, closing, between = _signs(ascii_only)
    return Text.assemble(
        (opening, _TRAINED), ("trained", _TRAINED), (closing, _TRAINED), " not trained ",
        ("<mark>", _MARK), "  ", (between, _BETWEEN), " between tokens",
    )  # fmt: skip


def _signs(ascii_only: bool) -> tuple[str, str, str]:
    """Before and after what is trained, and between tokens."""
    return ("[[", "]]", "|") if ascii_only else ("⟦", "⟧", "·")


def _token_lines(sample: ShownSample, width: int, ascii_only: bool) -> Iterator[Text]:
    """The tokens of a sample, in lines that end where those of the sample do, or are full."""
    line = _line()
    for text, style, ends_line in _pieces(sample, ascii_only):
        size = cell_len(text)
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
    """As much of the beginning as there is room for; at least a character."""
    size = 0
    for count, character in enumerate(text):
        size += cell_len(character)
        if size > room:
            return text[: max(count, 1)]
    return text


def _pieces(sample: ShownSample, ascii_only: bool) -> Iterator[tuple[str, str, bool]]:
    """Pieces of text, their styles, and whether a line of the sample ends behind them."""
    opening, closing, between = _signs(ascii_only)
    end_of_line = "\\n" if ascii_only else "↵"
    left_out = range(MOST_TOKENS * 2 // 3, len(sample.ids) - MOST_TOKENS // 3)
    for i, (text, trained, special) in enumerate(
        zip(sample.texts, sample.trained, sample.special, strict=True)
    ):
        if i in left_out:
            if i == left_out.start:
                yield f" ... {len(left_out):,} tokens ... ", _BETWEEN, True
            continue
        if trained and not (i and sample.trained[i - 1]):
            yield opening, _TRAINED, False
        style = _TRAINED if trained else _MARK if special else ""
        *whole, last = text.split("\n")
        if whole and not last:  # the line ends behind what separates it from the next token
            last = whole.pop() + "\n"
        for line in whole:
            yield visible(line) + end_of_line, style, True
        yield visible(last.removesuffix("\n")) + end_of_line * last.endswith("\n"), style, False
        goes_on = i + 1 < len(sample.ids) and sample.trained[i + 1] == trained
        ends = i + 1 == len(sample.ids) or last.endswith("\n")
        if trained and not goes_on:
            yield closing, _TRAINED, ends
        else:
            yield between * goes_on, _BETWEEN, ends
