"""Sequences in a row are computed as each is by itself, in every family and on every path."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import litgpt
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from adapters import build, lora_recipe
from litgpt_models import litgpt_architecture
from tiny import LITGPT_ONLY, make_litgpt_only, make_llama
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import Sample
from ftkit.errors import UserError
from ftkit.models.bodies import attention
from ftkit.models.bodies.attention import (
    AttentionKernel,
    KeyValueCache,
    Scores,
    Sequences,
    attend,
    planned_path,
)
from ftkit.models.language_model import LanguageModel, output_of
from ftkit.models.lora.targets import our_name
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import Plan, make_plan

VOCABULARY = 397
SIZES: dict[str, Any] = {
    "block_size": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_query_groups": 2,
    "n_embd": 32,
    "padded_vocab_size": VOCABULARY,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 48,
    "bias": False,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
}
NEOX = {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "bias": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one group": {"n_query_groups": 1},
    "partial rotary, parallel": NEOX | {"rotary_percentage": 0.25, "parallel_residual": True},
    "interleaved rotary": {"rope_interleave": True},
    "soft-capping": {
        "attention_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "attention_scores_scalar": 16,
        "scale_embeddings": True,
        "post_attention_norm": True,
        "post_mlp_norm": True,
        "mlp_class_name": "GemmaMLP",
    },
    "norm of queries and keys": {"norm_qk": True},
    "norm of queries and keys before the heads": {"norm_qk": True, "norm_qk_type": "olmo2"},
    "two rotary tables": {"rope_local_base_freq": 10_000, "rope_indices": [0, 1], "norm_qk": True},
    "YaRN": {
        "rope_adjustments": {
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_seq_len": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
}
LENGTHS = (9, 30, 30, 5, 64, 2)


def architecture(**settings: Any) -> Any:
    return litgpt_architecture(litgpt.Config(**SIZES | settings))


def make_model(kernel: AttentionKernel = "sdpa", **settings: Any) -> LanguageModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LanguageModel(architecture(**settings), tied=False)
    model.kernel = kernel
    return model


def make_samples(lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    """So many input tokens each; the second half carries loss."""
    generator = np.random.default_rng(0)
    return [
        Sample(
            generator.integers(1, VOCABULARY, length + 1).astype(np.int32),
            np.array([[(length + 1) // 2, length + 1]], dtype=np.int32),
        )
        for length in lengths
    ]


def loss_of(
    model: LanguageModel, samples: Sequence[Sample | None], *, padding_free: bool
) -> Tensor:
    batch = collate(samples, {"label_tokens": 1}, padding_free=padding_free)
    return output_of(model, batch)


def learned(model: LanguageModel, *, padding_free: bool) -> tuple[float, dict[str, Tensor]]:
    """The loss of a micro-batch with a filler, and its gradients."""
    model.zero_grad()
    loss = loss_of(model, [*make_samples(), None], padding_free=padding_free)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


def assert_equal(
    found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys() and found[1]
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-5 * max(1, largest))


@pytest.mark.parametrize("kernel", ["cpu", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_gives_the_loss_and_the_gradients_of_padded_sequences(
    family: str, kernel: AttentionKernel
) -> None:
    model = make_model(kernel, **FAMILIES[family])
    assert_equal(learned(model, padding_free=True), learned(model, padding_free=False))


@pytest.mark.parametrize("kernel", ["cpu", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_sequences_give_the_logits_of_litgpt(family: str, kernel: AttentionKernel) -> None:
    model = make_model(kernel, **FAMILIES[family])
    theirs = litgpt.GPT(litgpt.Config(**SIZES | FAMILIES[family]))
    state = {our_name(n): p for n, p in model.state_dict().items()}
    for name in [name for name in state if ".q_proj." in name]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[name.replace(".q_proj", "")] = torch.cat(parts)
    theirs.load_state_dict(state)
    ids = torch.arange(40).view(2, 20) * 7 % VOCABULARY
    with torch.no_grad():
        found, expected = model(ids, torch.arange(40)), theirs(ids).flatten(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.extensions
@pytest.mark.parametrize("name", LITGPT_ONLY)
def test_families_of_litgpts_layout_take_rows(name: str, tmp_path: Path) -> None:
    base = open_base(str(make_litgpt_only(tmp_path, name)))
    model = LanguageModel(base.architecture, tied=False)
    assert_equal(learned(model, padding_free=True), learned(model, padding_free=False))


@pytest.mark.parametrize("family", ["grouped heads", "soft-capping"])
def test_a_sequence_in_a_row_is_computed_as_if_it_were_alone(family: str) -> None:
    model = make_model("cpu", **FAMILIES[family])
    samples = make_samples()
    with torch.no_grad():
        alone = [loss_of(model, [sample], padding_free=False).item() for sample in samples]
        for end in range(1, len(samples) + 1):
            found = loss_of(model, samples[:end], padding_free=True).item()
            assert found == pytest.approx(sum(alone[:end]), rel=1e-5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return open_base(str(make_llama(tmp_path_factory.mktemp("llama"))))


ADAPTED: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_key": True, "lora_projection": True, "lora_mlp": True, "lora_head": True},
    "DoRA": {"lora_variant": "dora"},
    "nf4": {"quantize": "bnb.nf4"},
    "int8": {"quantize": "bnb.int8"},
    "nf4, checkpointed": {"quantize": "bnb.nf4", "memory__activation_checkpointing": True},
    "LoRA, checkpointed": {"memory__activation_checkpointing": True},
}


@pytest.mark.parametrize("kernel", ["cpu", "sdpa"])
@pytest.mark.parametrize("keys", ADAPTED.values(), ids=ADAPTED)
def test_adapters_learn_from_rows_what_they_learn_from_padded_sequences(
    llama: BaseModel, keys: dict[str, Any], kernel: AttentionKernel
) -> None:
    model = build(llama, lora_recipe(llama, **keys)).train()
    model.body.build_rope_cache(torch.device("cpu"), 64)
    model.kernel = kernel
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # which begins with zeros, and A then has no gradient
            torch.nn.init.normal_(parameter, std=0.02)
    assert_equal(learned(model, padding_free=True), learned(model, padding_free=False))


class Largest(TorchDispatchMode):
    """Counts the numbers of the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        found = function(*arguments, **(options or {}))
        if isinstance(found, Tensor):
            self.numbers = max(self.numbers, found.numel())
        return found


