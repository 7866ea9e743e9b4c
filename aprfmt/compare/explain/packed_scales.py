"""Faults of a packed copy's scales and minima.

The factor that every cell's values lack is the least-squares one. With it put right the errors must
be usual; how the factors go with the stored scales then says what was done to these.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aprfmt.compare.bounds import fit
from aprfmt.compare.explain import lattices
from aprfmt.compare.explain.guesses import Explanation
from aprfmt.compare.explain.packed import Copy, cells, scaled, spread

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

NEAR = 0.04  # relative: how well a factor is known, typically
VARIED = 3.0  # times NEAR: scales nearer to each other than this prove nothing by their order
FEW_COLUMNS = 1 << 24  # products tried to find the group of every input


def factors(copy: Copy, y: "Array") -> "Array":
    """Return the least-squares factor of every cell [cells]; 1 for a cell of zeros."""
    import numpy as np

    mine, source = (np.nan_to_num(lattices.split(v, copy.grouping)) for v in (y, copy.x))
    square, product = (mine * mine).sum(1), (mine * source).sum(1)
    return np.where(square > 0, product / np.where(square > 0, square, 1.0), 1.0)


def affine(copy: Copy) -> tuple["Array", "Array"]:
    """Return the least-squares factor and offset of every cell [cells]."""
    import numpy as np

    mine, source = (lattices.split(v, copy.grouping) for v in (copy.y, copy.x))
    m, s = np.nanmean(mine, axis=1), np.nanmean(source, axis=1)
    away = np.nan_to_num(mine - m[:, None])
    square = (away * away).sum(1)
    factor = (away * np.nan_to_num(source - s[:, None])).sum(1) / np.where(square > 0, square, 1.0)
    factor = np.where(square > 0, factor, 1.0)
    return factor, s - factor * m


def scales(copy: Copy) -> Iterator[Explanation]:
    """Find scales that are wrong: a factor a cell makes the errors usual."""
    import numpy as np

    factor = factors(copy, copy.y)
    if not (np.isfinite(factor).all() and (factor > 0).all()):
        return
    wide = spread(copy, factor)
    y, lattice = copy.y * wide, scaled(copy.lattice, wide)
    if not fit(copy.x, y, lattice).how:
        return
    stored = _scales(copy)
    wrong = np.abs(factor - 1) > NEAR
    says, certain = _relation(copy, stored, stored * factor, wrong)
    if not certain and np.ptp(factor) <= VARIED * NEAR * np.abs(factor).mean():
        return  # one factor for all: no fault of a packed encoding by itself
    numbers = f"factors from {factor.min():.4g} to {factor.max():.4g}"
    few = f"in {int(wrong.sum())} of {wrong.size} groups"
    found = copy.explained(
        "quant_scale", (f"{copy.whose} scales are wrong: {says}", few, numbers, copy.scheme), y,
        lattice,
    )  # fmt: skip
    if found is not None and "nested" in says:
        found = copy.explained("nested_offset", (f"{copy.whose} {says}", few, numbers), y, lattice)
    if found is not None:
        yield found


def _scales(copy: Copy) -> "Array":
    """Return the scale of every cell [cells]: the step, or a share of the end of other codes."""
    import numpy as np

    if copy.bits:
        return np.nanmedian(cells(copy, copy.lattice.step), axis=1)
    ends = np.maximum(np.abs(copy.lattice.low), np.abs(copy.lattice.high))
    return np.asarray(np.nanmax(cells(copy, ends), axis=1) / _top(copy), np.float64)


def _top(copy: Copy) -> float:
    """Return the largest entry of a copy's code: what an end is in scales."""
    for name, top in (("E5M2", 57344.0), ("E4M3", 448.0), ("E2M1", 6.0), ("FP8", 448.0),
                      ("PLAIN", 448.0)):  # fmt: skip
        if name in copy.scheme:
            return top
    return 1.0


def _relation(copy: Copy, stored: "Array", right: "Array", wrong: "Array") -> tuple[str, bool]:
    """Say how stored scales go with the right ones (both [cells]), and whether that is certain."""
    import numpy as np

    def near(x: "Array", y: "Array") -> bool:
        return bool(np.median(np.abs(x / y - 1)) < NEAR)

    varied = float(np.std(np.log(right))) > VARIED * NEAR
    if near(stored, np.ones_like(stored)) and np.ptp(stored) <= NEAR:
        return "they are ignored, as if each were 1", True
    if near(stored * right, np.ones_like(right)):
        return "they are inverted: 1/s stands for s", True
    if varied and near(stored * right, np.full_like(right, np.median(stored * right))):
        return "they are inverted, up to one factor", True
    if varied and not wrong.all() and wrong.sum() <= 0.5 * wrong.size:
        return "those of some groups are others", False
    shape = _shape(copy)
    grid, true = stored.reshape(shape), right.reshape(shape)
    if varied:
        moved = _moved(grid, true)
        if moved:
            return moved, True
        if np.ptp(stored) <= NEAR * np.abs(stored).max():
            return "one scale is shared by all", True
        for axis, what in ((0, "rows"), (1, "groups of a row")):
            if shape[axis] > 1 and (np.ptp(grid, axis=axis) <= NEAR * grid.max(axis)).all():
                return f"one scale is shared by all {what}", True
        runs = _shared(grid, true)
        if runs:
            return runs, True
        apart = right - stored
        if np.median(np.abs(apart)) and np.std(apart) < NEAR * np.median(right):
            return "the offset of nested absmax was lost: each is too small by one number", True
    return "each group's is another", False


