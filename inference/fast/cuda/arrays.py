"""GPU memory as kernels need it (pointer, count, dtype), from any kind of array."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from aprfmt.errors import CodecError
from aprfmt.inference.fast.cuda.loader import load_cupy

ITEM = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(slots=True)
class Flat:
    """Contiguous elements in GPU memory; the caller keeps the memory alive."""

    ptr: int
    count: int
    dtype: str


def flat(x: Any, dtype: str | None = None) -> Flat:
    """Return address, size and dtype of a torch tensor, a cupy array or a `__dlpack__` object.

    Nothing is copied. `dtype` gives the type of the elements if the array's dtype does not
    (bfloat16 stored as uint16). Raises CodecError for memory that is not contiguous.
    """
    if isinstance(x, Flat):
        return x
    if hasattr(x, "data_ptr"):
        contiguous, ptr, count = x.is_contiguous(), int(x.data_ptr()), int(x.numel())
        name = str(x.dtype).removeprefix("torch.")
    else:
        if not hasattr(x, "__cuda_array_interface__"):
            x = load_cupy().from_dlpack(x)
        contiguous, ptr, count = bool(x.flags.c_contiguous), int(x.data.ptr), int(x.size)
        name = str(x.dtype.name)
    if not contiguous:
        raise CodecError(f"an array of shape {list(x.shape)} is not contiguous; copy it first")
    return Flat(ptr, count, dtype or name)


class _Stream:
    """A raw stream handle with the attribute `ptr`, which CuPy's launches read."""

    def __init__(self, ptr: int) -> None:
        """Take the raw handle."""
        self.ptr = ptr


@lru_cache(maxsize=64)
def stream_of(ptr: int | None) -> Any | None:
    """Return an object with `ptr` for a raw stream handle; None for None, cupy's current stream."""
    return None if ptr is None else _Stream(ptr)
