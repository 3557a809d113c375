"""The simulated cards behave like CUDA for all that ftkit uses, and count events."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import ROOT, command_environment
from simulated_card import driver
from simulated_card.build import needs_card
from simulated_card.kinds import KINDS
from simulated_card.machine import Machine, cards, machine, with_cards
from simulated_card.settings import VARIABLE, Cards, Shortage

pytestmark = needs_card

ALL_KINDS = tuple(kind for kind in KINDS if "mig" not in kind)


@pytest.fixture(scope="module")
def card() -> Iterator[Machine]:
    """A machine with one card of each kind."""
    with machine(with_cards(command_environment(), cards(*ALL_KINDS))) as found:
        yield found


# --- Where things are -----------------------------------------------------------------------------


@pytest.mark.slow
def test_devices_do_not_mix(card: Machine) -> None:
    def body() -> list[str]:
        import torch

        here, there = torch.ones(2, 2, device="cuda:0"), torch.ones(2, 2, device="cuda:1")
        host = torch.ones(2, 2)
        refused = []
        for wrong in (
            lambda: here + host,
            lambda: host + here,
            lambda: here @ there,
            lambda: host.add_(here),
            lambda: host.add_(here.sum()),
            lambda: torch.cat([here, host]),
            lambda: torch.nn.functional.embedding(torch.zeros(1, dtype=torch.long), here),
            lambda: torch.stack([here, there]),
        ):
            try:
                wrong()
            except RuntimeError as error:
                refused.append(str(error))
        return refused

    refused = card.run(body)
    assert len(refused) == 8
    assert all("Expected all tensors to be on the same device" in text for text in refused)


@pytest.mark.extensions
def test_numbers_copies_and_indexes_of_the_host_are_taken(card: Machine) -> None:
    def body() -> list[object]:
        import torch

        x = torch.arange(4.0, device="cuda")
        x[torch.tensor([0, 1])] = 7.0
        x.add_(torch.tensor(0.5))
        x[:2].copy_(torch.tensor([3.0, 4.0]))
        return [x.tolist(), x[torch.tensor([3])].tolist(), str((x * torch.tensor(2.0)).device)]

    assert card.run(body) == [[3.0, 4.0, 2.5, 3.5], [3.5], "cuda:0"]


@pytest.mark.extensions
def test_a_result_is_where_its_inputs_are(card: Machine) -> None:
    def body() -> list[str]:
        import torch

        torch.cuda.set_device(1)
        x = torch.ones(4, 4, device="cuda")
        view = x.view(16)[3:7]
        view.fill_(2)
        with torch.cuda.device(2):
            made = torch.zeros(1, device="cuda")
        with torch.device("cuda:3"):
            default = torch.empty(2)
        places = [x, view, x.t(), x.sum(), torch.empty_like(x), x.to("cuda:0"), made, default]
        assert x.sum().item() == 20
        return [str(t.device) for t in places]

    expected = ["cuda:1"] * 5 + ["cuda:0", "cuda:2", "cuda:3"]
    assert card.run(body) == expected


@pytest.mark.extensions
def test_the_host_cannot_read_the_memory(card: Machine) -> None:
    def numpy() -> str:
        import torch

        try:
            torch.ones(2, device="cuda").numpy()
        except TypeError as error:
            return str(error)
        return ""

    def pointer() -> int:
        import ctypes

        import torch

        x = torch.ones(2, device="cuda")
        return ctypes.c_float.from_address(x.data_ptr()).value  # type: ignore[return-value]

    assert "can't convert cuda:0 device type tensor to numpy" in card.run(numpy)
    with pytest.raises(AssertionError, match=r"ended with -(11|7|10)"):
        card.run(pointer)


@pytest.mark.extensions
def test_a_card_that_is_not_there_is_refused(card: Machine) -> None:
    def body(count: int) -> list[str]:
        import torch

        refused = []
        for wrong in (
            lambda: torch.empty(1, device=f"cuda:{count}"),
            lambda: torch.cuda.set_device(count),
            lambda: torch.cuda.get_device_properties(count),
        ):
            try:
                wrong()
            except (RuntimeError, AssertionError) as error:
                refused.append(str(error))
        return refused

    refused = card.run(body, len(ALL_KINDS))
    assert len(refused) == 3
    assert "invalid device ordinal" in refused[0]


# --- Random numbers -------------------------------------------------------------------------------


@pytest.mark.extensions
def test_cards_have_generators_of_their_own(card: Machine) -> None:
    def body() -> list[object]:
        import torch

        torch.manual_seed(3)
        before = torch.get_rng_state()
        drawn = torch.rand(3, device="cuda")
        dropped = torch.dropout(torch.ones(64, device="cuda"), 0.5, True)
        untouched = torch.equal(before, torch.get_rng_state())
        torch.cuda.manual_seed_all(3)
        again = torch.rand(3, device="cuda")
        dropped_again = torch.dropout(torch.ones(64, device="cuda"), 0.5, True)
        other = torch.rand(3, device="cuda:1").tolist() == again.tolist()
        equal = torch.equal(drawn, again) and torch.equal(dropped, dropped_again)
        refused = ""
        try:
            torch.empty(2, device="cuda").normal_(generator=torch.Generator())
        except RuntimeError as error:
            refused = str(error)
        own = torch.Generator("cuda").manual_seed(5)
        torch.empty(2, device="cuda").normal_(generator=own)
        return [untouched, equal, other, refused]

    untouched, equal, other, refused = card.run(body)
    assert untouched and equal and other
    assert refused == "Expected a 'cuda' device type for generator but found 'cpu'"


# --- Learning -------------------------------------------------------------------------------------


@pytest.mark.extensions
def test_a_step_gives_the_numbers_of_the_host_and_backward_runs_in_another_thread(
    card: Machine,
) -> None:
    def body() -> list[object]:
        import threading

        import torch

        threads = set()

        def step(device: str) -> list[float]:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).to(device)
            model[0].weight.register_hook(lambda _: threads.add(threading.get_ident()))  # type: ignore[operator]
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
            for _ in range(3):
                model(torch.ones(2, 8, device=device)).square().sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            return model[0].weight.detach().cpu().flatten().tolist()  # type: ignore[operator]

        on_card = step("cuda")
        others = threads - {threading.get_ident()}
        return [on_card == step("cpu"), bool(others)]

    assert card.run(body) == [True, True]


@pytest.mark.extensions
def test_16_bits_and_checkpoints_of_activations_work(card: Machine) -> None:
    def body() -> None:
        import torch
        from torch.utils.checkpoint import checkpoint

        model = torch.nn.Linear(4, 4).cuda()
        scaler = torch.amp.GradScaler("cuda")
        optimizer = torch.optim.SGD(model.parameters())

        def forward(x: torch.Tensor) -> torch.Tensor:
            return torch.dropout(model(x), 0.5, True)

        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cuda", dtype):
                out = checkpoint(forward, torch.ones(2, 4, device="cuda"), use_reentrant=False)
            assert out.dtype is dtype
            scaler.scale(out.float().sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    card.run(body)


@pytest.mark.extensions
def test_packed_weights_are_those_of_the_host(card: Machine) -> None:
    def body() -> bool:
        import torch
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        torch.manual_seed(0)
        weight = torch.randn(64, 64)
        packed, state = quantize_4bit(weight.cuda(), quant_type="nf4")
        expected, on_host = quantize_4bit(weight, quant_type="nf4")
        assert packed.is_cuda
        back = dequantize_4bit(packed, state).cpu()
        return torch.equal(packed.cpu(), expected) and torch.equal(
            back, dequantize_4bit(expected, on_host)
        )

    assert card.run(body)


# --- Memory, streams and events -------------------------------------------------------------------


@pytest.mark.extensions
def test_memory_is_counted_as_torchs_allocator_counts_it(card: Machine) -> None:
    def body() -> list[int]:
        import torch

        found = []
        a = torch.empty(1000, device="cuda")  # 4,000 bytes: 8 blocks of 512
        b = a.view(10, 100).t()
        found.append(torch.cuda.memory_allocated())
        c = torch.empty(1, device="cuda")
        found.append(torch.cuda.memory_allocated())
        del a, b, c
        found += [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
        torch.cuda.reset_peak_memory_stats()
        found.append(torch.cuda.max_memory_allocated())
        found.append(torch.cuda.memory_allocated(1))
        return found

    assert card.run(body) == [4096, 4608, 0, 4608, 0, 0]


@pytest.mark.slow
def test_a_full_card_says_so_as_torch_does() -> None:
    def body() -> list[object]:
        import torch

        kept = torch.empty(2**20, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(2**21, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            return [str(error), kept.numel(), torch.cuda.memory_allocated()]
        return []

    small = cards("l4", memory_bytes=2 * 2**20)
    with machine(with_cards(command_environment(), small)) as card:
        text, _, allocated = card.run(body)
    assert text.startswith(
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 2.00 MiB"
        " of which 1.00 MiB is free."
    )
    assert allocated == 2**20


@pytest.mark.extensions
def test_events_that_were_not_recorded_or_take_no_time_raise(card: Machine) -> None:
    def body() -> list[str]:
        import torch

        recorded = torch.cuda.Event(enable_timing=True)
        recorded.record()
        refused = []
        for other in (torch.cuda.Event(enable_timing=True), torch.cuda.Event()):
            try:
                recorded.elapsed_time(other)
            except ValueError as error:
                refused.append(str(error))
        assert recorded.elapsed_time(recorded) == 0
        return refused

    never, untimed = card.run(body)
    assert "must be recorded" in never
    assert "enable_timing=True" in untimed


@pytest.mark.extensions
def test_pinned_memory_is_recognised(card: Machine) -> None:
    def body() -> list[bool]:
        import torch

        made = torch.empty(100, pin_memory=True)
        return [
            made.is_pinned(),
            made[10:].is_pinned(),
            torch.ones(3).pin_memory().is_pinned(),
            torch.ones(3).is_pinned(),
            torch.ones(3, device="cuda").is_pinned(),
        ]

    assert card.run(body) == [True, True, True, False, False]


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("wording", "type_", "words"),
    [
        ("torch", "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("driver", "AcceleratorError", "CUDA error: out of memory"),
        ("cublas", "RuntimeError", "CUBLAS_STATUS_ALLOC_FAILED"),
    ],
)
def test_out_of_memory_has_the_requested_message(
    card: Machine, wording: str, type_: str, words: str
) -> None:
    def body(wording: str) -> list[str]:
        import torch
        from simulated_card import device

        x = torch.ones(2, device="cuda")
        device.LIBRARY.card_fail(wording.encode())
        try:
            x + 1
        except RuntimeError as error:
            assert (x + 1).sum().item() == 4  # once
            return [type(error).__name__, str(error)]
        return []

    found_type, found_words = card.run(body, wording)
    assert found_type == type_
    assert words in found_words


# --- What is counted ------------------------------------------------------------------------------


@pytest.mark.extensions
def test_host_waits_are_counted(card: Machine) -> None:
    def body() -> dict[str, int]:
        import torch
        from simulated_card import counts

        x = torch.arange(4.0, device="cuda")
        counts.forget()
        x.sum().item()
        float(x[0])
        if x[1] > 0:
            pass
        x.tolist()
        x.cpu()
        x.nonzero()
        x[x > 0] = x[x > 0] + 1
        x[x > 0] = 1.0  # filled where the mask says so: nothing is looked for
        torch.cuda.synchronize()
        torch.cuda.current_stream().synchronize()
        torch.cuda.Event().synchronize()
        torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
        torch.empty(4).copy_(x, non_blocking=True)  # not pinned: the host waits
        torch.ones(4).to("cuda")
        (x * 2 + x.mean()).relu().softmax(0)
        return {" ".join(key): count for key, count in counts.counted().items()}

    assert card.run(body) == {
        "item item": 3,
        "to_host pageable": 3,
        "shape nonzero": 1,
        "shape index": 1,
        "shape index_put_impl": 1,
        "synchronize device": 1,
        "synchronize stream": 1,
        "synchronize event": 1,
        "to_host_async pinned": 1,
        "to_device pageable": 1,
    }


@pytest.mark.extensions
def test_a_process_that_only_asks_for_names_takes_no_memory_of_a_card(card: Machine) -> None:
    def body() -> list[list[int]]:
        import torch
        from simulated_card import counts

        torch.cuda.get_device_name(0), torch.cuda.is_bf16_supported(including_emulation=False)
        torch.cuda.get_device_properties(0), torch.cuda.device_count()
        asked = counts.contexts()
        torch.cuda.mem_get_info(1)
        torch.ones(1, device="cuda:2")
        return [asked, counts.contexts()]

    assert card.run(body) == [[], [1, 2]]


# --- Kinds of cards -------------------------------------------------------------------------------


@pytest.mark.extensions
def test_cards_have_properties(card: Machine) -> None:
    def body() -> list[list[object]]:
        import torch

        found = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            with torch.cuda.device(index):
                native = torch.cuda.is_bf16_supported(including_emulation=False)
            name, capability = (
                torch.cuda.get_device_name(index),
                torch.cuda.get_device_capability(index),
            )
            found.append([name, list(capability), properties.total_memory, native])
        return found

    expected = [KINDS[name] for name in ALL_KINDS]
    assert card.run(body) == [
        [kind.name, list(kind.capability), kind.memory_bytes, kind.capability >= (8, 0)]
        for kind in expected
    ]


@pytest.mark.slow
def test_the_kernels_that_torch_has_can_be_chosen() -> None:
    old = cards("v100", archs=("sm_50", "sm_60", "sm_70"), cuda="12.6")

    def body() -> list[object]:
        import torch

        return [torch.cuda.get_arch_list(), torch.version.cuda]

    with machine(with_cards(command_environment(), old)) as card:
        assert card.run(body) == [["sm_50", "sm_60", "sm_70"], "12.6"]


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("", []),
        ("1,7,0", [1]),
        ("1,1", [1]),
        ("{uuid}", [2]),
        ("{start}", [2]),
        ("-1", []),
    ],
)
def test_the_visible_cards_are_those_that_cuda_would_show(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, shown: list[int]
) -> None:
    three = Cards(kinds=("h100", "l4", "t4"), library="")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        text = visible.format(uuid=three.uuid(2), start=three.uuid(2)[:8])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert three.visible() == shown


def test_the_driver_lists_whole_cards_and_torch_a_slice_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sliced = Cards(kinds=("h100-mig-1g.10gb", "h100-mig-1g.10gb"), library="")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (shown,) = sliced.shown()
    assert shown.name.endswith("MIG 1g.10gb")
    nvml = driver.module(sliced)
    assert nvml.nvmlDeviceGetCount() == 1
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetName(card) == KINDS["h100"].name
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetUtilizationRates(card)
    slice_ = nvml.nvmlDeviceGetHandleByUUID(sliced.uuid(1))
    assert nvml.nvmlDeviceGetMemoryInfo(slice_).total == shown.memory_bytes


def test_settings_travel_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Cards(
        kinds=("h100", "t4"),
        library="card.so",
        shortage=Shortage(wording="nccl", moment="backward", rank=1, after_steps=2),
    )
    monkeypatch.setenv(VARIABLE, given.environment()[VARIABLE])
    assert Cards.here() == given
    monkeypatch.delenv(VARIABLE)
    assert Cards.here() is None


@pytest.mark.slow
def test_a_driver_that_torch_cannot_use_shows_no_cards() -> None:
    old = cards("h100", usable=False, driver="525.60.13")
    program = (
        "import os, pynvml, torch; "
        "print(torch.cuda.is_available(), pynvml.nvmlDeviceGetCount(), "
        "os.path.exists('/dev/nvidiactl'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=with_cards(command_environment(), old),
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["False", "1", "True"]


def test_the_compiled_cards_lie_outside_of_the_project() -> None:
    root = ROOT
    assert root not in Path(cards("h100").library).parents
    assert os.access(cards("h100").library, os.R_OK)


# --- Between ranks --------------------------------------------------------------------------------


def _ranks(card: Machine, backend: str) -> list[object]:
    def body(backend: str) -> list[object]:
        import os
        import tempfile

        import torch
        import torch.distributed as dist
        from simulated_card import counts

        file = tempfile.mktemp()
        other = os.fork()
        rank = 0 if other else 1
        torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            init_method=f"file://{file}",
            rank=rank,
            world_size=2,
            device_id=torch.device("cuda", rank),
        )
        counts.forget()
        found: list[object] = [dist.get_backend()]
        total = torch.full((2,), rank + 1.0, device="cuda")
        dist.all_reduce(total)
        gathered = torch.empty(4, device="cuda")
        dist.all_gather_into_tensor(gathered, total + rank)
        share = torch.empty(2, device="cuda")
        dist.reduce_scatter_tensor(share, gathered)
        said = torch.tensor(rank, device="cuda")
        dist.broadcast(said, src=0)
        dist.barrier()
        objects = [None, None]
        dist.all_gather_object(objects, rank)
        found += [total.tolist(), gathered.tolist(), share.tolist(), said.item(), objects]
        refused = ""
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            refused = str(error)
        kinds = {what: n for (kind, what), n in counts.counted().items() if kind == "collective"}
        dist.barrier()
        if rank:
            os._exit(0)
        os.waitpid(other, 0)
        return [*found, refused, kinds]

    return card.run(body, backend)


@pytest.mark.extensions
def test_nccl_takes_tensors_of_cards_alone(card: Machine) -> None:
    backend, total, gathered, share, said, objects, refused, kinds = _ranks(card, "nccl")
    assert backend == "nccl"
    assert (total, gathered, share) == ([3, 3], [3, 3, 4, 4], [6, 6])
    assert (said, objects) == (0, [0, 1])
    assert "No backend type associated with device type cpu" in str(refused)
    assert isinstance(kinds, dict)
    expected = {"allreduce": 1, "reduce_scatter_base": 1, "broadcast": 1, "barrier": 1}
    assert {what: kinds[what] for what in expected} == expected


@pytest.mark.extensions
def test_a_group_of_both_backends_takes_tensors_of_the_host_too(card: Machine) -> None:
    *found, refused, _ = _ranks(card, "cpu:gloo,cuda:nccl")
    assert found[1] == [3, 3]
    assert refused == ""


# --- Kernels that differ from card to card --------------------------------------------------------


@pytest.mark.extensions
def test_experts_without_rows_have_no_gradient_on_any_card(card: Machine) -> None:
    """And the host waits for no card to learn which they are."""

    def body(*devices: str) -> list[list[object]]:
        import torch
        from simulated_card import counts

        from ftkit.models.bodies.expert_products import grouped_product

        torch.manual_seed(0)
        x, weight = torch.randn(7, 8), torch.randn(4, 16, 8)
        found = []
        for device in devices:
            ends = torch.tensor([0, 3, 3, 7], dtype=torch.int32, device=device)
            rows, matrices = (t.clone().to(device).requires_grad_() for t in (x, weight))
            counts.forget()
            grouped_product(rows, matrices, ends, transposed=False).square().sum().backward()
            waits = sum(n for (kind, _), n in counts.counted().items() if kind in counts.WAITS)
            assert rows.grad is not None and matrices.grad is not None
            found.append([waits, rows.grad.tolist(), matrices.grad.tolist()])
        return found

    h100, b200 = (f"cuda:{ALL_KINDS.index(kind)}" for kind in ("h100", "b200"))
    on_h100, on_b200 = card.run(body, h100, b200)
    assert on_b200 == on_h100
    of_each = on_b200[2]
    assert [any(map(any, matrix)) for matrix in of_each] == [False, True, False, True]
