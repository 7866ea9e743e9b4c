"""Faults of some matrices in a model that was trained further, where no rule gives the values.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

Training moved all other matrices a little, and one is as far away as another model's. A fault of
that matrix is told by what remains: with the fault made on A's matrix, B's is as near as a training
leaves the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.tensor import permutation
from aprfmt.causes.tensor.context import PairContext, find_in_pairs
from aprfmt.causes.tensor.proof import make_finding
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.findings import Finding
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

FAR = 4.0  # times what the others moved, at the median, that a matrix moved which has a fault
HALVED = 0.5  # share of its distance that a fault leaves of it at most
LEAST = 6  # differing matrices from which their median is what a training did
UNRELATED = 0.2  # correlation below which two matrices have nothing in common
RELATED = 0.9  # the same of all other matrices, where that is said
TURNED = 0.1  # distance of a factor from -1 within which it turns the sign alone
LARGEST = 1 << 24  # elements of a matrix whose rows are looked for one by one
COLUMNS = 512  # of a row, by which it is known
ROTATED = ("attn_q.", "attn_k.")  # begin the roles whose rows rope turns
_AFTER_TRAINING = "in addition to what was done to all the others"


@dataclass(frozen=True)
class MovedMatrix:
    """A differing matrix: its distance from A's over A's norm, and their correlation."""

    key: str
    size: float
    related: float


@dataclass(frozen=True)
class _Fault:
    """A fault of one matrix: its cause, its sentence, and A's matrix with the fault made."""

    cause: str
    says: str
    values: "Array"


