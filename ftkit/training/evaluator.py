"""Evaluation during training: validation loss, scores of answers, and a sample answer."""

import dataclasses
import math
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ftkit.data.records.media import shown_medium
from ftkit.data.samples.loader import validation_loader
from ftkit.errors import UserError
from ftkit.evaluation.scoring import Score, Scoring
from ftkit.evaluation.task_programs import (
    EvaluationAborted,
    FoundTasks,
    LoadedTasks,
    TaskOptions,
    make_scorer,
)
from ftkit.evaluation.validation import (
    answer_records,
    answer_scores,
    exact_text,
    validation_loss,
)
from ftkit.objectives.objective import checked_amounts
from ftkit.runs.report.answers import (
    MOST_SHOWN,
    AnsweredExample,
    AnswerScore,
    ExactMatch,
    TaskResult,
    score_text,
    with_results,
)
from ftkit.runs.report.metrics import loss_column, perplexity, term_column
from ftkit.runs.report.table import term_text
from ftkit.strategies.distributed import rank
from ftkit.training.finite import diverged
from ftkit.training.journal import Journal
from ftkit.training.loggers import Loggers
from ftkit.training.setup import Setup, result_stop_ids, result_template
from ftkit.utils.console.formatting import (
    marked,
    number_text,
    percent_text,
    shortened,
    shortened_within,
)
from ftkit.utils.progress import OnProgress

_MOST_ROWS = 64
"""Most sequences of a forward pass for tasks, even if they are short."""


