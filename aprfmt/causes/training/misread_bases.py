"""A backward pass that decodes an adapter's base of 4 bits otherwise than the forward does."""

from collections.abc import Iterator
from typing import get_args

from aprfmt.causes.row import Cause
from aprfmt.causes.training.adapter_passes import distance_of_pass, pairs_of
from aprfmt.causes.training.backward_case import (
    BackwardCase,
    BackwardGuess,
    BackwardHypothesis,
    first_place,
)
from aprfmt.inference.gradients.changes import BackwardChange, Misreading

CAUSE_ROWS = (
    Cause(
        "backward_dequantization",
        "gradient",
        "bug",
        "The backward through a frozen base of 4 bits decodes its weights otherwise than the "
        "forward: with other scales, by the other table of values, or with codes exchanged.",
        "Gradients of an adapter are right down to the first product with the base, and wrong from "
        "there on.",
        "The batch's gradients, computed with the base decoded so in the backward alone, give "
        "every parameter's.",
    ),
)
SAYS = {
    "scales without their offset": "without the offset of its scales (double quantization)",
    "scales of the block before": "with the scale of the block before each",
    "scales of the block after": "with the scale of the block after each",
    "one scale for all blocks": "with the largest scale for all blocks",
    "codes of the other encoding": "by the values of {other}",
    "codes of a byte exchanged": "with the two codes of each byte exchanged",
}
LEFT = 0.01  # of a difference: what an offset leaves that is known to 1e-4 of it


def guess_misread_base(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield the guess of the wrong decoding of the base that gives an adapter's gradients.

    Of the decodings that are tried, it is the one that leaves least of the difference. It is
    yielded twice: to be confirmed by the gradients, then as explained, for a rest that rounding
    does not give.
    """
    if case.base is None or not pairs_of(case) or case.missing or not case.wrong:
        return
    unlike = sorted(case.wrong | case.open)
    there = distance_of_pass(case, unlike, None)
    left = {
        way: distance_of_pass(case, unlike, BackwardChange(misread=way))
        for way in get_args(Misreading)
    }
    best = min(left, key=lambda way: left[way])
    if left[best] > LEFT * there:
        return
    other = "FP4" if case.base.encoding == "NF4" else "NF4"
    says = (
        f"the backward decodes the {case.base.encoding} base {SAYS[best].format(other=other)}; the "
        "forward decodes it rightly"
    )
    yield BackwardGuess("backward_dequantization", says, BackwardChange(misread=best))
    says += f"; backward from the loss it begins {first_place(unlike, case.right)}"
    yield BackwardGuess("backward_dequantization", says, most="explained")


HYPOTHESES = (
    BackwardHypothesis(
        ("backward_dequantization",), guess_misread_base, 331, "the nearest of some is taken"
    ),
)
