"""Cards of a kind that torch has no build for, as a backend out of torch's tree brings them.

Its device type is PrivateUse1 under a name of its own; its module in torch has what torch's notes
on such backends ask for and no more; a backend of torch.distributed of its own carries messages.
"""

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from simulated_card.settings import Cards

COMMUNICATION = "ring"
"""The backend of torch.distributed for tensors on these cards."""

ROW = {
    "noun": "card",
    "tried": True,
    "communication": COMMUNICATION,
    "strategies": ("single", "ddp", "fsdp"),
    "counts_memory": True,
    "allocator_block_bytes": 512,
    "times_events": True,
    "pins_host_memory": True,
}
"""All that ftkit knows of them: see ftkit.utils.accelerators.kinds."""


def install(cards: Cards, library: Any) -> None:
    """Make torch know these cards; right after it was imported."""
    import torch

    from simulated_card import counts

    library.card_register_kernels()
    library.card_register_namespace(b"c10d")
    for index, kind in enumerate(cards.shown()):
        library.card_set_capacity(index, kind.memory_bytes)
    counts.install(cards, library)
    registration = torch.utils.backend_registration
    registration.rename_privateuse1_backend(cards.kind)
    torch._register_device_module(cards.kind, _module(cards, library))
    registration.generate_methods_for_privateuse1_backend()
    torch._C._set_only_lift_cpu_tensors(True)
    _communicate(cards)


def _module(cards: Cards, library: Any) -> ModuleType:
    """torch.NAME."""
    import torch

    shown = cards.shown()
    library.card_hand_out_defaults(1)
    generators = [torch.Generator(torch.device(cards.kind, index)) for index in range(len(shown))]
    library.card_hand_out_defaults(0)

    def index_of(device: Any = None) -> int:
        if device is None or device == cards.kind:
            return int(library.card_current_device())
        return device if isinstance(device, int) else torch.device(device).index or 0

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def stream_context(stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else stream

    def make_stream(device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device(cards.kind, index_of(device)), priority=priority)

    found: Any = ModuleType(f"torch.{cards.kind}")
    found.is_available = lambda: bool(shown)
    found.is_initialized = lambda: True
    found._is_in_bad_fork = lambda: False
    found.device_count = lambda: len(shown)
    found.current_device = index_of
    found.set_device = lambda device: library.card_set_device(index_of(device))
    found.get_device_name = lambda device=None: shown[index_of(device)].name
    found.get_device_properties = lambda device=None: SimpleNamespace(
        name=shown[index_of(device)].name, total_memory=shown[index_of(device)].memory_bytes
    )
    found.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    found.manual_seed_all = manual_seed_all
    found.get_rng_state = lambda device=None: generators[index_of(device)].get_state()
    found.set_rng_state = lambda state, device=None: generators[index_of(device)].set_state(state)
    found.empty_cache = lambda: None
    found.synchronize = torch.accelerator.synchronize
    found.Stream = make_stream
    found.Event = torch.Event
    found.stream = stream_context
    found.current_stream = torch.accelerator.current_stream
    return found


def _communicate(cards: Cards) -> None:
    """Register the backend: gloo carries the messages; see `groups`."""
    import torch.distributed as dist

    if not dist.is_available():
        return

    from simulated_card.groups import make_in_name, never_split

    never_split()
    dist.Backend.register_backend(COMMUNICATION, make_in_name, devices=[cards.kind])
