"""The proof of a guess about a pair of tensors, and the finding that it makes.

A *guess* is a change of one tensor of a pair after which both should be equal.

The numbers of a guess are found on one half of the values and judged on the other. Dozens of
guesses are tried on a pair, and a value says only as much as it has digits: whole numbers, flags
and single numbers are often a factor, an order or a function of each other by chance.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.causes import CAUSES
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.proofs import BITS, Proof
from aprfmt.measure.verdicts import Verdict

if TYPE_CHECKING:
    from aprfmt.causes.tensor.differing_pair import DifferingPair
    from aprfmt.causes.tensor.guess import Guess

EXACT = 1e-6  # relative distance beyond which an equal function was rounded otherwise
FEW = 1 << 12  # values from which bits need not be counted: each has one
BYTE = 256  # values of a byte


def make_finding(
    cause: str,
    where: Sequence[str],
    evidence: Sequence[str],
    before: float | None,
    after: float | None,
    proof: Proof | None,
    *,
    confirmed: bool = True,
) -> Finding:
    """Return the finding of why two tensors differ, with its verdict and proof.

    `evidence` are sentences, the general one first. `before` and `after` are the relative distances
    as stored and with the defect removed. `where` are tensor keys. `confirmed`: the cause is shown,
    so that no other hypothesis is tried.
    """
    verdict = verdict_of(cause, () if after is None else (after,))
    return Finding(
        cause,
        evidence[0],
        "tensor",
        verdict,
        tuple(where),
        confirmed,
        residual_before=before,
        residual_after=after,
        of="stored values",
        proof=proof,
        evidence=tuple(evidence),
    )


def verdict_of(cause: str, after: Sequence[float]) -> Verdict:
    """Return a cause's verdict; "precision" for an equal function that was rounded.

    `after` are the distances that remain. An unknown cause is a bug.
    """
    if cause not in CAUSES:
        return "bug"  # a cause that another package's hypothesis names, and no row describes
    verdict = CAUSES[cause].verdict
    return "precision" if verdict == "same" and max(after, default=0.0) > EXACT else verdict


def prove_guess(case: "DifferingPair", guess: "Guess", count: int, share: float) -> Proof:
    """Return the proof of a guess that explains the fraction `share` of `count` changed values."""
    if guess.constant:
        return Proof(count, share, 0, math.inf)
    rows = np.arange(case.a.rows) if guess.rows is None else guess.rows
    enough = count - guess.free >= FEW
    bits = BITS / FEW if enough else _usual_bits(guess.right(rows[:FEW]), guess.slack)
    return Proof(count, share, guess.free, bits)


def prove_values(values: Any, count: int, free: int, slack: float) -> Proof:
    """Return the proof of a change that gives these values within relative distance `slack`.

    `count` is the number of values that judge it, `free` how many numbers were fitted. A slack of
    0 means to the bit.
    """
    return Proof(count, 1.0, free, _usual_bits(values, slack))


def prove_bytes(data: bytes, count: int, free: int) -> Proof:
    """Return the proof of a change that gives `count` bytes to the bit; `data` are some of them."""
    return Proof(count, 1.0, free, math.log2(min(BYTE, max(1, len(set(data))))))


def fitted_proof(count: float) -> Proof:
    """Return the proof of a change fitted to all the values it explains, so that none judges it."""
    return Proof(count, 1.0, count, 0.0)


def accused_proof(count: float) -> Proof:
    """Return the proof of a change that holds within the quantization steps of the wrong tensor."""
    return Proof(count, 1.0, 0, math.inf, accused=True)


def _usual_bits(values: Any, slack: float) -> float:
    """Return how many significant bits values have on average, not counting bits below `slack`.

    `slack` is a relative distance.
    """
    flat = to_float64(values).reshape(-1)
    most = -math.log2(slack) if 0 < slack < 1 else math.inf
    return float(np.minimum(significant_bits(flat), most).mean()) if flat.size else 0.0


def significant_bits(values: np.ndarray) -> np.ndarray:
    """Return how many significant bits each value has as float32; 1 for 0 and powers of two."""
    mantissa = np.ascontiguousarray(values, np.float32).view(np.uint32) & 0x7FFFFF | 0x800000
    lowest = mantissa & -mantissa.astype(np.int64)
    found: np.ndarray = 24 - np.log2(lowest.astype(np.float64))
    return found


def either_side_text(whose: str, what: str) -> str:
    """Return the clause that either file may be wrong; `whose` is named first, "A's" or "B's".

    `what` is what equal codes in both files do not decide, with its verb: "order is".
    """
    other = "A's" if whose == "B's" else "B's"
    same = "both have the same codes, which do not say whose"
    return f"; or {other} {what} wrong: {same} {what} right"
