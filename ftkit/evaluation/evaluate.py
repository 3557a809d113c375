"""`ftkit evaluate`: the loss of a result, scores of its answers, and tasks of the harness."""

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ftkit.checkpoint.metadata import PLUGIN
from ftkit.data.dataset import HeldOut, ValidationSets, load_held_out, load_sets
from ftkit.data.samples.layout import RankLayout
from ftkit.data.samples.loader import validation_loader
from ftkit.data.samples.sample_set import Samples
from ftkit.data.samples.shapes import FixedShapes
from ftkit.data.sources import settled, validation_sets
from ftkit.errors import UserError
from ftkit.evaluation.loading import open_result
from ftkit.evaluation.prompting import prompting_of
from ftkit.evaluation.result import Result, require_answers
from ftkit.evaluation.scoring import DEFAULT_RECORDS, EXACT_MATCH, Score, Scoring
from ftkit.evaluation.session import Session, plan_session, start_session
from ftkit.evaluation.task_programs import FoundTasks, TaskOptions, make_scorer
from ftkit.evaluation.validation import Validated, Wanted, answer_scores, validation_loss
from ftkit.models.bodies.attention import attention_kernel, common_path, planned_path
from ftkit.models.flops import attention_cost
from ftkit.models.language_model import LanguageModel
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.objectives.companion import Companion
from ftkit.objectives.objective import (
    Objective,
    checked_amounts,
    ignores_padding,
    make_objective,
)
from ftkit.recipe.companions import named_companion
from ftkit.recipe.objectives import check_objective, is_below_adapter, objective_rules
from ftkit.recipe.options import EvaluateOptions
from ftkit.recipe.parsing import recipe_as_dict, with_overrides
from ftkit.recipe.plugin import own_name, plugin_in_use
from ftkit.recipe.recipe import METRICS, Recipe
from ftkit.runs.report.answers import TaskResult, score_text, score_title
from ftkit.runs.report.metrics import perplexity
from ftkit.runs.report.table import term_title, term_value_text
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import loss_text, number_text, percent_text
from ftkit.utils.console.terminal import labelled_grid
from ftkit.utils.progress import print_notice
from ftkit.utils.urls import display_path

DEFAULT_NEW_TOKENS = 100
"""Most tokens of an answer, where the run has no number of its own."""
_TASK_ROWS = 8
"""Sequences per forward pass of a task, where no number is given."""


class ResultCompanion(Protocol):
    """The other model of a result, which its objective needs (`ftkit.recipe.companions`).

    It is made, and computes what can be computed of it, before the result is loaded.
    """

    @property
    def models(self) -> Sequence[LanguageModel]:
        """Models that it holds in memory beside the result."""

    def loaded(self, session: Session, display: Display) -> AbstractContextManager[None]:
        """Load what is held beside the result, which is loaded; it is there inside the context.

        Raises:
            UserError: it does not fit into memory.
        """

    def of(self, samples: Samples) -> Companion:
        """Return what computes, or has computed, micro-batches of some samples."""


def evaluate(result: Result, options: EvaluateOptions) -> int:
    """Evaluate a result, show the numbers and return the exit code.

    Args:
        result: what is evaluated.
        options: which data, how much of them, and how it computes.

    Raises:
        UserError: something is missing, or does not fit.
    """
    if options.tasks is not None:
        require_answers(result, "--tasks")
        return _evaluate_tasks(result, options)
    recipe, is_of_run = _recipe(result, options), result.recipe is not None
    _require_plugin(result, recipe)
    for source in validation_sets(recipe.data, recipe.eval.sets).values():
        source.files()  # a missing one is named before anything is loaded
    scoring = _scoring(recipe, options)
    if result.scores:
        check_objective(recipe)
        if options.metrics:
            require_answers(result, "--metric")
    result = dataclasses.replace(result, recipe=recipe)
    plan_session(result, options)  # a device that is not here is refused before data are read
    base = open_result(result, options.base)
    if result.template_directory is not None and not is_of_run:
        # The result was trained with this template, whatever its base model comes with.
        base.tokenizer.chat_template = prompting_of(result, base).template.source
    objective = make_objective(recipe.objective).alone
    _compare_plugins(result)
    given = {key.removeprefix("data.").removeprefix("init_args.") for key, _ in options.data}
    longest = base.architecture.context_length
    if result.metadata is not None:
        longest = result.metadata.max_seq_length
    longest = recipe.train.max_seq_length or longest
    held_out, sets = _held_out(recipe, base.tokenizer, longest, given)
    wanted = _validated_samples(recipe, objective, held_out, sets)
    refers = objective.needs_reference
    if options.reference is not None and (not refers or is_below_adapter(recipe)):
        raise UserError(
            f"--reference is {options.reference}, but {result.name} is compared with no other "
            "model. Leave --reference out."
        )
    companion: ResultCompanion | None = None
    if refers:
        code = named_companion("reference").code()
        companion = code.of_result(result, options, base, longest, wanted)
    session = start_session(result, options)
    session.see({name for part in (*held_out.parts, *sets.parts) for name in part.part.media})
    with ExitStack() as models, Display(None, stream=sys.stderr) as display:
        if companion is not None:
            models.enter_context(companion.loaded(session, display))
        measured = _measure(
            session, base.tokenizer, objective, held_out, sets, wanted, companion, scoring, display
        )
    values = {
        "result": result.name,
        "directory": display_path(result.directory),
        "step": result.step,
        "base_model": _base_name(result, session),
        "precision": session.plan.precision,
        "quantize": session.rounding,
        "data": recipe_as_dict(recipe)["data"],
        **measured,
    }
    if options.format == "json":
        print(json.dumps(values, indent=2, default=str))
    else:
        _show(values, objective, of_tokens=not objective_rules(recipe.objective).scores)
    return 0


