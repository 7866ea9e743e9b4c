"""Ghosts: arrays that have a shape and take memory in an account, but hold no numbers.

A `Ghost` is used where a backend's array would be: slices share its memory, operations allocate,
and what nobody holds any more is freed, as in a run. So the account's peak is the run's.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]


class Ledger:
    """Bytes of one device: `live` are allocated now, `peak` is the most that ever was."""

    def __init__(self, device: str) -> None:
        """Start with nothing allocated on `device`."""
        self.device = device
        self.live = 0
        self.peak = 0

    def allocate(self, nbytes: int) -> None:
        """Count bytes as allocated, until Memory gives them back."""
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def count_briefly(self, nbytes: int) -> None:
        """Raise the peak as if `nbytes` bytes were allocated for the length of one operation."""
        self.peak = max(self.peak, self.live + nbytes)


class Memory:
    """One allocation; it is given back when the last array in it goes."""

    __slots__ = ("account", "nbytes")

    def __init__(self, account: Ledger, nbytes: int) -> None:
        """Count `nbytes` as allocated in `account`."""
        self.account, self.nbytes = account, nbytes
        account.allocate(nbytes)

    def __del__(self) -> None:
        """Count the bytes as free again."""
        self.account.live -= self.nbytes


class Flags:
    """The part of numpy's array flags that is read; `writeable` is False for a mapped file."""

    c_contiguous = True

    def __init__(self, writeable: bool) -> None:
        """Take whether the array may be written, False for a mapped file."""
        self.writeable = writeable


class Ghost:
    """An array of `shape`, `itemsize` bytes an element, in one allocation."""

    __slots__ = ("itemsize", "memory", "shape")
    __array_ufunc__ = None  # numpy's operators leave the operation to this class

    def __init__(self, shape: Sequence[int], itemsize: int, memory: Memory) -> None:
        """Make an array of `shape` that lies in the allocation `memory`; nothing is counted."""
        self.shape = tuple(int(size) for size in shape)
        self.itemsize = itemsize
        self.memory = memory

    @classmethod
    def allocate(cls, account: Ledger, shape: Sequence[int], itemsize: int) -> "Ghost":
        """Return an array in a new allocation, counted in `account`."""
        return cls(shape, itemsize, Memory(account, math.prod(shape) * itemsize))

    def allocate_like(self, shape: Sequence[int], itemsize: int | None = None) -> "Ghost":
        """Return an array in a new allocation on the same device; the item size is kept if None."""
        return Ghost.allocate(self.memory.account, shape, itemsize or self.itemsize)

    def copy(self) -> "Ghost":
        """Return an array of the same shape and item size in a new allocation."""
        return self.allocate_like(self.shape)

    # what it is

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements: what it would take if it were the whole of an allocation."""
        return self.size * self.itemsize

    @property
    def device(self) -> str:
        """The name of the device that the array is on."""
        return self.memory.account.device

    @property
    def dtype(self) -> np.dtype[Any]:
        """A float dtype of `itemsize` bytes."""
        return np.dtype(f"f{self.itemsize}")

    @property
    def flags(self) -> Flags:
        """Flags with `writeable` False if the array lies in a mapped file, free of memory."""
        return Flags(self.memory.nbytes > 0)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> "Iterator[Ghost]":
        """Yield the rows of the first axis, as views."""
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Numbers:
        """Return zeros that take no memory; a branch on values goes the way that zeros take."""
        return np.broadcast_to(np.zeros((), dtype or np.float32), self.shape)

    def __float__(self) -> float:
        """Return 0: a number that is read from an array has no value here."""
        return 0.0

    def astype(self, dtype: Any, copy: bool = True) -> Numbers:
        """Return zeros that take no memory."""
        return self.__array__(dtype)

    # views

    def _view(self, shape: Sequence[int]) -> "Ghost":
        """Return an array of another shape in the same allocation."""
        return Ghost(shape, self.itemsize, self.memory)

    def _indexed(self, key: Any) -> tuple[int, ...]:
        """Return the shape of self[key]; a list of rows is as long as itself."""
        keys = key if isinstance(key, tuple) else (key,)
        plain = tuple(slice(len(k)) if isinstance(k, list | np.ndarray) else k for k in keys)
        return np.broadcast_to(np.zeros((), np.int8), self.shape)[plain].shape

    def __getitem__(self, key: Any) -> "Ghost":
        """Return a view for slices and numbers, a new array for lists of rows, as numpy does."""
        keys = key if isinstance(key, tuple) else (key,)
        shape = self._indexed(key)
        if any(isinstance(k, list | np.ndarray) for k in keys):
            return self.allocate_like(shape)
        return self._view(shape)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Do nothing: a write allocates nothing, and there are no numbers."""

    def reshape(self, *shape: Any) -> "Ghost":
        """Return a view of the same elements in another shape; one size may be -1."""
        sizes = [int(n) for n in (shape[0] if isinstance(shape[0], Iterable) else shape)]
        if -1 in sizes:
            known = math.prod(n for n in sizes if n != -1)
            sizes[sizes.index(-1)] = self.size // max(known, 1)
        return self._view(sizes)

    def swapaxes(self, a: int, b: int) -> "Ghost":
        """Return a view with axes `a` and `b` exchanged."""
        shape = list(self.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return self._view(shape)

    @property
    def T(self) -> "Ghost":
        """The array with its axes reversed."""
        return self._view(self.shape[::-1])

    # operations

    def _binary_result(self, other: Any) -> "Ghost":
        """Return a new array for a binary operation: shapes broadcast, the larger item size."""
        shape = np.broadcast_shapes(self.shape, getattr(other, "shape", ()))
        wide = other.itemsize if isinstance(other, Ghost) and other.ndim else 0
        return self.allocate_like(shape, max(self.itemsize, wide))

    def _in_place_result(self, other: Any) -> "Ghost":
        """Return self, the result of an operation in place."""
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _binary_result
    __truediv__ = __rtruediv__ = __pow__ = _binary_result
    __iadd__ = __isub__ = __imul__ = __itruediv__ = _in_place_result

    def __neg__(self) -> "Ghost":
        """Return a new array for the negated elements."""
        return self.copy()

    def __matmul__(self, other: "Ghost") -> "Ghost":
        """Return a new array for the matrix product, outer axes broadcast."""
        outer = np.broadcast_shapes(self.shape[:-2], other.shape[:-2])
        return self.allocate_like((*outer, self.shape[-2], other.shape[-1]))

    def clip(self, low: Any = None, high: Any = None, **limits: Any) -> "Ghost":
        """Return a new array for the clamped elements; the limits are not used."""
        return self.copy()

    def sum(self, axis: int = -1, keepdims: bool = False) -> "Ghost":
        """Return a new array for the sum over an axis."""
        shape = list(self.shape)
        shape[axis] = 1
        if not keepdims:
            del shape[axis]
        return self.allocate_like(shape)