def _shape(copy: Copy) -> tuple[int, int]:
    rows = copy.y.shape[0]
    return -(-rows // (copy.grouping.rows or rows)), -1


def _moved(grid: "Array", true: "Array") -> str:
    """Say how scales stand elsewhere than they should: shifted, turned; "" where they do not."""
    import numpy as np

    def near(x: "Array", y: "Array") -> bool:
        return bool(np.median(np.abs(x / y - 1)) < NEAR)

    for shift in (1, -1):
        for axis, what in ((1, "group"), (0, "row of groups"), (None, "group")):
            size = grid.size if axis is None else grid.shape[axis]
            if size > 2 and near(np.roll(true, shift, axis), grid):
                return f"each is that of the {what} {'before' if shift > 0 else 'after'}"
    if min(grid.shape) > 1 and near(true.T.reshape(grid.shape), grid):
        return "they are transposed"
    if min(grid.shape) > 1 and near(true.reshape(grid.shape[::-1]).T, grid):
        return "they are transposed"
    for axis, what in ((1, "groups"), (0, "rows")):
        if grid.shape[axis] > 2 and near(np.flip(true, axis), grid):
            return f"those of the {what} stand in reverse"
    return ""


def _shared(grid: "Array", true: "Array") -> str:
    """Say that scales are shared where they should not be: runs of rows have one."""
    import numpy as np

    different = np.unique(np.round(np.log(grid.reshape(-1)) / NEAR)).size
    expected = np.unique(np.round(np.log(true.reshape(-1)) / NEAR)).size
    return "several groups share one" if different * 4 < expected else ""


# --- minima ---------------------------------------------------------------------------------------


def minima(copy: Copy) -> Iterator[Explanation]:
    """Find what is added to each group's values wrong: another sign, lost, or scales exchanged."""
    import numpy as np

    factor, offset = affine(copy)
    if not (np.isfinite(factor).all() and np.isfinite(offset).all() and (factor > 0).all()):
        return
    only = np.nanmean(cells(copy, copy.x - copy.y), axis=1)
    for k, h in ((np.ones_like(only), only), (factor, offset)):
        wide, off = spread(copy, k), spread(copy, h)
        y, lattice = copy.y * wide + off, scaled(copy.lattice, wide, off)
        if not fit(copy.x, y, lattice).how:
            continue
        says = _of_minima(copy, k, h)
        if says:
            found = copy.explained("quant_min", (f"{copy.whose} {says}", copy.scheme), y, lattice)
            if found is not None:
                yield found
        return


def _of_minima(copy: Copy, factor: "Array", offset: "Array") -> str:
    """Say how factors and offsets of cells go with the minima that are stored."""
    import numpy as np

    low = np.nanmin(cells(copy, copy.lattice.low), axis=1)
    step = np.nanmedian(cells(copy, copy.lattice.step), axis=1)

    def near(x: "Array", y: "Array") -> bool:
        return bool(np.median(np.abs(x - y)) < 0.3 * np.median(step) * np.median(factor))

    if near(factor, np.ones_like(factor)) and (factor == 1).all():
        if near(offset, -2 * low):
            return "minima have the other sign: added where they are taken away"
        if near(low, np.zeros_like(low)):
            return "minima are lost: each group starts at 0"
        shape = _shape(copy)
        right = (low + offset).reshape(shape)
        for shift in (1, -1):
            if near(np.roll(right, shift, 1).reshape(-1), low):
                return f"minima are each that of the group {'before' if shift > 0 else 'after'}"
        return ""
    if near(offset, low * (1 / factor - factor)):
        return "scales of the scales and of the minima (d and dmin) are exchanged"
    return ""


# --- groups of inputs -----------------------------------------------------------------------------


def columns(copy: Copy) -> Iterator[Explanation]:
    """Find inputs that have another group's scale: an order of activation that was ignored."""
    import numpy as np

    rows, count = copy.y.shape
    wide = copy.grouping.columns
    if copy.grouping.rows != 1 or not wide or not copy.bits or count % wide:
        return
    groups = count // wide
    if groups < 2 or rows * count * groups > FEW_COLUMNS:
        return
    stored = _scales(copy).reshape(rows, groups)
    own = np.arange(count) // wide
    best, least = own.copy(), np.full(count, np.inf)
    for group in range(groups):
        ratio = stored[:, group, None] / stored[:, own]
        error = ((copy.y * ratio - copy.x) ** 2).sum(0)
        better = error < least
        best[better], least[better] = group, error[better]
    ratio = stored[:, best] / stored[:, own]
    found = copy.explained(
        "group_index",
        (f"{copy.whose} inputs have the scales of other groups: g_idx was ignored",
         f"{int((best != own).sum())} of {count} inputs"),
        copy.y * ratio, scaled(copy.lattice, ratio),
    )  # fmt: skip
    if found is not None:
        yield found
