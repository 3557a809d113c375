"""As rank_cases.py, but each run computes its own reference, and must have freed it to train."""

import gc
import runpy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from ftkit.extensions.other_models import references
    from ftkit.extensions.other_models.reference_values import ReferenceCache
    from ftkit.strategies.frozen import frozen
    from ftkit.training.step import TrainStep

    prepare = TrainStep.__init__
    known: list[weakref.ref[Any]] = []

    @contextmanager
    def watched(*arguments: Any, **options: Any) -> Iterator[Any]:
        with frozen(*arguments, **options) as model:
            known.extend(map(weakref.ref, model.parameters()))
            yield model

    def without_reference(self: TrainStep, *arguments: Any, **options: Any) -> None:
        gc.collect()
        left = [parameter for one in known if (parameter := one()) is not None]
        taken = sum(one.numel() + getattr(one, "ds_tensor", one).numel() for one in left)
        assert not taken, f"the reference still has {taken} numbers"
        prepare(self, *arguments, **options)

    references.frozen = watched  # type: ignore[attr-defined]
    TrainStep.__init__ = without_reference  # type: ignore[method-assign]
    ReferenceCache.load_into = lambda *_: None  # type: ignore[method-assign]
    runpy.run_path(str(Path(__file__).with_name("rank_cases.py")), run_name="__main__")
