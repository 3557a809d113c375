"""The command of the extension, with its options."""

from dataclasses import dataclass
from pathlib import Path

from ftkit.cli.command import Command
from ftkit.recipe.options import CommonOptions, option, word


@dataclass(frozen=True, kw_only=True)
class DownloadOptions(CommonOptions):
    """Options of ftkit download."""

    repo_id: str = word("REPO_ID", ask="which model?")
    """The model, such as TinyLlama/TinyLlama_v1.1, or ORG/NAME@VERSION: a commit, a tag or a
    branch."""
    access_token: str | None = option(None, placeholder="TOKEN")
    """Hugging Face token for gated models. Default: $HF_TOKEN."""
    checkpoint_dir: Path = Path("checkpoints")
    """Directory for downloaded models."""


ROWS = (
    Command(
        name="download",
        summary="download a base model from the Hugging Face hub",
        text="Download a base model from the Hugging Face hub, or finish an earlier download.",
        options=DownloadOptions,
        function="ftkit.extensions.hub.models:download_model",
        examples=("TinyLlama/TinyLlama_v1.1",),
    ),
)
