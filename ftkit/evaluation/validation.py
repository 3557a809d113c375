"""Evaluation on held-out records: the validation loss, and scores of answers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from ftkit.data.media import with_media
from ftkit.data.rendering import Example
from ftkit.data.samples.layout import IntArray
from ftkit.data.samples.sample_set import Samples
from ftkit.evaluation.scoring import Score, Scoring
from ftkit.models.generation import Context, ReadMedia, answer_greedily, length_for
from ftkit.models.language_model import LanguageModel, output_of
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.objectives.companion import Companion
from ftkit.objectives.objective import (
    EXCHANGE,
    OF_STEP,
    Objective,
    checked_sums,
    shares_of_rank,
)
from ftkit.objectives.step_loss import of_whole_step, with_observed
from ftkit.strategies.distributed import sum_over_ranks
from ftkit.strategies.strategy import Strategy
from ftkit.utils.accelerators.use import sum_dtype
from ftkit.utils.progress import OnProgress

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


STOP_INTERVAL = 10
"""Batches between two checks for an early end."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Samples of a data set on which something is computed."""

    samples: Samples
    numbers: IntArray
    """Those that are taken."""


class EvaluatedWeights:
    """Swaps averaged weights in for evaluation, if the recipe has an average."""

    def __init__(self, strategy: Strategy) -> None:
        """Wrap a strategy that is set up."""
        self._strategy = strategy
        self._is_averaged = strategy.averages is not None
        self.before: Callable[[], None] = lambda: None
        """Called before weights are replaced: pending copies have to finish first."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model hold the averages inside the context, and the trained weights after it."""
        if not self._is_averaged:
            yield
            return
        self.before()
        give_back = self._strategy.take_averages()
        try:
            yield
        finally:
            give_back()

    def keep(self) -> None:
        """Load the averages into the model for good; training cannot continue after."""
        if self._is_averaged:
            self.before()
            self._strategy.take_averages()
        self.are_kept()

    def are_kept(self) -> None:
        """Record that the model holds the averages already."""
        self._is_averaged = False


class Validated(NamedTuple):
    """Terms of an objective over validation samples."""

    loss: float
    """Loss over all samples."""
    terms: dict[str, float]
    """Value of each term and measure that the objective reports, by name; without those of
    which the samples have nothing, as the reward of undesirable answers if all are desirable."""
    of_sources: tuple[float | None, ...]
    """Loss by source; None: it has no sample."""


