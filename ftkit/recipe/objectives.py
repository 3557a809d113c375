"""Objectives without torch: their names, options, and what they need of data and model."""

import dataclasses
import importlib
import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ftkit.errors import UserError
from ftkit.recipe.plugin import own_name, plugin_in_use, require_own, short_names
from ftkit.recipe.recipe import Component, LoraRecipe, Recipe
from ftkit.utils.names import nearest, unknown_option
from ftkit.utils.registry import Registry

Preference = str
"""How records say what is learned of them beside their texts: the name of a row of `preferences`,
and behind a space what this takes, as JSON. pairs: two answers to a prompt, the better one first.
labels: one answer, and whether it is desirable. queries: a query and its documents."""
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
"""What scores of sequences mean, in the words of transformers."""
Observed = Literal["own", "joined"]
"""Sequences of which an objective needs something before the first backward pass of a step: the
step's own, or those made of each sample and the one before it."""
Pooling = Literal["last", "mean"]
"""Which hidden state of a sequence is its vector: that of its last token, or the mean over all."""
REWARD = "reward"
"""Objective of models with one score whose meaning their settings do not say."""
RELEVANCE = "relevance"
"""Name of the one score of rerankers, by which their settings say what it means."""


@dataclass(frozen=True, kw_only=True)
class ScoreLabels:
    """What a model gives a sequence: scores as transformers' config.json names them, or vectors."""

    names: tuple[str, ...] = ("LABEL_0",)
    """A name for each score; none of a vector, which no output layer computes."""
    problem_type: ProblemType | None = None
    """None: one score, which is the higher the better an answer, or a document, is."""
    pooling: Pooling | None = None
    """Where the vector of a sequence is; None: it has scores."""

    @classmethod
    def unnamed(cls, count: int) -> "ScoreLabels":
        """So many scores of a model that says no more, as transformers names them."""
        problem: ProblemType | None = None if count == 1 else "single_label_classification"
        return cls(names=tuple(f"LABEL_{n}" for n in range(count)), problem_type=problem)

    @property
    def is_reward(self) -> bool:
        """Whether the score is a reward."""
        return self.problem_type is None and not self.is_relevance and self.pooling is None

    @property
    def is_relevance(self) -> bool:
        """Whether the score is that of a document for a query."""
        return self.problem_type is None and self.names == (RELEVANCE,)

    @property
    def noun(self) -> str:
        """A model that gives them, for people."""
        if self.is_relevance:
            return "a reranker"
        if self.pooling is not None:
            return "an embedding model"
        return "a reward model" if self.is_reward else "a classifier"

    @property
    def objective(self) -> Component:
        """The objective of such models, where no recipe says it."""
        if self.is_reward:
            return Component(class_path=REWARD, init_args={})
        if self.is_relevance:
            return Component(class_path="rerank", init_args={})
        if self.pooling is not None:
            return Component(class_path="embed", init_args={"pooling": self.pooling})
        options: dict[str, Any] = {"problem_type": self.problem_type}
        if self.problem_type != "regression":
            options["classes"] = [*self.names]
        return Component(class_path="classify", init_args=options)


@dataclass(frozen=True, kw_only=True)
class SftOptions:
    """Options of `objective: sft`."""

    z_loss: float = 0.0
    """Coefficient of the mean of (log Z)^2 beside the cross-entropy, with Z the sum of exp(logits)
    of a token: it keeps logits from drifting; 1e-4 is usual."""


@dataclass(frozen=True, kw_only=True)
class DftOptions:
    """Options of `objective: dft`."""


