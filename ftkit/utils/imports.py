"""Imports of heavy libraries: quick, silent, and without the parts that ftkit does not use.

Importing a module of a package runs the package's `__init__` first. That of Lightning imports its
Trainer, torchmetrics and with it matplotlib, that of LitGPT all its commands, that of PEFT forty
kinds of adapters: together they took a third of the time until a rank could begin, which only uses
`lightning.fabric`, `litgpt.model` and `peft.tuners.lora` of them.
"""

import functools
import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

PACKAGES = ("lightning", "litgpt", "peft", "peft.tuners", "torchmetrics")
"""Packages whose modules are imported without the package's own code, which runs when another name
of the package is used."""
FUNCTIONS = ("litgpt.scripts.convert_hf_checkpoint", "litgpt.utils")
"""Modules from which functions can be imported without running them; their code runs when one is
called. In LitGPT 0.5.13 the network and the tokenizer import one function each, for files that
ftkit reads by itself."""
_LISTING = "transformers.utils.import_utils"
"""Module that lists the names in all 1,300 files of models when transformers is imported. It does
so twice, because its cache holds 128 folders and there are 440, and reads each file line by line,
though the names are at its end. Seen in 5.3.0. It also tells whether scikit-learn and SciPy are
installed: assisted generation and losses of object detection would import them, in more than a
second, and ftkit uses neither."""
_OPTIONALS = "jsonargparse._optionals"
"""Module that looks for packages which jsonargparse supports if they are installed. ftkit's parsers
are of plain dataclasses: neither attrs, which other packages bring, nor the stubs of
typeshed_client, which its extra requires, say anything about those. Seen in 4.53."""

# Reentrant: the code of a package imports other names of the same package.
_LOCK = threading.RLock()


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, and exempt what was imported from later collections."""
    # Collections took half of the time: torch, Lightning and transformers in 3.4 s instead of 6.2 s
    # on one core, and a fifth of a run of short steps.
    gc.disable()
    try:
        yield
    finally:
        # Nothing that was imported is garbage: later collections skip it.
        gc.freeze()
        gc.enable()


def without_hub_kernels() -> None:
    """Keep bitsandbytes from downloading native code from a hub and running it at import.

    It does so on some CPUs if the package `kernels` is installed: what a run computes would depend
    on that. The package is hidden from all libraries.
    """
    sys.modules["kernels"] = None  # type: ignore[assignment]  # importing it fails, as expected
    # Else it advises to install the package.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Hide a package from libraries inside the block, unless it is imported already."""
    hides = name not in sys.modules
    if hides:
        sys.modules[name] = None  # type: ignore[assignment]  # see without_hub_kernels
    try:
        yield
    finally:
        if hides:
            del sys.modules[name]


def silence_libraries() -> None:
    """Keep bitsandbytes and DeepSpeed from reporting the kernels and devices that they do not find.

    For processes that do not train: the log of a run has these messages.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # it sets its level itself


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def postpone_modules() -> None:
    """Import the modules above without their code from now on; for ftkit's own processes only."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # At the front: Python tries the finders in order.
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds modules to postpone, where Python finds them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        loader_class = _loader_class(fullname)
        if loader_class is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            # Only the loader is replaced: path and cached bytecode are Python's own.
            spec.loader = loader_class(spec.loader.name, spec.loader.path)
        return spec


def _loader_class(module: str) -> type[SourceFileLoader] | None:
    """Loader class of a module; None: Python's own."""
    if module in PACKAGES:
        return _Package
    if module in FUNCTIONS:
        return _Functions
    if module == _OPTIONALS:
        return _Optionals
    return _Listing if module == _LISTING else None


class _Listing(SourceFileLoader):
    """Makes the same list in a quarter of the time, and hides scikit-learn and SciPy."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, and replace some functions if they are as expected."""
        super().exec_module(module)
        names = vars(module)
        of_folder = names.get("create_import_structure_from_path")
        # Its cache of 128 folders becomes one without a limit.
        if (function := getattr(of_folder, "__wrapped__", None)) is not None:
            names["create_import_structure_from_path"] = functools.cache(function)
        if (of_text := names.get("fetch__all__")) is not None:
            names["fetch__all__"] = lambda text: of_text(_from_last_line(text, "__all__"))
        for name in {"is_scipy_available", "is_sklearn_available"} & names.keys():
            names[name] = lambda: False


def _from_last_line(text: str, start: str) -> str:
    """The text from its last line with this start on; all of it if there is no such line."""
    return text[text.rfind(f"\n{start}") + 1 :]


class _Optionals(SourceFileLoader):
    """Hides packages that jsonargparse would import for every parser."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, which looks for them."""
        with hidden("attrs"), hidden("typeshed_client"):
            super().exec_module(module)


class _Postponed(SourceFileLoader):
    """Leaves a module empty, and runs its code when a name is missing from it."""

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing yet."""
        vars(module)["__getattr__"] = lambda name: self.found(module, name)

    def found(self, module: ModuleType, name: str) -> Any:
        """Resolve a name of the module."""
        self.run(module)
        return getattr(module, name)

    def run(self, module: ModuleType) -> None:
        """Run the module's code, once."""
        with _LOCK:
            # Removed before the code runs: a name that is still missing then raises as usual.
            if vars(module).pop("__getattr__", None) is not None:
                super().exec_module(module)


class _Package(_Postponed):
    """Resolves the modules of a package, and its version, without running its code."""

    def found(self, module: ModuleType, name: str) -> Any:
        """Resolve a name of the package."""
        if name == "__version__":
            return metadata.version(module.__name__)
        # A module of the package needs none of the package's own code.
        inner = f"{module.__name__}.{name}"
        if inner in sys.modules or PathFinder.find_spec(inner, module.__path__) is not None:
            return import_module(inner)
        return super().found(module, name)


class _Functions(_Postponed):
    """Every name is a function, which runs the module's code when it is called."""

    def found(self, module: ModuleType, name: str) -> Callable[..., Any]:
        """Return a stand-in for a function, which runs the module's code when called."""
        if name.startswith("__"):  # Python looks these up itself, such as __path__
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        def function(*arguments: Any, **options: Any) -> Any:
            self.run(module)
            return getattr(module, name)(*arguments, **options)

        return function
