"""Products of many pairs of matrices whose addresses lie on the device, by torch's own cuBLAS.

torch offers no such product, and CuPy's refuses to run while a pass is recorded.
"""

import ctypes
from functools import cache
from typing import Any

import torch

# cudaDataType_t, cublasComputeType_t, cublasOperation_t and cublasGemmAlgo_t of CUDA's
# library_types.h and cublas_api.h.
_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F, _COMPUTE_64F, _TURNED, _PLAIN, _DEFAULT = 68, 70, 1, 0, -1
_ONES = {torch.float64: (ctypes.c_double * 2)(1, 0)}
_FACTORS = (ctypes.c_float * 2)(1, 0)

_NUMBER, _ADDRESS = ctypes.c_int, ctypes.c_void_p
_ARGUMENTS: tuple[Any, ...] = (
    _ADDRESS, *[_NUMBER] * 5, _ADDRESS, _ADDRESS, _NUMBER, _NUMBER, _ADDRESS, _NUMBER, _NUMBER,
    _ADDRESS, _ADDRESS, _NUMBER, _NUMBER, _NUMBER, _NUMBER, _NUMBER,
)  # fmt: skip


@cache
def _gemm() -> Any | None:
    """Return cublasGemmBatchedEx of the library that torch loaded; None where it is not found."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.partition('.')[0]}")
        found = library.cublasGemmBatchedEx
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = _ARGUMENTS, _NUMBER
    return found


def products(x: torch.Tensor, weights: torch.Tensor, columns: int) -> torch.Tensor:
    """Return x[i] times the weight [columns, depth] at address weights[i] transposed.

    x is [n, rows, depth], contiguous; `weights` [n] are int64 on its device, of its dtype. The
    result is [n, rows, columns]; sums are float32 (float64 in float64). Nothing waits.
    """
    gemm = _gemm()
    assert gemm is not None
    n, rows, depth = x.shape
    y = torch.empty((n, rows, columns), dtype=x.dtype, device=x.device)
    kind, item = _TYPES[x.dtype], x.element_size()

    def places(a: torch.Tensor, step: int) -> torch.Tensor:
        return torch.arange(n, device=x.device) * step + a.data_ptr()

    given, out = places(x, rows * depth * item), places(y, rows * columns * item)
    factors: Any = _ONES.get(x.dtype, _FACTORS)
    one = ctypes.addressof(factors)
    compute = _COMPUTE_64F if x.dtype == torch.float64 else _COMPUTE_32F
    # cuBLAS is column-major: its result is the transpose of ours.
    handle = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    status = gemm(
        handle, _TURNED, _PLAIN, columns, rows, depth,
        one, weights.data_ptr(), kind, depth, given.data_ptr(), kind, depth,
        one + ctypes.sizeof(factors) // 2, out.data_ptr(), kind, columns, n, compute, _DEFAULT,
    )  # fmt: skip
    if status:
        raise RuntimeError(f"cublasGemmBatchedEx: status {status}")
    return y


@cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether such products come out right on a device; it is tried on a small one."""
    if _gemm() is None or dtype not in _TYPES:
        return False
    x = torch.arange(48, device=device).reshape(2, 3, 8).to(dtype)
    w = (torch.arange(128, device=device) % 5).reshape(2, 8, 8).to(dtype)
    addresses = torch.arange(2, device=device) * (64 * w.element_size()) + w.data_ptr()
    try:
        found = products(x, addresses.flip(0), 8)
    except RuntimeError:
        return False
    wanted = x.cpu().double() @ w.cpu().double().flip(0).mT
    return bool((found.cpu().double() == wanted.to(dtype).double()).all())