@dataclass(frozen=True, kw_only=True)
class EaftOptions:
    """Options of `objective: eaft`."""

    alpha: float = 1.0
    """Exponent of the entropy by which the loss of a token is multiplied; 0: cross-entropy."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveRules:
    """Rules of an objective, known before torch is loaded."""

    preference: Preference | None = None
    """How its records say what is learned of them beside their texts; None: they do not."""
    scores: ScoreLabels | None = None
    """The scores that the model gives a sequence; None: it predicts tokens."""
    target_size: int = 0
    """Numbers of the target of a sequence, what is learned of it as a whole; 0: it has none."""
    sequences: int = 1
    """Sequences of a sample: 2 of a preference pair."""
    needs_reference: bool = False
    """Whether the model is compared with a reference: by default itself, before training."""
    needs_teacher: bool = False
    """Whether another model, the teacher, computes beside the one that is trained."""
    observes: Observed | None = None
    """The sequences of a step that are compared with each other, so that it has at least two
    samples; None: none are."""
    is_smoothed: bool = False
    """Whether train.label_smoothing applies to its loss."""
    shares_sequences: bool = False
    """Whether ranks may each have pieces of its sequences (strategy.context): its sums are over
    tokens, or of `ftkit.objectives.objective.sequence_sums`."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveRow(ObjectiveRules):
    """An objective."""

    name: str
    summary: str
    """What is learned, as a part of a sentence."""
    class_path: str
    """Module and class that make it: imported only where it is used, because it needs torch."""
    options: type[Any]
    """Its options, the keys below `objective`, which are the arguments of its class."""
    above_0: tuple[str, ...] = ()
    """Options that divide, or scale everything that is learned; other numbers may be 0."""
    refuse: Callable[[Any], None] | None = None
    """Refuses, by a UserError, options that exclude each other; None: none do."""
    decided: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Rules that its options decide, by name; None: they decide none."""
    settle_place: str = ""
    """MODULE:FUNCTION that takes a recipe and returns options that its data decide, before anything
    is planned; "": they decide none."""
    answers_place: str = ""
    """MODULE:FUNCTION by which `ftkit generate` answers with a result that gives scores: takes the
    result and options, and returns the exit code. "": it answers nothing."""

    @property
    def defaults(self) -> dict[str, Any]:
        """Its options where a recipe gives none."""
        return dataclasses.asdict(self.options())

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return options, with defaults of those that are not given.

        Args:
            given: by name.

        Raises:
            UserError: one is unknown, or out of its range.
        """
        kinds = get_type_hints(self.options)
        for key, value in given.items():
            if key not in kinds:
                nothing = "It takes none; remove it."
                raise unknown_option("objective", str(key), self.name, kinds, nothing)
            kind = kinds[key]
            if get_origin(kind) in (Union, UnionType):
                if value is None:
                    continue
                kind = get_args(kind)[0]
            if get_origin(kind) is Literal:
                choices = get_args(kind)
                if value not in choices:
                    near = nearest(str(value), choices, cutoff=0.3) or choices[0]
                    raise UserError(
                        f"objective.{key} is {value!r}, but must be one of: {', '.join(choices)}. "
                        f"Try --objective.{key} {near}."
                    )
                continue
            if kind == list[str]:
                if _are_names(value):
                    continue
                raise UserError(
                    f"objective.{key} is {value!r}, but must be a list of different names. "
                    f"Try --objective.{key} '[good, bad]'."
                )
            if kind is int:
                if type(value) is int and value >= 0:
                    continue
                raise UserError(
                    f"objective.{key} is {value!r}, but must be a whole number of at least 0. Try "
                    f"--objective.{key} 1."
                )
            if kind == list[int]:
                if _are_sizes(value):
                    continue
                raise UserError(
                    f"objective.{key} is {value!r}, but must be a list of different whole numbers "
                    f"above 0. Try --objective.{key} '[256, 64]'."
                )
            default = getattr(self.options(), key)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            least_excluded = key in self.above_0
            is_in_range = is_number and (value > 0 if least_excluded else value >= 0)
            if not is_in_range or not math.isfinite(value):  # NaN is in no range
                rule = "a number above 0" if least_excluded else "a number of at least 0"
                raise UserError(
                    f"objective.{key} is {value!r}, but must be {rule}. "
                    f"Try --objective.{key} {default:g}."
                )
        made = self.options(**given)
        if self.refuse is not None:
            self.refuse(made)
        return dataclasses.asdict(made)

    def make(self, options: Mapping[str, Any]) -> Any:
        """Make the objective of all its options."""
        module, _, name = self.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name)(**options)


def _are_names(value: Any) -> bool:
    is_list = isinstance(value, list) and all(isinstance(one, str) and one for one in value)
    return is_list and len({*value}) == len(value) > 0


def _are_sizes(value: Any) -> bool:
    is_list = isinstance(value, list) and all(type(one) is int and one > 0 for one in value)
    return is_list and len({*value}) == len(value) > 0


