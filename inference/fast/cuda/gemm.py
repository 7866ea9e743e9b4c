"""Dense products by cuBLAS, on row-major arrays in place: no copy, no transposition."""

import ctypes
from functools import cache
from importlib import import_module
from typing import Any

from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.fast.cuda import cublas
from aprfmt.inference.fast.cuda.loader import load_cupy

_WORKSPACE = 32 << 20  # what NVIDIA recommends on Hopper GPUs


def multiply_strided(
    dtype: str,
    a: int,
    b: int,
    c: int,
    *,
    rows: int,
    columns: int,
    depth: int,
    turned: bool,
    strides: tuple[int, int, int],
    batch: int = 1,
    steps: tuple[int, int, int] = (0, 0, 0),
    tf32: bool = False,
) -> None:
    """Set c [rows, columns] to a [rows, depth] times b, all of `dtype`, at these addresses.

    b is [columns, depth] if `turned`, else [depth, columns]. `strides` are the elements from one
    row of a, b, c to the next, `steps` those from one of `batch` products to the next. Sums are
    float32 (float64 in float64); TF32 is used in float32 only if `tf32`.
    """
    cublas.multiply_strided(
        *_current_handle(),
        dtype,
        (a, b, c),
        rows=rows,
        columns=columns,
        depth=depth,
        turned=turned,
        strides=strides,
        batch=batch,
        steps=steps,
        tf32=tf32,
    )


def multiply_addressed(
    dtype: str,
    a: int,
    b: int,
    c: int,
    *,
    count: int,
    rows: int,
    columns: int,
    depth: int,
    tf32: bool = False,
) -> None:
    """Set `count` matrices c [rows, columns] to a [rows, depth] times b transposed.

    b is [columns, depth]. `a`, `b` and `c` are device addresses of int64 arrays, which hold the
    matrices' addresses.
    """
    cublas.multiply_addressed(
        *_current_handle(),
        dtype,
        (a, b, c),
        count=count,
        rows=rows,
        columns=columns,
        depth=depth,
        tf32=tf32,
    )


def _current_handle() -> tuple[Any, int]:
    """Return (cuBLAS library, handle) of the current device, set to the current stream."""
    module = load_cupy()
    opened = _open_handle(module.cuda.runtime.getDevice())
    opened.set_stream(int(module.cuda.get_current_stream().ptr))
    return opened.library, opened.handle


class _Opened:
    """A cuBLAS handle with our own workspace, so that a recorded pass allocates nothing."""

    def __init__(self) -> None:
        """Load cuBLAS, create a handle and allocate its workspace.

        Raises BackendUnavailableError if the library is not found.
        """
        import_module("cupy_backends.cuda.libs.cublas")  # loads the library
        major = int(load_cupy().cuda.runtime.runtimeGetVersion()) // 1000
        try:
            self.library = cublas.load_library(major)
        except (OSError, AttributeError) as error:
            raise BackendUnavailableError(
                f"backend cupy: cuBLAS of CUDA {major} is not found ({error}); it is part of CUDA, "
                f"and of the package nvidia-cublas"
            ) from error
        handle = ctypes.c_void_p()
        cublas.call_function(self.library, "cublasCreate_v2", ctypes.byref(handle))
        assert handle.value is not None
        self.handle = handle.value
        self._room = load_cupy().cuda.Memory(_WORKSPACE)  # of no pool: it outlives recorded passes
        self._stream = -1

    def set_stream(self, stream: int) -> None:
        """Set the handle's stream, and its workspace again, which cublasSetStream resets."""
        if stream != self._stream:
            cublas.call_function(self.library, "cublasSetStream_v2", self.handle, stream)
            cublas.call_function(
                self.library, "cublasSetWorkspace_v2", self.handle, self._room.ptr, _WORKSPACE
            )
            self._stream = stream


@cache
def _open_handle(device: int) -> _Opened:
    """Return the handle of a device, created once; the device must be the current one."""
    return _Opened()
