"""Objectives on preferences, with their options."""

from dataclasses import dataclass
from typing import Literal

from ftkit.errors import UserError
from ftkit.recipe.objectives import ObjectiveRow, ScoreLabels


@dataclass(frozen=True, kw_only=True)
class DpoOptions:
    """Options of `objective: dpo`."""

    loss: Literal["sigmoid", "ipo", "hinge", "conservative", "robust"] = "sigmoid"
    """Loss of a pair. sigmoid: DPO; ipo: IPO, with log-probabilities per token; hinge: SLiC;
    conservative and robust: DPO for data of which label_noise pairs are labelled the wrong way."""
    beta: float = 0.1
    """Scale of the rewards: the larger, the closer the model stays to the reference."""
    label_noise: float = 0.0
    """Share of pairs whose answers are swapped, for conservative and robust; below 0.5."""
    sft_weight: float = 0.0
    """Weight of the cross-entropy of the chosen answers, per token, beside the preference."""


@dataclass(frozen=True, kw_only=True)
class OrpoOptions:
    """Options of `objective: orpo`."""

    weight: float = 0.1
    """Weight of the odds ratio beside the cross-entropy of the chosen answers."""


@dataclass(frozen=True, kw_only=True)
class SimPoOptions:
    """Options of `objective: simpo`."""

    beta: float = 2.0
    """Scale of the rewards, which are log-probabilities per token."""
    margin: float = 0.5
    """Least difference between the log-probabilities per token of both answers."""


@dataclass(frozen=True, kw_only=True)
class KtoOptions:
    """Options of `objective: kto`."""

    beta: float = 0.1
    """Scale of the rewards: the larger, the closer the model stays to the reference."""
    desirable_weight: float = 1.0
    """Weight of the losses of desirable answers."""
    undesirable_weight: float = 1.0
    """Weight of the losses of the others. Both weights times their numbers of answers should be
    about equal."""


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """Options of `objective: reward`."""

    center_weight: float = 0.0
    """Weight of (chosen reward + rejected reward)^2 beside the loss, which keeps rewards around 0;
    0.01 is usual."""


def _refuse_of_dpo(options: DpoOptions) -> None:
    noise = options.label_noise
    if noise >= 0.5:
        raise UserError(
            f"objective.label_noise is {noise}, but must be below 0.5: otherwise most pairs would "
            "be labelled the wrong way. Try --objective.label_noise 0.1."
        )
    if noise and options.loss not in ("conservative", "robust"):
        raise UserError(
            f"objective.label_noise is {noise}, but objective.loss is {options.loss}, which does "
            "not use it. Try --objective.loss conservative."
        )


ROWS = (
    ObjectiveRow(
        name="dpo",
        summary="which of two answers is better, compared with a reference",
        class_path="ftkit.extensions.preference.preference.Dpo",
        options=DpoOptions,
        above_0=("beta",),
        refuse=_refuse_of_dpo,
        preference="pairs",
        sequences=2,
        shares_sequences=True,
        needs_reference=True,
    ),
    ObjectiveRow(
        name="orpo",
        summary="the better of two answers, and the odds of both",
        class_path="ftkit.extensions.preference.preference.Orpo",
        options=OrpoOptions,
        preference="pairs",
        sequences=2,
        shares_sequences=True,
    ),
    ObjectiveRow(
        name="simpo",
        summary="which of two answers is better, by a margin and without a reference",
        class_path="ftkit.extensions.preference.preference.SimPo",
        options=SimPoOptions,
        above_0=("beta",),
        preference="pairs",
        sequences=2,
        shares_sequences=True,
    ),
    ObjectiveRow(
        name="kto",
        summary="which answers are desirable, without another one to compare with",
        class_path="ftkit.extensions.preference.kto.Kto",
        options=KtoOptions,
        above_0=("beta",),
        preference="labels",
        target_size=1,
        shares_sequences=True,
        needs_reference=True,
        observes="joined",
    ),
    ObjectiveRow(
        name="reward",
        summary="a score that is higher for the better of two answers",
        class_path="ftkit.extensions.preference.reward.Reward",
        options=RewardOptions,
        preference="pairs",
        sequences=2,
        shares_sequences=True,
        scores=ScoreLabels(),
    ),
)
