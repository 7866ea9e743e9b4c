"""Runs of zero bytes inside a weight, as a lost sector or page of a file leaves them.

Values of a trained weight are hardly ever exactly zero. Pruned, masked and padded weights have
zeros in whole rows, in whole columns, or all over the weight. A run of zero bytes that fills whole
pages of the file, begins or ends within a row, and is alone in its weight is none of these.
"""

from collections.abc import Iterator

import numpy as np

from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import LazyTensor
from aprfmt.checks.context import CheckContext
from aprfmt.checks.records import CheckFinding
from aprfmt.model.usual_zeros import is_usually_zero

PAGE = 4096  # bytes: of a file system's block, and of a sector of a disk
STEP = 16 << 20  # bytes read at a time, whole pages
FEW = 1 / 256  # of the values outside of the run that may be zero
MOST = 8  # runs: more are a pattern
SHARE = 0.5  # of a weight that the runs may fill: more was not lost, but never filled


def find_zero_pages(ctx: CheckContext) -> Iterator[CheckFinding]:
    """Yield a warning for each plain float weight with pages of zeros that no pattern explains.

    Only weights with enough zeros for a page, by the pass over all values, are read again.
    """
    for name, row in ctx.census.items():
        stats, kind = row.stats, find_encoding(row.info.encoding)
        if stats is None or not kind.numpy or kind.block_size != 1 or row.unread:
            continue
        lost = stats.zeros * kind.type_size
        if not PAGE <= lost <= SHARE * row.info.nbytes or len(row.info.shape) < 2:
            continue
        if is_usually_zero(name) or ctx.model.source.tensors[name].makes:
            continue
        found = _zero_runs(ctx.model.source.tensors[name])
        if not found or not _is_hole(row.info.shape, kind.type_size, found):
            continue
        inside = sum(stop - start for start, stop in found)
        rest = (row.info.nbytes - inside) / kind.type_size
        if (lost - inside) / kind.type_size > FEW * rest:
            continue  # zeros are all over it
        start, stop = found[0]
        more = f", and {len(found) - 1} more such ranges" if len(found) > 1 else ""
        yield CheckFinding(
            name,
            f"bytes {start} to {stop - 1} of {row.info.nbytes} are all zero{more}, whole pages of "
            f"{PAGE} bytes of the file that begin or end within a row; the rest has hardly any "
            "zero",
            "weights without a hole",
            "get the file again, or compare it with another copy",
            "warning",
        )


def _zero_runs(tensor: LazyTensor) -> list[tuple[int, int]]:
    """Return [start, stop) of each run of zero bytes of a tensor that holds a page of its file.

    Offsets are in the tensor. A run is as long as its bytes are zero.
    """
    info = tensor.info
    first = -info.offset % PAGE
    pages: list[int] = []
    for start in range(first, info.nbytes - PAGE + 1, STEP):
        count = min(STEP, info.nbytes - start) // PAGE
        data = np.frombuffer(tensor.raw(start, start + count * PAGE), np.uint8)
        full = ~data.reshape(count, PAGE).any(axis=1)
        pages += (start + np.flatnonzero(full) * PAGE).tolist()
        tensor.drop(start, start + count * PAGE)
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][1] >= page:
            runs[-1] = (runs[-1][0], page + PAGE)
        else:
            runs.append((page, page + PAGE))
    return [_extended(tensor, start, stop) for start, stop in runs]


def _extended(tensor: LazyTensor, start: int, stop: int) -> tuple[int, int]:
    """Return the run with the zero bytes before and after it, up to a page at each end."""
    before = np.frombuffer(tensor.raw(max(0, start - PAGE), start), np.uint8)
    after = np.frombuffer(tensor.raw(stop, min(tensor.info.nbytes, stop + PAGE)), np.uint8)
    at, end = np.flatnonzero(before), np.flatnonzero(after)
    less = len(before) - 1 - int(at[-1]) if at.size else len(before)
    more = int(end[0]) if end.size else len(after)
    return start - less, stop + more


def _is_hole(shape: tuple[int, ...], size: int, runs: list[tuple[int, int]]) -> bool:
    """Return whether the runs are holes: few, within rows, and not the same columns of more rows.

    `size` are the bytes of a value. A row is what belongs to one index of the last axis but one.
    """
    row = shape[-1] * size
    edges = [(start % row, stop % row) for start, stop in runs]
    columns = [start for start, _ in edges if start]
    within = any(start or stop for start, stop in edges)
    return within and len(runs) <= MOST and len(set(columns)) == len(columns)
