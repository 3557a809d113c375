"""`ftkit data`: the data of a recipe, tokenised and measured, as text, as a page or as JSON."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ftkit.errors import UserError
from ftkit.recipe.objectives import Preference, objective_rules
from ftkit.recipe.options import DataOptions
from ftkit.recipe.parsing import Override, read_recipe, sorted_words
from ftkit.recipe.peft_adapter import with_adapter
from ftkit.recipe.readers import NO_TERMS, Terms
from ftkit.utils.console.display import Display
from ftkit.utils.console.terminal import plain_text
from ftkit.utils.imports import silence_libraries

silence_libraries()  # before they are imported

from ftkit.data.dataset import DataSets, LoadedPart, OnSplitProgress, load_data  # noqa: E402
from ftkit.data.inspection.display import InspectionText, inspection_page  # noqa: E402
from ftkit.data.inspection.findings import (  # noqa: E402
    Evidence,
    RecordPlace,
    findings,
)
from ftkit.data.inspection.inspection import (  # noqa: E402
    Bar,
    Duplicates,
    Finding,
    Inspection,
    LeftOut,
    Lengths,
    ShownSample,
    SourceNumbers,
    SplitNumbers,
    Weights,
)
from ftkit.data.prepare import Prepared  # noqa: E402
from ftkit.data.records.bad import SKIP, BadData  # noqa: E402
from ftkit.data.records.media import shown_medium  # noqa: E402
from ftkit.data.records.shape_rows import label_text  # noqa: E402
from ftkit.data.samples.sample_set import Sample, SampleSet, media_numbers  # noqa: E402
from ftkit.data.sources import settled  # noqa: E402
from ftkit.models.pretrained.base_model import checked_length, read_blueprint  # noqa: E402
from ftkit.models.pretrained.model_files import has_tokenizer  # noqa: E402
from ftkit.models.pretrained.places import fetch_settings, find_or_download, find_single_file  # noqa: E402
from ftkit.models.pretrained.tokenizer import Tokenizer, end_tokens  # noqa: E402
from ftkit.recipe.hubs import HUBS, as_owner_of, or_download  # noqa: E402
from ftkit.utils.progress import print_notice  # noqa: E402


def show_data(options: DataOptions) -> int:
    """Inspect the data of a recipe, show the result and return the exit code.

    Raises:
        UserError: as a run would, of bad records after all others are shown; or the result cannot
            be written.
    """
    files, overrides = sorted_words(options.words, options.config, options.keys)
    with (
        # Progress goes to standard error: the result may be piped.
        Display(None, stream=sys.stderr) as display,
        display.phase("reading data", brief=True) as phase,
    ):
        found = inspect_data(
            files,
            overrides,
            show=options.show,
            progress=lambda _, done, total: phase.advance(done, total),
            terms=options.terms,
        )
    if options.out is not None:
        _write(options.out, _as_text(found, options.format))
    elif options.format == "text":
        with Display(None) as display:
            display.show(InspectionText(found))
    else:
        print(_as_text(found, options.format))
    if found.refusal is not None:
        raise UserError(found.refusal)
    return 0


def _as_text(found: Inspection, form: str) -> str:
    if form == "json":
        return json.dumps(dataclasses.asdict(found), indent=2)
    return inspection_page(found) if form == "html" else plain_text(InspectionText(found))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--out {file} cannot be written: {error.strerror}. Name a file in an existing "
            "directory."
        ) from None
    print_notice(f"ftkit: written to {file}", sys.stderr)


_AS_THEY_ARE = {
    "completion": "none: prompts and completions as they are",
    "text": "none: texts as they are",
    "tokens": "none: token ids as they are",
}
_BAD_RECORDS = Finding(
    kind="bad_records",
    severity="warning",
    text="A run refuses these data for their bad records, which are left out here.",
    advice=f"Correct them, or try --data.{SKIP} true.",
)
_EXAMPLE_TOKENS = 64
"""Tokens of an example that are shown."""


def inspect_data(
    files: Sequence[str | Path],
    overrides: Sequence[Override],
    *,
    show: int,
    progress: OnSplitProgress,
    terms: Terms = NO_TERMS,
) -> Inspection:
    """Inspect the data of a recipe, without loading or downloading weights.

    Args:
        files: recipes, later ones win.
        overrides: dotted key and YAML text, as on the command line.
        show: training samples to show token by token.
        terms: of the command for files of other programs.
        progress: called at least every 1000 records, where they are tokenised.

    Raises:
        UserError: as a run would, but for bad records; or the tokenizer is not here and cannot be
            fetched.
    """
    # The same steps as in a run, so that what is shown is what would be trained.
    recipe = settled(with_adapter(read_recipe(files, overrides, terms=terms)))
    # Settings and tokenizer, no weights.
    unreached = fetch_settings(recipe.checkpoint_dir, token=recipe.access_token)
    base = read_blueprint(recipe.checkpoint_dir, unreached=unreached)
    directory = base.tokenizer_directory
    if find_single_file(recipe.checkpoint_dir):  # its tokenizer comes with the conversion
        directory = find_or_download(recipe.checkpoint_dir, token=recipe.access_token)
    tokenizer = _tokenizer(directory, recipe.checkpoint_dir, unreached)
    tokenizer = tokenizer.with_tokens(tokenizer.lacks(recipe.added_tokens))
    limit = checked_length(base, recipe.train.max_seq_length)
    with as_owner_of(recipe.data_token):
        preference = objective_rules(recipe.objective).preference
        load = partial(
            load_data,
            tokenizer=tokenizer,
            max_seq_length=limit,
            preference=preference,
            progress=progress,
        )
        refusal = None
        try:
            data = load(recipe.data)
        except BadData as refused:  # the others are shown too
            refusal = str(refused)
            data = load(recipe.data | {"init_args": recipe.data["init_args"] | {SKIP: True}})
    evidence = Evidence(
        data=data,
        tokenizer=tokenizer,
        end_ids=end_tokens(directory),
        max_seq_length=limit,
        model_context=base.architecture.context_length,
        validates=recipe.eval.validates,
        settings=recipe.data,
    )
    # Before truncation: the question is which limit would hold the samples.
    lengths = lengths_of(_whole_lengths(data.parts), limit)
    assert lengths is not None, "data without samples are refused"
    return Inspection(
        base_model=base.name,
        max_seq_length=limit,
        model_context=base.architecture.context_length,
        sources=[
            _source(part, take, limit) for part, take in zip(data.parts, data.takes, strict=True)
        ],
        lengths=lengths,
        duplicates=_duplicates(evidence),
        findings=[*([_BAD_RECORDS] if refusal else []), *findings(evidence)],
        refusal=refusal,
        samples=[
            sample
            for source, number in _chosen(data, show)
            for sample in _shown(data.parts[source], number, tokenizer)
        ],
    )


def _tokenizer(directory: Path, checkpoint_dir: str, unreached: UserError | None) -> Tokenizer:
    if not has_tokenizer(directory):
        if unreached is not None and not any(HUBS):
            raise unreached  # no hub could answer
        raise UserError(
            f"checkpoint_dir {checkpoint_dir}: its tokenizer is not on this machine, and the hub "
            "does not answer. Copy tokenizer.json and tokenizer_config.json into "
            f"{directory}{or_download(checkpoint_dir)}."
        )
    return Tokenizer(directory)


def _whole_lengths(parts: Sequence[LoadedPart]) -> np.ndarray:
    return np.concatenate([part.splits["train"].whole_lengths for part in parts])


def _source(part: LoadedPart, take: int, limit: int) -> SourceNumbers:
    return SourceNumbers(
        name=part.source.name,
        where=part.source.where,
        records=part.part.description,
        unused=part.part.unused,
        shape=part.part.shape,
        template=_AS_THEY_ARE.get(part.part.shape) or part.renderer.template.name,
        train_on=part.part.rules.train_on,
        overlong=part.part.rules.overlong,
        per_epoch=take,
        train=_split(part.splits["train"], limit, part.part.rules.preference),
        val=_split(part.splits["val"], limit, part.part.rules.preference),
    )


def _split(prepared: Prepared, limit: int, preference: Preference | None) -> SplitNumbers:
    counts = prepared.counts
    return SplitNumbers(
        records=counts.records,
        used=counts.used,
        left_out=[
            LeftOut(reason=reason, records=count, example=prepared.examples[reason])
            for reason, count in counts.reasons.items()
        ],
        samples=counts.samples,
        truncated=counts.truncated,
        dropped=counts.dropped,
        short=counts.short,
        split=counts.split,
        split_by_turn=counts.split_by_turn,
        tokens=counts.tokens,
        trained_tokens=counts.label_tokens,
        weights=_weights(prepared.samples),
        labels=_labels(prepared.samples, preference),
        lost_tokens=counts.lost_tokens,
        lengths=lengths_of(prepared.whole_lengths, limit),
        media=media_numbers([prepared.samples]),
    )


def _weights(samples: SampleSet) -> Weights | None:
    weights, sums = samples.arrays.weights, samples.label_weights
    if weights is None or sums is None:
        return None
    mean = sums.sum() / samples.label_counts.sum()
    return Weights(least=float(weights.min()), most=float(weights.max()), mean=float(mean))


def _labels(samples: SampleSet, preference: Preference | None) -> dict[str, int]:
    """Samples by their label in words, the most frequent first."""
    if samples.targets is None:
        return {}
    targets, counts = np.unique(samples.targets, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    texts = [label_text(preference, targets[i].tolist()) for i in order]
    return {text: int(counts[i]) for text, i in zip(texts, order, strict=True) if text}


def _duplicates(evidence: Evidence) -> Duplicates:
    found, parts = evidence.duplicates, evidence.data.parts
    train = [part.splits["train"].samples for part in parts]
    val = [part.splits["val"].samples for part in parts]
    return Duplicates(
        train=found.train,
        val=found.val,
        val_in_train=found.val_in_train,
        train_examples=_beginnings(train, found.train_places, evidence.tokenizer),
        val_in_train_examples=_beginnings(val, found.val_in_train_places, evidence.tokenizer),
    )


def _beginnings(
    sets: Sequence[SampleSet], places: Sequence[RecordPlace], tokenizer: Tokenizer
) -> list[str]:
    return [_beginning(sets[source][i], tokenizer) for source, i in places]


def _beginning(sample: Sample, tokenizer: Tokenizer) -> str:
    """Text of the first tokens of a sample, with a mark for each medium among them."""
    text, at, room = "", 0, _EXAMPLE_TOKENS
    for medium in (*sample.media, None):
        end = len(sample.ids) if medium is None else medium.first
        shown = sample.ids[at : min(end, at + room)].tolist()
        text += "".join(token_texts(tokenizer, shown)[0])
        room -= len(shown)
        if medium is None or not room:
            break
        text, at = f"{text}[{medium.kind}]", medium.end
    return text


def _chosen(data: DataSets, show: int) -> list[RecordPlace]:
    """Choose samples of all sources in turn, evenly spread in each."""
    sizes = [len(part.splits["train"].samples) for part in data.parts]
    counts = [0] * len(sizes)
    for _ in range(min(show, sum(sizes))):
        # The source with the fewest shown samples is next, as long as it has more.
        open_ones = [i for i in range(len(sizes)) if counts[i] < sizes[i]]
        counts[min(open_ones, key=lambda i: counts[i])] += 1
    return [
        (source, place * size // count)
        for source, (size, count) in enumerate(zip(sizes, counts, strict=True))
        for place in range(count)
    ]


def _shown(part: LoadedPart, number: int, tokenizer: Tokenizer) -> Iterator[ShownSample]:
    """The sequences of a sample: one, or both answers of a pair, or a query and its documents."""
    sequences = part.splits["train"].samples.sequences(number)
    answers = part.renderer.names or (None,)
    first = sequences[0]
    for answer, sample in zip(answers, sequences, strict=True):
        ids = sample.ids.tolist()
        weights = np.zeros(len(ids))
        of_spans = np.ones(len(sample.trained)) if sample.weights is None else sample.weights
        for (begin, end), weight in zip(sample.trained, of_spans, strict=True):
            weights[begin:end] = weight
        weights[0] = 0  # nothing predicts it
        texts, special = token_texts(tokenizer, ids)
        yield ShownSample(
            source=part.source.name,
            number=number,
            answer=answer,
            label=None
            if sample.target is None
            else label_text(part.part.rules.preference, sample.target.tolist()),
            shared=_shared(first, sample) if answer == "rejected" else 0,
            ids=ids,
            texts=texts,
            trained=(weights > 0).tolist(),
            weights=weights.tolist(),
            special=special,
            media=[shown_medium(medium) for medium in sample.media],
        )


def _shared(chosen: Sample, rejected: Sample) -> int:
    """Tokens with which both sequences of a pair begin, before any that carries loss."""
    most = min(int(one.trained[0, 0]) for one in (chosen, rejected))
    differs = np.flatnonzero(chosen.ids[:most] != rejected.ids[:most])
    return int(differs[0]) if len(differs) else most


MOST_BARS = 12
_STEPS = (1, 2, 5)
"""Widths of bars are these times a power of ten."""


def lengths_of(tokens: npt.NDArray[np.int32], limit: int) -> Lengths | None:
    """Summarise lengths by percentiles and a histogram; None: there are none.

    Args:
        tokens: [samples], length of each before long ones are cut or left out.
        limit: max_seq_length.
    """
    if not len(tokens):
        return None
    # method="higher": the length of a sample, not a number between two.
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
    """Bars of one width up to the 99th percentile; the last one has all that is longer."""
    longest = int(tokens.max())
    first = int(tokens.min())
    # Up to the 99th percentile: one very long sample would squeeze all others into one bar.
    width = _width(p99 - first + 1)
    # Bars begin at 1, 1 + width and so on, so that they read 1-100, 101-200.
    start = first - (first - 1) % width
    edges = [*range(start, p99 + 1, width), longest + 1]
    # The last bar is as wide as the others, unless longer samples follow.
    if longest - edges[-2] < width:
        edges[-1] = edges[-2] + width
    counts, _ = np.histogram(tokens, edges)
    over, _ = np.histogram(tokens[tokens > limit], edges)
    return [
        Bar(first=edge, last=min(end - 1, longest), samples=int(count), over=int(more))
        for edge, end, count, more in zip(edges, edges[1:], counts, over, strict=False)
    ]


def _width(span: int) -> int:
    """Smallest width that gives few enough bars."""
    power = 1
    while True:
        for step in _STEPS:
            # Two bars less: the first one may begin before the shortest sample, and the last one
            # holds all that are longer.
            if span <= step * power * (MOST_BARS - 2):
                return step * power
        power *= 10


_BEFORE = 4
"""Tokens before one that decide how it is written: whether a space is its own."""
_MOST_IN_CHARACTER = 8
"""Tokens that a character may be made of."""
_INCOMPLETE = "\ufffd"


def token_texts(tokenizer: "Tokenizer", ids: Sequence[int]) -> tuple[list[str], list[bool]]:
    """Return the text of each token, and whether it is a special token.

    Joined, they are the text of the sample. A token that ends within a character has none; the one
    that completes the character has it.

    Args:
        tokenizer: of the base model.
        ids: tokens.
    """
    marks = _marks(tokenizer, ids)
    texts: list[str] = []
    first = 0  # first token whose text is not emitted yet
    for i, token in enumerate(ids):
        if token in marks:
            texts.append(marks[token])
            first = i + 1
            continue
        # Decoded with some tokens before them: SentencePiece drops the space of the first one.
        before = _decode(tokenizer, ids[max(first - _BEFORE, 0) : first])
        text = _decode(tokenizer, ids[max(first - _BEFORE, 0) : i + 1])
        # A bound, because a text may really hold U+FFFD.
        is_open = text.endswith(_INCOMPLETE) and i + 1 - first < _MOST_IN_CHARACTER
        if is_open and i + 1 < len(ids) and ids[i + 1] not in marks:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        first = i + 1
    return texts, [token in marks for token in ids]


def _marks(tokenizer: "Tokenizer", ids: Sequence[int]) -> dict[int, str]:
    """Names of the tokens that are marks."""
    added = tokenizer.processor.get_added_tokens_decoder()
    return {i: added[i].content for i in {*ids} if i in added and added[i].special}


def _decode(tokenizer: "Tokenizer", ids: Sequence[int]) -> str:
    return str(tokenizer.processor.decode(list(ids), skip_special_tokens=False))
