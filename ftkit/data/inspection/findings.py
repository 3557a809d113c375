"""Findings: properties of the data that harm a run, each with a recommended change."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ftkit.data.dataset import DataSets, LoadedPart
from ftkit.data.inspection.inspection import Finding
from ftkit.data.prepare import NO_LABELS, NO_REASONING, advice_for
from ftkit.data.records.shape_rows import shape_row
from ftkit.data.samples.layout import IntArray
from ftkit.data.samples.sample_set import Sample, SampleSet
from ftkit.data.source_rows import OWN_NAME
from ftkit.models.chat_templates import NO_TOOLS
from ftkit.models.chat_templates.template import OF_TOKENIZER
from ftkit.recipe.recipe import Component
from ftkit.utils.console.formatting import percent_text, shortened

if TYPE_CHECKING:
    from ftkit.models.pretrained.tokenizer import Tokenizer

_MOST_EXAMPLES = 2
_PROBES = 16
"""Tokens of a sample that tell most samples apart."""
# 2^64 divided by the golden ratio: multiplied by it, keys that differ little are spread over all
# bits (Fibonacci hashing).
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

RecordPlace = tuple[int, int]
"""Number of the source, and of the sample in it."""


@dataclass(frozen=True, kw_only=True)
class _FoundDuplicates:
    """Numbers of duplicates, with the places of a few."""

    train: int
    """Training samples that repeat an earlier one."""
    val: int
    """Validation samples that repeat an earlier one."""
    val_in_train: int
    """Validation samples that are trained on."""
    train_places: tuple[RecordPlace, ...]
    """Places of some of `train`."""
    val_in_train_places: tuple[RecordPlace, ...]
    """Places of some of `val_in_train`."""


def find_duplicates(train: Sequence[SampleSet], val: Sequence[SampleSet]) -> _FoundDuplicates:
    """Find samples with the same tokens and media, regardless of which tokens are trained.

    A few tokens of each sample distinguish nearly all; only samples that agree in these are read in
    full. So a million samples take about a second. The tokens of a pair are those of both answers.

    Args:
        train: samples of each source.
        val: the same for validation.
    """
    keys = np.concatenate([_keys(samples) for samples in (*train, *val)])
    # Most samples have a key of their own: only the others are compared by all their tokens.
    _, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    alike = sizes[group] > 1
    seen: set[bytes] = set()
    repeats: list[RecordPlace] = []
    shared: list[RecordPlace] = []
    seen_in_val: set[bytes] = set()
    val_repeats = 0
    start = 0
    for number, samples in enumerate((*train, *val)):
        is_val = number >= len(train)
        # The arrays themselves: making an object of every sample would be slow.
        tokens, offsets = samples.arrays.tokens, _sample_offsets(samples)
        for index in np.flatnonzero(alike[start : start + len(samples)]).tolist():
            ids = tokens[offsets[index] : offsets[index + 1]]
            # Hashes, because the tokens of many long samples would fill memory.
            content = _media_of(samples, index) + ids.tobytes()
            key = hashlib.blake2b(content, digest_size=16).digest()
            if not is_val:
                if key in seen:
                    repeats.append((number, index))
                seen.add(key)
                continue
            # Training samples come first, so `seen` then holds all of them.
            if key in seen:
                shared.append((number - len(train), index))
            val_repeats += key in seen_in_val
            seen_in_val.add(key)
        start += len(samples)
    return _FoundDuplicates(
        train=len(repeats),
        val=val_repeats,
        val_in_train=len(shared),
        train_places=tuple(repeats[:_MOST_EXAMPLES]),
        val_in_train_places=tuple(shared[:_MOST_EXAMPLES]),
    )


def _media_of(samples: SampleSet, index: int) -> bytes:
    """Digests of the media of a sample: the same tokens may stand for other images."""
    if samples.arrays.media is None:
        return b""
    media = (medium for sequence in samples.sequences(index) for medium in sequence.media)
    return b"".join(bytes.fromhex(medium.digest) for medium in media)


def _keys(samples: SampleSet) -> npt.NDArray[np.uint64]:
    """Key of each sample, [samples]; equal tokens have equal keys."""
    tokens, offsets = samples.arrays.tokens, _sample_offsets(samples)
    starts, sizes = offsets[:-1], np.diff(offsets)
    keys = sizes.astype(np.uint64)
    for probe in range(_PROBES):
        # Evenly spread from the first token to the last.
        at = starts + (sizes - 1) * probe // (_PROBES - 1)
        keys = (keys ^ tokens[at].astype(np.uint64)) * _FACTOR
        # A product carries upwards only: its high bits are mixed into the low ones.
        keys ^= keys >> np.uint64(29)
    return keys


def _sample_offsets(samples: SampleSet) -> IntArray:
    """[samples + 1], where the tokens of each sample start, and the end."""
    return samples.arrays.offsets[:: samples.per_sample]


_MOST_EXAMINED = 500
"""Samples and records of a source that are examined; counts are of all."""
_MOST_TRIED = 20
"""Trained records that a recommended change must not lose."""
_MANY_CUT = 0.05
"""Least share of samples cut off or dropped that is reported."""
_MANY_LOST = 0.01
"""Least share of records without anything to train on that is reported."""
_MANY_SHARED = 0.01
"""Least share of validation samples in the training data that is reported."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Data and settings that findings are derived from."""

    data: DataSets
    tokenizer: "Tokenizer"
    end_ids: frozenset[int]
    """Tokens that end what the base model generates, by its own settings."""
    max_seq_length: int
    model_context: int
    """Tokens that the model takes at most."""
    validates: bool
    """Whether the run computes a validation loss."""
    settings: Component
    """The recipe's data."""

    @cached_property
    def duplicates(self) -> _FoundDuplicates:
        """Duplicates among all samples."""
        parts = self.data.parts
        return find_duplicates(
            [part.splits["train"].samples for part in parts],
            [part.splits["val"].samples for part in parts],
        )

    def of(self, part: LoadedPart) -> str:
        """Name the source in a sentence, if there are several."""
        return f" of {part.source.name}" if len(self.data.parts) > 1 else ""