OBJECTIVES = Registry(
    "objectives",
    (ObjectiveRow,),
    core=[
        ObjectiveRow(
            name="sft",
            summary="the answers of records",
            class_path="ftkit.objectives.supervised.Supervised",
            shares_sequences=True,
            options=SftOptions,
            is_smoothed=True,
        ),
        ObjectiveRow(
            name="dft",
            summary="the answers of records; unlikely tokens weigh less",
            class_path="ftkit.objectives.supervised.Dft",
            shares_sequences=True,
            options=DftOptions,
        ),
        ObjectiveRow(
            name="eaft",
            summary="the answers of records; tokens of which the model is sure weigh less",
            class_path="ftkit.objectives.supervised.Eaft",
            shares_sequences=True,
            options=EaftOptions,
        ),
    ],
)
"""Objectives by name. A new one is a row with its options, and its class."""


def objective_row(name: Any) -> ObjectiveRow:
    """Return the row of an objective by its name.

    Raises:
        UserError: no objective has this name.
    """
    row = OBJECTIVES.get(name) if isinstance(name, str) else None
    if row is None:
        require_own("objective", name)
        known = [*OBJECTIVES.names, *short_names(OBJECTIVES.held)]
        of_plugins = "" if plugin_in_use() else "; one of your own needs --plugin FILE.py"
        raise UserError(
            f"objective is {name!r}, but must be one of: {', '.join(known)}{of_plugins}. "
            f"Try --objective {nearest(str(name), known) or 'sft'}."
        )
    return row


def objective_rules(objective: Component) -> ObjectiveRules:
    """Return the rules of a recipe's objective.

    Raises:
        UserError: there is no objective of this name.
    """
    row = objective_row(objective["class_path"])
    if row.decided is None:
        return row
    return dataclasses.replace(row, **row.decided(objective["init_args"]))


def scores_of(objective: Component) -> ScoreLabels | None:
    """Return the scores that results of an objective give; None: they predict tokens.

    Known without the plugin: models of its objectives predict tokens.
    """
    return None if own_name(objective["class_path"]) else objective_rules(objective).scores


def is_below_adapter(recipe: Recipe) -> bool:
    """Whether the reference of a recipe is the trained model without its adapter.

    All weights of that model are there in every step, and stay as they are.
    """
    if recipe.reference is not None or not isinstance(recipe, LoraRecipe):
        return False
    # With an adapter to begin from, training begins at another model than the base. New tokens are
    # trained in embedding and head themselves.
    changes_base = recipe.lora_modules_to_save or recipe.added_tokens
    return recipe.adapter is None and not changes_base


@dataclass(frozen=True, kw_only=True)
class ModelBeside:
    """A frozen model that a run holds in memory beside the one that is trained."""

    key: Literal["teacher", "reference"]
    """What it is to the objective, and the key of recipes that names it."""
    name: str
    """A directory or name, as for checkpoint_dir."""
    implementation: str | None = None
    """The library whose code computes it; None: the usual one."""


def is_compared_with_base(recipe: Recipe) -> bool:
    """Whether the reference of a recipe, if it has one, is the model in its checkpoint_dir."""
    return recipe.reference in (None, recipe.checkpoint_dir)


def needs_reference_beside(recipe: Recipe) -> bool:
    """Whether the reference of a recipe has to be a model in memory beside the trained one.

    Its log-probabilities cannot be computed before training, and it is not the trained model below
    its adapter.
    """
    rules = objective_rules(recipe.objective)
    # Which sequences are joined depends on the order of the samples.
    is_joined = rules.observes == "joined"
    return rules.needs_reference and is_joined and not is_below_adapter(recipe)


def model_beside(recipe: Recipe) -> ModelBeside | None:
    """Return the model that a run of a recipe holds beside the trained one; None: it holds none.

    That is its teacher, or its reference if that is needed in every step.
    """
    if objective_rules(recipe.objective).needs_teacher and recipe.teacher is not None:
        return ModelBeside(key="teacher", name=recipe.teacher)
    if recipe.reference is None or not needs_reference_beside(recipe):
        return None
    # The same model is computed by the same code, so that the first step finds no difference.
    is_base = is_compared_with_base(recipe)
    return ModelBeside(
        key="reference",
        name=recipe.reference,
        implementation=recipe.implementation if is_base else None,
    )


