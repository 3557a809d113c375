"""Which runs may record their steps, as far as plans know it."""

from ftkit.recipe.objectives import objective_rules
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import LoraRecipe
from ftkit.recipe.recipe_sections import rounding_of
from ftkit.utils.accelerators.kinds import USUAL_KIND


def why_unrecorded(plan: Plan) -> str | None:
    """Return why train.record_steps has no effect on a plan, in words; None: it may have one."""
    recipe, train = plan.recipe, plan.recipe.train
    rules = objective_rules(recipe.objective)
    quantize = recipe.quantize if isinstance(recipe, LoraRecipe) else None
    # In the order in which a reader would change them.
    for applies, reason in (
        (plan.accelerator != USUAL_KIND, f"accelerator {plan.accelerator} has no graphs to record"),
        (
            plan.strategy not in ("single", "ddp"),
            f"strategy {plan.strategy} exchanges numbers meanwhile",
        ),
        (plan.mesh.context > 1, "strategy.context exchanges numbers meanwhile"),
        (recipe.compile, "compile makes graphs of its own"),
        (plan.precision == "16-mixed", "precision 16-mixed scales losses by changing numbers"),
        (train.optimizer_in_backward, "train.optimizer_in_backward updates in the backward pass"),
        (
            recipe.memory.activation_checkpointing or recipe.memory.offload_activations,
            "memory.activation_checkpointing keeps states of generators, which none may read",
        ),
        (train.neftune_noise_alpha is not None, "train.neftune_noise_alpha is scaled on the host"),
        (quantize is not None, f"quantize {quantize} computes outside of torch"),
        (rounding_of(recipe) is not None, f"{rounding_of(recipe)} computes outside of torch"),
        (rules.observes is not None, f"objective {recipe.objective['class_path']} observes steps"),
        (rules.needs_teacher, "the teacher's numbers change their shape"),
    ):
        if applies:
            return reason
    return None
