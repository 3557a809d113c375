"""The evaluator of a run: validation loss, scores of answers and sample answer while it trains."""

import dataclasses
import random
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ftkit.data.samples.loader import validation_loader
from ftkit.errors import UserError
from ftkit.evaluation.scoring.metrics import Score, Scoring
from ftkit.evaluation.tasks.finding import find_tasks
from ftkit.evaluation.tasks.scoring import AskingEnded, Scorer
from ftkit.evaluation.validation import (
    EvaluatedWeights,
    answer_records,
    answer_scores,
    validation_loss,
)
from ftkit.runs.report.answers import (
    AnsweredExample,
    AnswerScore,
    ExactMatch,
    TaskResult,
    score_text,
    with_results,
)
from ftkit.runs.report.metrics import loss_column, perplexity
from ftkit.strategies.distributed import rank
from ftkit.training.journal import Journal
from ftkit.training.loggers import Loggers
from ftkit.training.setup import Setup
from ftkit.training.signals import StopRequest
from ftkit.utils.console.formatting import number_text, percent_text
from ftkit.utils.progress import OnProgress

if TYPE_CHECKING:
    from ftkit.evaluation.tasks.harness import TaskSet

MOST_ROWS = 64
"""Sequences of a forward pass when tasks are asked, however short they are."""


class Evaluator:
    """Evaluates a model between the steps of its training."""

    def __init__(
        self,
        setup: Setup,
        scoring: Scoring,
        stop: StopRequest,
        journal: Journal,
        loggers: Loggers,
        weights: EvaluatedWeights,
    ) -> None:
        """Prepare.

        Args:
            setup: what is trained, and its data.
            scoring: what is asked of answers.
            stop: the user's wish to end, which ends an evaluation early.
            journal: where results go.
            loggers: where the validation loss goes besides.
            weights: what is evaluated.

        Raises:
            UserError: the sample record does not exist.
        """
        self._setup, self._stop, self._journal, self._loggers = setup, stop, journal, loggers
        self._scoring, self._weights = scoring, weights
        recipe = setup.job.recipe
        self._settings = recipe.eval
        self._example = _example_index(
            recipe.eval.evaluate_example, len(setup.data.questions), recipe.seed
        )
        self._tasks = self._loaded_tasks() if recipe.eval.tasks and rank() == 0 else None
        self._newest: tuple[int, float] | None = None
        """The newest validation: step and loss."""

    def validation_loss(self, step: int) -> float | None:
        """The validation loss of this very step, if there was a validation."""
        known = self._newest
        return known[1] if known is not None and known[0] == step else None

    def evaluate(self, step: int, *, validation: bool, scores: bool, example: bool) -> None:
        """Validation loss, scores of answers and sample answer, as far as wanted and asked for.

        Tasks are asked where answers are scored.
        """
        with self._weights.in_place():
            self._evaluate(step, validation=validation, scores=scores, example=example)

    def _evaluate(self, step: int, *, validation: bool, scores: bool, example: bool) -> None:
        if scores and self._settings.tasks:
            self._ask_tasks(step)
        if not len(self._setup.data.val):
            return
        self._journal.recorder.enter("validation")
        self._setup.model.eval()
        if validation:
            self._validate(step)
        if scores and self._scoring.records:
            self._score_answers(step)
        if example and self._settings.max_new_tokens:
            self._show_example(step)
        self._setup.strategy.sharding.reshard(self._setup.model)
        self._setup.model.train()

    def _validate(self, step: int) -> None:
        limit = self._settings.max_iters * self._setup.job.recipe.train.global_batch_size
        batches = validation_loader(
            self._setup.data.val,
            limit=limit,
            layout=self._setup.layout,
        )
        with self._journal.display.phase("validating", brief=True) as phase:
            found = validation_loss(
                self._setup.model,
                batches,
                self._setup.strategy.device,
                sources=len(self._setup.data.parts),
                context=self._setup.strategy.precision.forward_context,
                stopped=self._stop.requested,
                progress=phase.advance,
            )
            of_sets = self._losses_of_sets(limit, phase.advance) if found else None
        if found is None or of_sets is None:
            return
        loss = found.loss
        self._newest = step, loss
        names = self._setup.data.names if len(found.of_sources) > 1 else ()
        of_sources = dict(zip(names, found.of_sources, strict=False)) | of_sets
        self._journal.recorder.on_validation(step, loss, of_sources)
        shown = {loss_column(name): its for name, its in of_sources.items() if its is not None}
        self._loggers.log({"val_loss": loss, **shown}, step)
        self._journal.display.message(
            f"step {step}: validation loss {loss:.4f}, perplexity {perplexity(loss):.3g}"
            + "".join(f", {name} {of_set:.4f}" for name, of_set in of_sets.items())
        )

    def _losses_of_sets(self, limit: int, progress: OnProgress) -> dict[str, float] | None:
        """Of each set of eval.sets, on its first `limit` samples; None: it was stopped early."""
        sets = self._setup.sets
        if not sets.parts:
            return {}
        found = validation_loss(
            self._setup.model,
            validation_loader(samples := sets.samples(limit), len(samples), self._setup.layout),
            self._setup.strategy.device,
            sources=len(sets.parts),
            context=self._setup.strategy.precision.forward_context,
            stopped=self._stop.requested,
            progress=progress,
        )
        if found is None:
            return None
        losses = zip(sets.names, found.of_sources, strict=True)
        return {name: loss for name, loss in losses if loss is not None}

    def _score_answers(self, step: int) -> None:
        questions = self._setup.data.questions[: self._scoring.records]
        if not questions:
            return
        title = f"answering {len(questions)} validation records"
        with self._journal.display.phase(title, brief=True) as phase:
            found = answer_scores(
                self._setup.model,
                self._setup.base.tokenizer,
                questions,
                self._scoring,
                batch_size=self._setup.plan.sequences_of(int(self._setup.data.val.lengths.max())),
                context=self._setup.strategy.precision.forward_context,
                stopped=self._stop.requested,
                progress=phase.advance,
            )
        for score in found or ():
            self._note_score(score, step)

    def _note_score(self, score: Score, step: int) -> None:
        recorder, records = self._journal.recorder, score.records
        when = "before" if step == 0 else "after"
        if score.metric.is_exact_match:
            match = recorder.report.exact_match or ExactMatch(samples=records)
            recorder.note(exact_match=_with_value(match, step, score.mean))
            share = percent_text(score.mean)
            text = f"exact match {when} training: {share} of {records} held-out records"
        else:
            noted = _with_value(self._known_score(score), step, score.mean)
            others = [one for one in recorder.report.scores if one.identity != noted.identity]
            recorder.note(scores=[*others, noted])
            value = number_text(score.mean)
            text = f"{noted.title} {when} training: {value} on {records} held-out records"
        self._journal.display.message(text)

    def _known_score(self, score: Score) -> AnswerScore:
        """What the report says of it; only of as many records, values can be compared."""
        own = score.metric.own
        new = AnswerScore(
            name=score.metric.name,
            samples=score.records,
            file=None if own is None else Path(own.file).name,
            sha256=None if own is None else own.sha256,
        )
        known = (new.samples, new.identity)
        return next(
            (s for s in self._journal.recorder.report.scores if (s.samples, s.identity) == known),
            new,
        )

    def _ask_tasks(self, step: int) -> None:
        """Ask tasks of the harness, which rank 0 has; the other ranks compute along."""
        self._journal.recorder.enter("validation")
        self._setup.model.eval()
        scorer = _scorer(self._setup, self._stop)
        title = f"asking {', '.join(self._settings.tasks or ())}"
        with self._journal.display.phase(title, brief=True) as phase, suppress(AskingEnded):
            scorer.progress = phase.advance
            if self._tasks is None:
                scorer.serve()
            else:
                self._note_tasks(step, self._tasks.results(scorer))
        scorer.restore()
        self._setup.strategy.sharding.reshard(self._setup.model)
        self._setup.model.train()

    def _note_tasks(self, step: int, results: list[TaskResult]) -> None:
        scores = with_results(self._journal.recorder.report.tasks, results, before=step == 0)
        self._journal.recorder.note(tasks=scores)
        when = "before" if step == 0 else "after"
        values = {f"tasks/{one.task}/{one.name}": one.value for one in results}
        self._loggers.log(values, step)
        for one in results:
            self._journal.display.message(
                f"{one.task} {when} training: {one.name} {score_text(one.value)}"
            )

    def _loaded_tasks(self) -> "TaskSet":
        from ftkit.evaluation.tasks.harness import (  # seconds, for those who ask tasks
            Asking,
            TaskSet,
        )

        settings, trusted = self._settings, self._setup.job.trusted
        definitions = find_tasks(
            settings.tasks or (),
            key="eval.tasks",
            trusted=None if trusted is None else Path(trusted),
        )
        asking = Asking(
            limit=settings.limit,
            num_fewshot=settings.num_fewshot,
            chat_template=self._setup.template if settings.apply_chat_template else None,
        )
        with self._journal.display.phase("loading tasks", brief=True):
            return TaskSet(definitions, asking, self._setup.base.architecture.context_length)

    def _show_example(self, step: int) -> None:
        if not self._setup.data.questions:
            return
        example = self._setup.data.questions[self._example]
        with self._journal.display.phase("answering an example", brief=True):
            (tokens,) = answer_records(
                self._setup.model,
                self._setup.base.tokenizer,
                [example],
                max_new_tokens=self._settings.max_new_tokens or 0,
                context=self._setup.strategy.precision.forward_context,
            )
        answer = self._setup.base.tokenizer.decode(tokens).strip()
        asked = " ".join(filter(None, (example.instruction, example.input)))
        self._journal.display.message(f"sample: {asked}\nanswer: {answer}")
        known = self._journal.recorder.report.examples or [
            AnsweredExample(
                instruction=example.instruction,
                input=example.input,
                expected=example.expected,
            )
        ]
        shown = (
            dataclasses.replace(known[0], before=answer)
            if step == 0
            else dataclasses.replace(known[0], after=answer)
        )
        self._journal.recorder.note(examples=[shown])