def test_nothing_as_large_as_the_square_of_a_row_is_made() -> None:
    model = make_model("cpu")
    samples = make_samples((8,) * 64)
    with Largest() as largest:
        loss_of(model, samples, padding_free=True).backward()
    logits = 64 * 5 * VOCABULARY
    assert largest.numbers <= logits < (64 * 8) ** 2


# --- Attention over variable lengths --------------------------------------------------------------


class FlashOnCpu:
    """Stand-ins for torch's kernels over variable lengths, sequence by sequence."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heads: list[tuple[int, int]] = []
        """Of queries and keys, in each call."""
        self.windows: list[tuple[bool, int, int]] = []
        """Whether a call was causal without a window, and tokens before and after a query."""
        self.starts: list[int] = []
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", self.forward)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", self.backward)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        starts_k: Tensor,
        longest: int,
        longest_k: int,
        dropout: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float,
        window_size_left: int,
        window_size_right: int,
    ) -> tuple[Tensor, ...]:
        assert starts.dtype == torch.int32 and starts_k is starts
        assert longest == longest_k == int(starts.diff().max())
        assert not dropout and not return_debug_mask
        self.heads.append((q.size(1), k.size(1)))
        self.windows.append((is_causal, window_size_left, window_size_right))
        self.starts = starts.tolist()
        state = torch.zeros(2)
        return self._attended(q, k, v, scale), torch.zeros(1), state, state, state

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        results = []
        for start, end in itertools.pairwise(self.starts):
            some = (part[None, start:end].transpose(1, 2) for part in (q, k, v))
            queries, keys, values = some
            result = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
            )
            results.append(result.transpose(1, 2)[0])
        return torch.cat(results)

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: Tensor,
        sums: Tensor,
        starts: Tensor,
        starts_k: Tensor,
        longest: int,
        longest_k: int,
        dropout: float,
        is_causal: bool,
        state: Tensor,
        unused: Tensor,
        *,
        scale: float,
        window_size_left: int,
        window_size_right: int,
    ) -> tuple[Tensor, ...]:
        assert starts.tolist() == self.starts and starts_k is starts and not dropout
        assert (
            longest == longest_k
            and (is_causal, window_size_left, window_size_right) == (self.windows[-1])
        )
        assert result.shape == q.shape and sums.numel() == 1 and state is unused
        q, k, v = (part.detach().requires_grad_() for part in (q, k, v))
        with torch.enable_grad():
            attended = self._attended(q, k, v, scale)
        return torch.autograd.grad(attended, (q, k, v), gradient)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("takes_groups", [True, False], ids=["torch 2.12", "torch 2.11"])
def test_a_row_goes_to_torchs_attention_over_variable_lengths_whole(
    takes_groups: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = FlashOnCpu(monkeypatch)
    monkeypatch.setattr(attention, "_takes_groups", lambda: takes_groups)
    model = make_model("flash", n_query_groups=groups)
    found = learned(model, padding_free=True)
    heads = (4, groups if takes_groups else 4)
    assert flash.heads == [heads] * 2, "one call in each of two layers"
    assert flash.starts == [0, 9, 39, 69, 74, 138, 140, 141]
    model.kernel = "sdpa"
    assert_equal(found, learned(model, padding_free=False))


def test_groups_of_heads_are_known_by_torchs_version() -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert attention._takes_groups() == (version >= (2, 12))


# --- Which path is taken --------------------------------------------------------------------------

AMPERE = Devices(accelerator="cuda", count=1, names=("NVIDIA A100",))
TURING = Devices(accelerator="cuda", count=1, names=("Tesla T4",), bf16_native=False)
HOST = Devices(accelerator="cpu", count=2)


def plan_of(devices: Devices, precision: str, padding_free: str) -> Plan:
    keys = {"checkpoint_dir": "base", "precision": precision, "train.padding_free": padding_free}
    return make_plan(read_recipe([], list(keys.items()), method="lora"), devices)


@pytest.mark.parametrize(
    ("devices", "precision", "settings", "paths"),
    [
        (HOST, "32-true", {}, "sdpa per sequence"),
        (HOST, "bf16-mixed", {}, "sdpa per sequence"),
        (HOST, "32-true", FAMILIES["soft-capping"], "sdpa per sequence"),
        (AMPERE, "bf16-true", {}, "varlen"),
        (AMPERE, "16-mixed", {}, "varlen"),
        (AMPERE, "32-true", {}, "padded, sdpa per sequence"),
        (AMPERE, "bf16-true", {"head_size": 12}, "padded, sdpa per sequence"),
        (AMPERE, "bf16-true", {"head_size": 264}, "padded, sdpa per sequence"),
        (AMPERE, "bf16-true", FAMILIES["soft-capping"], "padded, sdpa per sequence"),
        (TURING, "16-mixed", {}, "padded, sdpa per sequence"),
    ],
)
def test_rows_are_the_default_where_they_are_faster(
    devices: Devices, precision: str, settings: dict[str, Any], paths: str
) -> None:
    """`paths`: without train.padding_free, and if another, with it."""
    traits = architecture(**settings).attention
    usual, *wanted = paths.split(", ")
    for value, expected in (("null", usual), ("true", (wanted or [usual])[0]), ("false", "padded")):
        assert planned_path(traits, plan_of(devices, precision, value)) == expected


def test_latent_attention_is_padded_and_rows_are_refused() -> None:
    config = litgpt.Config(**SIZES)
    config.latent_attention = {"q_lora_rank": 8}
    traits = (
        pytest.importorskip("ftkit.extensions.litgpt.architecture")
        .LitgptArchitecture(config)
        .attention
    )
    made = plan_of(HOST, "32-true", "null")
    assert planned_path(traits, made) == "padded"
    of_tokens = dataclasses.replace(made, micro_batch_tokens=512, chosen=None)
    assert planned_path(traits, of_tokens) == "padded"
    words = r"train\.padding_free is true.*padded.*--train\.padding_free null"
    with pytest.raises(UserError, match=words):
        planned_path(traits, plan_of(HOST, "32-true", "true"))


def test_micro_batches_of_a_number_of_tokens_are_rows_even_where_rows_are_slower() -> None:
    older = Devices(accelerator="cuda", count=1, bf16_native=False)
    made = plan_of(older, "32-true", "null")
    traits = architecture().attention
    assert planned_path(traits, made) == "padded"
    assert made.micro_batch_tokens == 8192  # ftkit's choice, to which padded ones keep too
    of_tokens = dataclasses.replace(made, micro_batch_tokens=512, chosen=None)
    assert planned_path(traits, of_tokens) == "sdpa per sequence"


@pytest.mark.parametrize("kernel", ["cpu", "flash", "sdpa"])
def test_neighbours_of_one_length_are_computed_at_once(
    kernel: AttentionKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Sequences((3, 3, 5, 3)).runs == [(2, 3), (1, 5), (1, 3)]
    q, k = torch.randn(14, 4, 8), torch.randn(14, 2, 8)
    whole = attend(q, k, k, Sequences((3, 3, 5, 3), kernel), Scores(0.5))
    for start, end in ((0, 3), (3, 6), (6, 11), (11, 14)):
        parts = (q[start:end], k[start:end], k[start:end])
        alone = attend(*parts, Sequences((end - start,), kernel), Scores(0.5))
        torch.testing.assert_close(whole[start:end], alone, rtol=1e-5, atol=1e-6)


# --- Windows, bounds and sinks --------------------------------------------------------------------


def by_definition(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Attention within one sequence, head by head and token by token, as papers write it."""
    results = torch.empty(*q.shape[:2], v.size(-1), dtype=q.dtype)
    times = q.size(1) // k.size(1)
    for token in range(len(q)):
        first = 0 if scores.window is None else max(0, token - scores.window + 1)
        seen = slice(first, token + 1)
        for head in range(q.size(1)):
            products = k[seen, head // times] @ q[token, head] * scores.scale
            if scores.softcap is not None:
                products = torch.tanh(products / scores.softcap) * scores.softcap
            if scores.sinks is not None:
                products = torch.cat((products, scores.sinks[head, None]))
            weights = products.softmax(0)[: token + 1 - first]
            results[token, head] = weights @ v[seen, head // times]
    return results


KINDS_OF_SCORES = {
    "plain": Scores(0.4),
    "window": Scores(0.4, window=3),
    "a window of one": Scores(0.4, window=1),
    "window and bound": Scores(0.4, softcap=2.0, window=4),
    "sinks": Scores(0.4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "window and sinks": Scores(0.4, window=3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("kernel", ["cpu", "flash", "sdpa"])
@pytest.mark.parametrize("kind", KINDS_OF_SCORES)
@pytest.mark.parametrize("value_size", [8, 6])
def test_scores_are_those_of_their_definition(
    kind: str, kernel: AttentionKernel, value_size: int
) -> None:
    scores = KINDS_OF_SCORES[kind]
    generator = torch.Generator().manual_seed(0)
    lengths = (2, 7, 7, 5)

    def drawn(heads: int, size: int) -> Tensor:
        numbers = torch.randn(sum(lengths), heads, size, generator=generator)
        return numbers.requires_grad_()

    q, k, v = drawn(4, 8), drawn(2, 8), drawn(2, value_size)
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([by_definition(*part, scores) for part in parts])
    found = attend(q, k, v, Sequences(lengths, kernel), scores)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradient = torch.randn(found.shape, generator=generator)
    wanted = torch.autograd.grad(expected, (q, k, v), gradient)
    for ours, theirs in zip(torch.autograd.grad(found, (q, k, v), gradient), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS_OF_SCORES)
@pytest.mark.parametrize("value_size", [8, 6])
def test_tokens_attend_to_a_cache_as_to_their_sequence(kind: str, value_size: int) -> None:
    """Prompts of different lengths, padded; then a pass of two tokens, and of one at a time."""
    scores = KINDS_OF_SCORES[kind]
    generator = torch.Generator().manual_seed(0)
    starts, count = torch.tensor([[5], [3]]), 4
    length = 5 + count
    q = torch.randn(2, 4, length, 8, generator=generator)
    k = torch.randn(2, 2, length, 8, generator=generator)
    v = torch.randn(2, 2, length, value_size, generator=generator)
    by_token = [part.transpose(1, 2) for part in (q, k, v)]
    expected = [by_definition(rq, rk, rv, scores) for rq, rk, rv in zip(*by_token, strict=True)]
    cache = KeyValueCache((2, length + 1))
    passes = [torch.arange(5).expand(2, 5)]
    passes += [starts + torch.arange(2), starts + 2, starts + 3]
    for positions in passes:
        cache.positions = positions
        places = positions[:, None, :, None]
        own_q, own_k, own_v = (
            part.gather(2, places.expand(-1, part.size(1), -1, part.size(3))) for part in (q, k, v)
        )
        found = cache.attend(7, own_q, own_k, own_v, scores)
        for row, place in enumerate(positions):
            known = place < starts[row] + count
            wanted = expected[row][place[known]]
            torch.testing.assert_close(found[row, known], wanted, rtol=1e-5, atol=1e-6)


def test_a_token_attends_to_a_cache_without_a_copy_of_it() -> None:
    cache, scores = KeyValueCache((1, 64)), Scores(0.4)
    cache.positions = torch.arange(63)[None]
    q, k, v = torch.randn(1, 8, 63, 16), torch.randn(1, 2, 63, 16), torch.randn(1, 2, 63, 16)
    cache.attend(0, q, k, v, scores)
    cache.positions = torch.tensor([[63]])
    with Largest() as largest:
        cache.attend(0, q[:, :, :1], k[:, :, :1], v[:, :, :1], scores)
    assert largest.numbers <= 2 * 64 * 16, "as many as the keys of its groups"


def test_a_window_is_passed_to_torchs_attention_over_variable_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flash = FlashOnCpu(monkeypatch)
    q = torch.randn(6, 2, 8, requires_grad=True)
    starts = torch.tensor([0, 4, 6], dtype=torch.int32)
    for window in (None, 3):
        found = attend(q, q, q, Sequences((4, 2), "flash", starts), Scores(0.5, window=window))
        found.sum().backward()
    assert flash.windows == [(True, -1, 0), (False, 2, 0)]
