"""Table of a report for people: its rows, for a terminal, a log file and a notebook."""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.text import Text

from ftkit.models.pretrained.stored_forms import published_text
from ftkit.recipe.adapter_types import method_text
from ftkit.recipe.batches import SOURCE_WORDS
from ftkit.redaction import shown
from ftkit.runs.report import numbers
from ftkit.runs.report.answers import AnsweredExample, score_text
from ftkit.runs.report.report import (
    ENDED_WELL,
    Checkpoints,
    DataCounts,
    ExpertLoad,
    Loss,
    PeakMemory,
    PhaseName,
    Progress,
    RecordedSteps,
    Report,
    Resolved,
    Restart,
    Resumed,
    Source,
    Spread,
    TermValues,
    Throughput,
    Tokens,
)
from ftkit.strategies.step_memory import StepMemory
from ftkit.utils.console.formatting import (
    bytes_text,
    count_text,
    duration_text,
    from_to_text,
    loss_text,
    marked,
    number_text,
    percent_text,
    shortened,
    shortened_within,
)
from ftkit.utils.console.terminal import Value, labelled_grid
from ftkit.utils.urls import display_path

STYLE_OF_OUTCOME: dict[str, str] = {
    "completed": "bold green",
    "stopped": "bold green",
    "interrupted": "bold yellow",
    "out_of_memory": "bold red",
    "failed": "bold red",
}
"""Style of the word for how a run ended."""


def render(report: Report, out_dir: Path | None = None) -> Group:
    """Return the table of a report; what was not reached has no row.

    Args:
        report: of a run with any outcome.
        out_dir: the run's directory as the reader should see it. Default: paths are shown as the
            report has them.
    """
    words = Text(report.outcome.replace("_", " "), STYLE_OF_OUTCOME[report.outcome])
    rows: list[tuple[str | Text, RenderableType]] = [
        (words, end_text(report)),
        *((label, _Parts(value)) for label, value in measured_rows(report) if value),
        *summary_rows(report, out_dir),
    ]
    title = Text(shown(_title(report)), "bold")
    # No box characters: the table reads the same in a log file and without colour.
    line = Rule(title, characters="-", align="left", style="dim")
    return Group(line, labelled_grid(rows))


def summary_line(report: Report, out_dir: Path) -> str:
    """Return how a run ended and where its result is, in one line."""
    final = report.files and report.files.final
    result = f"; result in {display_path(out_dir / final)}" if final else ""
    return (
        f"{display_path(out_dir)}: {report.outcome.replace('_', ' ')}, {report.exit_reason}{result}"
    )


def report_as_html(report: Report, out_dir: Path | None = None) -> str:
    """Return the table of a report as HTML for a notebook; see `render`."""
    from ftkit.utils.console.html import block, escaped, labelled, styled

    words = styled(report.outcome.replace("_", " "), STYLE_OF_OUTCOME[report.outcome])
    return block(
        f"<b>{escaped(_title(report))}</b>",
        f"{words} {escaped(end_text(report))}",
        labelled((*measured_rows(report), *summary_rows(report, out_dir))),
    )


def _title(report: Report) -> str:
    return f"ftkit {subject_text(report)}".rstrip()


