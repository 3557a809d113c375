"""Tensors without values, in which a step is simulated, and a model tried before it is trained."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode


class _Converter(FakeTensorConverter):
    """Makes them of real ones without torch's compiler, which takes a second to import.

    Torch's own names where a tensor came from by classes of its compiler, for shapes that are free;
    here all are known. Seen in 2.13.
    """

    def from_real_tensor(
        self,
        fake_mode: FakeTensorMode,
        t: Tensor,
        make_constant: bool = False,
        shape_env: Any = None,
        **more: Any,
    ) -> FakeTensor:
        """Return the fake tensor of a real one; asked for twice, it is the same."""
        is_plain = type(t) is Tensor and t.layout == torch.strided and not t._is_view()
        if make_constant or not is_plain or t.requires_grad:
            return super().from_real_tensor(fake_mode, t, make_constant, shape_env, **more)
        known = self._get_memo(t)
        if known is None:
            shapes = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            known = self.from_meta_and_device(fake_mode, shapes, t.device)
            self.set_tensor_memo(t, known)
        return known


def fake_tensors() -> FakeTensorMode:
    """Return a context in which tensors have no values; real ones may be given to it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter = _Converter()
    return mode
