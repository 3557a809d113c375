"""`ftkit download`: a base model of the Hugging Face hub, into a directory."""

from ftkit.models.pretrained import hub
from ftkit.recipe.options import DownloadOptions


def download_model(options: DownloadOptions) -> int:
    """Fetch a model and say where it is; the exit code.

    Raises:
        UserError: see `ftkit.models.pretrained.hub.download`.
    """
    directory = hub.download(
        options.repo_id, token=options.access_token, root=options.checkpoint_dir
    )
    print(f"{directory} is ready: use it with --checkpoint_dir {directory}")
    return 0