def objective_options(objective: Component) -> dict[str, Any]:
    """Return the options of a recipe's objective, checked, with defaults of those it does not give.

    Those of a plugin's own have their defaults in its class.

    Raises:
        UserError: unknown objective or option, or a value out of its range.
    """
    return objective_row(objective["class_path"]).checked(objective["init_args"])


def _without_reference(recipe: Recipe) -> str:
    """Message to a recipe that needs a second model in memory and names none."""
    objective, base = recipe.objective["class_path"], shlex.quote(recipe.checkpoint_dir)
    begin = f"objective is {objective}, which compares with its reference in every step"
    if not isinstance(recipe, LoraRecipe):
        return (
            f"{begin}, but reference is not set, and full fine-tuning changes the model itself. "
            f"Try --reference {base}, which holds a second, frozen copy of it in memory, or LoRA "
            "(ftkit finetune), which needs none."
        )
    if recipe.adapter is not None:
        return (
            f"adapter is {recipe.adapter}, but {begin}: below this adapter that would be another "
            "model. Try --reference MODEL with the model that the adapter makes (ftkit merge "
            "writes it), which holds it in memory too, or leave adapter out."
        )
    if recipe.added_tokens:
        return (
            f"data.add_tokens is {json.dumps(recipe.added_tokens)}, which trains embedding and "
            f"head themselves, but {begin}. Learn the tokens by --objective sft first, and go on "
            "from the merged model."
        )
    return (
        f"lora_modules_to_save is {json.dumps(recipe.lora_modules_to_save)}, which changes these "
        f"layers themselves, but {begin}, and reference is not set. Try --reference {base}, which "
        "holds a second, frozen copy of the model in memory, or --lora_modules_to_save null, which "
        "needs none."
    )


def _advice(rule: str, key: str) -> str:
    """What a recipe may change that has a key which only objectives of a rule use."""
    first = next((row.name for row in OBJECTIVES if getattr(row, rule)), None)
    if first is None:
        return f"Leave {key} out."
    return f"Try --objective {first}, or leave {key} out."


def check_objective(recipe: Recipe) -> None:
    """Refuse an objective with settings that make no sense for it.

    Raises:
        UserError: as `objective_options`, or another key contradicts the objective.
    """
    objective_options(recipe.objective)
    rules, name = objective_rules(recipe.objective), recipe.objective["class_path"]
    evaluation, train = recipe.eval, recipe.train
    if train.label_smoothing and not rules.is_smoothed:
        of_plugin = " or of a class derived from it" if own_name(name) else ""
        raise UserError(
            f"train.label_smoothing is {train.label_smoothing:g}, but objective is {name}, and "
            f"only the cross-entropy of sft{of_plugin} can be smoothed. Try "
            "--train.label_smoothing 0."
        )
    if recipe.reference is not None and not rules.needs_reference:
        raise UserError(
            f"reference is {recipe.reference}, but objective is {name}, which compares with no "
            f"other model. {_advice('needs_reference', 'reference')}"
        )
    if rules.needs_teacher and recipe.teacher is None:
        raise UserError(
            f"objective is {name}, which learns from another model, but teacher is not set. Try "
            "--teacher MODEL, with the same tokenizer."
        )
    if recipe.teacher is not None and not rules.needs_teacher:
        raise UserError(
            f"teacher is {recipe.teacher}, but objective is {name}, which has no teacher. "
            f"{_advice('needs_teacher', 'teacher')}"
        )
    if recipe.reference is None and needs_reference_beside(recipe):
        raise UserError(_without_reference(recipe))
    is_alone = train.global_batch_size == 1 and train.global_batch_tokens is None
    if rules.observes and is_alone:
        raise UserError(
            f"train.global_batch_size is 1, but objective is {name}, which compares each example "
            "of a step with another one. Try --train.global_batch_size 16."
        )
    if not rules.scores:
        return
    settings: list[tuple[str, Any, Any]] = [
        *((f"eval.{name}", records, 0) for name, records in evaluation.metrics.items()),
        ("eval.tasks", evaluation.tasks or None, None),
        ("train.tie_embeddings", train.tie_embeddings or None, None),
    ]
    if isinstance(recipe, LoraRecipe):
        settings.append(("lora_head", recipe.lora_head, False))
    for key, value, neutral in settings:
        if value != neutral:
            raise UserError(
                f"{key} is {json.dumps(value)}, but objective is {name}, whose model predicts no "
                f"tokens. Try --{key} {json.dumps(neutral)}."
            )
