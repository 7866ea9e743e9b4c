"""Finds the row (or column) of B that equals each one of A, and names the rearrangement.

A *line* is a row or a column, whichever are compared. A and B are the two files that are compared;
a *side* is one of them, or its tensor.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.row_sources import MATCHED, nearest_rows
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

PROJECTIONS = 16  # numbers a row is known by
FOUND = 0.98  # share of rows that must be found
MOST_SHARED = 512  # lines of one nearest line that are told apart
MOSTLY = 0.8  # share of lines that show a named order; equal lines may stand in any
PARTS = 16  # parts of lines that may be dealt out in turn


@dataclass(frozen=True, slots=True)
class FoundLines:
    """Rows or columns of A found in B: line `index`[i] of A is line `at`[i] of B.

    `axis` is 0 for rows and 1 for columns; `count` is the number of all lines.
    """

    index: "Array"
    at: "Array"
    count: int
    axis: int

    @property
    def is_complete(self) -> bool:
        """Return whether every row or column of A was found in B."""
        return len(self.index) == self.count


def find_rows(case: DifferingPair) -> FoundLines | None:
    """Return which rows of A are found in B and where; None if too few of the sample are.

    Of many rows only those of the sample are searched. At least half of the sample must be found.
    """
    slack = 2 * case.slack() + 1e-6
    # Vectors by value; many equal rows by their bytes.
    if case.a.columns == 1:
        return _match_by_sorting(case)
    if case.b.rows != case.a.rows:
        return None
    if case.a.rows > MATCHED and case.slack() == 0 and case.a.row_bytes == case.b.row_bytes:
        return _match_by_hash(case)
    # Others by random projections: the sample's rows first.
    rng = np.random.default_rng(16)
    onto = rng.standard_normal((case.a.columns, PROJECTIONS))
    b = _project_rows(case.b, case, onto)
    first = nearest_rows(to_float64(case.sample_a) @ onto, b, slack, case.sample)
    if (first >= 0).mean() < 0.5:
        return None
    if case.a.rows > MATCHED:
        known = first >= 0
        return FoundLines(case.sample[known], first[known], case.a.rows, 0)
    # Then all rows.
    every = np.arange(case.a.rows)
    a = _project_rows(case.a, case, onto)
    at = one_to_one(a, b, nearest_rows(a, b, slack, every), slack)
    return FoundLines(every[at >= 0], at[at >= 0], case.a.rows, 0)


def one_to_one(a: "Array", b: "Array", at: "Array", slack: float) -> "Array":
    """Return `at` with each line of A given a line of B that no other has; int64, -1 for none.

    `a` and `b` are [lines, values]; `at` is the nearest line of B for each line of A, or -1. Lines
    of A that share a nearest line choose among that line and the lines of B that are the nearest of
    none: exact matches first, equal ones in order, none further than `slack` times the line's norm.
    If no line is shared, or too many are, `at` is returned unchanged.
    """
    times = np.bincount(at[at >= 0], minlength=len(b))
    shared = np.flatnonzero((at >= 0) & (times[np.maximum(at, 0)] > 1))
    if not 0 < len(shared) <= MOST_SHARED:
        return at
    free = np.flatnonzero(times != 1)
    away = np.array([np.abs(b[free] - a[line]).max(axis=1) for line in shared])
    limit = slack * np.linalg.norm(a[shared], axis=1)
    found = at.copy()
    found[shared] = -1
    order = np.lexsort((np.tile(free, len(shared)), np.repeat(shared, len(free)), away.reshape(-1)))
    taken: set[int] = set()
    for place in order.tolist():
        line, other = divmod(place, len(free))
        if away[line, other] > limit[line]:
            break
        if found[shared[line]] < 0 and int(free[other]) not in taken:
            found[shared[line]] = free[other]
            taken.add(int(free[other]))
    return found


def _match_by_hash(case: DifferingPair) -> FoundLines | None:
    """Return the numbers of A's rows in B, found by their bytes; None if most are not found.

    A row keeps its number if several rows are equal.
    """
    if case.a.row_bytes is None:
        return None
    known: dict[bytes, int] = {}
    for rows in case.windows(None):
        for number, row in zip(rows.tolist(), case.b.raw(rows), strict=True):
            known.setdefault(row.tobytes(), number)
    at = np.full(case.a.rows, -1)
    for rows in case.windows(None):
        mine, theirs = case.a.raw(rows), case.b.raw(rows)
        stays = (mine == theirs).all(axis=1)
        at[rows] = [
            number if same else known.get(row.tobytes(), -1)
            for number, same, row in zip(rows.tolist(), stays.tolist(), mine, strict=True)
        ]
        if rows[0] == 0 and (at[rows] >= 0).mean() < 0.5:
            return None
    every = np.arange(case.a.rows)
    return FoundLines(every[at >= 0], at[at >= 0], case.a.rows, 0)


def find_columns(case: DifferingPair) -> FoundLines | None:
    """Return which columns of A are found in B and where, compared in the sample's rows.

    None if fewer than half of 16 tried columns are found, or there are too many columns.
    """
    columns = case.a.columns
    if not 1 < columns <= MATCHED or case.b.columns != columns:
        return None
    a, b = (np.nan_to_num(to_float64(side)).T for side in (case.sample_a, case.sample_b))
    few = np.linspace(0, columns - 1, 16).astype(np.int64)
    slack = 2 * case.slack() + 1e-6
    if (nearest_rows(a[few], b, slack, few) >= 0).mean() < 0.5:
        return None
    every = np.arange(columns)
    at = one_to_one(a, b, nearest_rows(a, b, slack, every), slack)
    return FoundLines(every[at >= 0], at[at >= 0], columns, 1)


def _match_by_sorting(case: DifferingPair) -> FoundLines | None:
    """Return the indices of A's values in B's vector, found by sorting; None if the values differ.

    Equal values keep their index if possible. None too where most values have a neighbour within
    the rounding: sorted, any two such vectors are equal.
    """
    if case.a.size > MATCHED or case.a.size != case.b.size:
        return None
    every = np.arange(case.a.rows)
    a, b = (to_float64(side.take(every)).reshape(-1) for side in (case.a, case.b))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    at = np.full(a.size, -1)
    same = a == b
    at[same] = every[same]
    rest_a, rest_b = every[~same], every[~same]
    rest_a, rest_b = rest_a[np.argsort(a[rest_a])], rest_b[np.argsort(b[rest_b])]
    slack = 2 * case.slack() + 1e-12
    if not np.allclose(a[rest_a], b[rest_b], rtol=slack, atol=0):
        return None
    if case.slack() and not _mostly_apart(np.unique(a[rest_a]), slack):
        return None
    at[rest_a] = rest_b
    return FoundLines(every, at, a.size, 0)


def _mostly_apart(values: "Array", slack: float) -> bool:
    """Return whether at least half of ascending values have no neighbour within `slack`.

    `slack` is a relative distance.
    """
    near = np.diff(values) <= slack * np.maximum(np.abs(values[:-1]), np.abs(values[1:]))
    alone = ~(np.append(near, False) | np.append(False, near))
    return bool(2 * alone.sum() >= len(values))


def _project_rows(side: RowReader, case: DifferingPair, onto: "Array") -> "Array":
    """Return a side's rows times the matrix `onto` [columns, PROJECTIONS]: [rows, PROJECTIONS]."""
    return np.concatenate(
        [np.nan_to_num(to_float64(side.take(rows))) @ onto for rows in case.windows(None)]
    )


