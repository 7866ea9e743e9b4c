"""Codes of a packed weight whose rows moved, while their scales did not.

A *part* is one of the stored tensors of a packed weight: codes, scales, zero points. Both files
pack the weight alike. A reader that puts the rows of a fused weight in another order has to move
the scales of these rows as well.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.sequences import join_moves
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import make_finding, prove_bytes
from aprfmt.measure.findings import Finding
from aprfmt.tensors.runs import are_same_tensor

if TYPE_CHECKING:
    from aprfmt.base.protocols import LazyTensor
    from aprfmt.codecs.base import Array

MOST = 1 << 30  # bytes of codes that are looked at
SHOWN = 4  # moved rows that a sentence names


def explain_moved_codes(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that B's codes are A's in another order of rows or columns, alone.

    All other parts are equal to the byte, and one of them has more than one number, so that it
    should have moved too.
    """
    a, b = case.a.side, case.b.side
    if len(a.stored) != 1 or len(b.stored) != 1 or not a.stored[0].parts:
        return
    mine, theirs = a.stored[0].parts, b.stored[0].parts
    if mine.keys() != theirs.keys() or a.encoding != b.encoding or "" not in mine:
        return
    rest = [name for name in mine if name]
    codes = mine[""], theirs[""]
    if codes[0].info.shape != codes[1].info.shape or codes[0].info.nbytes > MOST:
        return
    if codes[0].info.nbytes != codes[1].info.nbytes or len(codes[0].info.shape) < 2:
        return
    if any(not are_same_tensor(mine[name], theirs[name]) for name in rest):
        return
    if not any(prod(mine[name].info.shape) > 1 for name in rest):
        return
    for axis, what in ((0, "rows"), (1, "columns")):
        x, y = (_lines(part, axis) for part in codes)
        order = _order_of_lines(x, y)
        if order is None:
            continue
        moved = np.flatnonzero(order != np.arange(len(order)))
        moves = list(zip(moved.tolist(), order[moved].tolist(), strict=True))
        says = (
            f"B's codes are A's with their {what} in another order, and their other parts "
            f"({', '.join(rest)}) are in A's order: they did not move with the codes",
            f"{len(moved)} of {len(order)} {what} moved: {join_moves(moves, SHOWN)}",
        )
        proof = prove_bytes(x[0].tobytes(), moved.size * x.shape[1], moved.size)
        yield make_finding("row_offset", (case.key,), says, case.before.relative, 0.0, proof)
        return


def _lines(part: "LazyTensor", axis: int) -> "Array":
    """Return the bytes of the rows (axis 0) or columns (axis 1) of a part, uint8 [lines, bytes].

    Axes after the first two belong to an element.
    """
    rows, columns = part.info.shape[:2]
    data = np.frombuffer(part.raw(), np.uint8)
    if not rows or not columns or data.size % (rows * columns):
        return np.zeros((0, 0), np.uint8)
    held = data.reshape(rows, columns, -1)
    return np.ascontiguousarray(np.moveaxis(held, axis, 0)).reshape(held.shape[axis], -1)


def _order_of_lines(x: "Array", y: "Array") -> "Array | None":
    """Return the number of the line of `y` that each line of `x` is, int64 [lines].

    Equal lines are taken in their order. None unless each line of both is used once, and some
    line moved.
    """
    if x.shape != y.shape or len(x) < 2:
        return None
    places: dict[bytes, deque[int]] = defaultdict(deque)
    for at, line in enumerate(y):
        places[_digest(line)].append(at)
    order = []
    for line in x:
        found = places.get(_digest(line))
        if not found or not np.array_equal(line, y[found[0]]):
            return None
        order.append(found.popleft())
    made = np.array(order)
    return made if (made != np.arange(len(made))).any() else None


def _digest(line: "Array") -> bytes:
    """Return 16 bytes that tell a line's bytes from others, so that no copy of it is kept."""
    return blake2b(line.tobytes(), digest_size=16).digest()


HYPOTHESES = (
    PairHypothesis(
        ("row_offset",),
        explain_moved_codes,
        202,
        "any order of rows of codes, once no order of words fits",
        facts=("companion tensors",),
    ),
)
