"""Products of many pairs of matrices whose addresses lie on the device, by torch's own cuBLAS."""

from functools import cache
from typing import Any

import torch

from aprfmt.inference.fast.cuda import cublas


@cache
def _library() -> Any | None:
    """Return the cuBLAS library that torch loaded, None where there is none."""
    if torch.version.cuda is None:
        return None
    try:
        return cublas.library(int(torch.version.cuda.partition(".")[0]))
    except (OSError, AttributeError):
        return None


def products(x: torch.Tensor, weights: torch.Tensor, columns: int) -> torch.Tensor:
    """Return x[i] times the weight [columns, depth] at address weights[i] transposed.

    x is [n, rows, depth], contiguous; `weights` [n] are int64 on its device, of matrices of its
    dtype. The result is [n, rows, columns]; sums are float32 (float64 in float64). The host does
    not wait.
    """
    n, rows, depth = x.shape
    y = torch.empty((n, rows, columns), dtype=x.dtype, device=x.device)
    item = x.element_size()

    def places(a: torch.Tensor, step: int) -> torch.Tensor:
        """Return int64 [n] on the device: the addresses of a's n matrices, `step` bytes apart."""
        return torch.arange(n, device=x.device) * step + a.data_ptr()

    given, out = places(x, rows * depth * item), places(y, rows * columns * item)
    handle = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    cublas.addressed(
        _library(),
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
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `products` comes out right on a device; tried once on a small example."""
    if _library() is None or str(dtype).removeprefix("torch.") not in cublas.TYPES:
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
