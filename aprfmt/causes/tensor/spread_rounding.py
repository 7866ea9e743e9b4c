"""Few values in many tensors, each within the rounding of a sum: another arithmetic, no damage.

A single tensor of which a few values differ looks damaged. Where several others of the same file
differ by rounding alone, so does it: a merge in float64 and one in float32 part in a few values of
each tensor.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from aprfmt.causes.tensor.arithmetic import all_equal_within
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import make_finding, within_accused
from aprfmt.errors import AprfmtError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import RowReader

SEVERAL = 4  # tensors that differ by rounding at most, from which the arithmetic is another one
ROWS = 512  # that are compared at once


def rounded_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield a function that returns {tensor key: finding} of tensors that only look damaged."""
    named = {"rounding": 0, "bit_rot": 0}
    for row in rows.values():
        if row.explanation is not None and row.explanation.cause in named:
            named[row.explanation.cause] += 1
    if named["bit_rot"] and sum(named.values()) >= SEVERAL:
        yield partial(_explain, pairs, rows)


def _explain(pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]) -> dict[str, Finding]:
    """Return {tensor key: finding} of those called damaged that are within rounding of a sum.

    {} where fewer than SEVERAL tensors differ by rounding at most.
    """
    found = {}
    for key, row in rows.items():
        if row.explanation is None or row.explanation.cause != "bit_rot":
            continue
        pair = pairs[key]
        try:
            if pair.a is None or pair.b is None or not _is_within(pair):
                continue
        except AprfmtError:
            continue
        finally:
            pair.drop()
        says = (
            "a few values are apart by at most one unit in the last place of their row's largest "
            "value, and other tensors by rounding alone: sums in another arithmetic"
        )
        before = None if row.stats is None else row.stats.rel_l2
        found[key] = make_finding("rounding", (key,), (says,), before, None, within_accused(1))
    rounded = sum(
        row.explanation is not None and row.explanation.cause == "rounding" for row in rows.values()
    )
    return found if rounded + len(found) >= SEVERAL else {}


def _is_within(pair: TensorPair) -> bool:
    """Return whether no two values of a pair are further apart than a unit of their row's largest.

    False for other types than floats, and for values that are not finite.
    """
    assert pair.a is not None and pair.b is not None
    a, b = RowReader(pair.a), RowReader(pair.b)
    if a.encoding not in UNIT or b.encoding not in UNIT or a.shape != b.shape:
        return False
    unit = 2 * max(UNIT[a.encoding], UNIT[b.encoding])
    for start in range(0, a.rows, ROWS):
        index = np.arange(start, min(start + ROWS, a.rows))
        x, y = to_float64(a.take(index)), to_float64(b.take(index))
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return False
        if not all_equal_within(x, y, unit, largest=True):
            return False
    return True


HYPOTHESES = (
    JointHypothesis(
        ("rounding",),
        rounded_groups,
        398,
        "what single tensors cannot tell from damage",
        weak=("bit_rot",),
    ),
)
