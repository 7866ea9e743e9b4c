"""Dense products by cuBLAS, on row-major arrays in place: no copy, no transposition."""

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from aprfmt.inference.fast.cuda.loader import cupy

# cudaDataType_t, cublasComputeType_t and cublasOperation_t of CUDA's library_types.h and
# cublas_api.h.
_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
_COMPUTE_32F, _COMPUTE_32F_TF32, _COMPUTE_64F = 68, 77, 70
_PLAIN, _TURNED = 0, 1
_DEFAULT = -1  # cublasGemmAlgo_t

# Scalars that cuBLAS reads from host memory, kept alive forever, and their addresses.
_FACTORS = {name: np.array([1, 0], name) for name in ("float32", "float64")}
_ONE = {name: int(pair.ctypes.data) for name, pair in _FACTORS.items()}
_ZERO = {name: int(pair[1:].ctypes.data) for name, pair in _FACTORS.items()}


def product(
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
    library, handle = _library(cupy().cuda.runtime.getDevice())
    scalar = "float64" if dtype == "float64" else "float32"
    compute = _COMPUTE_64F if scalar == "float64" else _COMPUTE_32F
    if tf32 and dtype == "float32":
        compute = _COMPUTE_32F_TF32
    kind = _TYPES[dtype]
    # cuBLAS is column-major: its c is the transpose of ours, so a and b change places.
    library.gemmStridedBatchedEx(
        handle, _TURNED if turned else _PLAIN, _PLAIN, columns, rows, depth,
        _ONE[scalar], b, kind, strides[1], steps[1], a, kind, strides[0], steps[0],
        _ZERO[scalar], c, kind, strides[2], steps[2], batch, compute, _DEFAULT,
    )  # fmt: skip


@cache
def _library(device: int) -> tuple[Any, int]:
    """Return cuBLAS and its handle on the current device; products run on the current stream."""
    library = import_module("cupy_backends.cuda.libs.cublas")
    return library, int(cupy().cuda.device.get_cublas_handle())