class Evaluator:
    """Evaluates a model between the steps of its training."""

    def __init__(
        self,
        setup: Setup,
        scoring: Scoring,
        stopped: Callable[[], int],
        journal: Journal,
        loggers: Loggers,
        trusted: Path | None,
    ) -> None:
        """Prepare evaluations; rank 0 loads the tasks of the recipe.

        Args:
            setup: of this rank.
            scoring: metrics of answers.
            stopped: whether a signal asks to end, which ends an evaluation early; ranks agree.
            journal: for results.
            loggers: for validation losses and scores of tasks.
            trusted: directory whose Python code tasks may run.

        Raises:
            UserError: the sample record or a task does not exist.
        """
        self._setup, self._stopped, self._journal, self._loggers = setup, stopped, journal, loggers
        self._scoring, self._weights = scoring, setup.evaluated_weights
        recipe = setup.recipe
        self._settings = recipe.eval
        self._example = _example_index(
            recipe.eval.evaluate_example, len(setup.data.questions), recipe.seed
        )
        self._tasks = self._load_tasks(trusted) if recipe.eval.tasks and rank() == 0 else None
        self._newest: tuple[int, float] | None = None
        """Step and loss of the newest validation."""

    def validation_loss(self, step: int) -> float | None:
        """Validation loss of exactly this step, if it was measured."""
        known = self._newest
        return known[1] if known is not None and known[0] == step else None

    def evaluate(
        self, step: int, *, validation: bool, scores: bool, example: bool
    ) -> dict[str, float] | None:
        """Evaluate after a step; every rank calls this.

        Args:
            step: optimizer steps done.
            validation: measure the validation loss.
            scores: score answers and run tasks, as far as the recipe wants them.
            example: show a sample answer, if the recipe wants one.

        Returns:
            Values of the validation, as `Callback.on_validation` gets them; None: there was none.

        Raises:
            NotFinite: a validation loss is not finite; it is reported.
        """
        with self._weights.in_place():
            return self._evaluate(step, validation=validation, scores=scores, example=example)

    def _evaluate(
        self, step: int, *, validation: bool, scores: bool, example: bool
    ) -> dict[str, float] | None:
        # Before and after training alone: tasks take minutes where a validation takes seconds.
        if scores and self._settings.tasks:
            self._run_tasks(step)
        if not len(self._setup.data.val):
            return None
        self._journal.recorder.enter("validation")
        self._setup.model.eval()
        values = self._validate(step) if validation else None
        if scores and self._scoring.records:
            self._score_answers(step)
        # A reward model answers nothing.
        if example and self._settings.max_new_tokens and not self._setup.base.architecture.scores:
            self._show_example(step)
        self._setup.strategy.sharding.reshard(self._setup.model)
        self._setup.model.train()
        return values

    def _validate(self, step: int) -> dict[str, float] | None:
        samples, objective = self._setup.data.val, self._setup.objective.validated
        batches = validation_loader(
            samples,
            checked_amounts(objective, samples),
            limit=self._setup.validation_limit,
            layout=self._setup.layout,
            joined=objective.joined,
        )
        with self._journal.display.phase("validating", brief=True) as phase:
            found = validation_loss(
                self._setup.model,
                objective,
                batches,
                self._setup.strategy.device,
                sources=len(self._setup.data.parts),
                context=self._setup.strategy.precision.forward_context,
                companion=self._setup.companion_of(samples),
                stopped=self._stopped,
                progress=phase.advance,
            )
            of_sets = self._losses_of_sets(phase.advance) if found else None
        if found is None or of_sets is None:
            return None
        loss = found.loss
        self._newest = step, loss
        names = self._setup.data.names if len(found.of_sources) > 1 else ()
        of_sources = dict(zip(names, found.of_sources, strict=False)) | of_sets
        self._journal.recorder.on_validation(step, loss, of_sources, found.terms)
        shown = {loss_column(name): its for name, its in of_sources.items() if its is not None}
        terms = {term_column(name): value for name, value in found.terms.items()}
        self._loggers.log({"val_loss": loss, **terms, **shown}, step)
        parts = [f"step {step}: validation loss {loss:.4f}"]
        if objective.is_cross_entropy:
            parts.append(f"perplexity {perplexity(loss):.3g}")
        parts += [
            term_text(term.name, found.terms[term.name], is_share=term.is_share)
            for term in objective.reported
            if term.name in found.terms
        ]
        parts += [f"{name} {of_set:.4f}" for name, of_set in of_sets.items()]
        self._journal.display.message(", ".join(parts))
        losses = {f"loss/{name}": its for name, its in of_sources.items() if its is not None}
        for name, value in {"the validation records": loss, **of_sources}.items():
            if value is not None and not math.isfinite(value):
                fact = f"After step {step}, the validation loss on {name} is {value}"
                raise diverged(self._setup, fact, computed_from=step)
        return {"loss": loss, **found.terms, **losses}

    def _losses_of_sets(self, progress: OnProgress) -> dict[str, float] | None:
        """Losses on the first samples of each set in eval.sets; None: stopped early."""
        sets, samples = self._setup.sets, self._setup.further_samples
        if samples is None:
            return {}
        objective = self._setup.objective.validated
        found = validation_loss(
            self._setup.model,
            objective,
            validation_loader(
                samples,
                checked_amounts(objective, samples),
                len(samples),
                self._setup.layout,
                joined=objective.joined,
            ),
            self._setup.strategy.device,
            sources=len(sets.parts),
            context=self._setup.strategy.precision.forward_context,
            companion=self._setup.companion_of(samples),
            stopped=self._stopped,
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
                stopped=self._stopped,
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
            text = f"exact match {when} training: {share} of {records} validation records"
        else:
            noted = _with_value(self._known_score(score), step, score.mean)
            others = [one for one in recorder.report.scores if one.identity != noted.identity]
            recorder.note(scores=[*others, noted])
            value = number_text(score.mean)
            text = f"{noted.title} {when} training: {value} on {records} validation records"
        self._journal.display.message(text)

    def _known_score(self, score: Score) -> AnswerScore:
        """The score in the report, if it was measured on as many records, otherwise a new one."""
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

    def _run_tasks(self, step: int) -> None:
        """Run tasks of lm-evaluation-harness: rank 0 has them, the other ranks compute with it."""
        self._journal.recorder.enter("validation")
        self._setup.model.eval()
        tokenizer, train = self._setup.base.tokenizer, self._setup.data.train
        longest = int(train.lengths.max())
        tokens = longest * self._setup.plan.sequences_of(longest)  # as many at once as in training
        scorer = make_scorer(
            self._setup.model,
            tokenizer,
            stop_ids=result_stop_ids(self._setup.base, self._setup.data) | {tokenizer.eos_id},
            world_size=self._setup.plan.world_size,
            rows_of=lambda length: max(1, min(_MOST_ROWS, tokens // length)),
            context=self._setup.strategy.precision.forward_context,
            stopped=self._stopped,
        )
        title = f"evaluating {', '.join(self._settings.tasks or ())}"
        with self._journal.display.phase(title, brief=True) as phase, suppress(EvaluationAborted):
            scorer.progress = phase.advance
            if self._tasks is None:
                scorer.serve()
            else:
                self._note_tasks(step, self._tasks.evaluate(scorer))
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

    def _load_tasks(self, trusted: Path | None) -> LoadedTasks:
        settings, base = self._settings, self._setup.base
        wanted = FoundTasks.find(settings.tasks or (), key="eval.tasks", trusted=trusted)
        assert wanted is not None
        options = TaskOptions(
            limit=settings.limit,
            num_fewshot=settings.num_fewshot,
            chat_template=result_template(base, self._setup.data)
            if settings.apply_chat_template
            else None,
        )
        with self._journal.display.phase("loading tasks", brief=True):
            return wanted.load(options, base.architecture.context_length)

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
        answer = exact_text(self._setup.base.tokenizer, tokens.tolist())
        known = self._journal.recorder.report.examples or [
            AnsweredExample(
                instruction=example.instruction,
                input=example.input,
                expected=exact_text(self._setup.base.tokenizer, example.expected),
                media=[shown_medium(one) for one in example.media[:MOST_SHOWN]],
                further_media=len(example.media[MOST_SHOWN:]),
            )
        ]
        shown = (
            dataclasses.replace(known[0], before=answer)
            if step == 0
            else dataclasses.replace(known[0], after=answer)
        )
        self._journal.recorder.note(examples=[shown])
        # Cut as in the report's table: a base model's answer often has no end. The report has all.
        asked = shortened_within(f"{example.instruction} {example.input}")
        self._journal.display.message(
            f"sample: {' '.join((asked, *shown.media_texts))}\n"
            f"answer: {shortened(marked(answer)) or '(empty)'}"
        )


_Noted = TypeVar("_Noted", ExactMatch, AnswerScore)


def _with_value(noted: _Noted, step: int, value: float) -> _Noted:
    if step == 0:
        return dataclasses.replace(noted, before=value)
    return dataclasses.replace(noted, after=value)


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