def findings(evidence: Evidence) -> list[Finding]:
    """Run all checks, and return what they find, warnings first."""
    found = [finding for check in _CHECKS if (finding := check(evidence)) is not None]
    for part in evidence.data.parts:
        found += [one for check in _PART_CHECKS if (one := check(evidence, part)) is not None]
    return sorted(found, key=lambda finding: finding.severity == "notice")


def no_end_of_turn(evidence: Evidence, part: LoadedPart) -> Finding | None:
    """No answer is trained to end, so the model will not learn to stop."""
    ends = part.renderer.stop_ids
    # Samples of the full length may have lost their end.
    whole = [
        sample
        for sample in _examined(part.splits["train"].samples)
        if len(sample.ids) < evidence.max_seq_length
    ]
    # Documents have no answers. One trained end is enough: some records may lack theirs.
    is_free = bool(shape_row(part.part.shape).learned) or not part.renderer.answers
    if is_free or not whole or any(ends & _trained(sample) for sample in whole):
        return None
    end = " or ".join(evidence.tokenizer.token_text(i) for i in sorted(ends))
    advice = "Try --data.chat_template zephyr, which ends turns with EOS"
    if part.renderer.template.marks_generation:
        advice += ", or put the end of the turn inside {% generation %} in the template"
    advice += "."
    return Finding(
        kind="no_end_of_turn",
        severity="warning",
        text=f"No end of an answer{evidence.of(part)} ({end}) is trained, so the model will not "
        "learn to stop.",
        advice=advice,
    )


