"""Zero points of a packed weight of which one value became another one everywhere.

A *part* is one of the stored tensors of a packed weight: codes, scales, zero points. Both files
pack the weight alike. A repacking that counts zero points from one where the bits have no room for
it turns the lowest into the highest, or the reverse. That may touch few bytes, so it is asked
before damage; but all zero points of that value must have changed, and nothing else.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import make_finding
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import Proof
from aprfmt.tensors.runs import are_same_tensor

if TYPE_CHECKING:
    from aprfmt.base.protocols import LazyTensor
    from aprfmt.codecs.base import Array

MOST = 1 << 26  # bytes of zero points that are looked at
SEVERAL = 8  # places from which any other value is a rule, not damage
_ZEROS = (".qzeros", ".weight_zero_point")
_WHOLE_BYTES = (2, 4, 8)  # bits of codes that no byte's end cuts


def explain_recoded_zero_points(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that one zero point value became another everywhere, all else equal."""
    a, b = case.a.side, case.b.side
    packed = b.stored[0].packed if len(b.stored) == 1 and len(a.stored) == 1 else None
    suffix = next((name for name in _ZEROS if name in b.parts), "")
    if packed is None or not suffix or a.encoding != b.encoding or a.parts.keys() != b.parts.keys():
        return
    # All other parts must be equal.
    codes = packed().codes()
    pair = a.parts[suffix], b.parts[suffix]
    if codes is None or codes.bits not in _WHOLE_BYTES or pair[1].info.nbytes > MOST:
        return
    if any(not are_same_tensor(a.parts[name], b.parts[name]) for name in b.parts if name != suffix):
        return
    if pair[0].info.nbytes != pair[1].info.nbytes:
        return
    # One old value became one new value, in all places.
    x, y = (_unpack_codes(part, codes.bits) for part in pair)
    changed = x != y
    old, new = np.unique(x[changed]), np.unique(y[changed])
    if len(old) != 1 or len(new) != 1 or not changed[x == old[0]].all():
        return
    count, ends = int(changed.sum()), {0, (1 << codes.bits) - 1}
    wraps = {int(old[0]), int(new[0])} == ends
    if not wraps and count < SEVERAL:
        return
    says = [f"B's zero points {old[0]} became {new[0]}"]
    if wraps:
        says.append(f"{codes.bits} bits have no room for one more or one less, which wraps round")
    says.append(f"in all {count} of {x.size} places with {old[0]}; all other bytes are equal")
    # One place gives the two numbers of the rule; from the second on each place judges it.
    proof = Proof(count, 1.0, 1, math.inf)
    yield make_finding("zero_point", (case.key,), says, case.before.relative, 0.0, proof)


def _unpack_codes(part: "LazyTensor", bits: int) -> "Array":
    """Return the codes of a part as integers [bytes, codes of a byte]."""
    raw = np.frombuffer(part.raw(), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    return np.stack([raw >> np.uint8(at) & mask for at in range(0, 8, bits)], -1)


HYPOTHESES = (
    PairHypothesis(
        ("zero_point",),
        explain_recoded_zero_points,
        65,
        "a rule of few bytes, before damage of them",
        facts=("companion tensors",),
    ),
)
