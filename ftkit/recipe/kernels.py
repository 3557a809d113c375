"""Rules of kernels and compilation: what runs them, and what has to be installed."""

import importlib.util
import os
import shutil
from importlib import metadata

from ftkit.errors import UserError
from ftkit.recipe.facts import Facts
from ftkit.recipe.recipe import Kernels

LIGER = "liger-kernel>=0.8.5,<0.9"
"""Liger-Kernel that ftkit knows: its loss takes a private kernel, whose arguments may change."""


def check_kernels(facts: Facts) -> list[str]:
    """Refuse kernels and compilation that these devices or this strategy cannot run."""
    recipe, accelerator = facts.recipe, facts.devices.accelerator
    if recipe.kernels == "liger" and not facts.kind.has_triton:
        raise UserError(
            f"kernels is liger, but the accelerator is {accelerator} and these kernels are "
            "for CUDA. "
            "Try --kernels torch."
        )
    if recipe.kernels == "liger" and recipe.compile:
        raise UserError(
            "kernels is liger and compile is true, which have not been tested together; compiled "
            "blocks fuse the same operations. Try --kernels torch, or --compile false."
        )
    if recipe.kernels == "liger" and recipe.train.label_smoothing:
        raise UserError(
            f"train.label_smoothing is {recipe.train.label_smoothing:g} and kernels is liger, "
            "whose loss has not been tested with it. Try --kernels torch."
        )
    if recipe.compile and facts.strategy.uncompiled:
        raise UserError(
            f"compile is true, but {facts.strategy.name} {facts.strategy.uncompiled}, or --compile "
            "false."
        )
    return []


def check_kernels_installed(kernels: Kernels, accelerator: str, *, compiles: bool) -> None:
    """Refuse a run whose kernels or compiler are not installed.

    Args:
        kernels: key of the recipe.
        accelerator: kind of device.
        compiles: its key `compile`.

    Raises:
        UserError: names what to install.
    """
    if kernels == "liger" and (obstacle := _liger_obstacle()) is not None:
        raise UserError(
            f"kernels is liger, but {obstacle}. Try pip install '{LIGER}', or --kernels torch."
        )
    # torch.compile writes C++ for CPUs; Triton compiles its launchers, which are C.
    variable, usual = ("CXX", "g++") if accelerator == "cpu" else ("CC", "gcc")
    compiler = os.environ.get(variable, usual)
    needs_compiler = compiles or kernels == "liger"
    if needs_compiler and shutil.which(compiler) is None:
        key, off = ("compile", "false") if compiles else ("kernels", "torch")
        raise UserError(
            f"{key} needs a compiler on this machine, but there is no {compiler}. Install it or "
            f"set ${variable}, or try --{key} {off}."
        )


def has_liger() -> bool:
    """Whether a Liger-Kernel that ftkit knows, and Triton, are installed."""
    return _liger_obstacle() is None


def _liger_obstacle() -> str | None:
    """Why Liger's kernels cannot run in this environment; None: they can."""
    from packaging.requirements import Requirement

    try:
        version = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        return "Liger-Kernel is not installed"
    if not Requirement(LIGER).specifier.contains(version, prereleases=True):
        return (
            f"Liger-Kernel {version} is installed, and ftkit uses a private kernel of it that it "
            "does not know in this version"
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, which compiles them"
    return None
