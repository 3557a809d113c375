"""What huggingface_hub counts while it fetches files, told as progress of ours."""

from typing import Any

from tqdm import tqdm

from ftkit.utils.progress import OnProgress


def telling(progress: OnProgress, total_bytes: int) -> Any:
    """Bars for huggingface_hub, which draws its own on terminals alone and in spite of --quiet.

    Args:
        progress: told of bytes, from any thread.
        total_bytes: of all files, with what an earlier download has left of them.
    """

    class Bar(tqdm):  # type: ignore[misc]  # it has no types
        def __init__(self, *args: Any, **settings: Any) -> None:
            settings.pop("name", None)
            self._counts_bytes = settings.get("unit") == "B"
            super().__init__(*args, **settings | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            if not self._counts_bytes or n is None:
                return
            with self.get_lock():
                self.n += n
                progress(int(self.n), total_bytes)

    return Bar