_Noted = TypeVar("_Noted", ExactMatch, AnswerScore)


def _with_value(noted: _Noted, step: int, value: float) -> _Noted:
    if step == 0:
        return dataclasses.replace(noted, before=value)
    return dataclasses.replace(noted, after=value)


def _scorer(setup: Setup, stop: StopRequest) -> Scorer:
    """What scores and answers for tasks, with as many tokens at once as in training."""
    tokenizer = setup.base.tokenizer
    longest = int(setup.data.train.lengths.max())
    tokens = longest * setup.plan.sequences_of(longest)
    return Scorer(
        setup.model,
        tokenizer,
        stop_ids=setup.stop_ids | {tokenizer.eos_id},
        world_size=setup.plan.world_size,
        rows_of=lambda length: max(1, min(MOST_ROWS, tokens // length)),
        context=setup.strategy.precision.forward_context,
        stopped=stop.requested,
    )


def _example_index(choice: str | int, questions: int, seed: int) -> int:
    if choice == "random":
        return random.Random(seed).randrange(max(1, questions))
    index = 0 if choice == "first" else int(choice)
    if index and index >= questions:
        raise UserError(
            f"eval.evaluate_example is {index}, but there are {questions} validation records "
            "(counted from 0). Try --eval.evaluate_example first."
        )
    return index
