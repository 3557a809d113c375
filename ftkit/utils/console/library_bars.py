"""Bars that libraries draw by themselves, told as progress of ours instead."""

from typing import Any

from tqdm import tqdm

from ftkit.utils.progress import OnProgress


def bars_telling(progress: OnProgress | None, total_bytes: int = 0) -> Any:
    """A class of bars for huggingface_hub, which else draws in spite of --quiet, and in no log.

    Args:
        progress: told of bytes, from any thread; None: nobody is.
        total_bytes: of all that is fetched.
    """

    class Bar(tqdm):  # type: ignore[misc]  # it has no types
        def __init__(self, *args: Any, **settings: Any) -> None:
            settings.pop("name", None)
            self._counts_bytes = settings.get("unit") == "B"
            super().__init__(*args, **settings | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            if progress is None or not self._counts_bytes or n is None:
                return
            with self.get_lock():
                self.n += n
                progress(int(self.n), total_bytes)

    return Bar
