"""The journal of a rank: what it shows and reports, and what it says of the data."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from ftkit.data.dataset import DataSets, ValidationSets
from ftkit.data.inspection.findings import REPORTED_BY_COUNTS, Evidence, findings
from ftkit.data.prepare import Counts
from ftkit.data.samples.sample_set import media_numbers
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.pretrained.tokenizer import end_tokens
from ftkit.recipe.recipe import Recipe
from ftkit.runs.report.report import DataCounts, Source
from ftkit.runs.report.table import losses_of_data_text
from ftkit.training.recorder import Recorder
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import percent_text

_MOST_SHOWN = 40
"""Characters of a data path in a message; of a longer one only the last part is shown."""


@dataclass(frozen=True)
class Journal:
    """Output of a rank: messages and progress on the display, measurements in the report."""

    display: Display
    recorder: Recorder

    def warn(self, text: str) -> None:
        """Show a warning and add it to the report."""
        self.display.warning(text)
        self.recorder.warn(text)


def log_data_summary(data: DataSets, journal: Journal) -> None:
    """Report the records and samples of each source, and show which ones are not trained on."""
    sources = {}
    for part, take in zip(data.parts, data.takes, strict=True):
        counts = {str(split): _report_counts(one.counts) for split, one in part.splits.items()}
        if data.stream is not None:  # what was read to train on is no more than the first records
            del counts["train"]
        per_epoch = take if data.stream is None else None
        sources[part.source.name] = Source(data=counts, samples_per_epoch=per_epoch)
        of_source = f" of {part.source.name}" if len(data.parts) > 1 else ""
        where = part.source.where
        shown = where if len(where) <= _MOST_SHOWN else Path(where).name
        journal.display.message(f"data of {shown}: {part.part.summary}")
        for split, known in counts.items():
            if text := losses_of_data_text(known):
                journal.display.message(f"{split} data{of_source}: {text}{_lost_text(known)}")
        for numbers in media_numbers([part.splits["train"].samples]):
            journal.display.message(f"train data{of_source}: {numbers.text}")
        for notice in part.notices:
            journal.warn(notice)
    of_all = {str(split): _report_counts(counts) for split, counts in data.counts.items()}
    if data.stream is not None:
        del of_all["train"]
    journal.recorder.on_data(of_all, sources)
    journal.recorder.note(shape=data.prompt_source.part.shape)


def log_sets_summary(sets: ValidationSets, journal: Journal) -> None:
    """Report the records and samples of each set, and show which ones are left out."""
    counts = {}
    for part in sets.parts:
        name, known = part.source.name, _report_counts(part.splits["val"].counts)
        counts[name] = Source(data={"val": known})
        journal.display.message(f"set {name}: {part.part.summary}")
        if text := losses_of_data_text(known):
            journal.display.message(f"set {name}: {text}{_lost_text(known)}")
        for notice in part.notices:
            journal.warn(notice)
    journal.recorder.on_sets(counts)


def log_findings(
    data: DataSets, base: BaseModel, max_seq_length: int, recipe: Recipe, journal: Journal
) -> None:
    """Show problems of the data, except for those that its counts already show."""
    evidence = Evidence(
        data=data,
        tokenizer=base.tokenizer,
        end_ids=end_tokens(base.tokenizer_directory),
        max_seq_length=max_seq_length,
        model_context=base.architecture.context_length,
        validates=recipe.eval.validates,
        settings=recipe.data,
    )
    for finding in findings(evidence):
        if finding.kind in REPORTED_BY_COUNTS:
            continue
        if finding.severity == "warning":
            journal.warn(finding.words)
        else:
            journal.display.message(f"notice: {finding.words}")


def _report_counts(counts: Counts) -> DataCounts:
    known = {field.name for field in dataclasses.fields(DataCounts)}
    values = {name: value for name, value in vars(counts).items() if name in known}
    return DataCounts(**values, lost_fraction=counts.lost_fraction)


def _lost_text(counts: DataCounts) -> str:
    """Share of the tokens that are lost for the length of samples, and the key to change."""
    of_length = counts.skipped_no_labels + counts.truncated + counts.dropped + counts.split
    if not of_length + counts.short:
        return ""
    keys = "train.max_seq_length decides that; of JSON data, data.overlong too"
    if counts.short:
        keys = f"data.min_tokens and {keys}" if of_length else "data.min_tokens decides that"
    return (
        f"; the longest sample has {counts.longest_tokens:,} tokens, "
        f"{percent_text(counts.lost_fraction or 0.0)} of all tokens are lost "
        f"({keys})"
    )
