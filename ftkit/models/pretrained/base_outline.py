"""The file that says, beside settings and tokenizer, what the weights of a base model would tell.

Read without torch, before a rank starts.
"""

from pathlib import Path

from ftkit.models.pretrained.hub import read_json

OUTLINE = "base.json"
"""Its name."""
KEEPS_REST = "keeps_rest"
"""Its key for models that are more than the language model that is trained."""


def keeps_rest(directory: Path) -> bool:
    """Whether a result takes from the files of the base model what no checkpoint holds.

    Args:
        directory: of a checkpoint, where settings, tokenizer and outline lie.

    Raises:
        UserError: the outline is damaged.
    """
    return bool(read_json(directory / OUTLINE).get(KEEPS_REST))