def end_of_turn_not_known(evidence: Evidence, part: LoadedPart) -> Finding | None:
    """Answers are trained to end with a token at which the base model's settings do not stop."""
    some = _examined(part.splits["train"].samples)
    # The token that ends each trained stretch.
    last = {int(sample.ids[end - 1]) for sample in some for _, end in sample.trained}
    # Cut samples end anywhere.
    last &= part.renderer.stop_ids
    unknown = sorted(last - evidence.end_ids)
    # Without known ends, nothing can be said.
    if not unknown or not evidence.end_ids:
        return None
    ends, known = (
        ", ".join(f"{evidence.tokenizer.token_text(i)} ({i})" for i in ids)
        for ids in (unknown, sorted(evidence.end_ids))
    )
    return Finding(
        kind="end_of_turn_not_known",
        severity="notice",
        text=f"Answers{evidence.of(part)} are trained to end with {ends}, but the settings of the "
        f"base model only stop at {known}.",
        advice="ftkit and the generation_config.json of the result stop there; other programs "
        f"that load the base model need eos_token_id {unknown[0]}.",
    )


def bos_twice(evidence: Evidence, part: LoadedPart) -> Finding | None:
    """Samples begin with two tokens that begin a text, which the model has never seen."""
    bos = evidence.tokenizer.bos_id
    some = _examined(part.splits["train"].samples)
    doubled = sum(sample.ids[:2].tolist() == [bos, bos] for sample in some)
    if bos is None or not doubled:
        return None
    name = evidence.tokenizer.token_text(bos)
    return Finding(
        kind="bos_twice",
        severity="warning",
        text=f"{doubled:,} of {len(some):,} samples{evidence.of(part)} begin with {name} twice.",
        advice=f"Remove {name} from the records, or from the template.",
    )


def nothing_trained(evidence: Evidence, part: LoadedPart) -> Finding | None:
    """Many records contain nothing to train on."""
    counts = part.splits["train"].counts
    # many_cut reports dropped samples, and tools_dropped tools.
    reasons = {why: count for why, count in counts.reasons.items() if why != NO_TOOLS}
    lost = sum(reasons.values())
    if lost < _MANY_LOST * counts.records or not lost:
        return None
    counted = "; ".join(f"{count:,}: {shortened(why)}" for why, count in reasons.items())
    most = max(reasons, key=lambda why: reasons[why])
    # A longer limit than the model's context would be refused.
    sufficient = min(counts.longest_tokens, evidence.model_context)
    if most == NO_LABELS and sufficient > evidence.max_seq_length:
        advice = f"Try --train.max_seq_length {sufficient}."
    elif most == NO_LABELS:
        advice = f"The model takes {evidence.model_context} tokens at most: shorten the records."
    else:
        advice = _advice(evidence, part, most)
        if len(reasons) > 1:
            advice = f"For most of them: {advice}"
        advice += " ftkit data RECIPE shows how one of each kind begins."
    return Finding(
        kind="nothing_trained",
        severity="warning",
        text=f"{lost:,} of {counts.records:,} records{evidence.of(part)} are left out, because "
        f"nothing in them can be trained ({counted}).",
        advice=advice,
    )


def tools_dropped(evidence: Evidence, part: LoadedPart) -> Finding | None:
    """Records have tools for which the template has no place, so they are left out."""
    counts = part.splits["train"].counts
    dropped = counts.refused.get(NO_TOOLS, 0)
    if not dropped:
        return None
    return Finding(
        kind="tools_dropped",
        severity="warning",
        text=f"The template leaves out tools or tool calls in {dropped:,} of {counts.records:,} "
        f"records{evidence.of(part)}, so these records are left out.",
        advice=_advice(evidence, part, NO_TOOLS),
    )


def reasoning_dropped(evidence: Evidence, part: LoadedPart) -> Finding | None:
    """Answers are trained without the reasoning that the records have."""
    counts = part.splits["train"].counts
    if not counts.without_reasoning:
        return None
    return Finding(
        kind="reasoning_dropped",
        severity="warning",
        text=f"The template leaves out the reasoning_content of turns that are trained in "
        f"{counts.without_reasoning:,} of {counts.records:,} records{evidence.of(part)}, so the "
        "model learns to answer without it.",
        advice=_advice(evidence, part, NO_REASONING),
    )


