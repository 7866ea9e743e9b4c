"""Products of many pairs of matrices whose addresses lie on the device, by torch's own cuBLAS."""

from functools import cache
from typing import Any

import torch

from aprfmt.inference.fast.cuda import cublas


@cache
def _loaded_cublas() -> Any | None:
    """Return the cuBLAS library that torch loaded, None where there is none."""
    if torch.version.cuda is None:
        return None
    try:
        return cublas.load_library(int(torch.version.cuda.partition(".")[0]))
    except (OSError, AttributeError):
        return None


def multiply_addressed(x: torch.Tensor, weights: torch.Tensor, columns: int) -> torch.Tensor:
    """Return x[i] times the weight [columns, depth] at address weights[i] transposed.

    x is [n, rows, depth], contiguous; `weights` [n] are int64 on its device, of matrices of its
    dtype. The result is [n, rows, columns]; sums are float32 (float64 in float64). The host does
    not wait.
    """
    n, rows, depth = x.shape
    y = torch.empty((n, rows, columns), dtype=x.dtype, device=x.device)
    item = x.element_size()

    def matrix_addresses(a: torch.Tensor, step: int) -> torch.Tensor:
        """Return the addresses of a's n matrices, `step` bytes apart: int64 [n] on the device."""
        return torch.arange(n, device=x.device) * step + a.data_ptr()

    given, out = (
        matrix_addresses(x, rows * depth * item),
        matrix_addresses(y, rows * columns * item),
    )
    handle = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    cublas.multiply_addressed(
        _loaded_cublas(),
        handle,
        str(x.dtype).removeprefix("torch."),
        (given.data_ptr(), weights.data_ptr(), out.data_ptr()),
        count=n,
        rows=rows,
        columns=columns,
        depth=depth,
    )
    return y


@cache
def gives_right_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `multiply_addressed` is right on a device, tried once on a small example."""
    if _loaded_cublas() is None or str(dtype).removeprefix("torch.") not in cublas.TYPES:
        return False
    x = torch.arange(48, device=device).reshape(2, 3, 8).to(dtype)
    w = (torch.arange(128, device=device) % 5).reshape(2, 8, 8).to(dtype)
    addresses = torch.arange(2, device=device) * (64 * w.element_size()) + w.data_ptr()
    try:
        found = multiply_addressed(x, addresses.flip(0), 8)
    except RuntimeError:
        return False
    wanted = x.cpu().double() @ w.cpu().double().flip(0).mT
    return bool((found.cpu().double() == wanted.to(dtype).double()).all())
