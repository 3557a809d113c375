"""Load of experts: how often the tokens of training chose each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """Choices of experts by the real tokens of all training steps of this session, all ranks."""

    layers: list[int]
    """Numbers of the layers with experts, from 0."""
    choices: int
    """Made in each of these layers: tokens times the experts that a token chooses."""
    fractions: list[list[float]]
    """For each of these layers, the fraction of its choices that fell on each expert."""
    even: float
    """The fraction of each expert, were all chosen equally often."""
    lowest: float
    """Least of all fractions."""
    highest: float
    """Largest of all fractions."""
    least_even_layer: int
    """The layer with the fraction that is furthest from even."""

    @classmethod
    def of_choices(cls, layers: Sequence[int], choices: Sequence[Sequence[int]]) -> Self | None:
        """The same of numbers of choices; None: there are none.

        Args:
            layers: numbers of those with experts.
            choices: [layers, experts].
        """
        if not any(map(sum, choices)):
            return None
        fractions = [[of_one / sum(of_layer) for of_one in of_layer] for of_layer in choices]
        even = 1 / len(fractions[0])
        furthest = [max(abs(of_one - even) for of_one in of_layer) for of_layer in fractions]
        return cls(
            layers=list(layers),
            choices=sum(choices[0]),
            fractions=fractions,
            even=even,
            lowest=min(map(min, fractions)),
            highest=max(map(max, fractions)),
            least_even_layer=layers[furthest.index(max(furthest))],
        )

    @classmethod
    def of_ranks(cls, parts: Sequence["ExpertLoad | None"]) -> "ExpertLoad | None":
        """What each rank counted, added up; None: none did."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        of_ranks = [
            [[round(of_one * part.choices) for of_one in layer] for layer in part.fractions]
            for part in found
        ]
        choices = [
            [sum(of_one) for of_one in zip(*layer, strict=True)]
            for layer in zip(*of_ranks, strict=True)
        ]
        return cls.of_choices(found[0].layers, choices)
