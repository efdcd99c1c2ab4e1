"""Which errors mean that memory ran out: torch's own class is that of its CUDA allocator alone."""

from __future__ import annotations

import torch

_OF_HOST = ("defaultcpuallocator: can't allocate memory", "error code 12 (cannot allocate memory)")
"""c10/core/impl/alloc_cpu.cpp."""
_OF_DEVICE = (
    "cuda out of memory",  # c10/cuda/CUDACachingAllocator.cpp; DataParallel raises it again as a RuntimeError (torch/_utils.py)
    "cuda error: out of memory",  # cudaErrorMemoryAllocation, c10/cuda/CUDAException.cpp: AcceleratorError since 2.8, RuntimeError before
    "cublas_status_alloc_failed",  # aten/src/ATen/cuda/Exceptions.h, as those of its neighbours
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_device_allocation_failed",  # cuDNN 9
    "failed to cuda calloc",  # NCCL src/include/alloc.h, under "unhandled cuda error"
    "cuda failure 2 'out of memory'",  # NCCL src/include/checks.h
    "cuda failure 'out of memory'",  # the same, before 2.19
)
_CODE = 2
"""cudaErrorMemoryAllocation, in `torch.AcceleratorError.error_code`."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory ran out, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    said = str(error).lower()
    return getattr(error, "error_code", None) == _CODE or any(sign in said for sign in (*_OF_HOST, *_OF_DEVICE))


def is_of_host(error: BaseException) -> bool:
    """Whether it was the host's memory that ran out, of an error of which `is_out_of_memory` is true."""
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _OF_HOST)