@torch.no_grad()
def validation_loss(
    model: LanguageModel,
    objective: Objective,
    batches: "DataLoader[dict[str, Any]]",
    device: torch.device,
    *,
    sources: int,
    context: Context,
    companion: Companion | None = None,
    stopped: Callable[[], object] = lambda: False,
    progress: OnProgress,
) -> Validated | None:
    """Terms of an objective over all batches of all ranks, and the loss of each source.

    Args:
        model: in evaluation mode.
        objective: what the model learns.
        batches: each of one source, as `validation_loader` makes them.
        device: where the model computes.
        sources: how many there are.
        context: in which it computes.
        companion: another model, for these samples, if the objective needs one.
        stopped: whether to end early; called before every tenth batch, as it is a collective.
        progress: called with (batches done, batches in all).

    Returns:
        The values; None if it was stopped early.
    """
    terms = objective.terms
    of_step: Any = None
    if objective.observes:
        observed: Tensor | None = None
        for number, batch in enumerate(with_media(batches)):
            if number % STOP_INTERVAL == 0 and stopped():
                return None
            batch = move_data_to_device(batch, device)
            observed = with_observed(observed, objective, model, companion, batch, context)
        assert observed is not None
        of_step = of_whole_step(objective, observed)
    # [sums and divisors, terms, sources]
    totals = torch.zeros(2, len(terms), sources, dtype=sum_dtype(device), device=device)
    tallies: Tensor | None = None
    for done, batch in enumerate(with_media(batches), start=1):
        if done % STOP_INTERVAL == 1 and stopped():
            return None
        batch = move_data_to_device(batch, device)
        batch[EXCHANGE] = model.body.exchange
        if companion is not None:
            companion.add_to(batch)
        batch[OF_STEP] = of_step
        with context():
            output = output_of(model, batch, objective.output(batch))
            sums = checked_sums(objective, output, batch)
        if objective.measures:
            (found,) = shares_of_rank(objective, [objective.tallies(output, batch)], batch)
            tallies = found if tallies is None else tallies + found
        for number, (term, value) in enumerate(zip(terms, sums, strict=True)):
            totals[0, number, batch["source"]] += value
            totals[1, number, batch["source"]] += batch["divisors"][term.divisor]
        progress(done, len(batches))
    values, divisors = sum_over_ranks(totals).tolist()
    # As in the loss of a step: a term of which there is nothing is 0.
    means = {
        term.name: sum(total) / (sum(divisor) or 1)
        for term, total, divisor in zip(terms, values, divisors, strict=True)
    }
    known = {term.name for term, divisor in zip(terms, divisors, strict=True) if sum(divisor)}
    of_sources: list[float | None] = []
    for source in range(sources):
        of_loss = [
            (term.name, total[source], divisor[source])
            for term, total, divisor in zip(terms, values, divisors, strict=True)
            if term.coefficient is not None
        ]
        is_known = all(divisor for _, _, divisor in of_loss)
        means_of = {name: total / (divisor or 1) for name, total, divisor in of_loss}
        of_sources.append(objective.loss_of(means_of) if is_known else None)
    reported = {name: value for name, value in means.items() if name in known}
    if tallies is not None:
        reported |= objective.measured(sum_over_ranks(tallies).cpu())
    return Validated(
        loss=objective.loss_of(means),
        terms={one.name: reported[one.name] for one in objective.reported if one.name in reported},
        of_sources=tuple(of_sources),
    )


def answer_records(
    model: LanguageModel,
    tokenizer: Tokenizer,
    questions: Sequence[Example],
    *,
    max_new_tokens: int,
    context: Context,
    goes_on: Callable[[int, list[int]], bool] | None = None,
) -> list[Tensor]:
    """Answer records of a data set greedily, in one batch.

    A prompt is used whole, however much of it is trained; one that fills the model's context gets
    an empty answer.

    Args:
        model: in evaluation mode.
        tokenizer: of its base model.
        questions: prompts with their stop tokens.
        max_new_tokens: longest answer.
        context: in which the model computes.
        goes_on: see `answer_greedily`.

    Returns:
        Token ids of the answers, [up to max_new_tokens] each.
    """
    stop_ids = frozenset({tokenizer.eos_id}).union(*(question.stop_ids for question in questions))
    context_length = model.architecture.context_length
    # The longer ones leave no room for an answer, which then is empty and wrong.
    fitting = [i for i, question in enumerate(questions) if len(question.prompt) < context_length]
    answers = [torch.empty(0, dtype=torch.long) for _ in questions]
    if not fitting:
        return answers
    prompts = [torch.tensor(questions[i].prompt) for i in fitting]
    longest = min(max(map(len, prompts)) + max_new_tokens, context_length)

    def of_interest(row: int, ids: list[int]) -> bool:
        return goes_on is None or goes_on(fitting[row], ids)

    with _reaching(model, length_for(model, longest)), context():
        found = answer_greedily(
            model,
            prompts,
            stop_ids=stop_ids,
            max_new_tokens=max_new_tokens,
            goes_on=None if goes_on is None else of_interest,
            media=media_of([questions[i] for i in fitting]),
        )
    for i, answer in zip(fitting, found, strict=True):
        answers[i] = answer
    return answers


def media_of(questions: Sequence[Example]) -> ReadMedia | None:
    """Return what reads the media of prompts; None: they have none."""
    reader = next((question.media_reader for question in questions if question.media), None)
    if reader is None:
        return None
    prompts = [question.prompt for question in questions]
    return partial(reader.read, [question.media for question in questions], prompts)