def system_message_dropped(evidence: Evidence, part: LoadedPart) -> Finding | None:
    """Records have system messages that the rendered text lacks."""
    # Training records are not kept in the cache; those of validation are, for questions.
    records = part.splits["val"].records or part.splits["train"].records
    with_system = [
        (record, text)
        for record in records[:_MOST_EXAMINED]
        if (text := part.renderer.system(record))
    ]
    dropped = 0
    for record, system in with_system:
        text = part.renderer.text(record)
        # Templates may strip white space or break lines.
        dropped += bool(text) and _squeezed(system) not in _squeezed(text)
    if not dropped:
        return None
    is_style = part.part.rules.prompt_style is not None
    # Both have a place for a system message, whatever the model.
    works = "--data.prompt_style alpaca" if is_style else "--data.chat_template zephyr"
    return Finding(
        kind="system_message_dropped",
        severity="warning",
        text=f"The template drops {dropped:,} of {len(with_system):,} examined system "
        f"messages{evidence.of(part)}.",
        advice=f"Try {works}, which has a place for them.",
    )


def many_cut(evidence: Evidence, part: LoadedPart) -> Finding | None:
    """Many samples are longer than max_seq_length."""
    counts = part.splits["train"].counts
    cut = counts.truncated + counts.dropped
    every = counts.samples + counts.dropped
    if not cut or cut < _MANY_CUT * every:
        return None
    what = "are cut off" if counts.truncated else "are left out"
    longest = counts.longest_tokens
    if longest <= evidence.model_context:
        advice = f"Try --train.max_seq_length {longest}; ftkit plan predicts the memory it takes."
    elif counts.truncated:
        advice = "Answers without an end teach a model not to stop: try --data.overlong drop."
    else:
        advice = f"The model takes {evidence.model_context} tokens at most: shorten the records."
    return Finding(
        kind="many_cut",
        severity="warning",
        text=f"{cut:,} of {every:,} samples{evidence.of(part)} ({percent_text(cut / every)}) are "
        f"longer than train.max_seq_length {evidence.max_seq_length} and {what}, with "
        f"{percent_text(counts.lost_fraction)} of all tokens; the longest has {longest:,}.",
        advice=advice,
    )


def train_in_validation(evidence: Evidence) -> Finding | None:
    """Validation samples are trained on, so the validation loss says little about new data."""
    if not evidence.validates:
        return None
    shared, every = evidence.duplicates.val_in_train, len(evidence.data.val)
    if not shared or shared < _MANY_SHARED * every:
        return None
    options = evidence.settings["init_args"]
    if options.get("val_split_fraction") == 0:
        advice = (
            "data.val_split_fraction is 0, so nothing is held out. Try --data.val_split_fraction "
            "0.05."
        )
    elif options.get("drop_equal"):
        advice = (
            "data.drop_equal is true, so their records differ, but only in what samples leave out, "
            "such as text behind train.max_seq_length. Remove one of each two."
        )
    elif evidence.settings["class_path"].rpartition(".")[2] == OWN_NAME:
        advice = "Try --data.drop_equal true, which keeps only the first of equal records."
    else:
        advice = "Remove duplicates from the data before a part of them is held out."
    return Finding(
        kind="train_in_validation",
        severity="warning",
        text=f"{shared:,} of {every:,} validation samples ({percent_text(shared / every)}) are "
        "training samples too, so the validation loss says little about new data.",
        advice=advice,
    )


def prompt_divided(evidence: Evidence, part: LoadedPart) -> Finding | None:
    """Prompts end in characters that belong to the first token of an answer in other texts."""
    counts = part.splits["train"].counts
    if not counts.divided:
        return None
    return Finding(
        kind="prompt_divided",
        severity="notice",
        text=f"In {counts.divided:,} of {counts.records:,} records{evidence.of(part)} one token of "
        "the whole text would hold the end of a prompt and the beginning of its answer, or the "
        "prompt alone has other tokens. There, prompt and answer are tokenised apart, as at "
        "inference, and each such turn of a conversation is a sample.",
        advice="If all prompts end in a space or a line break, remove it from the generation "
        "prompt of the template: a word is mostly one token with the space before it.",
    )


