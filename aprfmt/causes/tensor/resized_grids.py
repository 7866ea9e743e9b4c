"""Position tables that were resized to another number of places, as for another image size.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

A vision model has a row for each patch of a grid, after the rows of tokens such as the class token.
For images of another size the grid is interpolated; the other rows are kept. Tables of relative
positions are grids of offsets, and tables of texts and sounds are lines of places. Sources:
`torch.nn.functional.interpolate`, timm's `resample_abs_pos_embed`, transformers'
`interpolate_pos_encoding`.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import make_finding, prove_values
from aprfmt.causes.tensor.token_tables import TABLES
from aprfmt.measure.encoding_noise import pair_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "resized_positions", "tensor", "not_comparable",
        "A table of positions was resized for another number of places, such as for larger images: "
        "the two models take inputs of different sizes.",
        "The tables have different numbers of rows, and the rows before the grid are equal.",
        "The other side's grid, interpolated to this size, is equal to it.",
    ),
)  # fmt: skip

KEPT = range(9)  # rows before the grid that are kept: class, distillation, register tokens
MOST, MOST_VALUES = 1 << 16, 1 << 24  # rows of a table, and values
LONGEST = 2048  # places of a line of them
LEAST = 4  # places of a grid
SLACK = 2e-6  # relative: two orders of float32 sums
CUBIC = (-0.75, -0.5)  # coefficients of bicubic kernels: torch's, and torch's with antialiasing


def explain_resized_table(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that one side's table of positions is the other's, resized.

    Only tables of two axes (and axes of length 1) with equal rows and unequal numbers of them. The
    rows before the grid have to be equal. B from A is tried first.
    """
    a, b = case.a, case.b
    flat = all(sum(size > 1 for size in side.shape) == 2 for side in (a, b))
    if not flat or a.columns != b.columns or a.rows == b.rows or case.role in TABLES:
        return
    if max(a.rows, b.rows) > MOST or max(a.size, b.size) > MOST_VALUES:
        return
    slack = SLACK + 2 * pair_noise(a.encoding, b.encoding)
    for label, old, new in (("B", a, b), ("A", b, a)):
        found = _find_resizing(old, new, slack)
        if found is None:
            continue
        how, kept, apart = found
        other = "A" if label == "B" else "B"
        rows = f"; rows before the grid, equal in both: {kept}" if kept else ""
        text = f"{label}'s table of positions is {other}'s, resized: {how}"
        told = text, f"shape {list(a.shape)} in A, {list(b.shape)} in B{rows}"
        proof = prove_values(new.take(np.arange(min(new.rows, 64))), new.size, 0, slack)
        yield make_finding("resized_positions", (case.key,), told, None, apart, proof)
        return


def _find_resizing(old: RowReader, new: RowReader, slack: float) -> tuple[str, int, float] | None:
    """Return (words, rows kept, relative distance) of the resizing of `old` that gives `new`.

    None if none is within `slack` of it.
    """
    first, last = to_float64(old.whole), to_float64(new.whole)
    size = norms.exact_norm(last)
    if not size or not np.isfinite(first).all() or not np.isfinite(last).all():
        return None
    for kept in KEPT:
        if kept and (
            kept >= min(len(first), len(last)) or not _near(first[:kept], last[:kept], slack)
        ):
            break
        for grid, target in _grid_shapes(len(first) - kept, len(last) - kept):
            for how, rows, columns in _resizings(grid, target):
                values = first[kept:].reshape(*grid, -1)
                # One channel tells a wrong kernel, without the others' arithmetic.
                one = rows @ values[:, :, 0] @ columns.T
                if not _near(one.reshape(-1), last[kept:, 0], 4 * slack):
                    continue
                made = np.einsum("ip,pqc,jq->ijc", rows, values, columns, optimize=True)
                delta = norms.exact_norm(made.reshape(len(last) - kept, -1) - last[kept:])
                if delta <= slack * size:
                    sizes = " to ".join("x".join(map(str, one)) for one in (grid, target))
                    if grid[0] == target[0] == 1:
                        sizes = f"{grid[1]} to {target[1]} places"
                    return f"{sizes}, {how}", kept, float(delta / size)
    return None