@contextmanager
def _reaching(model: LanguageModel, length: int) -> Iterator[None]:
    """Extend the rotary tables for longer sequences than those of training."""
    body, usual = model.body, model.body.max_length
    if length <= usual:
        yield
        return
    kept = [(module._buffers, dict(module._buffers)) for module in body.modules()]
    body.build_rope_cache(body.device, length)
    try:
        yield
    finally:
        body.build_rope_cache(body.device, usual)
        # The very tensors of training: recorded steps read their memory.
        for buffers, before in kept:
            buffers.update(before)


def answer_scores(
    model: LanguageModel,
    tokenizer: Tokenizer,
    questions: Sequence[Example],
    scoring: Scoring,
    *,
    batch_size: int,
    context: Context,
    stopped: Callable[[], object] = lambda: False,
    progress: OnProgress,
) -> list[Score] | None:
    """Answer records greedily and score the answers by each metric.

    Each metric has the value that it has alone. For exact match alone, an answer ends where it can
    no longer be right.

    Args:
        model: in evaluation mode.
        tokenizer: of its base model.
        questions: made of the records; at least one, at most `scoring.records`.
        scoring: the metrics.
        batch_size: how many are answered at once.
        context: in which the model computes.
        stopped: whether to end early.
        progress: called with (records done, records in all).

    Returns:
        The scores; None if it was stopped early.
    """
    expected = [plain_text(tokenizer, question.expected).strip() for question in questions]
    exact = [exact_text(tokenizer, one.expected) for one in questions[: scoring.exact_match]]
    beginnings = [_letters(text) for text in exact]
    # One token more than the expected text has, so that a longer answer shows as one.
    longest = max((len(one.expected) for one in questions[: len(exact)]), default=-1) + 1
    most = scoring.max_new_tokens
    values: list[list[float]] = [[] for _ in scoring.metrics]
    for start in range(0, len(questions), batch_size):
        if stopped():
            return None

        def of_interest(row: int, ids: list[int], start: int = start) -> bool:
            place = start + row
            if place < scoring.whole_records and len(ids) < most:
                return True
            if place >= len(exact) or len(ids) > longest:
                return False
            return beginnings[place].startswith(_letters(exact_text(tokenizer, ids)))

        chunk = questions[start : start + batch_size]
        answers = answer_records(
            model,
            tokenizer,
            chunk,
            max_new_tokens=max(longest, most if start < scoring.whole_records else 0),
            context=context,
            goes_on=of_interest,
        )
        for place, (question, answer) in enumerate(zip(chunk, answers, strict=True), start):
            ids = answer.tolist()
            for metric, of_metric in zip(scoring.metrics, values, strict=True):
                if place >= metric.records:
                    continue
                if metric.is_exact_match:
                    looked_at = ids[: longest if question.is_whole else len(question.expected)]
                    texts = exact_text(tokenizer, looked_at), exact[place]
                else:
                    texts = plain_text(tokenizer, ids[:most]).strip(), expected[place]
                of_metric.append(metric.score(*texts, question.record, place))
        progress(min(start + batch_size, len(questions)), len(questions))
    return [
        Score(metric, sum(of_metric) / len(of_metric), len(of_metric))
        for metric, of_metric in zip(scoring.metrics, values, strict=True)
    ]


def exact_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of an answer, or of what is expected, in which special tokens and spaces count."""
    return str(tokenizer.processor.decode(list(ids), skip_special_tokens=False))


def plain_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The same without special tokens, as `ftkit generate` shows answers."""
    return str(tokenizer.processor.decode(list(ids)))


def _letters(text: str) -> str:
    """A text without spaces, which depend on the tokens that follow, and without half a character.

    What it is for the first tokens of an answer is the beginning of what it is for all of them.
    """
    return "".join(text.split()).rstrip("\ufffd")
