"""cuBLAS by ctypes, as CuPy or torch has loaded it.

CuPy refuses products while a pass is recorded, cuBLAS does not; torch has none for pairs of
matrices whose addresses lie on the device.
"""

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

# cudaDataType_t, cublasComputeType_t, cublasOperation_t and cublasGemmAlgo_t of CUDA's
# library_types.h and cublas_api.h.
TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
_COMPUTE_32F, _COMPUTE_32F_TF32, _COMPUTE_64F = 68, 77, 70
_PLAIN, _TURNED, _DEFAULT = 0, 1, -1

_NUMBER, _STEP, _ADDRESS = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
_SIZES = [_ADDRESS, *[_NUMBER] * 5]  # handle, operations, columns, rows, depth
_PLACED = [_ADDRESS, _NUMBER, _NUMBER]  # a matrix, its type and its leading dimension
_ENDS = [_NUMBER] * 3  # matrices, arithmetic, algorithm
_ARGUMENTS: dict[str, list[Any]] = {
    "cublasCreate_v2": [_ADDRESS],
    "cublasSetStream_v2": [_ADDRESS, _ADDRESS],
    "cublasSetWorkspace_v2": [_ADDRESS, _ADDRESS, ctypes.c_size_t],
    "cublasGemmStridedBatchedEx": [
        *_SIZES, _ADDRESS, *_PLACED, _STEP, *_PLACED, _STEP, _ADDRESS, *_PLACED, _STEP, *_ENDS,
    ],
    "cublasGemmBatchedEx": [*_SIZES, _ADDRESS, *_PLACED, *_PLACED, _ADDRESS, *_PLACED, *_ENDS],
}  # fmt: skip
# One and zero, which cuBLAS reads from host memory.
_FACTORS: dict[str, Any] = {
    "float32": (ctypes.c_float * 2)(1, 0),
    "float64": (ctypes.c_double * 2)(1, 0),
}


@cache
def load_library(major: int) -> Any:
    """Return the cuBLAS library of a CUDA major version, its functions' argument types set.

    Raises OSError if the library is not found, AttributeError if it lacks a function.
    """
    name = f"cublas64_{major}.dll" if os.name == "nt" else f"libcublas.so.{major}"
    found = ctypes.CDLL(name)
    for function, arguments in _ARGUMENTS.items():
        getattr(found, function).argtypes = arguments
    return found


def call_function(found: Any, name: str, *arguments: Any) -> None:
    """Call the function `name` of cuBLAS (`found`); RuntimeError if its status is not success."""
    status = getattr(found, name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: status {status}")


def _call_types(dtype: str, tf32: bool) -> tuple[int, int, int, int]:
    """Return (cudaDataType_t, cublasComputeType_t, address of 1, address of 0) for a dtype.

    The addresses are of host memory, in the type of the sums.
    """
    wide = "float64" if dtype == "float64" else "float32"
    compute = _COMPUTE_64F if wide == "float64" else _COMPUTE_32F
    if tf32 and dtype == "float32":
        compute = _COMPUTE_32F_TF32
    factors = _FACTORS[wide]
    one = ctypes.addressof(factors)
    return TYPES[dtype], compute, one, one + ctypes.sizeof(factors) // 2


# cuBLAS is column-major: its result is the transpose of ours, so a and b change places.


def multiply_strided(
    found: Any,
    handle: int,
    dtype: str,
    places: Sequence[int],
    *,
    rows: int,
    columns: int,
    depth: int,
    turned: bool,
    strides: Sequence[int],
    batch: int,
    steps: Sequence[int],
    tf32: bool,
) -> None:
    """Set c [rows, columns] to a [rows, depth] times b, `batch` times.

    `places` are the device addresses of (a, b, c); b is [columns, depth] if `turned`, else [depth,
    columns]. `found` is the library, `handle` its handle. `strides` are the elements from one row
    of a, b, c to the next, `steps` those from one product to the next.
    """
    kind, compute, one, zero = _call_types(dtype, tf32)
    call_function(
        found,
        "cublasGemmStridedBatchedEx",
        handle,
        _TURNED if turned else _PLAIN,
        _PLAIN,
        columns,
        rows,
        depth,
        one,
        places[1],
        kind,
        strides[1],
        steps[1],
        places[0],
        kind,
        strides[0],
        steps[0],
        zero,
        places[2],
        kind,
        strides[2],
        steps[2],
        batch,
        compute,
        _DEFAULT,
    )


def multiply_addressed(
    found: Any,
    handle: int,
    dtype: str,
    places: Sequence[int],
    *,
    count: int,
    rows: int,
    columns: int,
    depth: int,
    tf32: bool = False,
) -> None:
    """Set each c [rows, columns] to a [rows, depth] times b [columns, depth] transposed.

    `found` is the library, `handle` its handle. `places` are three device addresses: of the arrays
    that hold the `count` addresses of a, of b and of c.
    """
    kind, compute, one, zero = _call_types(dtype, tf32)
    call_function(
        found,
        "cublasGemmBatchedEx",
        handle,
        _TURNED,
        _PLAIN,
        columns,
        rows,
        depth,
        one,
        places[1],
        kind,
        depth,
        places[0],
        kind,
        depth,
        zero,
        places[2],
        kind,
        columns,
        count,
        compute,
        _DEFAULT,
    )
