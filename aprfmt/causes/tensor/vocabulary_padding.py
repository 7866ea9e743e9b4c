"""Padding rows after the vocabulary in an embedding or head, which one side has longer.

A and B are the two files that are compared; a *side* is one of them, or its tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import FEW, make_finding, prove_values
from aprfmt.causes.tensor.token_tables import TABLES, claims_more_rows, vocabulary_size
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import pair_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms
from aprfmt.tensors.view import View

CAUSE_ROWS = (
    Cause(
        "padded_vocabulary", "tensor", "same",
        "The embedding and the head have rows after the vocabulary, which no token id reaches.",
        "The first rows are equal, and the tokenizer has no ids for the others.",
        "The rows of the shorter side are equal, and so are their logits.",
        explains=("vocab_size",),
    ),
)  # fmt: skip

STEP = 1 << 20  # values compared at a time


def padded_tables(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield a function that explains the embedding and head, where their shapes differ."""
    chosen = [pairs[key] for key in TABLES if key in pairs and rows[key].verdict == "SHAPE_DIFFERS"]
    yield partial(_explain_tables, context, [pair for pair in chosen if pair.a and pair.b])


def _explain_tables(context: PairContext, chosen: Sequence[TensorPair]) -> dict[str, Finding]:
    """Return {tensor key: finding} of the tables among these that are padded on one side."""
    found: dict[str, Finding] = {}
    for pair in chosen:
        assert pair.a is not None and pair.b is not None
        try:
            explanation = _explain_padding(context, pair.key, pair.a, pair.b)
        finally:
            pair.drop()
        if explanation is not None:
            found[pair.key] = explanation
    return found


def _explain_padding(context: PairContext, key: str, a: View, b: View) -> Finding | None:
    """Return the finding of padding rows; None if common rows differ or ids reach the others."""
    first, second = RowReader(a), RowReader(b)
    if first.columns != second.columns or first.rows == second.rows:
        return None
    few, label = min((first.rows, "B"), (second.rows, "A"))
    slack = pair_noise(first.encoding, second.encoding)
    step = max(1, STEP // first.columns)
    worst = 0.0
    # The rows that both have must be equal.
    for start in range(0, few, step):
        rows = np.arange(start, min(few, start + step))
        x, y = to_float64(first.take(rows)), to_float64(second.take(rows))
        norm = float(max(norms.exact_norm(x), norms.exact_norm(y)))
        apart = norms.exact_norm(x - y) / norm if norm else 0.0
        if apart > slack or (not slack and not np.array_equal(x, y)):
            return None
        worst = max(worst, apart)
    # The tokenizer must have no ids for the other rows.
    known = [
        n for n in (vocabulary_size(context.models[side]) for side in ("a", "b")) if n is not None
    ]
    if known and max(known) > few:
        return None  # ids of the longer vocabulary reach the other rows
    if not known and claims_more_rows(context.models["b" if label == "A" else "a"]):
        return None  # the shorter side's own key says that the other rows were there
    large = second if label == "B" else first
    more = large.rows - few
    says = f"{label} has {more} more rows after the {few} that both have and that are equal"
    ids = f"the tokenizer has {max(known)} ids" if known else "neither side has a tokenizer"
    line = f"{ids}; the rows after them are {_padding_content(large, few)}"
    both = first.take(np.arange(min(few, FEW)))
    proof = prove_values(both, few * first.columns, 0, slack)
    return make_finding("padded_vocabulary", (key,), (says, line), None, worst, proof)


def _padding_content(side: RowReader, start: int) -> str:
    """Return in words what the rows from `start` on are: zeros, one repeated row, or others."""
    values = to_float64(side.take(np.arange(start, side.rows)))
    if not values.any():
        return "zeros"
    if bool((values == values[0]).all()):
        return "one row again and again"
    return "of their own values, which make logits of ids that stand for nothing"


HYPOTHESES = (
    JointHypothesis(
        ("padded_vocabulary",),
        padded_tables,
        440,
        "rows of tables alone, whatever explains the layers",
        shapes=True,
    ),
)
