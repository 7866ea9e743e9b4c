"""The orders in which writers store fused tensors: by part, head, group, row or shard.

A *place* is the number of a row in B's fused tensor.

A *part* is the rows of one projection in the fused tensor: q, k or v, gate or up. An order has, for
each row of the fused tensor, its number in the canonical order: all of the first part, then all of
the second, and so on.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.tensor.permutation import invert_permutation
from aprfmt.causes.tensor.row_sources import source_runs

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

SHARDS = (2, 4, 8, 16, 3, 5, 6, 7)  # devices that tensor parallelism cuts a matrix for


def layout_words(
    at: "Array", parts: Sequence[tuple[str, int]], kv_heads: int, outer: int = 1
) -> str:
    """Return in words how the rows of a fused tensor are ordered; "" if the order is not known.

    `at` is A's row at each place of B. `parts` are (name, rows) of the fused tensors; `outer`
    stacks (experts) repeat them. `kv_heads` groups q, k and v, 0 for other parts.
    """
    for text, order in worded_orders(parts, kv_heads, outer):
        if np.array_equal(at, order):
            return text
    names = " ".join(name for name, _ in parts)
    return _rotation_words(at, names) or _block_order_words(at, names)


def worded_orders(
    parts: Sequence[tuple[str, int]], kv_heads: int, outer: int = 1
) -> "Iterator[tuple[str, Array]]":
    """Yield (words, order) of every known layout and its inverse: A's row at each place of B.

    `parts` are (name, rows) of the fused tensors; `outer` stacks (experts) repeat them.
    `kv_heads` groups q, k and v, 0 for other parts.
    """
    names = " ".join(name for name, _ in parts)
    whole = f"all {', then all '.join(name for name, _ in parts)}"
    stacked = outer > 1
    head = f"[{names}] of each expert" if stacked else f"[{names}]"
    for text, order in layout_orders(parts, kv_heads, outer):
        yield f"{head}: {whole} in A became {text} in B", order
        yield f"{head}: {text} in A became {whole} in B", invert_permutation(order)


def layout_orders(
    parts: Sequence[tuple[str, int]], kv_heads: int, outer: int = 1
) -> "Iterator[tuple[str, Array]]":
    """Yield (words, order) of every known layout, inside each of `outer` stacked tensors.

    An order has, at each place, the row's number in the layout of one part after the other.
    `parts` are (name, rows in all stacks). `kv_heads` groups q, k and v, 0 for other parts.
    """
    if outer > 1:
        return _stacked_orders(parts, kv_heads, outer)
    return fused_orders(parts, kv_heads)


def fused_orders(parts: Sequence[tuple[str, int]], kv_heads: int) -> "Iterator[tuple[str, Array]]":
    """Yield (words, order) of every known layout except one part after the other.

    `order` has, at each place, the row's number in the layout of one part after the other.
    `parts` are (name, rows), `kv_heads` is 0 or the number of groups to cut by.
    """
    sizes = [size for _, size in parts]
    starts = np.cumsum([0, *sizes]).tolist()
    every = [np.arange(starts[i], starts[i + 1]) for i in range(len(parts))]
    # Whole parts in another order.
    for chosen in permutations(range(len(parts))):
        if list(chosen) != sorted(chosen):
            words = ", then ".join(f"all {parts[i][0]}" for i in chosen)
            yield words, np.concatenate([every[i] for i in chosen])
    # Parts that alternate row by row.
    if len(set(sizes)) == 1:
        names = " ".join(name for name, _ in parts)
        yield f"[{names}] row by row", np.stack(every, 1).reshape(-1)
    # Parts cut into equal units, by head, by group or by shard.
    units = [(kv_heads, "per KV group", "per head")] if kv_heads > 1 else []
    units += [(count, f"per part of {count} (tensor parallel)", "") for count in SHARDS]
    for count, grouped, single in units:
        if any(size % count for size in sizes):
            continue
        even = len(set(sizes)) == 1 and single
        for chosen in permutations(range(len(parts))):
            names = " ".join(parts[i][0] for i in chosen)
            cut = [every[i].reshape(count, -1) for i in chosen]
            yield f"[{names}] {single if even else grouped}", np.concatenate(cut, 1).reshape(-1)


def _stacked_orders(
    parts: Sequence[tuple[str, int]], kv_heads: int, outer: int
) -> "Iterator[tuple[str, Array]]":
    """Yield (words, order) of layouts inside each of `outer` stacked tensors (experts).

    Rows are numbered part by part, over all stacked tensors. `parts` are (name, rows of all of
    them).
    """
    inner = [(name, size // outer) for name, size in parts]
    count = sum(size for _, size in inner)
    # canonical number of row r of the fused expert e
    starts = np.cumsum([0, *(size for _, size in parts)]).tolist()
    rows = np.concatenate(
        [
            starts[i] + np.arange(outer)[:, None] * size + np.arange(size)
            for i, (_, size) in enumerate(inner)
        ],
        axis=1,
    )
    places = invert_permutation(rows.reshape(-1))
    for text, order in fused_orders(inner, kv_heads):
        moved = rows[:, order].reshape(outer * count)
        yield text, moved[places]


def _rotation_words(at: "Array", names: str) -> str:
    """Return in words by how much the rows `at` are rotated; "" if they are not.

    `names` are the fused parts, for the sentence.
    """
    n = len(at)
    by = int(at[0])
    if by and np.array_equal(at, (np.arange(n) + by) % n):
        return f"[{names}]: {_rotation_text(by, n)}"
    return ""


def _rotation_text(by: int, count: int) -> str:
    """Return a rotation of `count` rows in words; `by` is the number of the first row."""
    by = by if by <= count // 2 else by - count
    half = "; the halves are exchanged" if 2 * abs(by) == count else ""
    return f"rotated by {by}: row i of B is row i{by:+d} of A, {abs(by)} come round{half}"


def _block_order_words(at: "Array", names: str) -> str:
    """Return in words the order of whole blocks of rows; "" if single rows are scattered.

    `at` is A's row at each place of B, `names` the fused parts for the sentence.
    """
    size = 0
    for first, source, length in source_runs(at):
        size = gcd(size, gcd(gcd(first, source), length))
    if size < 2:
        return ""
    order = (at[::size] // size).tolist()
    shown = ", ".join(map(str, order[:24])) + (" ..." if len(order) > 24 else "")
    return f"[{names}]: blocks of {size} rows in another order, by numbers of A: {shown}"
