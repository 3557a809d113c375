"""Rules of ranks that share sequences, `strategy.context`."""

from ftkit.errors import UserError
from ftkit.recipe.facts import Facts
from ftkit.recipe.objectives import OBJECTIVES, objective_rules


def check_context(facts: Facts) -> list[str]:
    """Refuse ranks that share sequences where they cannot.

    What this depends on the model and on its data is checked with these.

    Raises:
        UserError: names what works.
    """
    context, world_size = facts.strategy.context(facts.options), facts.world_size
    if context == 1 or not facts.trains:
        return []
    if world_size % context:
        fewer = max(n for n in range(1, context) if world_size % n == 0)
        raise UserError(
            f"strategy.context is {context}, but devices x num_nodes is {world_size}, which it "
            f"must divide: so many ranks share the sequences of a micro-batch. Try "
            f"--strategy.context {fewer}."
        )
    if facts.kind.compiles_shapes:
        raise UserError(
            f"strategy.context is {context}, but accelerator is {facts.kind.name}, on which "
            "micro-batches are padded, and only rows without padding are shared. Try "
            "--strategy.context 1."
        )
    if facts.recipe.train.padding_free is False:
        raise UserError(
            f"strategy.context is {context}, but train.padding_free is false: only rows without "
            "padding are shared. Try --train.padding_free null, or --strategy.context 1."
        )
    if facts.recipe.compile:
        raise UserError(
            f"strategy.context is {context}, but compile is true, and compiled blocks were not "
            "tried with pieces of sequences. Try --compile false, or --strategy.context 1."
        )
    objective = facts.recipe.objective
    if not objective_rules(objective).shares_sequences:
        known = ", ".join(row.name for row in OBJECTIVES if row.shares_sequences)
        raise UserError(
            f"strategy.context is {context}, but objective is {objective['class_path']}, which may "
            f"need whole sequences on a rank; objectives that do not are {known}. Try "
            "--strategy.context 1."
        )
    return []
