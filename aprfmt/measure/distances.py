"""Distances of two values of one capture point, with NaN and infinities counted.

A *side* is one of the two values. A *piece*, or run, is values that follow each other and are read
together.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from aprfmt.codecs import native_kernels
from aprfmt.measure.nonfinite import Census, NonFinite, equal_or_both_nan
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array


_PIECE = 1 << 17  # elements of two arrays that are compared at a time: caches hold them
_TOGETHER = 1 << 21  # stored elements of each array whose pages are mapped at a time


class StoredValues(Protocol):
    """Values as files store them, for native kernels that read rows."""

    def rows_from(self, first: int) -> tuple[Any, int, int]:
        """Return what the kernel `native.apart_rows` takes for values from element `first` on."""
        ...

    def count_until(self, last: int) -> None:
        """Add the elements before `last` to the statistics of the values, if these are wanted."""
        ...

    @property
    def drop(self) -> Callable[[], None]:
        """A function that releases the values' memory pages; they are read again if needed."""
        ...


class StoredReader(Protocol):
    """Reads values in their order as files store them."""

    def read_range(self, first: int, last: int) -> StoredValues:
        """Return values `first` to `last`; each call continues where the one before ended."""
        ...


class ValueBlocks(Protocol):
    """Float32 values that are read piece by piece from where they are stored."""

    @property
    def size(self) -> int:
        """The number of values."""
        ...

    def pieces(self, counts: Sequence[int]) -> "Iterator[Array]":
        """Yield flat pieces of these sizes, in order; each is valid until the next one."""
        ...

    def stored_reader(self) -> StoredReader | None:
        """Return a reader of the values as stored; None where no kernel reads that form."""
        ...


@dataclass(frozen=True, slots=True)
class PointDistance:
    """Distances of two values of a point; infinite where only one side is not finite.

    `rel` is relative L2, `finite` the same over what is finite on both sides. `largest` is the
    largest absolute difference, `at` its index. `rms` is that of the reference. `bits` says that
    all values are equal.
    """

    rel: float
    finite: float
    largest: float
    at: tuple[int, ...] | None
    rms: float
    bits: bool
    count: int
    nonfinite: NonFinite | None


def measure_values(
    x: "Array", y: "Array", chosen: "Array | None", shape: tuple[int, ...]
) -> PointDistance | None:
    """Return the distances of flat values; `y` is the reference. None where no value counts.

    `chosen` is a bool array of the values that count, None for all. `shape` is that of the point,
    for indices in the result. Of whole float32 arrays a native kernel takes the same sums, without
    copies.
    """
    if chosen is None and x.dtype == y.dtype == np.float32 and x.size == y.size:
        if (native := native_kernels()) is not None and native.apart is not None:
            return _measure_by_kernel(native.apart, x, y, shape)
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    chosen = np.ones(x.size, np.bool_) if chosen is None else chosen
    places = np.flatnonzero(chosen)
    if x.size and not len(places):
        return None
    odd = Census()
    with np.errstate(invalid="ignore", over="ignore"):
        odd.add(np.where(chosen, x, 0.0), np.where(chosen, y, 0.0))
        x, y = x[places], y[places]
        same = equal_or_both_nan(x, y)
        finite = np.isfinite(x) & np.isfinite(y)
        delta = np.where(same, 0.0, np.where(finite, np.abs(x - y), np.inf))
        norm = float(np.sqrt(np.sum(np.where(finite, y, 0.0) ** 2)))
        distance = float(np.sqrt(np.sum(delta**2)))
        rest = float(np.sqrt(np.sum(np.where(finite, delta, 0.0) ** 2)))
    at = int(np.argmax(delta)) if delta.size else 0
    largest = float(delta[at]) if delta.size else 0.0
    index = tuple(int(i) for i in np.unravel_index(int(places[at]), shape)) if x.size else None
    return PointDistance(
        relative_share(distance, norm),
        relative_share(rest, norm),
        largest,
        index,
        norm / float(np.sqrt(max(y.size, 1))),
        bool(same.all()),
        int(x.size),
        odd.result(shape),
    )


