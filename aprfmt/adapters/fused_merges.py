"""Finds changes of fused weights that a merge added to other rows: q, k and v, or gate and up.

A *part* is one projection of those that writers store as one tensor: q, k or v, gate or up. The
*change* of a part is what the adapter adds to it.

Some programs store the parts as one tensor whose rows stand in an order of their own, such as
[q k v] per KV group. A merge there may join the changes in another order than the rows. Each part
alone then has rows of several parts' changes, which no multiple of its own change gives. So the
changes of all parts are joined, put in every known order, and compared with B together.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.adapters.merge_faults import Merge, added_change

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F64 = NDArray[np.float64]
    Order = NDArray[np.int64]

COLUMNS = 16  # columns of the joined change on which orders are tried first
FIT = 0.25  # how far from 1 the projection on those columns may be


class FusedPart(NamedTuple):
    """One part of a fused weight: its short name, and its values [rows, columns] as a Merge.

    The values of stacked experts are [experts, rows, columns].
    """

    name: str
    merge: Merge


def find_fused_order(parts: Sequence[FusedPart], kv_heads: int) -> str:
    """Return in words how the joined changes of all parts have to be laid out to give B.

    "" where no known order gives every value of B, and where B does not tell that one does.
    `kv_heads` is the number of groups of q, k and v, 0 for other parts.
    """
    shapes = [part.merge.plain.shape for part in parts]
    if len({(len(shape), shape[-1], *shape[:-2]) for shape in shapes}) != 1 or len(shapes[0]) < 2:
        return ""
    columns = shapes[0][-1]
    changes = np.concatenate([part.merge.change.reshape(-1, columns) for part in parts])
    # A few columns tell which orders are worth the whole comparison.
    few = np.unique(np.linspace(0, columns - 1, COLUMNS).astype(np.int64))
    off = np.concatenate(
        [
            (part.merge.theirs[..., few] - part.merge.plain[..., few]).reshape(-1, len(few))
            for part in parts
        ]
    )
    own = changes[:, few]
    size = float(np.square(own).sum())
    if not size:
        return ""
    for says, at in _orders_of_changes(parts, kv_heads):
        near = abs(float((off * own[at]).sum()) / size - 1) < FIT
        if near and not np.array_equal(at, np.arange(len(at))) and _gives(parts, changes[at]):
            return says
    return ""


def _gives(parts: Sequence[FusedPart], changes: "F64") -> bool:
    """Return whether the rows `changes` [rows of all parts, columns], added to the base, give B.

    False too where B's type is so coarse that the base alone gives every part as well.
    """
    told = False
    start = 0
    for part in parts:
        shape = part.merge.plain.shape
        stop = start + int(np.prod(shape[:-1]))
        with_it, without = added_change(part.merge, changes[start:stop].reshape(shape))
        if not with_it:
            return False
        told |= not without
        start = stop
    return told


def _orders_of_changes(parts: Sequence[FusedPart], kv_heads: int) -> "Iterator[tuple[str, Order]]":
    """Yield (words, order) of every way to lay the joined changes onto rows in another order.

    An order has, for each row of the parts one after the other, the row of the joined changes that
    was added to it.
    """
    from aprfmt.causes.tensor.fused_layouts import layout_orders
    from aprfmt.causes.tensor.permutation import invert_permutation

    shapes = [part.merge.plain.shape for part in parts]
    sizes = [(part.name, int(np.prod(s[:-1]))) for part, s in zip(parts, shapes, strict=True)]
    names = [part.name for part in parts]
    outer = shapes[0][0] if len(shapes[0]) > 2 else 1
    whole = f"all {', then all '.join(names)}"
    what = f"the changes of {', '.join(names[:-1])} and {names[-1]} were joined"
    what += " in each expert" * (outer > 1)
    for text, order in layout_orders(sizes, kv_heads, outer):
        yield (
            f"{what} as {whole}, and added to rows that stand as {text}",
            (invert_permutation(order).astype(np.int64)),
        )
        yield f"{what} as {text}, and added to rows that stand as {whole}", order.astype(np.int64)
