"""CUDA graphs: operations that are recorded once and run again on the same memory; see `tape.h`."""

import ctypes
import itertools
from typing import Any

from simulated_card import counts

_pools = itertools.count(1)


def install(library: Any) -> None:
    """Put them in the place of torch's, which need CUDA."""
    import torch

    library.card_capture_end.restype = ctypes.c_void_p
    library.card_replay.restype = ctypes.c_char_p
    library.card_graph_size.restype = ctypes.c_int64
    for name in ("card_replay", "card_free_graph", "card_graph_size"):
        getattr(library, name).argtypes = [ctypes.c_void_p]

    class CUDAGraph:
        """Recorded operations with their memory."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._graph: int | None = None
            self._pool: Any = None

        def capture_begin(
            self,
            pool: Any = None,
            capture_error_mode: str = "global",
            check_input_liveness: bool = False,
        ) -> None:
            assert self._graph is None and not library.card_is_capturing()
            self._pool = pool or pool_handle()
            library.card_capture_begin()

        def capture_end(self) -> None:
            self._graph = library.card_capture_end()

        def replay(self) -> None:
            refuse_while_capturing("a replay")
            counts.replayed()
            if why := library.card_replay(self._graph):
                raise RuntimeError(why.decode().partition("\nException raised")[0])

        def reset(self) -> None:
            if self._graph is not None:
                library.card_free_graph(self._graph)
                self._graph = None

        def pool(self) -> Any:
            return self._pool

        def operations(self) -> int:
            """How many a replay runs."""
            return int(library.card_graph_size(self._graph))

        def __del__(self) -> None:
            self.reset()

    def pool_handle() -> tuple[int, int]:
        return 0, next(_pools)

    def is_capturing() -> bool:
        return bool(library.card_is_capturing())

    def refuse_while_capturing(what: str) -> None:
        if is_capturing():
            raise torch.AcceleratorError(
                f"CUDA error: operation not permitted when stream is capturing ({what})"
            )

    synchronize = torch.cuda.synchronize

    def checked_synchronize(device: Any = None) -> None:
        refuse_while_capturing("synchronize")
        synchronize(device)

    torch.cuda.synchronize = checked_synchronize
    torch._C._host_emptyCache = lambda: None
    torch._C._cuda_isCurrentStreamCapturing = is_capturing
    for module in (torch.cuda, torch.cuda.graphs):
        module.CUDAGraph = CUDAGraph  # type: ignore[attr-defined]
        module.graph_pool_handle = pool_handle  # type: ignore[attr-defined]
        module.is_current_stream_capturing = is_capturing  # type: ignore[attr-defined]