def equal_answers(evidence: Evidence, part: LoadedPart) -> Finding | None:
    """Pairs have the same answer twice."""
    samples = part.splits["train"].samples
    if part.part.rules.preference != "pairs":
        return None
    examined = _examined_places(samples)
    equal = sum(
        len({sequence.ids.tobytes() for sequence in samples.sequences(i)}) == 1 for i in examined
    )
    if not equal:
        return None
    return Finding(
        kind="equal_answers",
        severity="warning",
        text=f"In {equal:,} of {len(examined):,} examined pairs{evidence.of(part)} the chosen and "
        "the rejected answer have the same tokens, so no preference is learned from them.",
        advice="Remove them, or raise train.max_seq_length if answers differ only behind it.",
    )


def one_label(evidence: Evidence) -> Finding | None:
    """All answers have the same label, so nothing says what distinguishes good ones."""
    labels = evidence.data.train.targets
    preference = evidence.data.parts[0].part.rules.preference
    if labels is None or preference != "labels" or len({*labels[:, 0].tolist()}) > 1:
        return None
    label, other = ("desirable", "false") if labels[0, 0] else ("undesirable", "true")
    return Finding(
        kind="one_label",
        severity="warning",
        text=f"All {len(labels):,} training answers are {label}, so there is nothing to learn that "
        "distinguishes them from others.",
        advice=f"Add answers whose label is {other}"
        + (", or learn from these with --objective sft." if labels[0] else "."),
    )


def template_not_used(evidence: Evidence, part: LoadedPart) -> Finding | None:
    """The base model has its own chat template, but is trained with another one."""
    own = evidence.tokenizer.chat_template
    if own is None or not shape_row(part.part.shape).has_template:
        return None
    used = part.renderer.template
    # Compared by their text too: a named template may be the model's own.
    if used.source == own or part.part.rules.chat_template == OF_TOKENIZER:
        return None
    return Finding(
        kind="template_not_used",
        severity="notice",
        text=f"The base model has a chat template of its own, but the prompts{evidence.of(part)} "
        f"are made by another one ({used.name}).",
        advice="To use its own: --data.chat_template tokenizer, without data.prompt_style.",
    )


REPORTED_BY_COUNTS = ("nothing_trained", "many_cut")
"""Findings that a run reports with the counts of its records."""
_CHECKS: Sequence[Callable[[Evidence], Finding | None]] = (train_in_validation, one_label)
"""Checks of the data as a whole."""
_PART_CHECKS: Sequence[Callable[[Evidence, LoadedPart], Finding | None]] = (
    no_end_of_turn,
    bos_twice,
    nothing_trained,
    tools_dropped,
    reasoning_dropped,
    system_message_dropped,
    many_cut,
    prompt_divided,
    equal_answers,
    end_of_turn_not_known,
    template_not_used,
)
"""Checks of each source."""


def _examined(samples: SampleSet) -> list[Sample]:
    """Choose samples to examine, evenly spread."""
    return [samples[i] for i in _examined_places(samples)]


def _examined_places(samples: SampleSet) -> range:
    # Spread over all, because data are often sorted by origin.
    return range(0, len(samples), max(len(samples) // _MOST_EXAMINED, 1))


def _advice(evidence: Evidence, part: LoadedPart, reason: str) -> str:
    """Recommend a change for the records with a reason."""
    kept, used = part.splits["train"].kept.get(reason, []), part.splits["val"].records
    return advice_for(reason, kept, part.part, evidence.tokenizer, used=used[:_MOST_TRIED])


def _trained(sample: Sample) -> set[int]:
    """The tokens that carry loss."""
    return {token for first, end in sample.trained for token in sample.ids[first:end].tolist()}


def _squeezed(text: str) -> str:
    return " ".join(text.split())