def _measure_by_kernel(
    kernel: Callable[..., Any], x: "Array", y: "Array", shape: tuple[int, ...]
) -> PointDistance:
    """Return the distances of all values of flat float32 arrays, as the kernel `native.apart` does.

    `shape` is that of the point, for indices in the result.
    """
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    dd, yy, most, at, odd_x, odd_y, alone, both, alone_at, both_at = kernel(x, y)
    norm, rest = math.sqrt(yy), math.sqrt(dd)
    largest, place = (math.inf, alone_at) if alone else (most, at)
    odd = Census()
    odd.add_counts(
        x,
        y,
        (odd_x, odd_y),
        (alone, alone_at if alone else None),
        (both, both_at if both else None),
    )
    return PointDistance(
        relative_share(math.inf if alone else rest, norm),
        relative_share(rest, norm),
        largest,
        tuple(int(i) for i in np.unravel_index(place, shape)) if x.size else None,
        norm / math.sqrt(max(y.size, 1)),
        largest == 0,
        int(x.size),
        odd.result(shape),
    )


def measure_blocks(x: ValueBlocks, y: ValueBlocks, shape: tuple[int, ...]) -> PointDistance | None:
    """Return the distances of all values of x from the reference y, read piece by piece.

    They have the bits that `measure_values` gives. `shape` is that of the point, for indices. None
    where values have to be compared as whole arrays: one is not finite, sizes differ, or there is
    no native kernel.
    """
    native = native_kernels()
    if native is None or native.apart is None or x.size != y.size or not x.size:
        return None
    counts = list(_kernel_runs(x.size))
    most, at, start = 0.0, 0, 0
    sums: list[tuple[float, float]] = []
    runs = _runs_of_pieces(native.apart, x, y, counts)
    if native.apart_rows is not None:
        mine, other = x.stored_reader(), y.stored_reader()
        if mine is not None and other is not None:
            runs = _runs_of_stored(native.apart_rows, mine, other, counts)
    for count, (dd, yy, largest, place, odd_x, odd_y, *_) in zip(counts, runs, strict=True):
        if odd_x or odd_y:
            return None
        if largest > most:
            most, at = largest, start + place
        sums.append((dd, yy))
        start += count
    dd, yy = _sum_of_runs(x.size, iter(sums))
    norm, rest = math.sqrt(yy), math.sqrt(dd)
    rel, index = relative_share(rest, norm), tuple(int(i) for i in np.unravel_index(at, shape))
    rms = norm / math.sqrt(x.size)
    return PointDistance(rel, rel, most, index, rms, most == 0, x.size, None)


def _runs_of_pieces(
    kernel: Callable[..., Any], x: ValueBlocks, y: ValueBlocks, counts: Sequence[int]
) -> Iterator[tuple[Any, ...]]:
    """Yield what `native.apart` returns for each of the consecutive runs of `counts` values.

    `x` and `y` decode their values to float32 for that.
    """
    for mine, other in zip(x.pieces(counts), y.pieces(counts), strict=True):
        yield kernel(mine, other)


def _runs_of_stored(
    kernel: Callable[..., Any], x: StoredReader, y: StoredReader, counts: Sequence[int]
) -> Iterator[tuple[Any, ...]]:
    """Yield the distances of two arrays for runs of `counts` values that follow one another.

    Each is the tuple that `native.apart` returns. `kernel` is `native.apart_rows`, which decodes a
    few stored values at a time; each side's statistics are taken while these are in the caches.
    """
    start = 0
    for group in _groups_of_runs(counts):
        stop = start + sum(group)
        mine, other = x.read_range(start, stop), y.read_range(start, stop)
        try:
            for count in group:
                found = kernel(mine.rows_from(start), other.rows_from(start), count)
                start += count
                mine.count_until(start)
                other.count_until(start)
                yield found
        finally:
            mine.drop()
            other.drop()


