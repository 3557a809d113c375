"""The objective that a recipe names."""

import dataclasses

from ftkit.objectives.objective import Objective
from ftkit.objectives.preference import Dpo, Orpo, SimPo
from ftkit.objectives.reward import Reward
from ftkit.objectives.supervised import Dft, Eaft, Supervised
from ftkit.recipe.objectives import objective_options
from ftkit.recipe.recipe import Component

_CLASSES: dict[str, type[Objective]] = {
    "sft": Supervised,
    "dft": Dft,
    "eaft": Eaft,
    "dpo": Dpo,
    "orpo": Orpo,
    "simpo": SimPo,
    "reward": Reward,
}


def make_objective(objective: Component) -> Objective:
    """Make the objective of a recipe.

    Raises:
        UserError: unknown objective or option, or a value out of its range.
    """
    options = objective_options(objective)
    return _CLASSES[objective["class_path"]](**dataclasses.asdict(options))
