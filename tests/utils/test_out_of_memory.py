"""Which errors say that memory is exhausted."""

import errno
import os

import pytest
import torch

from ftkit.errors import UserError, is_out_of_memory
from ftkit.strategies.state import state_kinds

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
ON_DEVICE = {
    "torch": "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "the runtime": "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the docs.",
    "the driver": "CUDA driver error: out of memory",
    "a thread that pins": "Caught AcceleratorError in pin memory thread for device 0.\n"
    "torch.AcceleratorError: CUDA error: out of memory",
    "cuBLAS": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN 9": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuSOLVER": "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`",
    "cuSPARSE": "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "NCCL": NCCL + "Cuda failure 2 'out of memory'",
    "NCCL before 2.19": NCCL + "Cuda failure 'out of memory'",
    "NCCL's buffers": NCCL + "Failed to CUDA calloc async 2432 bytes",
    "NCCL's host buffers": NCCL + "Failed to CUDA host alloc 65536 bytes",
    "Triton": "Triton Error [CUDA]: out of memory",
}


@pytest.mark.parametrize("text", ON_DEVICE.values(), ids=ON_DEVICE.keys())
def test_every_wording_of_a_device_without_memory_counts(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(torch.AcceleratorError(text))
    assert is_out_of_memory(torch.distributed.DistBackendError(text))


@pytest.mark.parametrize("text", ON_DEVICE.values(), ids=ON_DEVICE.keys())
@pytest.mark.parametrize("kind", [UserError, KeyError, ValueError])
def test_an_error_that_quotes_such_words_does_not(kind: type[Exception], text: str) -> None:
    assert not is_out_of_memory(kind(f"records.json: no answer to {text!r}"))


def test_errors_of_the_host_count_as_they_did() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("no memory left"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: ..."))


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "NCCL error: remote process exited or there was a network error",
        "The size of tensor a (3) must match the size of tensor b (4)",
    ],
)
def test_other_errors_of_a_device_do_not(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


def test_memory_that_runs_out_while_an_optimizer_is_tried_does_not_speak_against_it() -> None:
    class OnAFullCard(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise torch.AcceleratorError("CUDA error: out of memory")

    with pytest.raises(torch.AcceleratorError, match="out of memory"):
        state_kinds(OnAFullCard, {"lr": 0.1}, torch.device("cpu"))
