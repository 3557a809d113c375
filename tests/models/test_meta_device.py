"""Models on the meta device: shapes without values."""

import torch
from torch import nn

from ftkit.models.meta_device import allocate, on_meta_device


def test_a_model_on_the_meta_device_has_the_shapes_of_a_plain_one_and_can_be_allocated() -> None:
    def build() -> nn.Module:
        body = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3).bfloat16())
        body.register_buffer("turned", torch.empty(2, 3).t())
        nn.init.constant_(body[0].weight, 2.0)
        nn.init.zeros_(tensor=body[1].bias)
        return body

    def described(model: nn.Module) -> dict[str, object]:
        return {n: (t.shape, t.stride(), t.dtype) for n, t in model.state_dict().items()}

    with on_meta_device():
        outline = build()
    plain = build()
    assert {tensor.device.type for tensor in outline.state_dict().values()} == {"meta"}
    assert described(outline) == described(plain)
    allocate(outline, torch.device("cpu"))
    assert {tensor.device.type for tensor in outline.state_dict().values()} == {"cpu"}
    assert described(outline) == described(plain)
    assert [type(p) for p in outline.parameters()] == [nn.Parameter] * 5
