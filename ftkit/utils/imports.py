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
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ftkit.utils.accelerators.backends import keep_out_backends

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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
though the names are at its end. Seen in 5.3.0."""
_DENIED = {
    # Assisted generation and losses of object detection would import scikit-learn and SciPy, in
    # more than a second, and ftkit uses neither.
    _LISTING: ("is_scipy_available", "is_sklearn_available", "is_torchao_available"),
    # Both would import torchao to ask whether a weight is one of its tensors, which ftkit's never
    # are: it takes a second, and reports the kernels that it does not find.
    "peft.import_utils": ("is_torchao_available",),
}
"""Modules, and those of their functions that say that no such package is installed."""
_WITHOUT = {
    # Looks for packages which it supports if they are installed. ftkit's parsers are of plain
    # dataclasses: neither attrs, which other packages bring, nor the stubs of typeshed_client,
    # which its extra requires, say anything about those. Seen in 4.53.
    "jsonargparse._optionals": ("attrs", "typeshed_client"),
    # For training in Amazon's cloud. Seen in 1.14.
    "accelerate.commands.config.sagemaker": ("boto3",),
    # To know how layers are split over devices by transformers, as which ftkit's never are. Seen
    # in 0.21.2.
    "peft.import_utils": ("transformers.distributed.tensor_parallel",),
}
"""Modules, and what is hidden from them because they import it only to know that it is there."""
_COMPILER = "torch._dynamo"
"""Package of torch's compiler, which every step of an optimizer imports. It takes a second, and
SymPy with it, and is of use only where something is compiled."""
_OF_COMPILER_ALONE = "torch._dynamo.config"
"""Module of it that needs none of its code. Predictions of memory ask it for one setting."""
_ASKED = {
    "PreTrainedModel": "transformers.modeling_utils",
    # For a method of it that transformers removed long ago.
    "BloomPreTrainedModel": "transformers.models.bloom.modeling_bloom",
    "DTensor": "torch.distributed.tensor",
}
"""Classes that PEFT uses only to ask whether an object is one of them, and where they are defined.
With the first comes what all models need, in half a second, with the last SymPy. Seen in 0.21.2."""

# Reentrant: the code of a package imports other names of the same package.
_LOCK = threading.RLock()


def prepare_imports() -> None:
    """Decide what importing a library runs; for ftkit's own processes, before any heavy import."""
    without_hub_kernels()
    keep_out_backends()
    postpone_modules()


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
    """Keep libraries from reporting the kernels and devices that they do not find.

    For processes that do not train: the log of a run has these messages.
    """
    # The last one, of torch, is about torchao's use of it.
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # it sets its level itself
    # Of bitsandbytes, whose steps are simulated on a CPU for GPUs.
    warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def dtensor() -> type["DTensor"] | tuple[()]:
    """Torch's class of tensors that are split over ranks, for isinstance; empty if not imported.

    Importing it takes half a second, and as long as nobody has, no tensor is one.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", ())  # the module may just be importing


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
        if fullname.startswith(f"{_COMPILER}."):
            return _module_of_compiler(fullname)
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
    if module in _WITHOUT:
        return _Without
    if module == _COMPILER:
        return _Compiler
    if module == _LISTING:
        return _Listing
    return _Asking if module.startswith("peft.") else None


class _Listing(SourceFileLoader):
    """Makes the same list in a quarter of the time, and denies that some packages are installed."""

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
        _deny(module)


def _deny(module: ModuleType) -> None:
    """Replace the functions of a module that say whether certain packages are installed."""
    for name in set(_DENIED.get(module.__name__, ())) & vars(module).keys():
        vars(module)[name] = lambda: False


def _from_last_line(text: str, start: str) -> str:
    """The text from its last line with this start on; all of it if there is no such line."""
    return text[text.rfind(f"\n{start}") + 1 :]


class _Without(SourceFileLoader):
    """Hides packages from a module that imports them to see whether they are installed."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        with ExitStack() as stack:
            for name in _WITHOUT[module.__name__]:
                stack.enter_context(hidden(name))
            super().exec_module(module)
        _deny(module)


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


def _is_postponed(module: ModuleType) -> bool:
    """Whether the code of a module has not begun to run."""
    return "__getattr__" in vars(module)


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


class _Compiler(_Postponed):
    """Answers by itself what is asked of the compiler where nothing is compiled."""

    def found(self, module: ModuleType, name: str) -> Any:
        """Resolve a name of the package."""
        if name.startswith("__"):  # tools look at all modules for names such as __wrapped__
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        if name == "graph_break":  # optimizers mark places
            return lambda: None
        if name == "disable":
            return functools.partial(self._disable, module)
        if name == "OptimizedModule":  # Lightning asks whether a model is one
            return _Uncompiled
        return super().found(module, name)

    def _disable(
        self,
        module: ModuleType,
        function: Callable[..., Any] | None = None,
        *rest: Any,
        **options: Any,
    ) -> Callable[..., Any]:
        """Keep a function out of graphs, as soon as there can be graphs."""
        if function is None:
            return super().found(module, "disable")(function, *rest, **options)
        kept_out: Callable[..., Any] | None = None

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal kept_out
            if _is_postponed(module):
                return function(*arguments, **keywords)
            if kept_out is None:
                kept_out = module.disable(function, *rest, **options)
            return kept_out(*arguments, **keywords)

        return call


class _Uncompiled:
    """What no model is: ftkit compiles functions, and no model as a whole."""


def _module_of_compiler(name: str) -> ModuleSpec | None:
    """Run the package before its module; None: Python finds the module as usual."""
    package = sys.modules[_COMPILER]
    loader = package.__spec__ and package.__spec__.loader
    if name == _OF_COMPILER_ALONE:
        return None
    if not (isinstance(loader, _Compiler) and _is_postponed(package)):
        return None
    loader.run(package)
    # Otherwise Python would run the module's code once more.
    module = sys.modules.pop(name, None)
    return None if module is None else ModuleSpec(name, _Imported(module))


class _Imported(Loader):
    """Leaves a module as it is that was imported while Python looked for it."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: its code has run."""
        with suppress(AttributeError):  # torch's configurations have only their own attributes
            module.__spec__ = self._spec


class _Asking(SourceFileLoader):
    """Keeps a module from importing classes that it only asks about."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code with stand-ins for the classes."""
        names = vars(import_module("transformers"))
        missing = {name: _Asked(name, (), {}) for name in _ASKED if name not in names}
        names.update(missing)
        # Python replaces this attribute when the module is imported.
        vars(import_module("torch.distributed")).setdefault("tensor", _SplitTensors())
        try:
            super().exec_module(module)
        finally:
            for name in missing:
                names.pop(name)


class _Asked(type):
    """A class that tells whether an object is of another class, which need not be imported."""

    def __instancecheck__(cls, instance: object) -> bool:
        module = sys.modules.get(_ASKED[cls.__name__])
        return module is not None and isinstance(instance, getattr(module, cls.__name__))


class _SplitTensors:
    """Stands for the module `torch.distributed.tensor` until it is imported."""

    DTensor = _Asked("DTensor", (), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("torch.distributed.tensor"), name)
