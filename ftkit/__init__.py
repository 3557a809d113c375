"""Fine-tune language models with PyTorch Lightning: full, LoRA and QLoRA.

In Python and in notebooks::

    import ftkit

    run = ftkit.finetune("recipes/x.yaml", **{"train.micro_batch_size": 8})
    run.report
    print(ftkit.generate(run, "Tell me a story."))
    ftkit.compare([run, "out/other"]).plot()
"""

import importlib
from typing import Any

from ftkit.moved import find_moved_modules
from ftkit.version import __version__ as __version__

find_moved_modules()


def __getattr__(name: str) -> Any:
    # By name: `import ftkit` imports nothing of it before it is used.
    names = importlib.import_module("ftkit.python_names")
    if name == "__all__":
        return names.PYTHON_NAMES.names
    row = None if name.startswith("_") else names.PYTHON_NAMES.get(name)
    if row is None:
        raise AttributeError(f"module 'ftkit' has no attribute {name!r}")
    return names.value_of(row)


def __dir__() -> list[str]:
    # Completion in a notebook offers names that are not imported yet.
    return sorted({*globals(), *__getattr__("__all__")})
