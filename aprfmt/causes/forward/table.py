"""The hypotheses about a forward pass, in the order they are tried.

A *row* is one hypothesis. It proposes changes of the reference, with values solved from the trace,
likeliest first; it proposes nothing if the signature does not fit. A change becomes a cause only if
the changed pass no longer differs (`diagnosis/wrong_operations.py`). Each row of a module's
`HYPOTHESES` has its rank and the reason: what an operation reads comes before what it computes, and
a change that fits few passes before one that fits many.
"""

from aprfmt.causes import hypotheses_of
from aprfmt.causes.forward.mismatch import FittedNumber, Hypothesis

__all__ = ["NUMBERS", "TABLE", "Hypothesis"]

TABLE = hypotheses_of("forward", Hypothesis)
# Numbers that are fitted next to other changes, where no single change explains a point.
NUMBERS = hypotheses_of("forward", FittedNumber)
