"""Hypotheses about cached keys and values of other tokens: stale, moved or never written."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np

from aprfmt.base.sequences import join_first
from aprfmt.causes.forward.attention import known_entries
from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    Hypothesis,
    Mismatch,
    Patch,
    differing_rows,
)
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import OperationCall
from aprfmt.inference.replay.shadow import ShadowPoint
from aprfmt.tensors.norms import exact_norm

CAUSE_ROWS = (
    Cause(
        "kv_cache", "forward", "bug",
        "Keys or values read from the cache are not those of the tokens: stale, moved or cut.",
        "One pass over all tokens is equal, steps with a cache are not; attention's output "
        "belongs to other keys or values than the recorded ones.",
        "Attention over the keys of the named rows is equal.",
    ),
)  # fmt: skip

# Keys and values as a cache keeps them.
WRITTEN = ("k", "k_norm", "k_rope", "k_attn", "k_cache", "v", "v_norm", "v_cache")
SLOTS = 4  # newest slots of the cache that are tried: as many as are drafted at once
BLOCKS = (4, 8, 16, 32, 64)  # tokens of a block of a cache
MOST_BLOCKS = 6  # of which each is tried for each
RUNS = 4  # runs of tokens that a sentence names
MOST = 64  # rows that are listed; those that are the tokens' own are no part of the change


def _attend_to_rows(
    keys: Array | None, values: Array | None, since: int, heads: Sequence[int]
) -> Patch:
    """Return a patch: for token j, attention reads the key of token keys[j]; -1 is a row of zeros.

    `values` says the same of values. None leaves keys or values unchanged. Queries of tokens
    before `since`, and other key heads than `heads` (() for all), read the tokens' own rows.
    """

    def pick(x: Any, rows: Array) -> Any:
        """Return the keys or values x [tokens, heads, d] of the token numbers `rows`.

        Zeros for -1.
        """
        return np.where((rows >= 0)[:, None, None], x[np.maximum(rows, 0)], 0).astype(x.dtype)

    def read(what: str, layer: int, own: Any) -> Any:
        """Return the keys ("k") or values ("v") that attention reads: those of the tokens chosen.

        `own` [tokens, heads, d] are the layer's, returned where no rows are chosen.
        """
        rows = keys if what == "k" else values
        if rows is None or not heads:
            return own if rows is None else pick(own, rows)
        made = own.copy()
        some = [head for head in heads if head < own.shape[1]]
        made[:, some] = pick(own[:, some], rows)
        return made

    return lambda patched, layers: patched.with_keys_and_values(read, layers, since)


def cache_change(
    keys: Array | None, values: Array | None, since: int = 0, heads: Sequence[int] = ()
) -> Change:
    """Return the change that attention reads cached keys and values of other tokens.

    For token j they are those of tokens keys[j] and values[j]; -1 is a row of zeros, None means
    unchanged. Queries of tokens before `since` read the right rows, and so do other key heads than
    `heads`, () for all.
    """
    rows = keys if keys is not None else values
    assert rows is not None
    wrong = np.flatnonzero(rows != np.arange(len(rows)))
    what = (
        "keys and values"
        if keys is not None and values is not None
        else ("keys" if keys is not None else "values")
    )
    says = f"{f'from token {since} on ' * bool(since)}attention reads {_runs_text(rows, wrong)}"
    if heads:
        says += f" in key head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}"
    return Change(
        "kv_cache",
        f"{what} are not the tokens' own: {says}",
        ("kv_cache",),
        _attend_to_rows(keys, values, since, heads),
        {"rows": {str(token): int(rows[token]) for token in wrong[:MOST]}}
        | ({"since": since} if since else {})
        | ({"heads": list(heads)} if heads else {}),
    )


def _runs_text(rows: Array, wrong: Array) -> str:
    """Return a clause on which rows attention reads for the tokens `wrong`: "zeros for token 3".

    `rows` [tokens] are the rows read, -1 for zeros. Tokens whose rows follow one another are named
    together; of more than RUNS such runs the first is named, and the other tokens are counted.
    """
    runs: list[tuple[int, int]] = []  # the first and the last token of each
    for token in wrong.tolist():
        first, last = runs[-1] if runs else (token, -2)
        follows = rows[token] == rows[first] + (token - first if rows[first] >= 0 else 0)
        if token == last + 1 and follows:
            runs[-1] = (first, token)
        else:
            runs.append((token, token))
    named = runs if len(runs) <= RUNS else runs[:1]
    parts = []
    for first, last in named:
        many = last > first
        source = f"{rows[first]} to {rows[last]}" if many else f"{rows[first]}"
        read = "zeros" if rows[first] < 0 else f"the row{'s' * many} of token{'s' * many} {source}"
        tokens = f"tokens {first} to {last}" if many else f"token {first}"
        parts.append(f"{read} for {tokens}")
    more = len(wrong) - sum(last + 1 - first for first, last in named)
    counted = [f"and other rows for {more} more token{'s' * (more > 1)}"] if more else []
    return ", ".join([*parts, *counted])


def later_pass_changes(n: int, first: int) -> Iterator[Change]:
    """Yield changes in which tokens from `first` on read wrong cached rows of earlier tokens.

    An earlier pass filled the cache: its newest rows or its first one are stale or never written,
    or all rows are off by one. `n` is the number of tokens.
    """
    at = np.arange(n)
    before = at < first
    slots = dict.fromkeys((*range(first - 1, max(first - 1 - SLOTS, -1), -1), 0))
    tried = [
        np.where(at == slot, read, at)
        for slot in slots
        for read in dict.fromkeys((slot - 1, slot + 1, -1))
    ]
    tried += [np.where(before, rows, at) for rows in (np.maximum(at - 1, 0), at + 1, -1)]
    for rows in tried:
        for keys, values in ((rows, rows), (rows, None), (None, rows)):
            yield cache_change(keys, values, first)


def _repeated_blocks(n: int, first: int) -> Iterator[Array]:
    """Yield the cached row of each of `n` tokens where a block before `first` is read for another.

    Blocks have the usual sizes of engines' caches; few are tried. A later query reads all blocks,
    so that their order alone changes nothing.
    """
    for size in BLOCKS:
        count = first // size
        if not 2 <= count <= MOST_BLOCKS:
            continue
        for lost, read in permutations(range(count), 2):
            rows = np.arange(n)
            rows[lost * size : (lost + 1) * size] += (read - lost) * size
            yield rows


def find_cached_rows(case: Mismatch) -> Iterator[Change]:
    """Yield changes to the cached rows that attention read, as solved from the trace.

    Where the trace does not show them, the row before, the row after, a stale row and zeros are
    tried.
    """
    if case.view.point in ("k_cache", "v_cache"):
        rows = _match_cache_rows(case)
        if rows is not None:
            keys, values = (rows, None) if case.view.point == "k_cache" else (None, rows)
            held, found = frozenset({case.view.key}), cache_change(keys, values)
            # The same rows of keys and of values are one fault in two places.
            says = f"the cache's rows are not the tokens' own: {found.says.partition(': ')[2]}"
            mine = case.view.mine
            gives = np.where((rows >= 0).reshape(-1, *[1] * (mine.ndim - 1)), mine[rows], 0)
            yield replace(found, says=says, drop=held, where=(case.view.key,), gives=gives)
        return
    # Recorded scores show which key each column belongs to.
    scores, mix = case.call("scores"), case.call("mix")
    if scores is not None and case.gives_point_value(scores):
        rows = _match_score_columns(case, scores)
        if rows is not None and not np.array_equal(rows, np.arange(len(rows))):
            yield cache_change(rows, None)
            yield cache_change(rows, rows)
        return
    # Attention's output on recorded probabilities shows the values.
    if mix is not None and scores is None and case.gives_point_value(mix):
        rows = _solve_value_rows(case, mix)
        if rows is not None and not np.array_equal(rows, np.arange(len(rows))):
            yield cache_change(None, rows)
        return
    if scores is None or mix is None:
        return
    # Otherwise try usual mistakes: the row before, after, stale, or zeros.
    at = np.arange(case.tokens)
    first = differing_rows(case)
    start = int(first[0]) if len(first) else 0
    stale = [np.maximum(at - 1, 0), np.minimum(at + 1, case.tokens - 1)]
    stale.append(np.where(at == start, np.maximum(start - 1, 0), at))
    stale.append(np.where(at >= start, np.maximum(start - 1, 0), at))
    stale.append(np.where(at == start, -1, at))
    for rows in stale:
        if not np.array_equal(rows, at):
            yield cache_change(rows, rows)
            yield cache_change(rows, None)
            yield cache_change(None, rows)
    if start > 1:
        yield from later_pass_changes(case.tokens, start)
        for rows in _repeated_blocks(case.tokens, start):
            yield cache_change(rows, rows, start)


def find_unwritten_rows(case: Mismatch) -> Change | None:
    """Return the change that some recorded rows of keys or values are zeros, never written.

    All other rows are the tokens' own. The points of all layers with such rows make one change;
    None where this point's rows are not such.
    """
    views = {key: view for key, view in case.found.views.items() if view.flagged}
    empty = {key: held for key, view in views.items() if (held := _empty_rows(case, view)).size}
    if case.view.key not in empty:
        return None
    gives = case.plain[case.view.key].copy()
    gives[empty[case.view.key]] = 0
    rows = sorted({int(row) for each in empty.values() for row in each})
    shown = join_first(rows, MOST)
    return Change(
        "kv_cache",
        f"keys or values of {'row' if len(rows) == 1 else 'rows'} {shown} are zeros, so they were "
        "never written; the other rows are the tokens' own",
        tuple(empty),
        values={"rows": {str(row): -1 for row in rows[:MOST]}},
        scoped=False,
        drop=frozenset(empty),
        gives=gives,
    )


def _empty_rows(case: Mismatch, view: ShadowPoint) -> Array:
    """Return the numbers of the tokens whose recorded keys or values are zeros, as an int array.

    Empty unless the point is of keys or values, some rows are zeros and all other rows are right.
    """
    none: Array = np.empty(0, np.int64)
    plain = case.plain.get(view.key)
    if view.point not in WRITTEN or view.recorded is None or plain is None:
        return none
    mine, theirs = view.recorded.comparable_values(plain, view.axis)
    if mine.shape != theirs.shape:
        return none
    zero = mine.reshape(len(mine), -1).any(axis=1) & ~theirs.reshape(len(theirs), -1).any(axis=1)
    left, right = mine[~zero], theirs[~zero]
    near = exact_norm(left - right) <= 2 * view.tolerance * exact_norm(right)
    if zero.all() or not near:
        return none
    at = np.arange(len(plain)) if view.recorded.rows is None else np.asarray(view.recorded.rows)
    return at[zero]


def _match_cache_rows(case: Mismatch) -> Array | None:
    """Return, for each row of the recorded cache, the number of the token it belongs to.

    -1 for a row of zeros; None if a row fits no token.
    """
    ours, theirs = (x.reshape(len(x), -1) for x in (case.view.mine, case.view.theirs))
    rows = np.arange(len(theirs))
    for j, row in enumerate(theirs):
        size = max(exact_norm(row), 1e-30)
        away = np.linalg.norm(ours - row, axis=1) / size
        if away[j] <= 2 * case.view.tolerance:
            continue
        rows[j] = -1 if not row.any() else int(np.argmin(away))
        if rows[j] >= 0 and away[rows[j]] > 2 * case.view.tolerance:
            return None
    return rows


def _match_score_columns(case: Mismatch, call: OperationCall) -> Array | None:
    """Return, for each column of recorded scores, the number of the token whose key gives it.

    -1 for zeros. None if a column fits no token, or the scores are not recorded or too many.
    """
    theirs = case.recorded_result(call)
    if theirs is None or theirs.shape[2] != case.tokens or case.tokens > 512:
        return None
    ours, known = case.array(call.result), known_entries(case)
    rows = np.full(case.tokens, -2, np.int64)
    # Find for each recorded column of scores the key that gives it.
    for j in range(case.tokens):
        use = known[:, :, j]
        column = theirs[:, :, j][use]
        if not column.any():
            rows[j] = -1
            continue
        away = np.linalg.norm(ours[use] - column[:, None], axis=0) / exact_norm(column)
        best = j if away[j] <= case.view.tolerance else int(np.argmin(away))
        if away[best] > 2 * case.view.tolerance:
            return None
        rows[j] = best
    return rows


def _solve_value_rows(case: Mismatch, call: OperationCall) -> Array | None:
    """Return, for each cached value, the number of the token it belongs to; -1 for zeros.

    Solved from the recorded results and the probabilities. None if there are too many tokens, no
    recorded result, or if the probabilities are not square.
    """
    theirs = case.recorded_result(call)
    probs, v = (case.array(x).astype(np.float64) for x in call.args)
    if theirs is None or probs.shape[1] != probs.shape[2] or case.tokens > 512:
        return None
    groups = probs.shape[0] // v.shape[1]
    solved = np.stack([
        np.linalg.lstsq(probs[g * groups], theirs[:, g * groups].astype(np.float64), rcond=1e-6)[0]
        for g in range(v.shape[1])
    ], axis=1)  # fmt: skip
    rows = np.empty(len(v), np.int64)
    for j, row in enumerate(solved):
        away = np.linalg.norm((v - row).reshape(len(v), -1), axis=1)
        rows[j] = int(np.argmin(away))
        if exact_norm(row) < 0.5 * away[rows[j]]:
            rows[j] = -1
    return rows


HYPOTHESES = (
    Hypothesis(
        "kv_cache", find_cached_rows, 340, "keys and values of other tokens, once the mask is right"
    ),
)
