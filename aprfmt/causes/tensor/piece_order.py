"""Pieces of a flattened matrix in another order, which need not begin or end with a row.

A partitioned run keeps a tensor's values as pieces of a flat vector, one a rank. Joined in the
order of their files' names ("rank_10" before "rank_2") they are all there, at other places.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.arithmetic import store_as
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import make_finding, prove_bytes
from aprfmt.causes.tensor.stored_bytes import ANCHOR, STORED, byte_layouts, copy_bytes
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "piece_order", "tensor", "bug",
        "Pieces of a tensor, cut where no row ends, are joined in another order, such as ranks' "
        "parts of flat parameters (ZeRO, FSDP) in the order of their files' names.",
        "Long runs of the other side's values, all there, at other places.",
        "The runs, put back, give every value of the other side, bit for bit.",
    ),
)  # fmt: skip

MOST = 256  # runs that a tensor is taken apart into
VARIED = 8  # different bytes that a run begins with at least: zeros are found anywhere
SHOWN = 4  # runs that are named
Run = tuple[int, int, int]  # first byte in B, first byte in A, number of bytes


def explain_piece_order(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that B's values are runs of A's values in another order."""
    if case.a.columns == 1 or case.a.shape != case.b.shape or case.numbers is not None:
        return
    for first, second, size in _comparable_bytes(case):
        runs = _runs_in_other_order(first, second, size)
        row = size * case.a.columns
        if not runs or all(start % row == 0 for run in runs for start in run[:2]):
            continue  # whole rows in another order are a cause of their own
        if _is_order_of_columns(runs, size, case.a.rows, case.a.columns):
            continue  # and so are columns: one order says more than many runs
        text = (
            "B has A's values in runs that stand in another order, as ranks' pieces of flat "
            "parameters joined in the order of their files' names"
        )
        shown = ", ".join(
            f"{at // size} to {(at + many) // size - 1}" for _, at, many in runs[:SHOWN]
        )
        more = f", ... {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
        told = f"{len(runs)} runs: B begins with A's values {shown}{more}"
        proof = prove_bytes(second[:STORED], case.before.changed, 2 * len(runs))
        yield make_finding("piece_order", (case.key,), (text, told), case.before.relative, 0, proof)
        return


def _is_order_of_columns(runs: Sequence[Run], size: int, rows: int, columns: int) -> bool:
    """Return whether the runs put the columns of every row in one and the same other order.

    `size` is the number of bytes of a value; the tensor has `rows` rows of `columns` values.
    """
    source = np.concatenate(
        [np.arange(place, place + many, size) // size for _, place, many in runs]
    )
    if source.size != rows * columns:
        return False
    order = source.reshape(rows, columns) - columns * np.arange(rows)[:, None]
    return bool((order == order[0]).all() and order.min() >= 0 and order.max() < columns)


def _comparable_bytes(case: DifferingPair) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield (A's bytes, B's bytes, bytes of a value) to be compared; nothing for large tensors.

    For two plain float types both are converted to the coarser one.
    """
    a, b = case.a, case.b
    size = encoding_row(b.encoding).type_size
    if a.encoding == b.encoding and encoding_row(b.encoding).block_size == 1:
        if not 0 < len(b.bytes) <= STORED:
            return
        for laid, stored, _ in byte_layouts(case):
            if len(laid) == len(stored):
                yield copy_bytes(laid, 0, len(laid)), copy_bytes(stored, 0, len(stored)), size
    elif a.encoding in UNIT and b.encoding in UNIT and 4 * a.size <= STORED:
        coarser = store_as(max(a.encoding, b.encoding, key=lambda name: UNIT[name]))
        rows = np.arange(a.rows)
        mine, theirs = (
            np.ascontiguousarray(coarser(side.take(rows)), np.float32).tobytes() for side in (a, b)
        )
        yield mine, theirs, 4


def _runs_in_other_order(a: bytes, b: bytes, size: int) -> list[Run]:
    """Return the runs of A's bytes that B consists of, in B's order; [] where it does not.

    A run is (offset in B, offset in A, length), all in bytes.
    Every byte of A must be in one run, each run longer than ANCHOR, at most MOST of them and at
    least two. `size` is the number of bytes of a value: runs begin at whole values.
    """
    x, y = (np.frombuffer(side, f"u{size}") for side in (a, b))
    found: list[Run] = []
    at = 0
    while at < len(b):
        anchor = b[at : at + ANCHOR]
        if len(found) == MOST or len(anchor) < ANCHOR or len(set(anchor)) < VARIED:
            return []
        place = _find_aligned(a, anchor, size)
        if place is None:
            return []
        back = _equal_values(x[: place // size][::-1], y[: at // size][::-1])
        if found:  # what the run before took beyond its end, by chance
            back = min(back, found[-1][2] // size)
            found[-1] = (*found[-1][:2], found[-1][2] - back * size)
        else:
            back = 0
        many = back + _equal_values(x[place // size :], y[at // size :])
        found.append((at - back * size, place - back * size, many * size))
        at += (many - back) * size
    ends = 0
    for _, place, many in sorted(found, key=lambda run: run[1]):
        if place != ends or many <= ANCHOR:
            return []
        ends += many
    return found if len(found) > 1 and ends == len(a) else []


def _find_aligned(data: bytes, anchor: bytes, size: int) -> int | None:
    """Return the first offset of `anchor` in `data` that is a multiple of `size`, in bytes.

    `size` is that of one value. None where the anchor is at no such offset.
    """
    place = data.find(anchor)
    while place >= 0 and place % size:
        place = data.find(anchor, place + 1)
    return None if place < 0 else place


def _equal_values(x: "Array", y: "Array") -> int:
    """Return how many leading values of two arrays are equal, bit for bit."""
    most, done, step = min(len(x), len(y)), 0, 64
    while done < most:
        stop = min(most, done + step)
        apart = np.flatnonzero(x[done:stop] != y[done:stop])
        if apart.size:
            return done + int(apart[0])
        done, step = stop, min(4 * step, 1 << 20)
    return done


HYPOTHESES = (
    PairHypothesis(
        ("piece_order",),
        explain_piece_order,
        79,
        "all values in a few runs: less is left open than by a shift of some of them",
    ),
)
