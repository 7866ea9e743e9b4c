"""Hypotheses about logits recorded for one token that are another token's.

An engine keeps the last token's row of each request before it multiplies by the head. If it counts
the rows of a batch wrongly, the head reads another token's row, and a wrong token is sampled.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from aprfmt.base.sequences import join_first
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


SHOWN = 4  # rows of other tokens that a sentence names
COLUMNS = 64  # of the logits by which other tokens' rows are looked for


def find_rows_of_others(case: Mismatch) -> Iterator[Change]:
    """Yield the change that some rows of the logits are those of other tokens, the rest their own.

    Every row that differs must equal the logits of exactly one other token. Where all rows are
    those of the token at the same distance, `find_logits_row` says so.
    """
    head = case.call("linear")
    if case.view.point != "logits" or case.view.recorded is None or head is None:
        return
    ours = case.view.mine.reshape(len(case.view.mine), -1)
    theirs = case.view.theirs.reshape(ours.shape)
    if case.view.recorded.normalized:  # known up to a constant of each row
        ours, theirs = (x - x.mean(axis=1, keepdims=True) for x in (ours, theirs))
    wrong = [
        int(at) for at in case.rows if not rel_l2(ours[at], theirs[at]) <= 2 * case.view.tolerance
    ]
    few = np.linspace(0, ours.shape[1] - 1, COLUMNS).astype(np.int64)
    if not wrong or len(wrong) == len(ours) or next(find_logits_row(case), None):
        return
    tokens_of = np.arange(len(ours))
    for at in wrong:
        near = np.linalg.norm(ours[:, few] - theirs[at, few], axis=1)
        best = [int(token) for token in np.argsort(near)[:2]]
        fits = [rel_l2(ours[token], theirs[at]) <= 2 * case.view.tolerance for token in best]
        if fits != [True, False][: len(fits)]:
            return
        tokens_of[at] = best[0]
    named = [f"those of position {at} are those of position {tokens_of[at]}" for at in wrong]
    yield Change(
        "logits_row",
        f"the logits of {len(wrong)} of {len(ours)} positions are another token's: "
        f"{join_first(named, SHOWN)}; the head was given another token's row, or it was recorded "
        "in another place",
        ("logits",),
        _patch_head_rows(head.location, tokens_of),
        {"rows": {str(at): int(tokens_of[at]) for at in wrong}},
        scoped=False,
    )


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
    Hypothesis("logits_row", find_rows_of_others, 25, "some rows, once not all have one shift"),
)