def _require_plugin(result: Result, recipe: Recipe) -> None:
    """Refuse a recipe with classes of a plugin if there is none, naming that of the run."""
    classes = [component["class_path"] for component in (recipe.objective, recipe.data)]
    own = next(filter(own_name, classes), None)
    file = next(
        (
            place / PLUGIN
            for place in (result.directory, result.directory.parent)
            if (place / PLUGIN).is_file()
        ),
        None,
    )
    if own is not None and file is not None and plugin_in_use() is None:
        raise UserError(
            f"{result.name} is of a run with {own}, which its plugin defines, and nothing that a "
            f"run holds is executed by itself. Try --plugin {shlex.quote(display_path(file))}"
        )


def _compare_plugins(result: Result) -> None:
    """Show if the plugin in use is another one than that of the result's run."""
    plugin = plugin_in_use()
    entry = None if result.metadata is None else result.metadata.files.get(PLUGIN)
    if plugin is not None and entry is not None and entry.sha256 != plugin.sha256:
        print_notice(
            f"{plugin.option} is another one than that of the run: numbers may differ from those "
            "that it reported",
            sys.stderr,
        )


def _recipe(result: Result, options: EvaluateOptions) -> Recipe:
    """Recipe of the run, changed by the options."""
    if result.recipe is None and not options.data:
        raise UserError(
            f"{result.name} does not say which data it was trained on. "
            "Try --data JSON --data.path FILE."
        )
    recipe = result.recipe or Recipe(checkpoint_dir=str(result.directory))
    if result.recipe is None and result.scores is not None:
        recipe = dataclasses.replace(recipe, objective=result.scores.objective)
    # Other data are evaluated alone: the run's sets would be rendered like them.
    sets = "null" if options.data and options.sets is None else options.sets
    data_keys = [
        ("eval.sets", sets),
        ("train.micro_batch_size", options.micro_batch_size),
        ("eval.max_iters", options.max_iters),
        *((f"eval.{name}", getattr(options, name)) for name in METRICS),
        ("eval.max_new_tokens", options.max_new_tokens),
    ]
    given = [(key, str(value)) for key, value in data_keys if value is not None]
    recipe = with_overrides(recipe, [*options.data, *given])
    # What these data decide of an objective that nothing else says more about.
    return settled(recipe) if result.recipe is None else recipe


def _scoring(recipe: Recipe, options: EvaluateOptions) -> Scoring:
    """Choose the metrics of answers."""
    settings = recipe.eval
    records = settings.metrics
    answers = not objective_rules(recipe.objective).scores
    if options.exact_match is None and not records[EXACT_MATCH] and answers:
        records[EXACT_MATCH] = DEFAULT_RECORDS
    return Scoring(
        records,
        own=options.metrics,
        max_new_tokens=settings.max_new_tokens or DEFAULT_NEW_TOKENS,
    )


