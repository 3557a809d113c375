"""Objectives of classifiers, regressions, rerankers and embedding models, with their options."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ftkit.errors import UserError
from ftkit.recipe.objectives import (
    RELEVANCE,
    ObjectiveRow,
    Pooling,
    ProblemType,
    ScoreLabels,
)


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """Options of `objective: classify`."""

    problem_type: ProblemType | None = None
    """What labels are: one class of each text, several, or a number (regression). Default: several
    where labels of the training data are lists, a number where some have a fraction, else one."""
    classes: list[str] | None = None
    """Names of the classes, in the order of their scores. Default: those of the training data,
    sorted."""


@dataclass(frozen=True, kw_only=True)
class RerankOptions:
    """Options of `objective: rerank`."""

    loss: Literal["lists", "pairs", "points"] = "lists"
    """Loss of a query. lists: the cross-entropy of its document among all that it has; pairs: of
    its document and each of the others; points: each document for itself, right or wrong."""
    negatives: int | None = None
    """Documents of each query that do not answer it; of records with more, the first ones count.
    Default: as many as every training record has. 0, for points: records have one document with a
    label from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """Options of `objective: embed`."""

    negatives: int | None = None
    """Documents of each query that do not answer it, beside those of all other queries of a step;
    of records with more, the first ones count. Default: as many as every training record has."""
    temperature: float = 0.05
    """Number that cosines are divided by: the inverse of the scale in sentence-transformers, 20."""
    pooling: Pooling = "last"
    """The vector of a text: the hidden state of its last token, or the mean over all."""
    sizes: list[int] | None = None
    """Sizes to which vectors may be cut later: the loss of their first numbers is added, for each
    size (Matryoshka). Default: vectors are used whole."""


def _decided_of_embed(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rules by its options; those of the data while these have not decided them."""
    pooling, negatives = options.get("pooling", EmbedOptions.pooling), options.get("negatives")
    rules: dict[str, Any] = {"scores": ScoreLabels(names=(), pooling=pooling)}
    if negatives is None:
        return rules
    of_reader = {"negatives": negatives, "labelled": False}
    rules["preference"] = f"queries {json.dumps(of_reader)}"
    return rules | {"sequences": 2 + negatives}


def _refuse(options: ClassifyOptions) -> None:
    count = None if options.classes is None else len(options.classes)
    if options.problem_type == "regression" and count is not None:
        raise UserError(
            "objective.classes is set, but objective.problem_type is regression, which learns "
            "numbers. Leave out objective.classes."
        )
    if count == 1 and options.problem_type != "multi_label_classification":
        raise UserError(
            f"objective.classes is {json.dumps(options.classes)}, but a text can only be told from "
            "others where there are at least two classes. Try --objective.classes '[good, bad]'."
        )


def _decided(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rules by its options; none while its data have not decided them."""
    problem, classes = options.get("problem_type"), options.get("classes")
    if problem is None or (classes is None and problem != "regression"):
        return {}
    of_reader = json.dumps({"problem_type": problem, "classes": classes})
    scores = ScoreLabels(problem_type=problem)
    if classes is not None:
        scores = ScoreLabels(problem_type=problem, names=tuple(classes))
    is_of_each = problem == "multi_label_classification"
    return {
        "preference": f"classes {of_reader}",
        "scores": scores,
        "target_size": len(scores.names) if is_of_each else 1,
    }


def _refuse_of_rerank(options: RerankOptions) -> None:
    if options.negatives == 0 and options.loss != "points":
        raise UserError(
            f"objective.negatives is 0, but objective.loss is {options.loss}, which compares the "
            "documents of a query. Try --objective.negatives 1; or, if each record has one "
            "document with a label, --objective.loss points."
        )


def _decided_of_rerank(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rules by its options; none while its data have not decided them."""
    negatives = options.get("negatives")
    if negatives is None:
        return {}
    of_reader = {"negatives": negatives, "labelled": negatives == 0, "together": True}
    return {
        "preference": f"queries {json.dumps(of_reader)}",
        "sequences": 1 + negatives,
        "target_size": int(negatives == 0),
    }


ROWS = (
    ObjectiveRow(
        name="classify",
        summary="the class of a text, several of them, or a number",
        class_path="ftkit.extensions.heads.classify.Classify",
        options=ClassifyOptions,
        refuse=_refuse,
        decided=_decided,
        settle_place="ftkit.extensions.heads.classes:settle",
        answers_place="ftkit.extensions.heads.generate:generate",
        preference="classes",
        scores=ScoreLabels(problem_type="single_label_classification"),
        target_size=1,
        shares_sequences=True,
    ),
    ObjectiveRow(
        name="rerank",
        summary="a score that is higher for the document that answers a query",
        class_path="ftkit.extensions.heads.rerank.Rerank",
        options=RerankOptions,
        refuse=_refuse_of_rerank,
        decided=_decided_of_rerank,
        settle_place="ftkit.extensions.heads.negatives:settle_rerank",
        answers_place="ftkit.extensions.heads.rank:generate",
        preference="queries",
        scores=ScoreLabels(names=(RELEVANCE,)),
        shares_sequences=True,
    ),
    ObjectiveRow(
        name="embed",
        summary="vectors of texts, alike for a query and the document that answers it",
        class_path="ftkit.extensions.heads.embed.Embed",
        options=EmbedOptions,
        above_0=("temperature",),
        decided=_decided_of_embed,
        settle_place="ftkit.extensions.heads.negatives:settle_embed",
        answers_place="ftkit.extensions.heads.vectors:generate",
        preference="queries",
        scores=ScoreLabels(names=(), pooling="last"),
        target_size=4,
        observes="own",
        shares_sequences=True,
    ),
)
