"""Statistics of a tensor's values or of a captured activation, in one function for both.

PART is how many elements the moments are computed of at a time, from the first element on.

Sums are float64. Mean, deviation, extremes and norm are over the finite values; how many are not
finite is counted next to them. The deviation divides by n (`std`); `std_sample` divides by n - 1.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.base.budget import end_where_time_is_over
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.processors import cpu_count
from aprfmt.base.protocols import LazyTensor, raw_parts
from aprfmt.codecs import codec, decode_chunked, native_kernels
from aprfmt.tensors.norms import exact_dot

if TYPE_CHECKING:
    from aprfmt.codecs.native.moments import Moments

# Elements handled at a time: their float64 copies stay in the second-level cache.
CHUNK = 1 << 16
# Elements of a part of `compute_stats_of_parts`, as native kernels join them.
PART = 1 << 17


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of `count` values; None where no value is finite.

    `std` is the root of the mean squared deviation (divisor n), `l2` the root of the sum of
    squares, `zeros` counts +0 and -0.
    """

    count: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    absmax: float | None
    l2: float | None
    nan: int
    inf: int
    zeros: int

    @property
    def finite(self) -> int:
        """Number of finite values: mean and deviation are taken over these."""
        return self.count - self.nan - self.inf

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`, with `std_divisor` "n": the divisor of `std`."""
        return asdict(self) | {"std_divisor": "n"}


class Accumulator:
    """Statistics of values that come array by array, in any shapes and dtypes.

    Of complex numbers the real and the imaginary parts are counted as values.
    """

    def __init__(self, threads: int = 1) -> None:
        """Start with no values; `threads` do not change a result."""
        self._threads = threads  # they change nothing of a result
        self._count = self._nan = self._inf = self._zeros = 0
        self._n = 0  # finite values so far, their mean and sum of squared deviations
        self._mean = self._deviations = 0.0
        self._min, self._max = math.inf, -math.inf

    def add(self, values: Any) -> None:
        """Add the values of a numpy array; float32 by the native kernel where there is one.

        A complex number counts as two values.
        """
        flat = np.ascontiguousarray(values).reshape(-1)
        if flat.dtype.kind == "c":
            flat = flat.view(flat.real.dtype)
        elif flat.dtype.kind not in "fiub":  # bfloat16 and the float8 types of ml_dtypes
            flat = flat.astype(np.float32)
        if flat.dtype == np.float32 and (native := native_kernels()) is not None:
            self.add_stats(_from_moments(flat.size, native.stats(flat, self._threads)))
            return
        self._count += flat.size
        with np.errstate(all="ignore"):
            for start in range(0, flat.size, CHUNK):
                self._add_chunk(flat[start : start + CHUNK])

    def _add_chunk(self, chunk: Any) -> None:
        """Add a flat chunk of real values; what is not finite is only counted."""
        low, high = float(chunk.min()), float(chunk.max())  # a NaN comes through both
        if not (math.isfinite(low) and math.isfinite(high)):
            nan = np.isnan(chunk)
            finite = np.isfinite(chunk)
            self._nan += int(np.count_nonzero(nan))
            self._inf += int(chunk.size - np.count_nonzero(nan) - np.count_nonzero(finite))
            chunk = chunk[finite]
            if not chunk.size:
                return
            low, high = float(chunk.min()), float(chunk.max())
        self._zeros += int(chunk.size - np.count_nonzero(chunk))
        self._min, self._max = min(self._min, low), max(self._max, high)
        wide = chunk.astype(np.float64)
        shift = float(wide[0])  # deviations from some value: constants come out exact
        wide -= shift
        total, squares = float(wide.sum()), exact_dot(wide, wide)
        n = chunk.size
        self._join(n, shift + total / n, max(squares - total * total / n, 0.0))

    def add_stats(self, part: Stats) -> None:
        """Add values of which only the statistics, `part`, are known."""
        self._count += part.count
        self._nan += part.nan
        self._inf += part.inf
        self._zeros += part.zeros
        if part.mean is None or part.std is None or part.min is None or part.max is None:
            return
        self._min, self._max = min(self._min, part.min), max(self._max, part.max)
        self._join(part.finite, part.mean, part.finite * part.std * part.std)

    def _join(self, n: int, mean: float, deviations: float) -> None:
        """Add n values by their mean and sum of squared deviations (Chan's formula)."""
        both = self._n + n
        step = mean - self._mean
        self._deviations += deviations + step * step * self._n * n / both
        self._mean += step * n / both
        self._n = both

    def result(self) -> Stats:
        """Return the statistics of all values added."""
        n = self._n
        if not n:
            none = (None,) * 6
            return Stats(self._count, *none, nan=self._nan, inf=self._inf, zeros=self._zeros)
        return Stats(
            count=self._count,
            mean=self._mean,
            std=math.sqrt(self._deviations / n),
            min=self._min,
            max=self._max,
            absmax=max(abs(self._min), abs(self._max)),
            l2=math.sqrt(self._deviations + n * self._mean * self._mean),
            nan=self._nan,
            inf=self._inf,
            zeros=self._zeros,
        )


def compute_stats(values: Any, threads: int = 1) -> Stats:
    """Return the statistics of a numpy array; they do not depend on `threads`."""
    accumulator = Accumulator(threads)
    accumulator.add(values)
    return accumulator.result()


def compute_stats_of_parts(parts: Iterable[Any]) -> Stats:
    """Return the statistics of float32 arrays that follow each other, as of one array.

    The result is that of `compute_stats` to the bit. `parts` yields the arrays. Each but the last
    has PART elements, and is used before the next is taken. ValueError for a longer one, or one
    after a shorter.
    """
    accumulator, native = Accumulator(), native_kernels()
    total: Moments | None = None
    count = 0
    for part in parts:
        if part.size > PART or count % PART:
            raise ValueError(f"a piece of {part.size} elements after {count}; expected {PART}")
        count += part.size
        if native is None:
            accumulator.add(part)
        else:
            found = native.stats(part)
            total = found if total is None else total.joined(found)
    return accumulator.result() if total is None else stats_of_moments(count, total)


def stats_of_moments(count: int, found: "Moments") -> Stats:
    """Return the statistics of `count` values from their moments, as `compute_stats` gives them.

    The moments have to be those of each PART elements, joined in order.
    """
    accumulator = Accumulator()
    accumulator.add_stats(_from_moments(count, found))
    return accumulator.result()


def merge_stats(parts: Iterable[Stats]) -> Stats:
    """Return the statistics of several tensors' values together, from their statistics alone."""
    accumulator = Accumulator()
    for part in parts:
        accumulator.add_stats(part)
    return accumulator.result()


def _band_stats(tensor: LazyTensor) -> Stats:
    """Return the statistics of a dialect's packed weight, decoded some rows at a time."""
    assert tensor.packed is not None
    whole = Accumulator()
    for band in tensor.packed().split_bands(CHUNK):
        values = band.decode().reshape(-1)
        for start in range(0, values.size, CHUNK):
            whole.add(values[start : start + CHUNK])
    return whole.result()


def tensor_stats(tensor: LazyTensor) -> Stats:
    """Return the statistics of a stored tensor's decoded values.

    One pass through the native kernels where the encoding has one, else chunks of the reference
    codec; the decoded tensor is never in memory as a whole. Raises CodecError or UnsupportedError.
    """
    end_where_time_is_over()
    info = tensor.info
    if tensor.parts:
        from aprfmt.codecs.scale_checks import check_input_scale_tensors

        check_input_scale_tensors(tensor.parts)
    # Weights that a dialect packs are decoded in bands.
    if tensor.decode is not None:
        try:
            return _band_stats(tensor)
        finally:
            tensor.drop()
    # Others by native kernels, else in chunks.
    reference = codec(info.encoding)
    parts = raw_parts(tensor)
    if len(parts) > 1:
        from aprfmt.codecs.scale_checks import check_block_scales

        check_block_scales(parts)
    count = math.prod(info.shape)
    try:
        fast = _kernel_stats(info.encoding, parts, count)
        if fast is not None:
            return fast
        columns = info.shape[-1] if info.shape else 1
        buffer = np.empty(max(CHUNK, columns, min(count, reference.block_size)), reference.dtype)
        accumulator = Accumulator()
        for chunk in decode_chunked(
            info.encoding, parts, info.shape, buffer, row_bytes=info.row_bytes
        ):
            end_where_time_is_over()
            accumulator.add(chunk)
        return accumulator.result()
    finally:
        tensor.drop()


def _kernel_stats(encoding: str, parts: Mapping[str, memoryview], count: int) -> Stats | None:
    """Return the statistics computed by native kernels.

    None where there is no kernel, the tensor is stored as several tensors, or rows are padded.
    """
    native, row = native_kernels(), ENCODINGS[encoding]
    fits = len(parts[""]) * row.block_size == count * row.type_size and not row.header
    if native is None or encoding not in native.KERNELS or len(parts) > 1 or not fits:
        return None
    found = native.stats_of(encoding, parts[""], count, cpu_count())
    return _from_moments(count, found)


def _from_moments(count: int, found: "Moments") -> Stats:
    """Return the statistics of `count` values from their moments."""
    if not found.finite:
        none = (None,) * 6
        return Stats(count, *none, nan=found.nan, inf=found.inf, zeros=found.zeros)
    return Stats(
        count,
        found.mean,
        found.std,
        found.least,
        found.most,
        found.absmax,
        found.l2,
        nan=found.nan,
        inf=found.inf,
        zeros=found.zeros,
    )