def _held_out(
    recipe: Recipe, tokenizer: Tokenizer, max_seq_length: int, given: set[str]
) -> tuple[HeldOut, ValidationSets]:
    """Read the records to evaluate on; `given` are the options of the data that are set for it."""
    with (
        Display(None, stream=sys.stderr) as display,
        display.phase("reading data", brief=True) as phase,
    ):

        def advance(_: str, done: int, total: int) -> None:
            phase.advance(done, total)

        preference = objective_rules(recipe.objective).preference
        held_out = load_held_out(
            recipe.data,
            tokenizer,
            max_seq_length,
            given=given,
            preference=preference,
            progress=advance,
        )
        further = load_sets(
            recipe.data,
            recipe.eval.sets,
            tokenizer,
            max_seq_length,
            preference=preference,
            progress=advance,
        )
        for part in (*held_out.parts, *further.parts):
            for notice in part.notices:
                display.warning(notice)
    return held_out, further


def _base_name(result: Result, session: Session) -> str:
    """Name of the base model; of a model without run, its own name."""
    if result.kind == "model" and result.base is not None:
        return Path(result.base).name
    return session.loaded.base.name


def _validated_samples(
    recipe: Recipe, objective: Objective, held_out: HeldOut, sets: ValidationSets
) -> list[Wanted]:
    """List what is measured: samples of the data, and those of the sets if there are any."""
    most = recipe.eval.max_iters * recipe.train.global_batch_size
    samples = objective.view(held_out.samples)
    wanted = [Wanted(samples=samples, numbers=np.arange(min(most, len(samples))))]
    if sets.parts:
        joined = objective.view(sets.samples(most))
        wanted.append(Wanted(samples=joined, numbers=np.arange(len(joined))))
    return wanted


def _measure(
    session: Session,
    tokenizer: Tokenizer,
    objective: Objective,
    held_out: HeldOut,
    sets: ValidationSets,
    wanted: Sequence[Wanted],
    companion: ResultCompanion | None,
    scoring: Scoring,
    display: Display,
) -> dict[str, Any]:
    """Measure in the order and with the batches of a run, so that the numbers are equal."""
    model, base, plan = session.loaded.model, session.loaded.base, session.plan
    of_data, *of_sets = wanted
    samples, limit = of_data.samples, len(of_data.numbers)
    traits = base.architecture.attention
    kernel = attention_kernel(traits, plan.accelerator, has_flash=plan.has_flash)
    model.kernel = kernel
    # The same layout as in the run: sums in another order differ in the last digits.
    label_fraction = float(samples.label_counts.sum() / samples.lengths.sum())
    path = planned_path(traits, plan)
    for other in () if companion is None else companion.models:
        path = common_path(path, planned_path(other.architecture.attention, plan))
    layout = RankLayout.of(
        plan,
        padding_free=path != "padded",
        attention_cost=attention_cost(model, label_fraction=label_fraction),
        longest=max(int(one.samples.longest.max()) for one in wanted if len(one.samples)),
        shapes=FixedShapes.of(
            plan, [one.samples for one in wanted], pads_labels=ignores_padding(objective)
        ),
    )

    def validated(one: Wanted, sources: int) -> Validated:
        batches = validation_loader(
            one.samples,
            checked_amounts(objective, one.samples),
            limit=len(one.numbers),
            layout=layout,
            joined=objective.joined,
        )
        found = validation_loss(
            model,
            objective,
            batches,
            session.device,
            sources=sources,
            context=session.context,
            companion=None if companion is None else companion.of(one.samples),
            progress=phase.advance,
        )
        assert found is not None
        return found

    with display.phase("validating", brief=True) as phase:
        measured = validated(of_data, len(held_out.parts))
        losses = dict(zip(held_out.names, measured.of_sources, strict=True))
        if len(held_out.parts) == 1:
            losses = {}
        for one in of_sets:
            losses |= zip(sets.names, validated(one, len(sets.parts)).of_sources, strict=True)
    questions = held_out.questions[: scoring.records]
    scores: list[Score] = []
    if questions:
        with display.phase(f"answering {len(questions)} records", brief=True) as phase:
            found = answer_scores(
                model,
                tokenizer,
                questions,
                scoring,
                batch_size=plan.sequences_of(int(samples.lengths.max())),
                context=session.context,
                progress=phase.advance,
            )
        assert found is not None
        scores = found
    match = next((score for score in scores if score.metric.is_exact_match), None)
    return {
        "records": limit,
        "label_tokens": int(samples.label_counts[:limit].sum()),
        "loss": measured.loss,
        "perplexity": perplexity(measured.loss) if objective.is_cross_entropy else None,
        "terms": measured.terms,
        **({"losses": losses} if losses else {}),
        "exact_match": match and {"records": match.records, "share": match.mean},
        "scores": [_score_values(score) for score in scores if score is not match],
    }


