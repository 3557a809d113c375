"""A TPU that is none: torch_tpu as it is, over the CPU client of XLA.

torch_tpu loads the plugin that TPU_LIBRARY_PATH names, whatever it computes on. Three things keep
it from a plugin for CPUs, seen in 0.2.0: it counts chips on the PCI bus and names them from there,
and its attention is a kernel that is written for the chip. Python runs this file at its start where
its folder is on PYTHONPATH; ftkit knows nothing of it.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

CHIPS = "TPU_REHEARSAL_CHIPS"
"""Variable with the number of chips to show."""
HARDWARE = "torch_tpu._internal.utils.hardware"
"""Module that counts and names them."""


class Finder(importlib.abc.MetaPathFinder):
    """Has the module answer as on a machine with chips."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module where Python finds it, and change it when it has run."""
        if fullname != HARDWARE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            count = int(os.environ[CHIPS])
            module._scan_pci_tpus = lambda: (count, module._V5E_TOPOLOGY)
            module.get_tpu_device_name = lambda: "TPU v5e"
            from torch import _C

            _C._set_sdp_use_flash(False)

        loader.exec_module = exec_module
        return spec


if CHIPS in os.environ:
    sys.meta_path.insert(0, Finder())
