"""Weights that are published in 4 or 8 bits: read, and kept as they are by quantize: stored.

What knows a form is the class that its row names (`ftkit.models.pretrained.stored_forms`). Kept
weights are frozen, and unpacked for each use to the numbers that are read where they are not kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ftkit.errors import UserError
from ftkit.models.bodies.body import Body
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.pretrained.stored_forms import without_extension
from ftkit.models.pretrained.weight_files import WeightStorage, WeightTensor


class StoredWeights(ABC):
    """Weights of a form; made of its `StoredForm`."""

    @abstractmethod
    def unpacked(self, stored: Mapping[str, WeightTensor]) -> dict[str, WeightTensor]:
        """Return stored tensors with one plain tensor in place of those of each packed weight.

        Args:
            stored: all tensors of the files, by name.
        """

    def as_stored(
        self, stored: Mapping[str, WeightTensor], storage: WeightStorage
    ) -> Mapping[str, Callable[[], Any]]:
        """Return what reads the parameters that can be held as the files have them, by our names.

        Each gives an object with a method `to(device)`, which a layer of `keep` takes that
        `takes_stored`. Layers that make the form of the files of plain numbers need none.

        Args:
            stored: all tensors of the files, by name.
            storage: finds our parameters among them.
        """
        return {}

    def keep(self, body: Body, base: BaseModel, compute_dtype: torch.dtype) -> None:
        """Let a body hold weights of its blocks as the files do; no memory is taken.

        Called if the form says that it `can_stay`.

        Args:
            body: on the meta device, before its layers are adapted.
            base: the model whose files these are.
            compute_dtype: of the arithmetic.

        Raises:
            UserError: these weights have no form that can be kept.
        """
        # Not abstract: a form that cannot stay has nothing to keep, and is never asked.
        raise NotImplementedError


def keep_stored(body: Body, base: BaseModel, compute_dtype: torch.dtype) -> None:
    """Let a body hold weights of its blocks as the files of its base model do.

    Args:
        body: as `StoredWeights.keep` takes it, like the others.
        base: see there.
        compute_dtype: see there.

    Raises:
        UserError: they have no form that can be kept.
    """
    if base.form is None or not base.form.can_stay:
        raise cannot_stay(base, "plain numbers" if base.form is None else base.form.title)
    base.form.weights.keep(body, base, compute_dtype)


def cannot_stay(base: BaseModel, form: str) -> UserError:
    """Return the error for weights that cannot be kept.

    Args:
        base: the model.
        form: what it has instead.
    """
    return UserError(
        "quantize is stored, which keeps weights in the FP8 or MXFP4 of their files"
        f"{without_extension()}, but {base.name} has {form}. Try --quantize bnb.nf4-dq."
    )
