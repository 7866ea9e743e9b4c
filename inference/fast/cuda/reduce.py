"""One-pass statistics of an array; results stay in GPU memory until read.

A *piece* is the consecutive elements that one block of GPU threads sums up; the sums of the pieces
are then added in order.

Sums are float64 and their order is fixed, so every run gives the same bits. The definitions are
those of aprfmt.tensors.stats.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from aprfmt.errors import CodecError
from aprfmt.inference.fast.cuda.arrays import ITEM, flat, stream_of
from aprfmt.inference.fast.cuda.loader import Function, load_function
from aprfmt.tensors.stats import Stats

# Number of float64 in a result, and in the workspace of a stream's launches (zero at the start).
RESULT = 16
_PIECES = 1056
COLUMNS = 16  # float64 per piece
WORKSPACE = 2 + _PIECES * COLUMNS
_SMALLEST_PIECE = 4096  # elements; smaller pieces do not keep a group of threads busy
_FILES = ("prelude.cuh", "reduce.cu")
THREADS = 256  # reduce.cu


def launch_stats(
    x: Any, result: Any, workspace: Any, *, dtype: str | None = None, stream: int | None = None
) -> None:
    """Launch the statistics of x (float32, float64, bfloat16, float16), written to `result`.

    `result` holds RESULT float64. `workspace` holds WORKSPACE float64, zero before the first use,
    and is used by one stream at a time. `to_stats` reads the result. `dtype` is the element type
    of an x stored as uint16; `stream` is a raw handle, None for the current one. Raises CodecError
    if sizes or the type do not fit.
    """
    data, place, room = flat(x, dtype), flat(result), flat(workspace)
    if place.count < RESULT or room.count < WORKSPACE:
        raise CodecError(
            f"stats: a result of {place.count} and a workspace of {room.count} numbers; expected "
            f"{RESULT} and {WORKSPACE}"
        )
    if data.dtype not in ITEM or data.dtype == "uint8":
        raise CodecError(f"stats: found {data.dtype}, expected a floating-point type")
    pieces, size = split_pieces(data.count)
    args = (data.ptr, data.count, size, room.ptr, place.ptr)
    load_kernel("stats", data.dtype)((pieces,), (THREADS,), args, stream=stream_of(stream))


def load_kernel(name: str, dtype: str) -> Function:
    """Return the compiled kernel `name` (`stats` or `stats_many`) of a dtype."""
    return load_function(_FILES, f"{name}_{dtype}")


def split_pieces(count: int) -> tuple[int, int]:
    """Return (number of pieces, elements of a piece) in which an array of `count` is reduced.

    They depend on the count alone, so that every run adds in the same order.
    """
    size = max(_SMALLEST_PIECE, -(-count // _PIECES))
    size = -(-size // 1024) * 1024
    return max(1, -(-count // size)), size


def to_stats(count: int, result: Sequence[float]) -> Stats:
    """Return the statistics of `count` values from a result copied to the host."""
    return to_stats_of([count], np.array([result], np.float64))[0]


def to_stats_of(counts: Sequence[int], results: Any) -> list[Stats]:
    """Return the statistics of arrays of these sizes from numpy results [rows, RESULT], in order.

    There may be more rows than sizes. Statistics are None where an array has no finite number.
    """
    n, origin, total, squares, least, most, nan, inf, zeros = results[: len(counts), :9].T
    whole = np.maximum(n, 1)
    step = total / whole
    mean = origin + step
    deviations = np.maximum(squares - total * step, 0)
    reals = (
        mean,
        np.sqrt(deviations / whole),
        least,
        most,
        np.maximum(np.abs(least), np.abs(most)),
        np.sqrt(deviations + n * mean * mean),
    )
    integers = (x.astype(np.int64).tolist() for x in (nan, inf, zeros))
    none = (None,) * len(reals)
    return [
        Stats(count, *(values if some else none), *others)
        for count, some, values, *others in zip(
            counts,
            n.tolist(),
            zip(*(x.tolist() for x in reals), strict=True),
            *integers,
            strict=True,
        )
    ]
