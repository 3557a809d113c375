"""Commands of the extension, with their options."""

from dataclasses import dataclass
from pathlib import Path

from ftkit.cli.command import Command
from ftkit.recipe.options import CommonOptions, ForeignOptions, word


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(ForeignOptions, CommonOptions):
    """Options of ftkit convert."""

    file: Path = word("FILE.yml", ask="which file to convert?")
    """A configuration file of axolotl, LLaMA-Factory or torchtune, or of trl sft, dpo, kto or
    reward."""


ROWS = (
    Command(
        name="convert",
        summary="print the recipe that a file of axolotl, LLaMA-Factory, torchtune or TRL becomes",
        text="Print the recipe that a configuration file of axolotl, LLaMA-Factory, torchtune or "
        "TRL becomes, and behind it an explanation of each key; ftkit finetune FILE.yml trains it "
        "directly. A key that is absent has that program's default. A file with which ftkit "
        "would learn something else is refused, and the message names the keys; --without KEY "
        "accepts the difference. Nothing is downloaded.",
        options=ConvertOptions,
        function="ftkit.extensions.foreign_recipes.convert:print_converted",
        examples=("their.yml", "their.yml --from_devices 8 --without lisa_n_layers"),
    ),
)
