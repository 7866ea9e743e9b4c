"""Few differing values in many tensors, all within a sum's rounding: another arithmetic.

A single tensor of which a few values differ looks damaged. Where several others of the same file
differ by rounding alone, so does it: a merge in float64 and one in float32 part in a few values of
each tensor.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from aprfmt.causes.tensor.arithmetic import all_within_last_place
from aprfmt.causes.tensor.context import PairContext, find_in_pairs
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import accused_proof, make_finding
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import RowReader

SEVERAL = 2  # tensors that differ by rounding at most, from which the arithmetic is another one


def rounded_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield one function that returns {tensor key: finding} of tensors that only look damaged."""
    yield partial(_explain_rounded, context, pairs, rows)


def _explain_rounded(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of tensors called damaged that differ by a sum's rounding only.

    {} where fewer than SEVERAL tensors differ by rounding at most.
    """
    named = {key: row.explanation.cause for key, row in rows.items() if row.explanation is not None}
    rounded = sum(cause == "rounding" for cause in named.values())
    damaged = [key for key, cause in named.items() if cause == "bit_rot"]
    if rounded + len(damaged) < SEVERAL:
        return {}
    found = {}

    def find(pair: TensorPair) -> DifferingPair | None:
        """Return the pair of floats if all values are within one unit in the last place."""
        case = _pair_of_floats(context, pair)
        within = case is not None and all_within_last_place(case, largest=True)
        return case if within else None

    for key, case in find_in_pairs(context, pairs, damaged, ("rounding",), find):
        says = (
            "a few values are apart by at most one unit in the last place of their row's largest "
            "value, and other tensors by rounding alone: sums in another arithmetic"
        )
        found[key] = make_finding(
            "rounding", (key,), (says,), case.before.relative, None, accused_proof(1)
        )
    return found if rounded + len(found) >= SEVERAL else {}


def _pair_of_floats(context: PairContext, pair: TensorPair) -> DifferingPair | None:
    """Return a pair of float tensors of one shape and with finite values; None for any other."""
    assert pair.a is not None and pair.b is not None
    a, b = RowReader(pair.a), RowReader(pair.b)
    if a.encoding not in UNIT or b.encoding not in UNIT or a.shape != b.shape:
        return None
    case = DifferingPair(pair.key, a, b, context)
    return None if case.before.nonfinite is not None else case


HYPOTHESES = (
    JointHypothesis(
        ("rounding",),
        rounded_groups,
        398,
        "what single tensors cannot tell from damage",
        weak=("bit_rot",),
    ),
)
