"""The programs whose training files are read as recipes."""

from ftkit.recipe.readers import Reader

_TRL = tuple(frozenset({"model_name_or_path", data}) for data in ("dataset_name", "datasets"))

ROWS = (
    *(
        Reader(
            name=f"trl-{command}",
            marks=_TRL,
            program=f"ftkit.extensions.foreign_recipes.trl:TRL_{command.upper()}",
            family="TRL",
        )
        for command in ("sft", "dpo", "kto", "reward")
    ),
    Reader(
        name="llama-factory",
        marks=(
            frozenset({"model_name_or_path", "finetuning_type"}),
            frozenset({"model_name_or_path", "stage"}),
            frozenset({"model_name_or_path", "template"}),
            frozenset({"model_name_or_path", "dataset"}),
        ),
        program="ftkit.extensions.foreign_recipes.llama_factory:LLAMA_FACTORY",
    ),
    Reader(
        name="llama-factory-v1",
        marks=(frozenset({"model", "train_dataset"}),),
        program="ftkit.extensions.foreign_recipes.llama_factory_v1:LLAMA_FACTORY_V1",
    ),
    Reader(
        name="torchtune",
        marks=(frozenset({"tokenizer", "checkpointer"}),),
        program="ftkit.extensions.foreign_recipes.torchtune:TORCHTUNE",
    ),
    Reader(
        name="axolotl",
        marks=(
            frozenset({"base_model", "datasets"}),
            frozenset({"base_model", "pretraining_dataset"}),
            frozenset({"base_model", "micro_batch_size"}),
        ),
        program="ftkit.extensions.foreign_recipes.axolotl:AXOLOTL",
    ),
)