class _Parts:
    """A text that wraps after its commas and colons, and between words where that is too long."""

    def __init__(self, text: str) -> None:
        self._text = shown(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Splits after the sign, which stays with the part before it.
        first, *rest = re.split("(?<=[,:]) ", self._text)
        lines = [first]
        for part in rest:
            if len(lines[-1]) + len(part) < options.max_width:
                lines[-1] += f" {part}"
            else:
                lines.append(part)
        yield Value("\n".join(lines))


_PHASE_WORDS: dict[PhaseName, str] = {
    "set_up": "set-up",
    "reference": "reference",
    "training": "training",
    "validation": "validation",
    "saving": "saving",
}


def end_text(report: Report) -> str:
    """Return why a run ended; of one that did not end well, also in which phase."""
    if report.outcome in ENDED_WELL:
        return report.exit_reason
    return f"{report.exit_reason} (during {_PHASE_WORDS[report.phase]})"


def subject_text(report: Report) -> str:
    """Return method and model of a run: "lora on TinyLlama"."""
    model = (report.resolved and report.resolved.base_model) or report.recipe.get("checkpoint_dir")
    method = report.method and method_text(report.method, report.recipe.get("peft"))
    return " ".join(filter(None, (method, model and f"on {model}")))


def measured_rows(report: Report) -> Iterator[tuple[str, str]]:
    """Label and text of each measurement; the text is empty where nothing was measured."""
    world_size = (report.resolved and report.resolved.world_size) or 1
    if report.resolved:
        yield from _resolved_rows(report.resolved)
    yield from _progress_rows(report)
    if report.phases_s:
        parts = {word: getattr(report.phases_s, name) for name, word in _PHASE_WORDS.items()}
        yield "time", _parts_text(report.phases_s.total, parts)
    if report.throughput:
        # The first number of this row is tokens/s, by the order in NUMBERS.
        speed, *others = numbers.phrases(report, "throughput")
        each = f" ({number_text(report.throughput.tokens_per_s_per_device)} per device)"
        yield "throughput", _joined((speed + each * (world_size > 1), *others))
        if report.resolved:
            halved = f"halved {count_text(report.micro_batch_halved, 'time')}, as memory ran out"
            text = _micro_batches_text(report.throughput, report.resolved)
            yield "micro-batches", _joined((text, halved * bool(report.micro_batch_halved)))
    if report.recorded_steps:
        yield "recorded steps", _recorded_text(report.recorded_steps)
    if report.step_s:
        parts = dataclasses.asdict(report.step_s)
        yield "step", _parts_text(parts.pop("total"), parts)
    if report.expert_load:
        yield "experts", _expert_load_text(report.expert_load)
    if report.tokens and report.tokens.padding_fraction is not None:
        share = f"{percent_text(report.tokens.padding_fraction)} of computed positions"
        path = report.resolved and report.resolved.attention
        lengths = report.resolved and report.resolved.padded_lengths
        to = lengths and f"to {count_text(len(lengths), 'length')}, at most {lengths[-1]:,}"
        yield "padding", _joined((share, path and f"attention {path}", to))
    if report.peak_memory:
        yield "peak memory", memory_text(report.peak_memory)
    if report.step_memory:
        yield from _step_memory_rows(report.step_memory)
    # Numbers that were added to NUMBERS alone.
    yield from numbers.rows_of_their_own(report)
    yield from _learned_rows(report)
    if report.checkpoints:
        yield "checkpoints", _checkpoints_text(report.checkpoints)
    for split, counts in report.data.items():
        yield f"{split} data", losses_of_data_text(counts)
    yield from _source_rows(report)


def summary_rows(report: Report, out_dir: Path | None) -> Iterator[tuple[str, str]]:
    """Label and text of an example, of restarts and warnings, and of where the files are."""
    yield from _word_rows(report)
    yield from _result_rows(report, out_dir)
    if files := report.files:
        logs = [name for name in (files.metrics, files.validation, files.log) if name]
        if logs:
            yield "logs", _joined(_place(name, out_dir) for name in logs)
    if report.checkpoints and (last := report.checkpoints.last):
        yield "checkpoint", _place(last, out_dir)


def essential_rows(report: Report, out_dir: Path | None) -> Iterator[tuple[str, str]]:
    """Rows on what was learned, warnings and where the result is, without what it cost."""
    yield from _progress_rows(report)
    yield from _learned_rows(report)
    yield from _source_rows(report)
    yield from _word_rows(report)
    yield from _result_rows(report, out_dir)


def _progress_rows(report: Report) -> Iterator[tuple[str, str]]:
    if report.resumed:
        yield "continued", _resumed_text(report.resumed)
    if report.progress:
        # Tokens are counted by session, so a continued run has them in the next row.
        yield "trained", _progress_text(report.progress, None if report.resumed else report.tokens)
        if report.resumed:
            steps = report.progress.steps - report.resumed.from_step
            tokens = report.tokens and count_text(report.tokens.real, "token")
            yield "this session", _joined((count_text(steps, "step"), tokens))


def _learned_rows(report: Report) -> Iterator[tuple[str, str]]:
    if report.loss:
        yield from _loss_rows(report.loss)
    for name, term in report.terms.items():
        yield term_title(name), term_values_text(term)
    if match := report.exact_match:
        fractions = from_to_text(match.before, match.after, percent_text)
        yield "exact match", fractions and f"{fractions} of {count_text(match.samples, 'answer')}"
    for score in report.scores:
        values = from_to_text(score.before, score.after, number_text)
        yield score.title, f"{values} on {count_text(score.samples, 'answer')}"
    for one in report.tasks:
        values = from_to_text(one.before, one.after, score_text)
        yield one.task, values and f"{one.name} {values} of {count_text(one.samples, 'record')}"


def _source_rows(report: Report) -> Iterator[tuple[str, str]]:
    of_start = bool(report.loss and report.loss.is_of_start)
    sets = {f"set {name}": one for name, one in report.sets.items()}
    for name, source in (report.sources | sets).items():
        yield name, _source_text(source, of_start=of_start)


def _word_rows(report: Report) -> Iterator[tuple[str, str]]:
    yield from example_rows(report)
    if report.resumed:
        for change in report.resumed.changes:
            yield "changed", change
    for restart in report.restarts:
        yield "restarted", restart_text(restart)
    for warning in report.warnings:
        yield "warning", warning


def _resolved_rows(resolved: Resolved) -> Iterator[tuple[str, str]]:
    if resolved.parameters and resolved.trainable_parameters is not None:
        share = percent_text(resolved.trainable_parameters / resolved.parameters)
        trained, every = map(number_text, (resolved.trainable_parameters, resolved.parameters))
        yield "parameters", f"{trained} of {every} trained ({share})"
    if resolved.beside:
        assert resolved.beside_key is not None
        yield resolved.beside_key, _beside_text(resolved)
    if resolved.published:
        yield "published", published_text(resolved.published, resolved.quantize)
    if resolved.kept_bytes:
        yield "kept", f"{bytes_text(resolved.kept_bytes)} of parts other than the language model"
    device = resolved.device or resolved.accelerator
    if device:
        base = f"base weights {resolved.quantize}" if resolved.quantize else None
        device = f"{resolved.world_size or 1} x {device}"
        yield (
            "devices",
            _joined((device, resolved.strategy, resolved.precision, base, resolved.rounding)),
        )
    if (resolved.world_size or 1) > 1:
        shared = f"sequences over {resolved.context} ranks" if resolved.context else None
        yield "sharded", _joined((resolved.sharding, shared, f"over {resolved.communication}"))


def restart_text(restart: Restart) -> str:
    """Return "TIME from step 40 on 1 rank (2 before), 7 steps again: REASON"."""
    before = restart.world_size_before
    changed = before is not None and before != restart.world_size
    ranks = count_text(restart.world_size, "rank") + f" ({before} before)" * changed
    again = f"{count_text(restart.steps_lost, 'step')} again" if restart.steps_lost else None
    head = _joined((f"{restart.started_at} from step {restart.from_step:,} on {ranks}", again))
    return f"{head}: {shortened(restart.reason, 160)}"


def _resumed_text(resumed: Resumed) -> str:
    written = f"{resumed.strategy} on {count_text(resumed.world_size, 'rank')}"
    return f"from step {resumed.from_step:,}, written by {written}, {resumed.checkpoint}"


def _checkpoints_text(checkpoints: Checkpoints) -> str:
    def times(spread: Spread | None) -> str:
        if spread is None:
            return ""
        longest = f" (longest {duration_text(spread.max)})" if checkpoints.saved > 1 else ""
        return f"{duration_text(spread.mean)}{longest}"

    size, stall, write = checkpoints.last_bytes, checkpoints.stall_s, checkpoints.write_s
    advised = checkpoints.advised_every_s
    return _joined(
        (
            f"{checkpoints.saved:,} saved",
            checkpoints.failed and f"{checkpoints.failed:,} failed",
            size is not None and f"{bytes_text(size)} each",
            stall and f"training paused for {times(stall)}",
            write and f"written in {times(write)}",
            advised and f"checkpoint.save_every auto would save one every {duration_text(advised)}",
        )
    )


def _progress_text(progress: Progress, tokens: Tokens | None) -> str:
    # 1, not 1.00; 0.5, not 0.50.
    epochs = f"{progress.epochs:.2f}".rstrip("0").rstrip(".")
    return _joined(
        (
            count_text(progress.steps, "step"),
            f"{epochs} epoch" if epochs == "1" else f"{epochs} epochs",
            count_text(progress.samples, "sample"),
            tokens and count_text(tokens.real, "token"),
        )
    )


def _parts_text(total: float | None, parts: dict[str, float | None]) -> str:
    """A time and what it consists of: "4.2 s: data 1 ms, forward 1.2 s"."""
    known = _joined(f"{k} {duration_text(v)}" for k, v in parts.items() if v is not None)
    return ": ".join(filter(None, (duration_text(total) if total is not None else "", known)))


def _recorded_text(found: RecordedSteps) -> str:
    """What was recorded and replayed: "3 shapes in 1.2 s, 87 % of micro-steps replayed"."""
    shapes = f"{count_text(found.shapes, 'shape')} in {duration_text(found.recording_s)}"
    share = found.replayed / found.micro_steps if found.micro_steps else 0.0
    fillers = found.filled_fraction
    text = fillers is not None and f"{percent_text(fillers)} of their positions filled up"
    return _joined((shapes, f"{percent_text(share)} of micro-steps replayed", text))


def _micro_batches_text(speed: Throughput, resolved: Resolved) -> str:
    """Mean fill of micro-batches; empty where their tokens are not limited."""
    most_tokens, source = resolved.micro_batch_tokens, resolved.micro_batch_source
    if most_tokens is None or not speed.micro_steps_per_step:
        return ""
    # tokens/s divided by steps/s and by micro-steps per step.
    tokens = speed.tokens_per_s_per_device / speed.steps_per_s / speed.micro_steps_per_step
    in_step = number_text(speed.micro_steps_per_step)
    why = "" if source is None else f", {SOURCE_WORDS[source]}"
    return f"{in_step} in a step, each of {tokens:,.0f} tokens (at most {most_tokens:,}{why})"


def memory_text(memory: PeakMemory) -> str:
    """Return peak memory in words: "9.1 GiB allocated, 2.2 GiB host (largest of 4 ranks)"."""
    values = {
        "allocated": memory.allocated_bytes,
        "reserved": memory.reserved_bytes,
        "host": memory.host_bytes if memory.host_bytes is not None else memory.rss_bytes,
    }
    text = _joined(f"{bytes_text(v)} {word}" for word, v in values.items() if v is not None)
    ranks = len(memory.ranks)
    return f"{text} (largest of {ranks} ranks)" if text and ranks > 1 else text


def _step_memory_rows(memory: StepMemory) -> Iterator[tuple[str, str]]:
    fullest = memory.fullest
    parts = dataclasses.asdict(fullest.peak_breakdown_bytes)
    moments = fullest.moments_bytes
    totals = {f.name: getattr(moments, f.name) for f in dataclasses.fields(moments)}
    rank = f", rank {fullest.rank}" if len(memory.ranks) > 1 else ""
    consists_of = _bytes_by_name(parts)
    peak = f"{bytes_text(fullest.peak_bytes)} at its peak (step {fullest.step}{rank})"
    yield "step memory", f"{peak}: {consists_of}"
    known = {name: moment.total for name, moment in totals.items() if moment is not None}
    # Indented, because it explains the row above.
    yield "  over time", _bytes_by_name(known)
    if expected := memory.predicted:
        consists_of = _bytes_by_name(dataclasses.asdict(expected.peak_breakdown_bytes))
        error = f"{expected.error_fraction * 100:+z.1f} %"
        yield "predicted", f"{bytes_text(expected.peak_bytes)} ({error}): {consists_of}"
    if heaviest := memory.heaviest:
        batch = heaviest.micro_batch
        tokens = batch.sequences * batch.positions if batch.tokens is None else batch.tokens
        yield (
            "  heaviest",
            (
                f"{bytes_text(heaviest.peak_bytes)} predicted by ftkit plan for the largest "
                f"possible micro-batch ({tokens:,} tokens)"
            ),
        )


def _bytes_by_name(counts: dict[str, int]) -> str:
    return _joined(f"{name.replace('_', ' ')} {bytes_text(n)}" for name, n in counts.items() if n)


def _expert_load_text(load: ExpertLoad) -> str:
    low, high, even = map(percent_text, (load.lowest, load.highest, load.even))
    experts, layers = len(load.fractions[0]), len(load.layers)
    where = f" in each of {layers} layers" * (layers > 1)
    least = f"layer {load.least_even_layer} is the least even" * (layers > 1)
    return _joined((f"{experts}{where}: {low} to {high} of choices (even: {even})", least))


def _loss_rows(loss: Loss) -> Iterator[tuple[str, str]]:
    yield "loss", from_to_text(loss.first, loss.last, loss_text)
    if loss.router_aux_loss is not None:
        yield "router loss", f"{loss_text(loss.router_aux_loss)} in the last step"
    validation = _validation_text(loss, of_start=loss.is_of_start)
    if loss.validations_since_best and loss.validation_last is None:
        # There was one, but JSON has no word for such a number.
        validation = " -> ".join(filter(None, (validation, "not finite")))
    if validation:
        best, step, perplexity = loss.validation_best, loss.validation_best_step, loss.perplexity
        at = "" if step is None else f" (step {step:,})"
        parts = (
            validation,
            best not in (None, loss.validation_last) and f"best {loss_text(best)}{at}",
            perplexity is not None and f"perplexity {number_text(perplexity)}",
        )
        yield "validation", _joined(parts)


def term_title(name: str) -> str:
    """Return the name of a term of the objective in tables and messages."""
    return name.replace("_", " ")


def term_text(name: str, value: float | None, *, is_share: bool) -> str:
    """Return name and value of a term of the objective: "accuracy 97.5 %"."""
    return f"{term_title(name)} {term_value_text(value, is_share=is_share)}"


def term_value_text(value: float | None, *, is_share: bool) -> str:
    """Return the value of a term of the objective: "97.5 %" or "0.6931"."""
    if value is None:
        return "unknown"
    return percent_text(value) if is_share else loss_text(value)


def term_values_text(term: TermValues) -> str:
    """Return the values of a term: "50.0 % -> 97.5 %, validation 52.1 % -> 96.3 %"."""
    shown = partial(term_value_text, is_share=term.is_share)
    of_steps = from_to_text(term.first, term.last, shown)
    of_validation = from_to_text(term.validation_first, term.validation_last, shown)
    return _joined((of_steps, of_validation and f"validation {of_validation}"))


def _validation_text(losses: Loss | Source, *, of_start: bool) -> str:
    if of_start and losses.validation_first is not None:
        return f"{loss_text(losses.validation_first)} before training"
    return from_to_text(losses.validation_first, losses.validation_last, loss_text)


def example_rows(report: Report) -> Iterator[tuple[str, str]]:
    """Rows with a validation record and the model's answers to it; none if it was not asked."""
    for example in report.examples[:1]:
        yield from _rows_of_example(example)


def _rows_of_example(example: AnsweredExample) -> Iterator[tuple[str, str]]:
    question = f"{example.instruction} {example.input}"
    answers = (("expected", example.expected), ("before", example.before), ("after", example.after))
    # Of a long conversation, too, the question at its end.
    yield "example", shortened_within(question)
    for text in example.media_texts:
        yield "  with", text
    for label, answer in answers:
        if answer is not None:
            yield f"  {label}", shortened(marked(answer)) or "(empty)"


def summary_text(resolved: Resolved, method: str) -> str:
    """Return model, devices and steps of a run, in two lines."""
    assert resolved.parameters and resolved.trainable_parameters
    of_epoch = resolved.samples_per_epoch
    per_epoch = "" if of_epoch is None else f", {of_epoch:,} samples per epoch"
    return (
        f"{method} fine-tuning of {resolved.base_model}: "
        f"{resolved.trainable_parameters:,} of {resolved.parameters:,} parameters, "
        f"{resolved.precision} on {resolved.device}\n"
        f"{_beside_line(resolved)}"
        f"{_published_line(resolved)}"
        f"{_kept_line(resolved)}"
        f"{count_text(resolved.total_steps or 0, 'step')} of "
        f"{_step_text(resolved)} "
        f"({_micro_steps(resolved)}){per_epoch}"
    )


def _step_text(resolved: Resolved) -> str:
    if resolved.global_batch_tokens is not None:
        return f"at most {resolved.global_batch_tokens:,} tokens"
    return count_text(resolved.global_batch_size or 0, "sample")


def _beside_line(resolved: Resolved) -> str:
    return f"{resolved.beside_key}: {_beside_text(resolved)}\n" if resolved.beside else ""


def _beside_text(resolved: Resolved) -> str:
    assert resolved.beside_parameters is not None and resolved.beside_rank_bytes is not None
    return (
        f"{resolved.beside}, {resolved.beside_parameters:,} parameters, "
        f"{bytes_text(resolved.beside_rank_bytes)} on each rank"
    )


def _published_line(resolved: Resolved) -> str:
    if not resolved.published:
        return ""
    return f"published {published_text(resolved.published, resolved.quantize)}\n"


def _kept_line(resolved: Resolved) -> str:
    if not resolved.kept_bytes:
        return ""
    kept = bytes_text(resolved.kept_bytes)
    return f"only the language model is trained; {kept} of other parts stay unchanged\n"


def _micro_steps(resolved: Resolved) -> str:
    if resolved.micro_batch_tokens is None:
        steps = count_text(resolved.micro_steps_per_step or 0, "micro-step")
        return f"{steps} of {resolved.micro_batch_size}"
    return f"at most {resolved.micro_batch_tokens:,} tokens at once"


def losses_of_data_text(counts: DataCounts) -> str:
    """Return how many records are left out or cut, by reason; empty if none are."""
    losses = _joined(
        (
            counts.skipped_empty_output
            and f"{counts.skipped_empty_output:,} left out (empty output)",
            counts.skipped_no_labels
            and f"{counts.skipped_no_labels:,} left out (answer lies beyond max_seq_length)",
            *(f"{count:,} left out ({reason})" for reason, count in counts.refused.items()),
            counts.truncated and f"{counts.truncated:,} cut to max_seq_length",
            counts.dropped and f"{counts.dropped:,} left out (longer than max_seq_length)",
            counts.short and f"{counts.short:,} left out (fewer tokens than data.min_tokens)",
            counts.split and f"{counts.split:,} cut into several samples",
            counts.split_by_turn
            and f"{counts.split_by_turn:,} split by turn (text or tokens before it change)",
        )
    )
    return losses and f"of {count_text(counts.records, 'record')}: {losses}"


def _source_text(source: Source, *, of_start: bool) -> str:
    validation, best = _validation_text(source, of_start=of_start), source.validation_best
    return _joined(
        (
            source.samples and count_text(source.samples, "sample"),
            validation and f"validation {validation}",
            best not in (None, source.validation_last) and f"best {loss_text(best)}",
        )
    )


def _result_rows(report: Report, out_dir: Path | None) -> Iterator[tuple[str, str]]:
    if report.files and (final := report.files.final):
        chosen = report.result
        of_step = chosen and f"of step {chosen.step:,}"
        lowest = chosen and f"validation loss {loss_text(chosen.validation_loss)}"
        decay = report.recipe.get("train", {}).get("ema_decay")
        average = decay is not None and f"average of the weights (decay {decay:g})"
        yield "result", _joined((_place(final, out_dir), of_step, lowest, average))


def _place(name: str, out_dir: Path | None) -> str:
    return display_path(out_dir / name) if out_dir else name


def _joined(parts: Iterable[object]) -> str:
    return ", ".join(str(part) for part in parts if part)
