"""LoRA layers compute what the papers say, with one wide tensor and one dequantisation."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from adapters import MAKERS, build, lora_recipe, train
from peft.tuners.lora import Linear
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ftkit.models.lora.layers import lora_layers, unpacked_weight
from ftkit.models.lora.targets import INITIAL, TRAINED
from ftkit.models.pretrained.base_model import BaseModel, open_base

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"lora_variant": "rslora"},
    "dora": {"lora_variant": "dora"},
    "pissa": {"lora_init": "pissa"},
    "lora, 4 bits": {"quantize": "bnb.nf4"},
    "lora, 4 bits, quantised scales": {"quantize": "bnb.nf4-dq"},
    "lora, 8 bits": {"quantize": "bnb.int8"},
    "dora, 4 bits": {"lora_variant": "dora", "quantize": "bnb.nf4"},
    "pissa, 4 bits": {"lora_init": "pissa", "quantize": "bnb.nf4"},
}
WITH_BIAS = ("lora", "dora", "lora, 4 bits", "lora, 8 bits")


Layers = Callable[[str, str], Any]


@pytest.fixture(scope="module")
def layer_of(tmp_path_factory: pytest.TempPathFactory) -> Layers:
    """Gives a layer in the middle of training, with dropout, of a base model by name and kind."""
    directory = tmp_path_factory.mktemp("bases")

    @functools.cache
    def base_of(name: str) -> BaseModel:
        return open_base(str(MAKERS[name](directory / name)), "litgpt")

    @functools.cache
    def layer_of(name: str, kind: str) -> Any:
        base = base_of(name)
        keys = {"lora_projection": True, "lora_dropout": 0.3} | KINDS[kind]
        layers = lora_layers(train(build(base, lora_recipe(base, **keys))))
        return next(layer for name, layer in layers if name.endswith("h.1.attn.proj"))

    return layer_of


def by_hand(layer: Any, x: Tensor) -> Tensor:
    """As the papers have it, product by product."""
    a, b, base = layer.lora_A, layer.lora_B, layer.get_base_layer()
    weight, bias, scaling = unpacked_weight(base), base.bias, layer.scaling[TRAINED]
    dropped = layer.lora_dropout[TRAINED](x)
    update = F.linear(F.linear(dropped, a[TRAINED].weight), b[TRAINED].weight)
    if INITIAL in a:
        update = update - F.linear(F.linear(x, a[INITIAL].weight), b[INITIAL].weight)
    result = F.linear(x, weight) + update * scaling
    if TRAINED in layer.lora_magnitude_vector:
        with torch.no_grad():
            changed = weight + scaling * b[TRAINED].weight @ a[TRAINED].weight
        result = result * layer.lora_magnitude_vector[TRAINED].weight / changed.norm(dim=1)
    return result if bias is None else result + bias


def numbers_in(layer: Any, compute: Any, x: Tensor) -> list[Tensor]:
    """What a layer gives, and all gradients."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    result = compute(x)
    result.backward(torch.randn(result.shape, generator=torch.Generator().manual_seed(4)))
    gradients = [p.grad for p in layer.parameters() if p.requires_grad]
    return [result.detach(), *(t.clone() for t in (x.grad, *gradients))]


@pytest.mark.extensions
@pytest.mark.parametrize("drops", [True, False], ids=["with dropout", "without"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("llama", kind) for kind in KINDS), *(("gpt-neox", kind) for kind in WITH_BIAS)],
)
def test_results_and_gradients_are_those_of_the_formula(
    layer_of: Layers, name: str, kind: str, drops: bool
) -> None:
    layer = layer_of(name, kind).train(drops)
    assert (layer.get_base_layer().bias is not None) == (name == "gpt-neox")
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(2))
    expected = numbers_in(layer, lambda x: by_hand(layer, x), x)
    for found, tensor in zip(numbers_in(layer, layer, x), expected, strict=True):
        assert (found - tensor).norm() < 1e-6 * tensor.norm()


