"""Patches in which a recurrence begins with zeros at some tokens, as where its state is lost.

A *start* is such a token. Tokens before the first start keep the state that the pass was given;
with a start at token 0 that is lost too.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Patch


def _parts(starts: Sequence[int], tokens: int) -> Iterator[tuple[slice, bool]]:
    """Yield (part of a pass, whether it begins with zeros) for all parts between starts."""
    ends = sorted({0, *(at for at in starts if at < tokens)})
    for start, stop in pairwise([*ends, tokens]):
        yield slice(start, stop), start in starts


def scan_in_parts(op: Any, given: Sequence[Any], starts: Sequence[int]) -> tuple[Array, Any]:
    """Return (values read [tokens, heads, width], last state) of a scan that begins anew at starts.

    `given` are the operands of the scan `op`, the state last.
    """
    x, step, rate, b, c, skip, state = given
    reads = []
    for part, anew in _parts(starts, len(x)):
        before = None if anew else state
        read, state = op(x[part], step[part], rate, b[part], c[part], skip, before)
        reads.append(read)
    return np.concatenate(reads), state


def restart_scan(starts: Sequence[int]) -> Patch:
    """Return a patch: a scan's state is zero before each token of `starts`."""

    def override(op: Any, at: Any, *given: Any) -> Any:
        """Return (values read, last state) of a scan that begins anew at some tokens."""
        return scan_in_parts(op, given, starts)

    return lambda patched, layers: patched.with_op("scan", override, layers)


def restart_rule(starts: Sequence[int]) -> Patch:
    """Return a patch: a delta rule's state is zero before each token of `starts`."""

    def override(op: Any, at: Any, *given: Any) -> Any:
        """Return (values read, last state) of a delta rule that begins anew at some tokens."""
        *rows, state = given
        reads = []
        for part, anew in _parts(starts, len(rows[0])):
            read, state = op(*(x[part] for x in rows), None if anew else state)
            reads.append(read)
        return np.concatenate(reads), state

    return lambda patched, layers: patched.with_op("delta", override, layers)


def restart_convolution(starts: Sequence[int]) -> Patch:
    """Return a patch: a convolution sees zeros in place of the tokens before each of `starts`."""

    def override(op: Any, at: Any, window: Any, kernel: Any, *bias: Any) -> Any:
        """Return the convolution [tokens, channels] that begins anew at some tokens."""
        back = kernel.shape[1] - 1
        found = []
        for part, anew in _parts(starts, len(window) - back):
            own = np.array(window[part.start : part.stop + back])
            if anew:
                own[:back] = 0
            found.append(op(own, kernel, *bias))
        return np.concatenate(found)

    return lambda patched, layers: patched.with_op("convolve", override, layers)
