"""The objective of classifiers and regressions, with its options."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.objectives import ObjectiveRow, ProblemType, ScoreLabels


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """Options of `objective: classify`."""

    problem_type: ProblemType | None = None
    """What labels are: one class of each text, several, or a number (regression). Default: several
    where labels of the training data are lists, a number where some have a fraction, else one."""
    classes: list[str] | None = None
    """Names of the classes, in the order of their scores. Default: those of the training data,
    sorted."""


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
)