def faults_of_trained(
    context: PairContext, pairs: Mapping[str, TensorPair], moved: Sequence[MovedMatrix]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of faults in matrices that moved much further than the others.

    `moved` are all differing matrices. One has a finding if a fault made on A's matrix takes at
    least half of the distance away and leaves no more than a few times what the others moved, or
    if it is unrelated to A's while all others are related. {} if fewer than LEAST differ.
    """
    if len(moved) < LEAST:
        return {}
    usual = float(np.median([one.size for one in moved]))
    far = [one for one in moved if one.size > FAR * usual]
    if not far or 2 * len(far) > len(moved):
        return {}
    near = [one.related for one in moved if one not in far]
    by_key = {one.key: one for one in far}

    def find(pair: TensorPair) -> Finding | None:
        """Return the finding on one matrix that moved too far, None without a fault."""
        return _fault_finding(context, pairs, by_key[pair.key], FAR * usual, min(near) > RELATED)

    causes = ("transpose", "scale", "row_offset")
    return dict(find_in_pairs(context, pairs, by_key, causes, find))


def _fault_finding(
    context: PairContext,
    pairs: Mapping[str, TensorPair],
    moved: MovedMatrix,
    limit: float,
    alone: bool,
) -> Finding | None:
    """Return the finding on one matrix that moved too far; None if no fault explains the distance.

    `limit` is the largest distance that training leaves. `alone`: all other matrices are related to
    A's, so that one which is not has a fault, whatever it is.
    """
    x, y = (_matrix(pairs[moved.key], label) for label in "ab")
    for fault in _faults(context, pairs, moved.key, x, y):
        size = norms.exact_norm(fault.values)
        left = norms.exact_norm(y - fault.values) / size if size > 0 else np.inf
        if left <= min(limit, HALVED * moved.size):
            says = f"{fault.says}, {_AFTER_TRAINING}"
            line = f"{moved.size:.3g} of the norm as stored, {left:.3g} with that"
            evidence = (says, line)
            return make_finding(
                fault.cause, (moved.key,), evidence, moved.size, left, None, confirmed=False
            )
    if not alone or abs(moved.related) > UNRELATED:
        return None
    says = f"B holds values that have nothing of A's, {_AFTER_TRAINING}"
    line = f"{moved.size:.3g} of the norm, correlation {moved.related:.2g}"
    return make_finding(
        "stale_tensor", (moved.key,), (says, line), moved.size, None, None, confirmed=False
    )


def _matrix(pair: TensorPair, label: str) -> "Array":
    """Return one side's matrix in float32 [rows, columns]; a stack has all its matrices' rows.

    `label` is "a" or "b".
    """
    view = pair.a if label == "a" else pair.b
    assert view is not None
    values = np.asarray(view.numpy(), np.float32)
    return values.reshape(-1, values.shape[-1])


def _faults(
    context: PairContext, pairs: Mapping[str, TensorPair], key: str, x: "Array", y: "Array"
) -> Iterator[_Fault]:
    """Yield the faults to try on a matrix, each with the values that A's matrix has with the fault.

    `x` is A's matrix and `y` B's, both [rows, columns].
    """
    factor = float(np.vdot(x, y) / (np.vdot(x, x) or 1.0))
    says = f"B's values are A's times {factor:.4g}"
    if abs(factor + 1) < TURNED:
        says = "the sign is turned"
    yield _Fault("scale", says, np.float32(factor) * x)
    own = pairs[key].a
    shape = () if own is None else own.shape
    if len(shape) == 2 and shape[0] == shape[1]:
        yield _Fault("transpose", "B's matrix is A's with rows and columns exchanged", x.T)
    if len(shape) > 2:
        return
    layer, _ = split_key(key)
    yield from _rope_orders(context, key, x)
    yield from _other_matrices(pairs, key, y)
    yield from _row_orders(x, y)
    if layer is not None:  # of a table of tokens, a training may change few rows
        yield from _lost_lines(x, y)


def _rope_orders(context: PairContext, key: str, x: "Array") -> Iterator[_Fault]:
    """Yield the two rope pairing faults of a q or k matrix: A's rows `x` in the other order.

    The first is split halves stored as adjacent pairs inside each head, the second the reverse.
    Yields nothing for other tensors, or if the model's heads do not divide the rows.
    """
    layer, role = split_key(key)
    if not role.startswith(ROTATED) or context.rotated_pairs(layer) in ("", "none"):
        return
    heads = int(context.hyper[0]["n_heads" if role.startswith("attn_q.") else "n_kv_heads"])
    if heads < 1 or len(x) % (2 * heads):
        return
    halves = permutation.adjacent_pair_order(len(x), heads)
    ways = ("split halves in A, adjacent pairs in B", "adjacent pairs in A, split halves in B")
    for way, order in zip(ways, (permutation.invert_permutation(halves), halves), strict=True):
        yield _Fault("rope_pairing", f"rows of each head: {way}", x[order])


def _other_matrices(pairs: Mapping[str, TensorPair], key: str, y: "Array") -> Iterator[_Fault]:
    """Yield a fault for each other matrix of A that B may have under `key` (its matrix is `y`).

    It must have the same shape and a high cosine with `y` over up to eight of the rows. The two
    are exchanged where B has the matrix of `key` under the other name as well.
    """
    some = np.linspace(0, len(y) - 1, min(len(y), 8)).astype(np.int64)
    for other, pair in pairs.items():
        if other == key or pair.a is None or pair.a.shape != y.shape:
            continue
        values = _matrix(pair, "a")
        if norms.cosine(values[some], y[some]) > UNRELATED:
            own = _matrix(pairs[key], "a")
            there = own if pair.b is None else _matrix(pair, "b")
            back = pair.b is not None and norms.cosine(own[some], there[some]) > UNRELATED
            cause = "swapped_tensors" if back else "copied_tensor"
            yield _Fault(cause, f"B's matrix is that of {other} in A", values)
        pair.drop()


def _row_orders(x: "Array", y: "Array") -> Iterator[_Fault]:
    """Yield at most one fault: B (`y`) has the rows of A (`x`) in another order.

    It is yielded with A's rows in that order, if the nearest rows of A are all different ones.
    """
    if x.size > LARGEST:
        return
    at = np.linspace(0, x.shape[1] - 1, min(x.shape[1], COLUMNS)).astype(np.int64)
    mine, theirs = (_unit_rows(values[:, at]) for values in (x, y))
    order = np.concatenate(
        [(theirs[i : i + 1024] @ mine.T).argmax(axis=1) for i in range(0, len(theirs), 1024)]
    )
    moved = order != np.arange(len(order))
    if moved.any() and len(np.unique(order)) == len(order):
        says = f"B has A's rows in another order, {int(moved.sum())} of {len(order)} moved"
        yield _Fault("row_offset", says, x[order])


def _lost_lines(x: "Array", y: "Array") -> Iterator[_Fault]:
    """Yield the faults that B (`y`) has zeros or unrelated values in some of A's rows or columns.

    These lines are those that moved much further than the median one. A fault's values are `x`
    with B's values in these lines.
    """
    for what, mine, theirs in (("rows", x, y), ("columns", x.T, y.T)):
        apart, own = (np.sqrt(np.einsum("ij,ij->i", v, v)) for v in (theirs - mine, mine))
        share = apart / np.where(own > 0, own, 1)
        far = np.flatnonzero(share > FAR * np.median(share))
        if not 0 < 2 * len(far) < len(share):
            continue
        lost = not theirs[far].any()
        if not lost and norms.cosine(mine[far], theirs[far]) > UNRELATED:
            continue
        holds = "0" if lost else "values that have nothing of A's"
        values = mine.copy()
        values[far] = theirs[far]
        says = f"B holds {holds} in {len(far)} of {len(share)} {what}, the first is {far[0]}"
        yield _Fault("stale_tensor", says, values if what == "rows" else values.T)


def _unit_rows(values: "Array") -> "Array":
    """Return the rows of a matrix divided by their L2 norms; a row of zeros stays zero."""
    size = np.sqrt(np.einsum("ij,ij->i", values, values))
    return values / np.where(size > 0, size, 1)[:, None]