def _groups_of_runs(counts: Sequence[int]) -> Iterator[list[int]]:
    """Yield lists of consecutive run sizes out of `counts`, each of about _TOGETHER values."""
    group: list[int] = []
    for count in counts:
        group.append(count)
        if sum(group) >= _TOGETHER:
            yield group
            group = []
    if group:
        yield group


def _kernel_runs(count: int) -> Iterator[int]:
    """Yield the sizes of the pieces of `count` values that `native.apart` sums up undivided.

    It halves longer ones. The pieces follow one another.
    """
    if count <= _PIECE:
        yield count
        return
    half = _half_of_run(count)
    yield from _kernel_runs(half)
    yield from _kernel_runs(count - half)


def _sum_of_runs(count: int, sums: Iterator[tuple[float, float]]) -> tuple[float, float]:
    """Return (sum of squared differences, sum of squares of y) over `count` values.

    `sums` has these two sums of each piece of `_kernel_runs`, in order. They are added by halves,
    in the order in which the kernel `native.apart` adds, so that both give the same bits.
    """
    if count <= _PIECE:
        return next(sums)
    half = _half_of_run(count)
    (dd, yy), (more_dd, more_yy) = _sum_of_runs(half, sums), _sum_of_runs(count - half, sums)
    return dd + more_dd, yy + more_yy


def _half_of_run(count: int) -> int:
    """Return how many of `count` values are in the first half as `native.apart` adds (apart.h)."""
    return count // 2 - count // 2 % 8


def rel_l2(actual: ArrayLike, reference: ArrayLike) -> float:
    """Return ||actual - reference|| / ||reference|| in float64, of values of any equal sizes.

    Infinite where sizes differ, where one side alone is not finite, and where only the reference is
    all zero. Elements with the same NaN or infinity in both are no difference. Every relative L2 of
    two arrays is computed here. Where changes of a model are tried until it gives a recorded value,
    the recorded value is the reference, so that all have one norm.
    """
    x, y = (np.asarray(values, np.float64).reshape(-1) for values in (actual, reference))
    if x.size != y.size:
        return math.inf
    same = equal_or_both_nan(x, y)
    if not (same | (np.isfinite(x) & np.isfinite(y))).all():
        return math.inf
    norm = float(norms.exact_norm(np.where(np.isfinite(y), y, 0.0)))
    return relative_share(norms.exact_norm(np.where(same, 0.0, x) - np.where(same, 0.0, y)), norm)


def row_order(mine: "Array", theirs: "Array", tolerance: float) -> "Array | None":
    """Return the number of the row of `theirs` that each row of `mine` is, int64 [rows].

    Both have the same number of values, with rows along the first axis of `mine`. Rows are equal
    whose relative L2 distance is within `tolerance`. None if a row has no such row or several, and
    where each row is at its own place.
    """
    x = np.asarray(mine, np.float64).reshape(len(mine), -1)
    y = np.asarray(theirs, np.float64).reshape(x.shape)
    limit = tolerance * np.maximum(np.linalg.norm(x, axis=1), 1e-30)
    moved = np.flatnonzero(~(np.linalg.norm(x - y, axis=1) <= limit))
    order, rows = np.arange(len(x)), y[moved]
    for at in moved:
        near = np.flatnonzero(np.linalg.norm(rows - x[at], axis=1) <= limit[at])
        if near.size != 1:
            return None
        order[at] = moved[near[0]]
    return order if moved.size and len({*order.tolist()}) == len(x) else None


def exact_16_bit_type(values: ArrayLike) -> str:
    """Return the 16-bit float type that holds all values exactly; "" for none.

    "" too where a value is not finite.
    """
    held = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(held).all() or not np.array_equal(held, values):
        return ""
    if not (held.view(np.uint32) & 0xFFFF).any():
        return "bfloat16"
    with np.errstate(over="ignore"):
        return "float16" if np.array_equal(held.astype(np.float16), held) else ""


def relative_share(distance: float, norm: float) -> float:
    """Return distance / norm; 0 for no distance, infinite for a norm of zero or infinity."""
    if distance == 0:
        return 0.0
    return distance / norm if 0 < norm < math.inf else math.inf
