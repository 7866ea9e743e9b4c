"""Tensors that one file stores joined and the other apart, found by values, not by names.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

Original checkpoints of diffusion models have q, k and v as one matrix, and a projection joined with
a MLP's; diffusers has each as a tensor. With an architecture, roles say which tensors belong
together. Without one, the values do.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import FEW, make_finding, prove_values
from aprfmt.errors import AprfmtError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "joined_tensors", "tensor", "same",
        "One file stores as one tensor what the other stores as several, and no reader is known "
        "that asks for either.",
        "Tensors that one file alone has are, one after the other, the rows of one that the other "
        "file alone has.",
        "All rows are equal, and none is left over.",
    ),
)  # fmt: skip

STEP = 1 << 20  # values compared together
MOST = 16  # tensors that are joined to one

# (encoding, columns, the bytes of the first row) -> keys of tensors that begin so.
Beginnings = Mapping[tuple[str, int, bytes], Sequence[str]]


def joined_tensor_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield one function that returns {tensor key: finding} of tensors joined on one side."""
    yield partial(_explain_joined_tensors, context, rows)


def _explain_joined_tensors(
    context: PairContext, rows: Mapping[str, TensorDiff]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of joined tensors, and of the tensors that are their rows."""
    made: dict[str, Finding] = {}
    for whole, parts in (("a", "b"), ("b", "a")):
        wholes, others = (_one_sided(context, rows, label) for label in (whole, parts))
        starts = _keys_by_first_row(context, parts, others)
        for key in wholes:
            try:
                found = _parts_of(context, whole, key, parts, starts)
            except AprfmtError as error:
                context.record_not_tried(("joined_tensors",), key, error)
                continue
            if found:
                finding = _joined_finding(context, whole, key, found)
                made |= dict.fromkeys((key, *found), finding)
    return made


def _one_sided(context: PairContext, rows: Mapping[str, TensorDiff], label: str) -> list[str]:
    """Return the keys of unexplained tensors that only one side has, "a" or "b"."""
    return [
        key
        for key, row in rows.items()
        if row.verdict == f"ONLY_IN_{label.upper()}"
        and not row.is_explained()
        and not context.has_role(label, key)
    ]


def _keys_by_first_row(context: PairContext, label: str, keys: Sequence[str]) -> Beginnings:
    """Return {(encoding, columns, bytes of the first row): tensor keys} of a side's tensors."""
    found: dict[tuple[str, int, bytes], list[str]] = {}
    for key in keys:
        reader = context.reader(label, key)
        if reader is None or not reader.size:
            continue
        found.setdefault(_row_name(reader, 0), []).append(key)
        reader.side.drop()
    return found


def _row_name(reader: RowReader, row: int) -> tuple[str, int, bytes]:
    """Return (encoding, columns, bytes of the values) of a row of a tensor."""
    values = np.ascontiguousarray(reader.take(np.array([row])))
    return reader.encoding, reader.columns, values.tobytes()


def _parts_of(
    context: PairContext, whole: str, key: str, parts: str, starts: Beginnings
) -> tuple[str, ...]:
    """Return the keys of the other side's tensors that together are this tensor's rows, in order.

    () where fewer than two are found, or where rows are left over.
    """
    reader = context.reader(whole, key)
    found: list[str] = []
    at = 0
    while reader is not None and at < reader.rows and len(found) < MOST:
        for other in starts.get(_row_name(reader, at), ()):
            part = context.reader(parts, other)
            if part is not None and other not in found and _holds_at(reader, part, at):
                found.append(other)
                at += part.rows
                break
        else:
            break
    complete = reader is not None and at == reader.rows and len(found) > 1
    return tuple(found) if complete else ()


def _holds_at(whole: RowReader, part: RowReader, at: int) -> bool:
    """Return whether all rows of `part` equal those of `whole` from row `at` on."""
    if at + part.rows > whole.rows or part.rows == whole.rows:
        return False
    step = max(1, STEP // max(1, part.columns))
    try:
        for start in range(0, part.rows, step):
            numbers = np.arange(start, min(part.rows, start + step))
            x: Array = whole.take(numbers + at)
            if not np.array_equal(x, part.take(numbers), equal_nan=True):
                return False
    finally:
        whole.side.drop()
        part.side.drop()
    return True


def _joined_finding(context: PairContext, whole: str, key: str, parts: Sequence[str]) -> Finding:
    """Return the finding that tensor `key` of side `whole` is the other side's `parts` joined.

    Its first sentence names the sides only, so that findings of all such tensors are joined.
    """
    side, other = whole.upper(), "B" if whole == "a" else "A"
    says = f"{side} stores as one tensor what {other} stores as several"
    line = f"{side}'s {key} is {other}'s {', '.join(parts)}, one after the other"
    reader = context.reader(whole, key)
    assert reader is not None
    values = reader.take(np.arange(min(reader.rows, FEW)))
    proof = prove_values(values, reader.size, len(parts), 0.0)
    return make_finding("joined_tensors", (key, *parts), (says, line), None, 0.0, proof)


HYPOTHESES = (
    JointHypothesis(
        ("joined_tensors",),
        joined_tensor_groups,
        443,
        "tensors of one side alone, once each is looked for under another name",
        one_sided=True,
    ),
)