def _score_values(score: Score) -> dict[str, Any]:
    """Convert a score to JSON values."""
    values = {"name": score.metric.name, "records": score.records, "score": score.mean}
    if (own := score.metric.own) is not None:
        values |= {"file": Path(own.file).name, "sha256": own.sha256}
    return values


def _result_rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    step = "" if values["step"] is None else f" (step {values['step']:,})"
    quantize = f", {values['quantize']}" if values["quantize"] else ""
    return [
        ("result", f"{values['directory']}{step}"),
        ("base model", f"{values['base_model']}, {values['precision']}{quantize}"),
    ]


def _show(values: dict[str, Any], objective: Objective, *, of_tokens: bool) -> None:
    matches = values["exact_match"]
    of_labels = f", {values['label_tokens']:,} label tokens" * of_tokens
    rows = {
        **dict(_result_rows(values)),
        "data": f"{values['records']:,} records" + of_labels,
        "loss": loss_text(values["loss"]),
    }
    if values["perplexity"] is not None:
        rows["perplexity"] = f"{values['perplexity']:.4g}"
    shares = {term.name: term.is_share for term in objective.reported}
    for name, value in values["terms"].items():
        rows[term_title(name)] = term_value_text(value, is_share=shares[name])
    for name, loss in values.get("losses", {}).items():
        if loss is not None:
            rows[f"loss on {name}"] = loss_text(loss)
    if matches is not None:
        rows["exact match"] = f"{percent_text(matches['share'])} of {matches['records']:,} answers"
    for score in values["scores"]:
        title = score_title(score["name"], is_own="file" in score)
        rows[title] = f"{number_text(score['score'])} on {score['records']:,} answers"
    with Display(None) as display:
        display.show(labelled_grid(rows.items()))


# --- Tasks of the harness -------------------------------------------------------------------------


def _evaluate_tasks(result: Result, options: EvaluateOptions) -> int:
    assert options.tasks is not None
    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks is empty. Name tasks: --tasks arc_easy.")
    wanted = FoundTasks.find(names, key="--tasks", trusted=options.trust_task_code)
    assert wanted is not None
    session = start_session(result, options)
    loaded = session.loaded
    loaded.model.kernel = attention_kernel(
        loaded.base.architecture.attention,
        session.plan.accelerator,
        has_flash=session.plan.has_flash,
    )
    how = TaskOptions(
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        chat_template=loaded.prompting.template if options.apply_chat_template else None,
    )
    with Display(None, stream=sys.stderr) as display:
        with display.phase("loading tasks", brief=True):
            tasks = wanted.load(how, loaded.base.architecture.context_length)
        scorer = make_scorer(
            loaded.model,
            loaded.base.tokenizer,
            stop_ids=loaded.prompting.stop_ids(loaded.base.tokenizer),
            world_size=1,
            rows_of=lambda _: options.micro_batch_size or _TASK_ROWS,
            context=session.context,
        )
        title = "1 task" if len(tasks.names) == 1 else f"{len(tasks.names)} tasks"
        with display.phase(f"evaluating {title}", brief=True) as phase:
            scorer.progress = phase.advance
            found = tasks.evaluate(scorer)
    values = {
        "result": result.name,
        "directory": display_path(result.directory),
        "step": result.metadata.step if result.metadata else None,
        "base_model": _base_name(result, session),
        "precision": session.plan.precision,
        "quantize": session.rounding,
        "limit": options.limit,
        "num_fewshot": options.num_fewshot,
        "chat_template": None if how.chat_template is None else how.chat_template.name,
        "tasks": [dataclasses.asdict(one) for one in found],
    }
    if options.format == "json":
        print(json.dumps(values, indent=2))
    else:
        _show_tasks(values, found)
    return 0


def _show_tasks(values: dict[str, Any], found: list[TaskResult]) -> None:
    rows = [*_result_rows(values)]
    for one in found:
        error = "" if one.stderr is None else f" ± {score_text(one.stderr)}"
        text = f"{one.name} {score_text(one.value)}{error}"
        rows.append((one.task, f"{text} of {one.samples:,} records"))
    with Display(None) as display:
        display.show(labelled_grid(rows))
