"""What the tests of the torch backend on a GPU share; without one they are NOT-RUN."""

import gc
from functools import cache
from typing import Any

import pytest
import torch

from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.fast.torch_cuda import CudaBackend


@cache
def gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def need(count: int = 1) -> None:
    """Report the test as NOT-RUN where there are fewer GPUs."""
    if gpus() < count:
        pytest.skip(f"NOT-RUN: {gpus()} CUDA devices, the test needs {count}")


def clear_device_memory() -> int:
    """Free what earlier tests left on the GPU; return the bytes that torch still has there.

    Tensors in cycles, cuBLAS workspaces and cached blocks of other tests would be counted with, or
    freed while, the memory of a run is taken.
    """
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def cuda(dtype: str = "float32", device: str = "cuda", **options: Any) -> CudaBackend:
    """Return the torch backend on a GPU."""
    found = BACKENDS["torch"](device, dtype, **options)
    assert isinstance(found, CudaBackend)
    return found
