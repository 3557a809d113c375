"""The cards in a process: there from the first import of torch on, at no cost before."""

import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

from simulated_card import driver, private
from simulated_card.settings import Cards


def prepare() -> None:
    """Put the cards of the environment into this process; before torch is imported."""
    cards = Cards.here()
    assert cards is not None and "torch" not in sys.modules
    if cards.kind == "cuda":
        sys.modules["pynvml"] = driver.module(cards)
        _show_device_nodes()
    if cards.usable:
        sys.meta_path.insert(0, _Finder(cards))


def _show_device_nodes() -> None:
    """The driver's nodes exist, for those that look for them."""
    nodes = {"/dev/nvidiactl", "/dev/nvidia0"}
    exists, path_exists = os.path.exists, pathlib.Path.exists
    os.path.exists = lambda path: path in nodes or exists(path)
    pathlib.Path.exists = lambda self, *args, **kwargs: (
        str(self) in nodes or path_exists(self, *args, **kwargs)
    )


class _Finder(importlib.abc.MetaPathFinder):
    """Has a hand in the import of some packages."""

    def __init__(self, cards: Cards) -> None:
        self._cards = cards

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        around = {
            "torch": self._around_torch,
            "bitsandbytes": self._around_bitsandbytes,
            "ftkit.utils.accelerators.kinds": self._around_kinds,
        }.get(name)
        if around is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: around(load, module)
        return spec

    def _around_torch(self, load: Callable[[ModuleType], None], module: ModuleType) -> None:
        from simulated_card import device

        library = device.load(self._cards)
        load(module)
        if self._cards.kind == "cuda":
            device.install(self._cards, library)
        else:
            private.install(self._cards, library)

    def _around_kinds(self, load: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Add the row of the simulated kind to ftkit's table of devices."""
        load(module)
        if self._cards.kind != "cuda":
            module.DEVICE_KINDS._core[self._cards.kind] = module.DeviceKind(
                name=self._cards.kind, **private.ROW
            )

    def _around_bitsandbytes(self, load: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Use bitsandbytes' kernels for CPUs, as it has none for these cards."""
        import torch

        from simulated_card import device

        hidden: AbstractContextManager[None] = (
            device.no_cards() if torch.cuda.is_available() else nullcontext()
        )
        with hidden:
            load(module)
        device.LIBRARY.card_register_namespace(b"bitsandbytes")