@pytest.mark.extensions
def test_a_run_goes_on_as_it_would_have_with_the_layers_of_peft(
    layer_of: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which drew the same dropout."""
    layer = layer_of("llama", "lora").train()
    x = torch.randn(2, 9, 64)
    found = numbers_in(layer, layer, x)
    monkeypatch.setattr(layer, "lora_variant", {})
    of_peft = numbers_in(layer, lambda x: Linear.forward(layer, x), x)
    for tensor, expected in zip(found, of_peft, strict=True):
        assert (tensor - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.extensions
@pytest.mark.parametrize("drops", [True, False], ids=["with dropout", "without"])
def test_gradients_of_the_input_are_added_within_a_product(layer_of: Layers, drops: bool) -> None:
    layer = layer_of("llama", "lora").train(drops)
    layer.zero_grad()
    x = torch.randn(2, 9, 64, requires_grad=True)
    with Operations(x.numel()) as of_forward:
        result = layer(x)
    with Operations(x.numel()) as of_backward:
        result.backward(torch.ones_like(result))
    assert not of_forward.count["add"] and not of_backward.count["add"]
    assert of_backward.count["addmm_"] == 1 and not of_backward.count["add_"]


@pytest.mark.extensions
@pytest.mark.parametrize("drops", [True, False], ids=["with dropout", "without"])
def test_a_backward_pass_has_two_tensors_of_the_inputs_width_at_most(
    layer_of: Layers, drops: bool
) -> None:
    """Of long sequences these are what a step has most of, where blocks are checkpointed."""
    layer = layer_of("llama", "lora").train(drops)
    layer.zero_grad()
    x = torch.randn(2, 9, 64, requires_grad=True)
    result = layer(x)
    gradient = torch.ones_like(result)
    with Alive(x.numel(), x, gradient) as alive:
        result.backward(gradient)
    # What is dropped is read beside what is written.
    assert alive.most == (2 if drops else 1)


class Alive(TorchDispatchMode):
    """Counts the tensors of a size that are there at once."""

    def __init__(self, elements: int, *known: Tensor) -> None:
        super().__init__()
        self.most = 0
        self._elements = elements
        self._known = {tensor.data_ptr() for tensor in known}
        self._made: list[ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        is_wide = isinstance(result, Tensor) and result.numel() == self._elements
        if is_wide and result.is_floating_point():  # no mask of dropout
            self._made.append(ref(result))
        places = {tensor.data_ptr() for one in self._made if (tensor := one()) is not None}
        self.most = max(self.most, len(places - self._known))
        return result


class Operations(TorchDispatchMode):
    """Counts operations, and the tensors of a size that they make."""

    def __init__(self, elements: int, *known: Tensor) -> None:
        super().__init__()
        self.count = Counter[str]()
        self._elements = elements
        self._known = {tensor.data_ptr() for tensor in known}
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        self.count[func.overloadpacket.__name__] += 1
        if isinstance(result, Tensor) and result.numel() == self._elements:
            self._made[result.data_ptr()] = result  # kept, so that no two have the same memory
        return result

    @property
    def made(self) -> int:
        return len(self._made.keys() - self._known)


@pytest.mark.extensions
@pytest.mark.parametrize("kind", ["lora", "pissa", "lora, 4 bits", "pissa, 4 bits", "lora, 8 bits"])
def test_the_low_rank_product_is_added_in_the_memory_of_the_result(
    layer_of: Layers, kind: str
) -> None:
    layer = layer_of("llama", kind).train(False)
    x = torch.randn(2, 9, 64, requires_grad=True)
    with Operations(x.numel(), x) as seen:
        layer(x)
    assert seen.made == 1, "the result"
    assert not seen.count["clone"]


@pytest.mark.extensions
@pytest.mark.parametrize("drops", [True, False], ids=["with dropout", "without"])
def test_an_input_is_kept_once_for_all_adapters_of_it(layer_of: Layers, drops: bool) -> None:
    layer = layer_of("llama", "lora").train(drops)
    x = torch.randn(2, 9, 64, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = [layer(x) for _ in range(3)]
    wide = {t.data_ptr(): t.element_size() for t in kept if t.numel() == x.numel()}
    assert wide.pop(x.data_ptr()) == 4
    assert list(wide.values()) == [1] * len(results) * drops, "a mask of one byte for each"


@pytest.mark.extensions
@pytest.mark.parametrize("kind", ["lora, 4 bits", "lora, 4 bits, quantised scales"])
def test_a_packed_weight_is_unpacked_once_in_each_pass(layer_of: Layers, kind: str) -> None:
    layer = layer_of("llama", kind).train(False)
    x = torch.randn(2, 9, 64, requires_grad=True)
    with Operations(64 * 64) as forward:
        result = layer(x)
    with Operations(64 * 64) as backward:
        result.sum().backward()
    assert [seen.count["gemm_4bit"] for seen in (forward, backward)] == [1, 0]
    assert [seen.count["dequantize_4bit"] for seen in (forward, backward)] == [0, 1]
    assert [seen.made for seen in (forward, backward)] == [0, 1], "and is not copied"


@pytest.mark.extensions
@pytest.mark.parametrize("drops", [True, False], ids=["with dropout", "without"])
@pytest.mark.parametrize("kind", ["lora", "dora", "pissa"])
def test_autocast_computes_in_16_bits_and_learns_in_32(
    layer_of: Layers, kind: str, drops: bool
) -> None:
    layer = layer_of("llama", kind).train(drops)
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(2))

    def mixed(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = layer(x)
        assert result.dtype == torch.bfloat16
        return result.float()

    expected = numbers_in(layer, lambda x: by_hand(layer, x), x)
    for found, tensor in zip(numbers_in(layer, mixed, x), expected, strict=True):
        assert found.dtype == torch.float32
        assert (found - tensor).norm() < 1e-2 * tensor.norm()
