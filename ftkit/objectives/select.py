"""The objective that a recipe names."""

import dataclasses

from ftkit.objectives.distillation import Distill
from ftkit.objectives.kto import Kto
from ftkit.objectives.objective import Objective, check_terms
from ftkit.objectives.preference import Dpo, Orpo, SimPo
from ftkit.objectives.reward import Reward
from ftkit.objectives.supervised import Dft, Eaft, Supervised
from ftkit.recipe.objectives import objective_options
from ftkit.recipe.plugin import own_class
from ftkit.recipe.recipe import Component

_CLASSES: dict[str, type[Objective]] = {
    "sft": Supervised,
    "dft": Dft,
    "eaft": Eaft,
    "dpo": Dpo,
    "orpo": Orpo,
    "simpo": SimPo,
    "kto": Kto,
    "reward": Reward,
    "distill": Distill,
}


def make_objective(objective: Component) -> Objective:
    """Make the objective of a recipe.

    Raises:
        UserError: unknown objective or option, or a value out of its range.
    """
    options = objective_options(objective)
    if (own := own_class("objective", objective["class_path"])) is not None:
        plugin, defined = own
        made = plugin.make("objective", defined.name, **objective["init_args"])
        assert isinstance(made, Objective)
        check_terms(made)
        return made
    return _CLASSES[objective["class_path"]](**dataclasses.asdict(options))
