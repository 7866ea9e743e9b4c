"""Hypotheses about logits recorded for one token that are another token's.

An engine keeps the last token's row of each request before it multiplies by the head. If it counts
the rows of a batch wrongly, the head reads another token's row, and a wrong token is sampled.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Layers, Mismatch, Patch
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PassLocation, PatchedModel
from aprfmt.measure.distances import rel_l2

CAUSE_ROWS = (
    Cause(
        "logits_row", "forward", "bug",
        "The logits of a token are those of another token: the head was given another row.",
        "A row of logits is what the head makes of another row of the last norm.",
        "The head that is given the named rows makes equal logits.",
    ),
)  # fmt: skip


def find_logits_row(case: Mismatch) -> Iterator[Change]:
    """Yield the change that the head was given another token's hidden state, by recorded logits.

    The middle recorded row must equal the logits of exactly one other token. All other rows must
    be those of the token at the same distance; beyond an end of the run, of the first or last
    token.
    """
    head = case.call("linear")
    if case.view.point != "logits" or case.view.recorded is None or head is None:
        return
    ours = case.view.mine.reshape(len(case.view.mine), -1)
    _, theirs = case.recorded_rows
    theirs, bound = theirs.reshape(len(theirs), -1), case.view.tolerance
    middle, last = len(theirs) // 2, case.tokens - 1
    token = _token_of_row(ours, theirs[middle], bound)
    offset = token - int(case.rows[middle])
    if token < 0 or not offset:
        return
    tokens_of = np.clip(np.arange(last + 1) + offset, 0, last)
    if any(
        rel_l2(ours[tokens_of[at]], row) > bound for at, row in zip(case.rows, theirs, strict=True)
    ):
        return
    where = "before" if offset < 0 else "after"
    tokens = "one token" if abs(offset) == 1 else f"{abs(offset)} tokens"
    whose = f"the row of position {token}" if len(theirs) == 1 else f"rows {tokens} {where}"
    which = f"position {int(case.rows[-1])}" if len(theirs) == 1 else f"{len(theirs)} positions"
    yield Change(
        "logits_row",
        f"the logits of {which} are made of {whose}: the head was given another token's row",
        ("logits",),
        _patch_head_rows(head.location, tokens_of),
        {"offset": offset},
        scoped=False,
    )


def _token_of_row(ours: Array, row: Array, bound: float) -> int:
    """Return the number of the token in `ours` [tokens, vocabulary] whose logits `row` holds.

    `row` is [vocabulary]. -1 if it is not within `bound` (a relative distance) of exactly one.
    """
    near = [at for at, one in enumerate(ours) if rel_l2(one, row.reshape(-1)) <= bound]
    return near[0] if len(near) == 1 else -1


def _patch_head_rows(place: PassLocation, tokens: Array) -> Patch:
    """Return a patch: the head, called at `place`, gets the row of tokens[i] for token i."""

    def override(op: Any, at: Any, x: Any, w: Any, *rest: Any, **kwargs: Any) -> Any:
        """Return the product of `x` [tokens, hidden] and the weight `w`.

        At the head, x[tokens[i]] is the input of row i.
        """
        return op(x[tokens] if at == place else x, w, *rest, **kwargs)

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose head reads the last hidden state of tokens[i] for token i."""
        return patched.with_op("linear", override, None)

    return make


HYPOTHESES = (
    Hypothesis(
        "logits_row", find_logits_row, 26, "rows of the logits, before any factor of their values"
    ),
)
