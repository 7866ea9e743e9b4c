"""The Proof record, and the one function that derives a cause's certainty from it.

An *item* is what was compared and differed: a value, a byte, a row of a point, a text. The *accused
side* is the one of the two files that is said to be wrong. A and B are the two files that are
compared; a *side* is one of them, or its tensor.

A cause is located where a difference was found or measured. It is explained where the change that
it states was made and gives the other side. It is confirmed where that holds for all affected
items, on items that the change was not fitted to, within a bound that is not the accused side's
own.
"""

import math
from dataclasses import dataclass, replace

from aprfmt.measure.verdicts import Certainty

MOST = 0.5  # of the items a change has to give to be called explained
HALVES = 2  # one half of the items gives the numbers of a change, the other half judges them
BITS = 32  # that agree; a table of 2**6 changes then fits by chance once in 2**26 pairs


@dataclass(frozen=True, slots=True)
class Proof:
    """A stated change that was made, and how well it reproduces the other side.

    `count` is the number of items that differed and that the change is about: values, bytes, rows
    of a point, points, texts. `share` is the fraction of them that the change reproduces, to the
    bit or within the rounding of the coarser encoding. `free` counts the numbers that were fitted
    on these items, one item a number. `bits` are the binary digits with which one item judges;
    infinite where nothing else was a choice. `accused`: the bound is made of the steps of the
    accused side. `moved` counts the items that the stated change alters; infinite where it is about
    a whole tensor or model. One that alters none (in 0 groups, by a factor of 1) explains nothing.
    """

    count: float
    share: float
    free: float
    bits: float
    accused: bool = False
    moved: float = math.inf

    @property
    def judged(self) -> bool:
        """Whether enough items remain, besides those used for fitting, to exclude chance."""
        left = self.count - self.free
        return left > 0 and left >= (HALVES - 1) * self.free and left * self.bits >= BITS


def certainty_of(proof: Proof | None) -> Certainty:
    """Return how certain a cause is by its proof; "located" without one.

    "confirmed" needs that the whole other side is reproduced, on enough items that nothing was
    fitted to; "located" is for a change that reproduces little, is about no item or alters none.
    """
    if proof is None or proof.share < MOST or proof.count <= 0 or proof.moved <= 0:
        return "located"
    if proof.share < 1.0 or proof.accused or not proof.judged:
        return "explained"
    return "confirmed"


def cap_proof(proof: Proof, most: Certainty) -> Proof | None:
    """Return a proof whose certainty is at most `most`; None, the proof of "located", for that."""
    if most == "located":
        return None
    return proof if most == "confirmed" else replace(proof, free=proof.count)


def unfitted_proof(count: float = 1, share: float = 1.0) -> Proof:
    """Return the proof of a change whose numbers were not fitted to the items that judge it.

    Such are a key of the file, a part of the tokenizer exchanged for the other model's, a pass with
    a stated key. `count` is how many items judged it, `share` the fraction of them that agrees.
    """
    return Proof(count, share, 0, math.inf)
