"""Right and wrong packed copies: the rows of the table of hypotheses, and the order of faults."""

from collections.abc import Iterator

from aprfmt.causes.tensor import packed_codes, packed_parts, packed_scales
from aprfmt.causes.tensor.differing_pair import Unequal
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.packed_copies import copies, explanation
from aprfmt.errors import AprfmtError
from aprfmt.measure.bounds import fit
from aprfmt.measure.findings import Finding


def quantisation(case: Unequal) -> Iterator[Finding]:
    """Find that a side is the other quantized, and perhaps decoded again."""
    for copy in copies(case):
        if not copy.finite:
            continue
        after = fit(copy.x, copy.y, copy.lattice)
        if after.how:
            again = " and decoded again" if copy.again else ""
            says = f"{copy.whose} values are {copy.other}, quantized{again}"
            yield explanation(copy, "quantisation", (says, copy.scheme), after)


def faults(case: Unequal) -> Iterator[Finding]:
    """Find what is wrong with a packed copy."""
    for copy in copies(case):
        if copy.finite and fit(copy.x, copy.y, copy.lattice).how:
            continue
        try:
            yield from packed_parts.codes_alone(copy)
            yield from packed_parts.read_otherwise(copy)
        except AprfmtError:
            pass  # parts that cannot be read in another way either
        for find in (
            ()
            if not copy.finite
            else (
                packed_codes.zero_points,
                packed_codes.signs,
                packed_scales.scales,
                packed_codes.variants,
                packed_codes.order_of_inputs,
                packed_scales.minima,
                packed_scales.above_minima,
                packed_codes.own_zero_points,
                packed_scales.columns,
            )
        ):
            yield from find(copy)


def other_scales(case: Unequal) -> Iterator[Finding]:
    """Find scales that go with the right ones in no known way, once nothing else explains them."""
    for copy in copies(case):
        if copy.finite and not fit(copy.x, copy.y, copy.lattice).how:
            yield from packed_scales.scales(copy, related=False)


def order_of_outputs(case: Unequal) -> Iterator[Finding]:
    """Find codes in another order along the outputs, once no order of heads explains the rows."""
    for copy in copies(case):
        if copy.finite and not fit(copy.x, copy.y, copy.lattice).how:
            yield from packed_codes.order_of_outputs(copy)


PACKED = tuple(
    cause.name
    for module in (packed_parts, packed_codes, packed_scales)
    for cause in module.CAUSE_ROWS
)
HYPOTHESES = (
    PairHypothesis(
        PACKED, faults, 90, "a packed copy is judged in its own steps, before plain values"
    ),
    PairHypothesis(
        ("packing_order",), order_of_outputs, 200, "once no order of heads explains the rows"
    ),
    PairHypothesis(("quantisation",), quantisation, 270, "a bound in the copy's own steps"),
    PairHypothesis(
        ("quant_scale",), other_scales, 300, "scales that go with the right ones in no known way"
    ),
)
