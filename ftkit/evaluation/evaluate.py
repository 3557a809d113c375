"""`ftkit evaluate`: the loss of a result on held-out records, and what its answers are worth."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from ftkit.data.dataset import HeldOut, ValidationSets, load_held_out, load_sets
from ftkit.data.samples.layout import RankLayout
from ftkit.data.samples.loader import validation_loader
from ftkit.data.samples.sample_set import Samples
from ftkit.data.sources import validation_sets
from ftkit.errors import UserError
from ftkit.evaluation.harness_tasks import evaluate_tasks
from ftkit.evaluation.result import Result
from ftkit.evaluation.scoring.metrics import DEFAULT_RECORDS, Score, Scoring
from ftkit.evaluation.session import InUse, put_to_use
from ftkit.evaluation.validation import Validated, answer_scores, validation_loss
from ftkit.models.bodies.attention import attention_kernel, attention_path
from ftkit.models.flops import attention_cost
from ftkit.recipe.options import EvaluateOptions
from ftkit.recipe.parsing import with_overrides
from ftkit.recipe.recipe import Recipe
from ftkit.runs.report.answers import score_title
from ftkit.runs.report.metrics import perplexity
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import loss_text, number_text, percent_text
from ftkit.utils.console.terminal import labelled_grid
from ftkit.utils.remote.urls import display_path

DEFAULT_NEW_TOKENS = 100
"""Of an answer at most, where the run made none."""


def evaluate(result: Result, options: EvaluateOptions) -> int:
    """Measure a result, and show what came out; the exit code.

    Args:
        result: what is measured.
        options: which data, how much of them, and how it computes.

    Raises:
        UserError: something is missing, or does not fit.
    """
    if options.tasks is not None:
        return evaluate_tasks(result, options)
    recipe, is_of_run = _recipe(result, options), result.recipe is not None
    for source in validation_sets(recipe.data, recipe.eval.sets).values():
        source.files()  # a missing one is named before anything is loaded
    scoring = _scoring(recipe, options)
    result = dataclasses.replace(result, recipe=recipe)
    in_use = put_to_use(result, options)
    if result.asked is not None and not is_of_run:
        # Conversations are written as it was trained, whatever template its base model has.
        in_use.loaded.base.tokenizer.chat_template = in_use.loaded.prompting.template.source
    given = {key.removeprefix("data.").removeprefix("init_args.") for key, _ in options.data}
    held_out, sets = _held_out(result, recipe, in_use, given)
    with Display(None, stream=sys.stderr) as display:
        measured = _measure(in_use, held_out, sets, recipe, scoring, display)
    values = {
        "result": result.name,
        "directory": display_path(result.directory),
        "step": result.step,
        "base_model": _base_name(result, in_use),
        "precision": in_use.plan.precision,
        "quantize": in_use.quantize,
        "data": recipe.data,
        **measured,
    }
    if options.format == "json":
        print(json.dumps(values, indent=2, default=str))
    else:
        _show(values)
    return 0


def _recipe(result: Result, options: EvaluateOptions) -> Recipe:
    """The recipe of the run, with what is asked instead."""
    if result.recipe is None and not options.data:
        raise UserError(
            f"{result.name} does not say which data it was trained on. "
            "Try --data JSON --data.path FILE."
        )
    recipe = result.recipe or Recipe(checkpoint_dir=str(result.directory))
    sets = "null" if options.data and options.sets is None else options.sets
    asked = [
        ("eval.sets", sets),
        ("train.micro_batch_size", options.micro_batch_size),
        ("eval.max_iters", options.max_iters),
        ("eval.exact_match", options.exact_match),
        ("eval.rouge_l", options.rouge_l),
        ("eval.max_new_tokens", options.max_new_tokens),
    ]
    given = [(key, str(value)) for key, value in asked if value is not None]
    return with_overrides(recipe, [*options.data, *given])


def _scoring(recipe: Recipe, options: EvaluateOptions) -> Scoring:
    """What is asked of answers."""
    exact_match = recipe.eval.exact_match
    if options.exact_match is None and not exact_match:
        exact_match = DEFAULT_RECORDS
    return Scoring(
        exact_match=exact_match,
        rouge_l=recipe.eval.rouge_l,
        own=options.metrics,
        max_new_tokens=recipe.eval.max_new_tokens or DEFAULT_NEW_TOKENS,
    )


def _held_out(
    result: Result, recipe: Recipe, in_use: InUse, given: set[str]
) -> tuple[HeldOut, ValidationSets]:
    """The records to evaluate on; `given` are the options of the data that were named for it."""
    longest = in_use.loaded.base.architecture.context_length
    if result.metadata is not None:
        longest = result.metadata.max_seq_length
    longest = recipe.train.max_seq_length or longest
    with (
        Display(None, stream=sys.stderr) as display,
        display.phase("reading data", brief=True) as phase,
    ):

        def advance(_: str, done: int, total: int) -> None:
            phase.advance(done, total)

        tokenizer = in_use.loaded.base.tokenizer
        held_out = load_held_out(recipe.data, tokenizer, longest, given=given, progress=advance)
        sets = load_sets(recipe.data, recipe.eval.sets, tokenizer, longest, progress=advance)
        for part in (*held_out.parts, *sets.parts):
            for notice in part.notices:
                display.warning(notice)
    return held_out, sets


def _base_name(result: Result, in_use: InUse) -> str:
    """What it was made from; of a model of no run, its own name."""
    if result.kind == "model" and result.base is not None:
        return Path(result.base).name
    return in_use.loaded.base.name


def _measure(
    in_use: InUse,
    held_out: HeldOut,
    sets: ValidationSets,
    recipe: Recipe,
    scoring: Scoring,
    display: Display,
) -> dict[str, Any]:
    """The numbers, in the way and order in which a run comes to them."""
    model, base = in_use.loaded.model, in_use.loaded.base
    samples = held_out.samples
    most = recipe.eval.max_iters * recipe.train.global_batch_size
    limit = min(most, len(samples))
    traits = base.architecture.attention
    model.kernel = attention_kernel(traits, in_use.plan)
    label_fraction = float(samples.label_counts.sum() / samples.lengths.sum())
    layout = RankLayout.of(
        in_use.plan,
        padding_free=attention_path(traits, in_use.plan) != "padded",
        attention_cost=attention_cost(model, label_fraction=label_fraction),
    )

    def validated(samples: Samples, limit: int, sources: int) -> Validated:
        batches = validation_loader(samples, limit=limit, layout=layout)
        found = validation_loss(
            model,
            batches,
            in_use.device,
            sources=sources,
            context=in_use.context,
            progress=phase.advance,
        )
        assert found is not None
        return found

    with display.phase("validating", brief=True) as phase:
        of_data = validated(samples, limit, len(held_out.parts))
        losses = dict(zip(held_out.names, of_data.of_sources, strict=True))
        if len(held_out.parts) == 1:
            losses = {}
        if sets.parts:
            of_sets = validated(joined := sets.samples(most), len(joined), len(sets.parts))
            losses |= zip(sets.names, of_sets.of_sources, strict=True)
    questions = held_out.questions[: scoring.records]
    scores: list[Score] = []
    if questions:
        with display.phase(f"answering {len(questions)} records", brief=True) as phase:
            found = answer_scores(
                model,
                base.tokenizer,
                questions,
                scoring,
                batch_size=in_use.plan.sequences_of(int(samples.lengths.max())),
                context=in_use.context,
                progress=phase.advance,
            )
        assert found is not None
        scores = found
    match = next((score for score in scores if score.metric.is_exact_match), None)
    return {
        "records": limit,
        "label_tokens": int(samples.label_counts[:limit].sum()),
        "loss": of_data.loss,
        "perplexity": perplexity(of_data.loss),
        **({"losses": losses} if losses else {}),
        "exact_match": match and {"records": match.records, "share": match.mean},
        "scores": [_score_values(score) for score in scores if score is not match],
    }


def _score_values(score: Score) -> dict[str, Any]:
    """A score as JSON has it."""
    values = {"name": score.metric.name, "records": score.records, "score": score.mean}
    if (own := score.metric.own) is not None:
        values |= {"file": Path(own.file).name, "sha256": own.sha256}
    return values


def _show(values: dict[str, Any]) -> None:
    step = "" if values["step"] is None else f" (step {values['step']:,})"
    quantize = f", {values['quantize']}" if values["quantize"] else ""
    matches = values["exact_match"]
    rows = {
        "result": f"{values['directory']}{step}",
        "base model": f"{values['base_model']}, {values['precision']}{quantize}",
        "data": f"{values['records']:,} records, {values['label_tokens']:,} label tokens",
        "loss": loss_text(values["loss"]),
        "perplexity": f"{values['perplexity']:.4g}",
    }
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