def _near(x: "Array", y: "Array", slack: float) -> bool:
    """Return whether two arrays of one shape are equal within a relative distance."""
    return norms.exact_norm(x - y) <= slack * max(norms.exact_norm(x), norms.exact_norm(y))


Grid = tuple[int, int]


def _grid_shapes(old: int, new: int) -> Iterator[tuple[Grid, Grid]]:
    """Yield (grid of `old` places, grid of `new` places): squares first, then a line of places.

    Of two grids one at least is a square.
    """
    if min(old, new) < LEAST:
        return
    squares = [math.isqrt(count) if math.isqrt(count) ** 2 == count else 0 for count in (old, new)]
    if all(squares):
        yield (squares[0], squares[0]), (squares[1], squares[1])
    if squares[0]:
        for rows in _divisors(new):
            if rows != squares[1]:
                yield (squares[0], squares[0]), (rows, new // rows)
    elif squares[1]:
        for rows in _divisors(old):
            yield (rows, old // rows), (squares[1], squares[1])
    if max(old, new) <= LONGEST:
        yield (1, old), (1, new)


def _divisors(count: int) -> Iterator[int]:
    """Yield the divisors of a number from 2 on for which the quotient is at least 2."""
    yield from (rows for rows in range(2, count // 2 + 1) if count % rows == 0)


def _resizings(grid: Grid, target: Grid) -> Iterator[tuple[str, "Array", "Array"]]:
    """Yield (words, weights of rows, weights of columns) of each way to interpolate a grid.

    The weights are [new, old].
    """
    line = grid[0] == target[0] == 1
    smaller = target[0] < grid[0] or target[1] < grid[1]
    for name in ("bicubic", "bilinear", "nearest"):
        for corners in (False, True)[: 1 if name == "nearest" else 2]:
            for antialias in (False, True)[
                : 2 if smaller and name != "nearest" and not corners else 1
            ]:
                rows, columns = (
                    _weights(old, new, name, corners, antialias)
                    for old, new in zip(grid, target, strict=True)
                )
                words = {"bicubic": "cubic", "bilinear": "linear"}.get(name, name) if line else name
                yield (
                    f"{words} interpolation"
                    + " with aligned corners" * corners
                    + " with antialiasing" * antialias,
                    rows,
                    columns,
                )


def _weights(old: int, new: int, name: str, corners: bool, antialias: bool) -> "Array":
    """Return the weights [new, old] of an interpolation along one axis, as torch computes it."""
    made = np.zeros((new, old))
    if corners:
        scale = (old - 1) / (new - 1) if new > 1 else 0.0
        places = np.arange(new) * scale
    else:
        scale = old / new
        places = (np.arange(new) + 0.5) * scale - 0.5
    if name == "nearest":
        made[np.arange(new), np.minimum((np.arange(new) * scale).astype(np.int64), old - 1)] = 1
        return made
    wide = max(scale, 1.0) if antialias else 1.0
    reach = (2 if name == "bicubic" else 1) * wide
    for i, place in enumerate(places):
        if name == "bilinear" and not antialias:
            place = max(place, 0.0) if not corners else place
        low, high = math.floor(place - reach), math.ceil(place + reach)
        taps = np.arange(low, high + 1)
        away = np.abs(taps - place) / wide
        weight = _cubic(away, CUBIC[antialias]) if name == "bicubic" else np.maximum(0, 1 - away)
        if antialias:  # taps beyond the edge are left out, and the others made to sum to one
            inside = (taps >= 0) & (taps < old)
            taps, weight = taps[inside], weight[inside] / weight[inside].sum()
        np.add.at(made[i], np.clip(taps, 0, old - 1), weight)
    return made


def _cubic(x: "Array", a: float) -> "Array":
    """Return the cubic convolution kernel of coefficient `a` at distances `x`, 0 from 2 on."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


HYPOTHESES = (
    PairHypothesis(
        ("resized_positions",),
        explain_resized_table,
        151,
        "two shapes of the same rows, after one of as many elements",
        shapes=True,
    ),
)
