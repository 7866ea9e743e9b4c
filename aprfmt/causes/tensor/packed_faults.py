"""The hypotheses on quantized copies, right and wrong, and the order in which they are tried.

A and B are the two files that are compared; a *side* is one of them, or its tensor.
"""

from collections.abc import Iterator

from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.packed_copies import explain_copy, packed_copies
from aprfmt.errors import AprfmtError
from aprfmt.measure.findings import Finding


def explain_quantization(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding of each side that is the other quantized, and perhaps decoded again."""
    for copy in packed_copies(case):
        if not copy.finite:
            continue
        after = copy.fit()
        if after.how:
            again = " and decoded again" if copy.again else ""
            says = f"{copy.whose} values are {copy.other}, quantized{again}"
            yield explain_copy(copy, "quantisation", (says, copy.scheme), after)


def explain_packed_faults(case: DifferingPair) -> Iterator[Finding]:
    """Yield the findings on each side that is a faulty quantized copy of the other."""
    both = None not in (case.a.side.lattice, case.b.side.lattice)
    if both:  # which side is wrong, if one shows
        from aprfmt.causes.tensor.packed_codes import explain_saturation

        for copy in packed_copies(case):
            if copy.finite:
                yield from explain_saturation(copy)
    for copy in packed_copies(case):
        fit = copy.fit() if copy.finite else None
        if fit is not None and fit.how and not fit.in_part:
            return  # a right copy: nothing is wrong with either side
        from aprfmt.causes.tensor import packed_codes, packed_parts, packed_scales

        if fit is not None and fit.how:  # whole columns may have the scales of another group
            yield from packed_scales.explain_input_scales(copy)
            continue
        try:
            yield from packed_parts.explain_part_reading(copy)
        except AprfmtError:
            pass  # parts that cannot be read in another way either
        for find in (
            ()
            if not copy.finite
            else (
                packed_codes.explain_cut_codes,
                packed_codes.explain_needless_cuts,
                *(() if both else (packed_codes.explain_saturation,)),
                packed_codes.explain_zero_points,
                packed_codes.explain_signs,
                packed_scales.explain_scales,
                packed_codes.explain_fp8_variant,
                packed_codes.explain_input_order,
                packed_codes.explain_copied_groups,
                packed_scales.explain_minima,
                packed_scales.explain_scales_above_minima,
                packed_codes.explain_group_zero_points,
                packed_scales.explain_input_scales,
            )
        ):
            yield from find(copy)


def explain_unrelated_scales(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding of a copy's wrong scales that relate to the right ones in no known way."""
    for copy in packed_copies(case):
        if copy.finite and not copy.fit().how:
            from aprfmt.causes.tensor.packed_scales import explain_scales

            yield from explain_scales(copy, related=False)


def explain_output_order(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding of a wrong packed copy whose codes are reordered along the outputs."""
    for copy in packed_copies(case):
        if copy.finite and not copy.fit().how:
            from aprfmt.causes.tensor.packed_codes import explain_output_order as explain_order

            yield from explain_order(copy)


HYPOTHESES = (
    PairHypothesis(
        (
            "scales_missing",
            "scales_shape",
            "scales_invalid",
            "packing_claim",
            "zero_point",
            "packing_order",
            "group_index",
            "clipped_codes",
            "fp8_variant",
            "quant_scale",
            "quant_min",
            "nested_offset",
        ),
        explain_packed_faults,
        90,
        "a packed copy is judged in its own steps, before plain values",
    ),
    PairHypothesis(
        ("packing_order",), explain_output_order, 200, "once no order of heads explains the rows"
    ),
    PairHypothesis(("quantisation",), explain_quantization, 270, "a bound in the copy's own steps"),
    PairHypothesis(
        ("quant_scale",),
        explain_unrelated_scales,
        300,
        "scales that go with the right ones in no known way",
    ),
)
