"""Quantized copies whose scales are all times one number that a step of their codes hides.

A *copy* is the quantized tensor, its *source* the tensor of the other file. A *group* is the values
that share a scale.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from aprfmt.base.encodings import find_encoding
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import FEW, make_finding, prove_values
from aprfmt.codecs import decode
from aprfmt.measure.copy_factor import (
    NEARLY_ALL,
    ROUNDED,
    are_as_near,
    find_copy_factor,
    share_of_times,
)
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.tensors import block_copy
from aprfmt.quantizing.row_encoding import encode_rows

ENOUGH = 1 << 22  # elements that are encoded again
MOST = 1.25  # a larger factor, or its reciprocal, no step hides: it is one of the values (`scale`)


def explain_factor_of_copy(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that a copy is its source encoded again, all scales times one number."""
    copied = block_copy(case.a.side, case.b.side)
    if copied is None:
        return
    whose, fine, coarse = "B's", case.a, case.b
    if copied is case.a.side:
        whose, fine, coarse = "A's", case.b, case.a
    factor = find_copy_factor(fine.side, copied)
    if factor is None or abs(np.log(factor)) > np.log(MOST):
        return
    # Found on some rows from the middle; judged on all, or on some from everywhere.
    name, block = coarse.encoding, find_encoding(coarse.encoding).block_size
    rows = np.arange(0, fine.rows, max(1, fine.size // ENOUGH))
    total = near = 0
    shares = []
    apart = norm = 0.0
    for chosen in case.windows(rows):
        x, y = np.ascontiguousarray(fine.take(chosen), np.float32), coarse.take(chosen)
        again = decode(name, {"": encode_rows(name, x)}, x.shape)
        x, again, held = (to_float64(part).reshape(-1, block) for part in (x, again, y))
        total += len(held)
        shares.append(share_of_times(again, held, factor))
        near += int(are_as_near(again, held, factor, x).sum())
        apart += float(np.square(held - factor * again).sum())
        norm += float(np.square(held).sum())
    if not shares or np.mean(shares) < NEARLY_ALL:
        return
    of = "all" if near == total else f"{near} of"
    alike = 100 * float(np.mean(shares))
    says = (
        f"{whose} scales are each {factor:.4g} times what they should be",
        f"in {of} {total} groups: {alike:.4g} % of the codes are the other side's, encoded again",
        name,
    )
    shown = coarse.take(rows[:FEW])
    proof = prove_values(shown, case.before.changed, 1, ROUNDED)
    yield make_finding(
        "quant_scale",
        (case.key,),
        says,
        case.before.relative,
        (apart / norm) ** 0.5,
        replace(proof, share=near / total),
    )


HYPOTHESES = (
    PairHypothesis(
        ("quant_scale",),
        explain_factor_of_copy,
        82,
        "the same codes by one number, before what groups or rows are off by",
        facts=("two encodings", "blocks"),
    ),
)
