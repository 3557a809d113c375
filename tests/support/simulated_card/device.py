"""torch.cuda as it is with cards: devices, memory, streams, random numbers."""

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from simulated_card.settings import Cards

LIBRARY: Any = None
"""The compiled cards, loaded."""
SEGMENT = 2 * 2**20
"""torch's allocator takes memory from the driver in multiples of it."""


def load(cards: Cards) -> Any:
    """The compiled cards, in place before torch asks for them."""
    global LIBRARY
    LIBRARY = ctypes.CDLL(cards.library, ctypes.RTLD_GLOBAL)
    LIBRARY.card_set_count(len(cards.visible()))
    LIBRARY.card_pinned_bytes.restype = ctypes.c_int64
    LIBRARY.card_host_register.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    LIBRARY.card_host_unregister.argtypes = [ctypes.c_size_t]
    LIBRARY.card_resize_storage.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    LIBRARY.card_set_capacity.argtypes = [ctypes.c_int, ctypes.c_int64]
    return LIBRARY


@contextmanager
def no_cards() -> Iterator[None]:
    """torch seems to have no cards."""
    import torch

    available = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = available


def install(cards: Cards, library: Any) -> None:
    """Make torch what it is with these cards; right after it was imported."""
    import torch

    from simulated_card import attention, counts, graphs, groups, products, streams

    library.card_register_kernels()
    library.card_register_namespace(b"c10d")
    for index, kind in enumerate(cards.shown()):
        library.card_set_capacity(index, kind.memory_bytes)
    torch.version.cuda = cards.cuda
    counts.install(cards, library)
    _devices(cards, library)
    _memory(cards, library)
    _generators(cards, library)
    streams.install()
    attention.install()
    groups.install()
    products.install()
    torch._C._set_only_lift_cpu_tensors(True)
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    graphs.install(library)
    torch.backends.cuda.is_built = lambda: True
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, lambda *_: None)
    importlib.import_module("torch.cuda.nccl").version = lambda: (2, 27, 5)  # type: ignore[attr-defined]


