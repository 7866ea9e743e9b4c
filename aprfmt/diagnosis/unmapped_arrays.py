"""The finding on arrays of two dumps that are no capture point: how B's values follow from A's.

A module of the same name gave both, so that their values can be compared though nothing is known of
how they are computed. A and B are the two dumps; A is the reference.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from aprfmt.base.sequences import join_moves
from aprfmt.causes.forward.relations import relation_text
from aprfmt.codecs.base import Array
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import Proof, cap_proof
from aprfmt.measure.unread_arrays import MOST_ROWS, UnequalArray

SHOWN = 3  # arrays and rows that a sentence names
BITS = 16  # in which two values agree that are within a run's rounding


class ArrayRelation(NamedTuple):
    """How B's values of an array follow from A's, in words, and the proof of it.

    `reordered`: they are A's rows in another order.
    """

    says: str
    proof: Proof | None
    reordered: bool = False


def unmapped_finding(arrays: Sequence[UnequalArray], alike: int) -> Finding | None:
    """Return the finding that arrays of the same name differ; None without any.

    `alike` is how many other arrays of the same names are equal to the byte.
    """
    if not arrays:
        return None
    related = [_relation(one) for one in arrays]
    said = [f"{one.name}: {how.says}" for one, how in zip(arrays, related, strict=True)]
    more = [f"{len(said) - SHOWN} more arrays"] if len(said) > SHOWN else []
    if alike:
        more.append(f"{alike} other array{'s are' if alike > 1 else ' is'} equal")
    moved = all(how.reordered for how in related)
    apart = [one.apart for one in arrays if one.apart is not None]
    proof = next((how.proof for how in related), None)
    proven = proof is not None and all(how.proof is not None for how in related)
    return Finding(
        "capture_rows" if moved else "",
        "; ".join([*said[:SHOWN], *more, "what computes them is not known here"]),
        "capture",
        "bug",
        tuple(one.name for one in arrays),
        moved,
        arrays[0].name,
        max(apart, default=None),
        0.0 if proven else None,
        proof=proof if proven else None,
    )


def _relation(one: UnequalArray) -> ArrayRelation:
    """Return how B's values of an array follow from A's, or that they are others."""
    order = one.order
    if order is not None:
        return ArrayRelation(*_order_of_rows(one, order), reordered=True)
    if one.apart is None:
        return next(_of_other_size(one), ArrayRelation(f"B has other values ({one.says})", None))
    relation = relation_text(one.mine, one.theirs, one.bound) if one.mine.ndim > 1 else ""
    if not relation:
        return ArrayRelation(f"B has other values ({one.says})", None)
    proof = Proof(one.mine.size, 1.0, len(one.mine), BITS)
    return ArrayRelation(f"B has A's: {relation}", cap_proof(proof, "explained"))


def _order_of_rows(one: UnequalArray, order: Array) -> tuple[str, Proof]:
    """Return the sentence that B has A's rows in another order, and its proof.

    `order` is the number of the row of B that each row of A is.
    """
    moved = np.flatnonzero(order != np.arange(len(order)))
    moves = list(zip(moved.tolist(), order[moved].tolist(), strict=True))
    each = one.mine.size // len(order)
    shown = join_moves(moves, SHOWN, lambda row: f"row {row}")
    says = f"B has A's {len(order)} rows in another order: {shown}"
    return says, Proof(moved.size * each, 1.0, moved.size, BITS)


def _of_other_size(one: UnequalArray) -> Iterator[ArrayRelation]:
    """Yield how the side with fewer rows follows from the other: by their means, or as a part."""
    if one.mine.ndim < 2 or one.mine.shape[1:] != one.theirs.shape[1:]:
        return
    x, y = (side.reshape(len(side), -1) for side in (one.mine, one.theirs))
    more, fewer, names = (x, y, ("B", "A")) if len(x) > len(y) else (y, x, ("A", "B"))
    if not len(fewer) or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return
    count = len(more) // len(fewer)
    proof = cap_proof(Proof(fewer.size, 1.0, len(fewer), BITS), "explained")
    if len(more) % len(fewer) == 0:
        means = more.reshape(len(fewer), count, -1).mean(1)
        if rel_l2(fewer, means) <= one.bound:
            says = f"each row of {names[0]} is the mean of {count} rows of {names[1]}, one by one"
            yield ArrayRelation(says, proof)
    at = _rows_among(fewer, more, one.bound)
    if at is not None:
        shown = ", ".join(str(row) for row in at[:SHOWN]) + (", ..." if len(at) > SHOWN else "")
        says = f"{names[0]} has only {len(fewer)} of {names[1]}'s {len(more)} rows: {shown}"
        yield ArrayRelation(says, proof)


def _rows_among(fewer: Array, more: Array, bound: float) -> Array | None:
    """Return which row of `more` each row of `fewer` is, int64 [rows]; None if one is none.

    Rows are equal whose relative L2 distance is within `bound`, and each is found once.
    """
    if len(more) > MOST_ROWS:
        return None
    limit = bound * np.maximum(np.linalg.norm(fewer, axis=1), 1e-30)
    at = []
    for row, near in zip(fewer, limit, strict=True):
        found = np.flatnonzero(np.linalg.norm(more - row, axis=1) <= near)
        if found.size != 1:
            return None
        at.append(int(found[0]))
    return np.array(at) if len({*at}) == len(at) else None
