"""GPU memory of the cupy backend: allocating, filling, reading. 16-bit floats are stored as uint16.

CuPy slices, joins and copies these arrays; our kernels do the arithmetic. So no version of CuPy
needs to support bfloat16.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.cuda_driver import driver_version
from aprfmt.inference.fast.cuda.loader import load_cupy

# Dtype of the arithmetic -> numpy dtype of the arrays.
STORED = {"float32": "float32", "float64": "float64", "bfloat16": "uint16", "float16": "uint16"}


def array_module() -> Any:
    """Return the array module, cupy."""
    return load_cupy()


def copy_to_gpu(x: Any) -> Any:
    """Return a numpy array copied to the GPU."""
    return load_cupy().asarray(x)


def allocate_for_later(size: int) -> tuple[Any, Callable[[Any], None]]:
    """Return (int64 array [size], the function that fills it after the pass was recorded).

    The array is outside the memory pool of the recording, as earlier operations of a replay write
    to the pool's memory.
    """
    module = load_cupy()
    with module.cuda.using_allocator(module.get_default_memory_pool().malloc):
        room = module.empty(size, "int64")
    return room, room.set


def copy_to_host(x: Any) -> Any:
    """Return an array copied to the host; waits for enqueued work and raises its errors."""
    return x.get()


def wait() -> None:
    """Wait for the work enqueued on the current stream."""
    load_cupy().cuda.get_current_stream().synchronize()


def pointer(x: Any) -> int:
    """Return the address of a contiguous array."""
    return int(x.data.ptr)


def is_on_gpu(x: Any) -> bool:
    """Return whether an array is in GPU memory."""
    return isinstance(x, load_cupy().ndarray)


def use_device(name: str) -> int:
    """Make `cuda` or `cuda:N` the current device of this thread, and return N.

    Raises BackendUnavailableError if the device, the driver or CuPy is missing.
    """
    kind, _, number = name.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise BackendUnavailableError(
            f"backend cupy: found device {name!r}; it computes on cuda or cuda:N only"
        )
    runtime, index = load_cupy().cuda.runtime, int(number or 0)
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise BackendUnavailableError(
            f"device {name!r}: CUDA does not start ({error}); this CuPy is built for CUDA "
            f"{_runtime_major(load_cupy())}, a driver of at least that version and a GPU are "
            "needed; nothing was run on the CPU instead"
        ) from error
    if index >= count:
        raise BackendUnavailableError(f"device {name!r}: there are {count} CUDA devices")
    load_cupy().cuda.Device(index).use()
    return index


def _runtime_major(module: Any) -> int:
    """Return the major version of the CUDA runtime that CuPy uses."""
    return int(module.cuda.runtime.runtimeGetVersion()) // 1000


def device_facts(index: int) -> dict[str, Any]:
    """Return {name: value} of a device: its name, driver and memory, and library versions.

    `memory_peak` is the size of CuPy's pool in bytes, recorded passes not included.
    """
    module = load_cupy()
    runtime = module.cuda.runtime
    free, total = runtime.memGetInfo()
    return {
        "device_name": _device_name(index),
        "driver": driver_version(),
        "cuda": _version_text(int(runtime.runtimeGetVersion())),
        "memory_total": int(total),
        "memory_free": int(free),
        "memory_peak": int(module.get_default_memory_pool().total_bytes()),
        "versions": {"cupy": module.__version__, "numpy": np.__version__},
    }


@cache
def _device_name(index: int) -> str:
    """Return the name of a device."""
    return str(load_cupy().cuda.runtime.getDeviceProperties(index)["name"].decode())


def _version_text(number: int) -> str:
    """Return CUDA's version number 1000 * major + 10 * minor as "major.minor"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def free_bytes() -> int:
    """Return the free GPU memory in bytes, including CuPy's unused blocks."""
    module = load_cupy()
    free, _ = module.cuda.runtime.memGetInfo()
    return int(free) + int(module.get_default_memory_pool().free_bytes())
