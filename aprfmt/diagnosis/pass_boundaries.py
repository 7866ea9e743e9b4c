"""Says that a point differs from the first token of a later pass on, and what that pass reads.

Tokens of earlier passes agree, so weights and operations are right for them. What a later pass adds
is what it reads of them: cached keys and values, or a state.
"""

from collections.abc import Mapping

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.forward.mismatch import Mismatch

AGREES = 2.0  # times the tolerance of a point, for one of its rows
# Operations that read something of earlier tokens -> what it is.
READ: Mapping[str, str] = {
    "mix": "cached keys and values", "scan": "the state", "delta": "the state",
    "convolve": "the last inputs of the convolution",
}  # fmt: skip
OWN = ("q", "k", "v", "q_norm", "k_norm", "q_rope", "k_rope")


def later_pass_clause(case: Mismatch) -> str:
    """Return the clause on what a later pass reads of earlier tokens; "" where it does not apply.

    It applies if the first row that differs is the first token of a later pass of a dump, and an
    operation before the point reads earlier tokens.
    """
    dump = case.recorded.trace.run.get("dump")
    steps = list(dump.get("steps", ())) if isinstance(dump, Mapping) else []
    ops = {call.op for call in case.view.calls}
    read = next((what for op, what in READ.items() if op in ops), "")
    if len(steps) != case.tokens or len(case.rows) != case.tokens or not read:
        return ""
    late = np.flatnonzero(case.distances_by_row(case.view) > AGREES * case.view.tolerance)
    first = int(late[0]) if len(late) else 0
    if not first or steps[first] == steps[first - 1]:
        return ""
    own = {split_key(key)[1] for key in case.view.after} & {*OWN}
    right = ", though their own q, k and v are right" if {"k", "v"} <= own else ""
    return (
        f"; tokens before {first} agree, and those from {first} on, where pass {steps[first]} "
        f"begins, do not{right}: {read} of the tokens before {first} are probably not what the "
        "earlier passes wrote (of another request, or another place)"
    )
