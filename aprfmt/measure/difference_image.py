"""An image of where two tensors differ: one number per block of rows and columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.errors import AprfmtError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.records import DifferenceImage, TensorDiff
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

ROWS, COLUMNS = 64, 96  # cells of an image at most
WINDOW = 1 << 20  # elements decoded at a time


def make_image(a: View, b: View, key: str) -> DifferenceImage | None:
    """Return the image of where two tensors differ; None if their shapes differ or are empty.

    The image has a number for each rectangle of elements: the root mean square of a - b in it over
    that of all of `a`; infinite where only one tensor is not finite. A vector is wrapped into rows.
    Where an encoding has blocks, a rectangle holds whole blocks, or one of equally many in a block.
    """
    left, right = RowReader(a), RowReader(b)
    if a.shape != b.shape or not left.size:
        return None
    # The size of a cell: whole blocks of the encodings, at most ROWS x COLUMNS cells.
    rows, columns = left.rows, left.columns
    if columns == 1:
        columns = min(COLUMNS, -(-rows // 8))
        rows = -(-rows // columns)
    block = max(encoding_row(side.encoding.split("+")[0]).block_size for side in (left, right))
    width = -(-columns // COLUMNS)
    if left.columns > 1 and block > 1 and columns % block == 0:
        width = _fitting_width(width, block)
    height = -(-rows // ROWS)
    across, down = -(-columns // width), -(-rows // height)
    # Sum squares per cell, some rows of cells at a time.
    sums, norm = np.zeros((down, across)), 0.0
    of_a, of_b = np.zeros((down, across)), np.zeros((down, across))
    wild = np.zeros((down, across), bool)
    step = max(1, WINDOW // max(1, columns * height)) * height
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        x, y = (_row_window(side, start, stop, columns) for side in (left, right))
        x, y = to_float64(x), to_float64(y)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        finite = np.isfinite(x) & np.isfinite(y)
        x, y = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
        with np.errstate(over="ignore"):
            square, of_x, of_y = (np.minimum(v * v, 1e300) for v in (x - y, x, y))
        norm += float(of_x.sum())
        at = start // height
        for into, part in ((sums, square), (of_a, of_x), (of_b, of_y), (wild, ~same & ~finite)):
            part_cells = _sum_cells(part, height, width, across)
            into[at : at + len(part_cells)] = into[at : at + len(part_cells)] + part_cells
    # Root mean squares relative to that of all of `a`.
    size = (norm / left.size) ** 0.5 or 1.0
    found = np.sqrt(sums / (height * width)) / size
    found[wild] = np.inf
    left.drop()
    right.drop()
    grids = (found, *(np.sqrt(each / (height * width)) for each in (of_a, of_b)))
    cells, own, others = (tuple(map(tuple, grid.tolist())) for grid in grids)
    return DifferenceImage(key, rows, columns, height, width, cells, own, others)


def _fitting_width(width: int, block: int) -> int:
    """Return the smallest width >= `width` that is a multiple or a divisor of `block`."""
    if width >= block:
        return -(-width // block) * block
    return next(w for w in range(width, block + 1) if block % w == 0)


def _row_window(side: RowReader, start: int, stop: int, columns: int) -> "Array":
    """Return rows [start, stop) of a tensor as the image sees it, [rows, columns].

    A vector is wrapped into rows, the last padded with 0.
    """
    if side.columns > 1 or columns == 1:
        return side.take(np.arange(start, stop))
    low, high = start * columns, min(stop * columns, side.rows)
    flat = np.zeros((stop - start) * columns, side.whole.dtype)
    flat[: high - low] = side.take(np.arange(low, high)).reshape(-1)
    return flat.reshape(stop - start, columns)


def _sum_cells(values: "Array", height: int, width: int, across: int) -> "Array":
    """Return the sums of `values` [n, columns] over rectangles of [height, width].

    The result is [n / height rounded up, across]; edges are padded with 0.
    """
    down = -(-values.shape[0] // height)
    padded = np.zeros((down * height, across * width), values.dtype)
    padded[: values.shape[0], : values.shape[1]] = values
    sums: Array = padded.reshape(down, height, across, width).sum(axis=(1, 3))
    return sums


def difference_images(
    pairs: Sequence[TensorPair], tensors: Sequence[TensorDiff], count: int
) -> tuple[DifferenceImage, ...]:
    """Return up to `count` images of tensors that differ, those with the largest distance first.

    Tensors beyond their bounds come before those within. The first tensor of each explanation comes
    before second ones.
    """
    order = sorted(
        (row for row in tensors if row.verdict in ("DIFFERENT", "WITHIN")),
        key=lambda row: (row.verdict != "DIFFERENT", -(row.stats.rel_l2 if row.stats else 0.0)),
    )
    seen: dict[str, int] = {}
    ranked = []
    for row in order:
        what = row.explanation.evidence[0] if row.explanation is not None else row.verdict
        seen[what] = seen.get(what, 0) + 1
        ranked.append((seen[what], row.key))
    by_key = {pair.key: pair for pair in pairs}
    found = []
    for _, key in sorted(ranked, key=lambda one: one[0])[:count]:
        pair = by_key[key]
        if pair.a is None or pair.b is None:
            continue
        try:
            image = make_image(pair.a, pair.b, key)
        except AprfmtError:
            continue
        if image is not None:
            found.append(image)
    return tuple(found)
