"""Sequences in a row are computed as each is by itself, in every family and on every path."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import litgpt
import numpy as np
import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
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


@dataclass
class Call:
    """A call of torch's function."""

    heads: list[tuple[int, int]]
    starts: list[int]
    longest: int


def of_torch_2_13(
    calls: list[Call],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's documented function, on CPUs."""
    assert cu_seq_q.dtype == torch.int32 and cu_seq_k is cu_seq_q and max_q == max_k
    assert window_size == (-1, 0), "causal"
    assert enable_gqa or query.size(1) == key.size(1)
    calls.append(Call([(query.size(1), key.size(1))], cu_seq_q.tolist(), max_q))
    results = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (part[None, start:end].transpose(1, 2) for part in (query, key, value))
        result = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        results.append(result.transpose(1, 2)[0])
    return torch.cat(results)


def of_torch_2_11(
    calls: list[Call],
    *rows: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """The same function before it had groups of heads."""
    return of_torch_2_13(calls, *rows, scale=scale, window_size=window_size)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("version", "knows_groups"), [(of_torch_2_13, True), (of_torch_2_11, False)]
)
def test_a_row_goes_to_torchs_attention_over_variable_lengths_whole(
    version: Callable[..., Tensor],
    knows_groups: bool,
    groups: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Call] = []
    monkeypatch.setattr(torch_varlen, "varlen_attn", partial(version, calls))
    attention._varlen_attention.cache_clear()
    model = make_model("flash", n_query_groups=groups)
    found = learned(model, padding_free=True)
    attention._varlen_attention.cache_clear()
    starts = [0, 9, 39, 69, 74, 138, 140, 141]
    heads = (4, groups if knows_groups else 4)
    assert calls == [Call([heads], starts, 64)] * 2, "one call in each of two layers"
    model.kernel = "sdpa"
    assert_equal(found, learned(model, padding_free=False))


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
    windows = []

    def varlen(*rows: Any, window_size: tuple[int, int], **_: Any) -> Tensor:
        windows.append(window_size)
        return torch.empty_like(rows[0])

    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen)
    attention._varlen_attention.cache_clear()
    q = torch.randn(6, 2, 8)
    starts = torch.tensor([0, 4, 6], dtype=torch.int32)
    for window in (None, 3):
        attend(q, q, q, Sequences((4, 2), "flash", starts), Scores(0.5, window=window))
    attention._varlen_attention.cache_clear()
    assert windows == [(-1, 0), (2, 0)]