def _devices(cards: Cards, library: Any) -> None:
    import torch

    from simulated_card import counts

    shown = cards.shown()
    state = SimpleNamespace(initialized=False)

    def initialize() -> None:
        if state.initialized:
            return
        if not shown:
            raise RuntimeError("No CUDA GPUs are available")
        state.initialized = True
        torch.cuda._initialized = True
        for queued, _ in torch.cuda._queued_calls:
            queued()
        for call in torch.cuda._lazy_seed_tracker.get_calls():
            if call:
                call[0]()

    def index_of(device: Any = None, optional: bool = True) -> int:
        if device is None:
            return int(library.card_current_device())
        if isinstance(device, int):
            return device
        found = torch.device(device)
        if found.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {found}")
        return int(library.card_current_device()) if found.index is None else found.index

    def kind_of(device: Any = None) -> Any:
        index = index_of(device)
        if not 0 <= index < len(shown):
            raise AssertionError("Invalid device id")
        return shown[index]

    def set_device(device: Any) -> None:
        index = index_of(device)
        if index >= len(shown):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        if index >= 0:
            initialize()
            counts.context(index)
            library.card_set_device(index)

    def exchange(device: int) -> int:
        before = int(library.card_current_device())
        if device >= 0:
            library.card_set_device(device)
        return before

    def properties(device: Any = None) -> SimpleNamespace:
        kind = kind_of(device)
        return SimpleNamespace(
            name=kind.name,
            major=kind.capability[0],
            minor=kind.capability[1],
            total_memory=kind.memory_bytes,
            multi_processor_count=kind.multiprocessors,
            uuid=cards.uuid(cards.visible()[index_of(device)]).partition("-")[2],
            is_integrated=0,
            gcnArchName="",
            warp_size=32,
            L2_cache_size=50 * 2**20,
        )

    def synchronize(device: Any = None) -> None:
        initialize()
        counts.context(index_of(device))
        counts.note(counts.SYNCHRONIZE, "device", 0)

    compiled = {  # functions of their own: torch.compile keeps rules by function
        "_cuda_getDeviceCount": lambda: len(shown),
        "_cuda_getDevice": lambda: index_of(),
        "_cuda_setDevice": lambda device: set_device(device),
        "_cuda_init": lambda: initialize(),
        "_cuda_synchronize": lambda: synchronize(),
        "_cuda_getArchFlags": lambda: " ".join(cards.archs),
    }
    for name, value in compiled.items():
        setattr(torch._C, name, value)
    torch.cuda._queued_calls.clear()
    replaced = {
        "is_available": lambda: bool(shown),
        "device_count": lambda: len(shown),
        "_lazy_init": initialize,
        "init": lambda: initialize(),
        "is_initialized": lambda: state.initialized,
        "current_device": lambda: (initialize(), index_of())[1],  # type: ignore[func-returns-value]
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": lambda device: exchange(device),
        "get_device_name": lambda device=None: kind_of(device).name,
        "get_device_capability": lambda device=None: kind_of(device).capability,
        "get_device_properties": properties,
        "get_arch_list": lambda: list(cards.archs),
        "synchronize": synchronize,
        "can_device_access_peer": lambda device, peer: True,
        "ipc_collect": lambda: None,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.cuda.device_count.cache_clear = lambda: None  # type: ignore[attr-defined]
    torch.cuda._get_nvml_device_index = lambda device: cards.visible()[index_of(device)]


def _memory(cards: Cards, library: Any) -> None:
    import torch

    from simulated_card import counts

    shown = cards.shown()

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(library.card_current_device())
        return device if isinstance(device, int) else torch.device(device).index or 0

    def stats(device: Any = None) -> dict[str, int]:
        values = (ctypes.c_int64 * 5)()
        library.card_memory(index_of(device), values)
        now, most, requested, most_requested, allocations = values
        found = {"num_alloc_retries": 0, "num_ooms": 0, "allocation.all.allocated": allocations}
        sizes = {
            "allocated_bytes": (now, most),
            "active_bytes": (now, most),
            "requested_bytes": (requested, most_requested),
            "reserved_bytes": (-(-most // SEGMENT) * SEGMENT,) * 2,
            "inactive_split_bytes": (0, 0),
        }
        for name, (current, peak) in sizes.items():
            found[f"{name}.all.current"] = current
            found[f"{name}.all.peak"] = peak
        return found

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        torch.cuda.init()
        index = index_of(device)
        counts.context(index)
        total = shown[index].memory_bytes
        return total - stats(index)["reserved_bytes.all.current"], total

    for module in (torch.cuda, torch.cuda.memory):
        module.memory_stats = stats  # type: ignore[attr-defined]
        module.mem_get_info = mem_get_info  # type: ignore[attr-defined]
        module.empty_cache = lambda: None  # type: ignore[attr-defined]
        module.reset_peak_memory_stats = lambda device=None: library.card_forget_peak(  # type: ignore[attr-defined]
            index_of(device)
        )
        module.reset_accumulated_memory_stats = lambda device=None: None  # type: ignore[attr-defined]

    errors = {712: "part or all of the requested memory range is already mapped", 713: "unknown"}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: library.card_host_register(address, size),
        cudaHostUnregister=lambda address: library.card_host_unregister(address),
        cudaGetErrorString=lambda code: errors[code],
    )
    torch.cuda._cudart = runtime  # type: ignore[attr-defined]  # modules that took the original _lazy_init ask for it
    torch.cuda.cudart = lambda: (torch.cuda.init(), runtime)[1]

    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        library.card_resize_storage(self._cdata, size)
        return self

    torch.UntypedStorage.resize_ = resize_


def _generators(cards: Cards, library: Any) -> None:
    import torch

    library.card_hand_out_defaults(1)
    torch.cuda.default_generators = tuple(
        torch.Generator(torch.device("cuda", index)) for index in range(len(cards.visible()))
    )
    library.card_hand_out_defaults(0)