# --- kinds of rearrangement -------------------------------------------------------------------


def adjacent_pair_order(count: int, heads: int) -> "Array":
    """Return p [count] such that split-half row i is row p[i] in adjacent-pair order.

    The rows are those of `heads` heads, each reordered by itself.
    """
    size = count // heads
    inside = np.arange(size).reshape(size // 2, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * size + inside[None, :]).reshape(-1)


def dealt_orders(found: FoundLines, sizes: "Collection[int]") -> "Iterator[tuple[str, Array]]":
    """Yield (words, p) of interleavings that most found lines follow: line i of A is p[i] of B.

    An interleaving splits lines into k equal parts and takes one line of each part in turn, or
    undoes that. It is tried over all lines first, then inside blocks of each of `sizes`, such as
    the size of a head.
    """
    for size in dict.fromkeys((found.count, *sizes)):
        if size < 2 or found.count % size:
            continue
        blocks = np.arange(found.count).reshape(-1, size)
        of_block = "" if size == found.count else f" of each block of {size}"
        for parts in (k for k in range(2, min(PARTS, size // 2) + 1) if size % k == 0):
            each = size // parts
            p = blocks.reshape(-1, each, parts).swapaxes(1, 2).reshape(-1)
            dealt = (
                f"the {parts} parts of {each}{of_block} in {{0}} are dealt out in turn in {{1}}: "
                f"{parts}i of {{1}} is i of {{0}}, {parts}i + 1 is i + {each}"
            )
            for order, sides in ((p, "AB"), (invert_permutation(p), "BA")):
                if (order[found.index] == found.at).mean() >= MOSTLY:
                    yield dealt.format(*sides), order


def invert_permutation(p: "Array") -> "Array":
    """Return the permutation that undoes `p`."""
    found = np.empty_like(p)
    found[p] = np.arange(len(p))
    return found


def head_counts(case: DifferingPair, count: int) -> list[int]:
    """Return the possible numbers of heads in `count` rows, those of the model's sizes first."""
    told = case.sizes("n_heads", "n_kv_heads")
    sizes = [count // size for size in case.sizes("head_dim", "rope_dim") if count % size == 0]
    every = [h for h in range(1, count // 2 + 1) if count % (2 * h) == 0][:256]
    return [h for h in dict.fromkeys((*sizes, *told, *every)) if h and count % (2 * h) == 0]


def permutation_fits(found: FoundLines, p: "Array") -> bool:
    """Return whether permutation `p` (A[i] = B[p[i]]) agrees with every line that was found."""
    return bool((p[found.index] == found.at).all())


def rope_pair_permutations(
    case: DifferingPair, found: FoundLines
) -> "Iterator[tuple[int, str, Array]]":
    """Yield (heads, words, p) of rope pair orders that fit the found rows: A[i] = B[p[i]].

    Such an order has split halves on one side and adjacent pairs on the other.
    """
    for heads in head_counts(case, found.count):
        p = adjacent_pair_order(found.count, heads)
        if permutation_fits(found, p):
            yield heads, "split halves in A, adjacent pairs in B", p
        elif permutation_fits(found, invert_permutation(p)):
            yield heads, "adjacent pairs in A, split halves in B", invert_permutation(p)


def regrouped_orders(
    case: DifferingPair, found: FoundLines, right: int
) -> "Iterator[tuple[int, str, Array]]":
    """Yield (heads, words, p) of rope pair orders applied for one head count, undone for another.

    `right` is the true number of heads, `heads` the other; A[i] = B[p[i]].
    """
    if found.count % (2 * right):
        return
    own = adjacent_pair_order(found.count, right)
    for heads in head_counts(case, found.count):
        if heads == right:
            continue
        other = adjacent_pair_order(found.count, heads)
        first, second = invert_permutation(own)[other], invert_permutation(other)[own]
        forth = f"made for {heads} heads and undone for {right}"
        back = f"made for {right} heads and undone for {heads}"
        if np.array_equal(first, second):  # one order, by either mistake
            forth = f"{forth}, or {back}"
        for p, words in ((first, forth), (second, back)):
            if permutation_fits(found, p):
                yield heads, words, p


def block_permutation(found: FoundLines, size: int) -> "Array | None":
    """Return q such that block b of A is block q[b] of B; None if a block is not moved as a whole.

    Blocks have `size` lines.
    """
    if size < 1 or found.count % size or found.count == size:
        return None
    if not bool((found.at % size == found.index % size).all()):
        return None
    q = np.full(found.count // size, -1, np.int64)
    q[found.index // size] = found.at // size
    if (q < 0).any() or not bool((q[found.index // size] == found.at // size).all()):
        return None
    return q if len(set(q.tolist())) == len(q) else None


def expand_blocks(q: "Array", size: int) -> "Array":
    """Return the permutation of single rows that moves whole blocks of `size` rows."""
    return (q[:, None] * size + np.arange(size)[None, :]).reshape(-1)


def constant_shift(found: FoundLines) -> int | None:
    """Return k if every line found is k lines later in B, with wrap-around; else None.

    A negative k is a shift to earlier lines.
    """
    away = np.unique((found.at - found.index) % found.count)
    if len(away) != 1 or away[0] == 0:
        return None
    k = int(away[0])
    return k if k <= found.count // 2 else k - found.count
