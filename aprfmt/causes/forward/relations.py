"""Finds how recorded values follow from a reference's, such as "times 2" or "transposed"."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.forward.rank_shares import block_order, order_text
from aprfmt.causes.forward.shards import COUNTS
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.verdicts import Certainty
from aprfmt.tensors.norms import exact_norm

Array = NDArray[Any]


def _misread_as_heads_first(x: Array) -> Array:
    """Return [tokens, heads, d] as it is read if its buffer was written as [heads, tokens, d]."""
    return np.ascontiguousarray(np.swapaxes(x, 0, 1)).reshape(x.shape)


# Of these values only the lengths of vectors, or the values without their places, come out.
ROTATED = "its value with every vector rotated, as by rope"
REORDERED = "the same values in another order"


def relation_text(mine: Array, theirs: Array, bound: float) -> str:
    """Return how `theirs` [rows, ...] follows from `mine`, in words; "" if no relation fits.

    `bound` is the relative L2 up to which a relation fits. "" too where both are equal.
    """
    # Only finite values of two axes or more that differ.
    x, y = np.asarray(mine, np.float64), np.asarray(theirs, np.float64).reshape(np.shape(mine))
    if x.ndim < 2 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return ""
    if rel_l2(x, y) <= bound:
        return ""
    # Other layouts of heads, or ranks' columns in another order.
    rows = [(name, made(x)) for name, made in LAYOUTS if x.ndim == 3]
    for name, value in rows:
        if rel_l2(value, y) <= bound:
            return name
    shares = _rank_order_text(x, y, bound)
    if shares:
        return shares
    # A constant difference, or a constant factor.
    flat, away = x.reshape(len(x), -1), (y - x).reshape(len(x), -1)
    mean = away.mean(0)
    left = exact_norm(away - mean)
    if len(away) > 1 and left <= min(bound * exact_norm(flat), 0.1 * exact_norm(away)):
        return "its value with the same vector added to every row, as a bias is"
    factor = float(np.sum(x * y) / max(float(np.sum(x * x)), 1e-300))
    if factor and rel_l2(x * factor, y) <= bound:
        return f"its value times {factor:.6g}"
    # Rotated vectors keep their lengths.
    ends = [np.linalg.norm(v, axis=-1) for v in (x, y)]
    if rel_l2(*ends) <= bound:
        return ROTATED
    # A factor for each row, or for each column: values that became zeros have none.
    other = y.reshape(len(x), -1)
    if any((flat.any(axis) & ~other.any(axis)).any() for axis in (0, 1)):
        return ""
    scale = np.sum(other * flat, 1) / np.maximum(np.sum(flat * flat, 1), 1e-300)
    if rel_l2(flat * scale[:, None], other) <= bound:
        return "its value with every row multiplied by a different number, as by a norm"
    column = np.sum(other * flat, 0) / np.maximum(np.sum(flat * flat, 0), 1e-300)
    if len(x) > 2 and rel_l2(flat * column, other) <= bound:
        return "its value with every column multiplied by a different number, as by a norm's weight"
    if np.allclose(np.sort(x, axis=None), np.sort(y, axis=None), rtol=bound, atol=bound):
        return REORDERED
    return ""


def _rank_order_text(x: Array, y: Array, bound: float) -> str:
    """Return a clause that ranks' blocks of columns are in another order; "" if they are not."""
    order = rank_order(x, y, bound)
    return "" if order is None else f"its value with {order_text(order)}"


def rank_order(mine: Array, theirs: Array, bound: float) -> list[int] | None:
    """Return which rank's block of columns of `mine` each block of `theirs` is; None if unclear.

    Both have a row per token. The first usual number of ranks counts by which the blocks of
    `theirs` are those of `mine`, within `bound`, in another order or one of them twice.
    """
    x, y = mine.reshape(len(mine), -1), theirs.reshape(len(mine), -1)
    orders = (block_order(x, y, count, bound) for count in COUNTS)
    return next((order for order in orders if order is not None), None)


LAYOUTS: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("its value laid out as [heads, tokens, dim]", _misread_as_heads_first),
    ("its value laid out as [tokens, dim, heads]",
     lambda x: np.ascontiguousarray(np.swapaxes(x, 1, 2)).reshape(x.shape)),
    ("its value with rotated pairs side by side",
     lambda x: np.stack(np.split(x[..., : x.shape[-1] // 2 * 2], 2, axis=-1), -1).reshape(
         *x.shape[:-1], -1) if x.shape[-1] % 2 == 0 else x),
)  # fmt: skip


def certainty_of_relations(found: Sequence[str]) -> Certainty:
    """Return how certain it is that points were recorded elsewhere, by their relations' texts.

    "located" where a point has no relation (""), "explained" where one relation is partial, else
    "confirmed".
    """
    if not all(found):
        return "located"
    parts = (ROTATED, REORDERED)
    return "explained" if any(text.endswith(parts) for text in found) else "confirmed"
