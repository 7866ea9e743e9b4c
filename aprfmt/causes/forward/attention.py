"""Hypotheses about errors between q, k, v and attention's output."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    FittedNumber,
    Hypothesis,
    Layers,
    Mismatch,
    Patch,
    change_head_fields,
    computed_layer,
    differing_rows,
    hyper_change,
)
from aprfmt.causes.forward.point_signatures import PointPair, PointSignature
from aprfmt.causes.row import Cause
from aprfmt.inference.layer_heads import kv_head_count
from aprfmt.inference.masks import chunk_mask
from aprfmt.inference.replay.patched_model import OperationCall, PatchedModel
from aprfmt.measure.distances import rel_l2

CAUSE_ROWS = (
    Cause(
        "sliding_window", "config", "bug",
        "Attention reaches back further, or less far, than the layer's window.",
        "Early rows are equal, rows past the window differ.",
        "Attention with the printed window is equal.",
        keys=("sliding_window", "window_layers"),
    ),
    Cause(
        "mask", "forward", "bug",
        "Attention is not causal, or hides tokens that it should see.",
        "The last row is equal and the first differs most; probabilities past the diagonal are "
        "not zero.",
        "Attention with the other mask is equal.",
    ),
    Cause(
        "softcap", "config", "bug",
        "Attention scores or logits are not capped, or by another cap.",
        "The larger a score or logit, the more it differs; one is a function of the other.",
        "Capping with the printed cap makes them equal.",
        keys=("attn_softcap", "final_softcap"),
    ),
    Cause(
        "attention_scale", "config", "bug",
        "Attention scores are multiplied by another factor.",
        "q and k are equal and all scores differ by one factor.",
        "Attention with the printed factor is equal.",
        keys=("qkv_clip", "temperature_scale", "temperature_length", "attn_scale",
              "attn_scale_by_layer"),
    ),
)  # fmt: skip

FAR = 4  # powers of 4 up to which factors on the scores are tried as starts of a fit
NOT_CAUSAL = (
    "attention is not causal: queries see later tokens, as with is_causal false in config.json"
)


def _query_key_products(case: Mismatch, call: OperationCall) -> Array:
    """Return q.k of every head without scale and softcap, float64 [heads, queries, keys]."""
    q, k = (case.array(x).astype(np.float64) for x in call.args[:2])
    groups = q.shape[1] // k.shape[1]
    return np.asarray(np.einsum("thd,jhd->htj", q, np.repeat(k, groups, axis=1)))


def known_entries(case: Mismatch) -> Array:
    """Return the bool mask, in the point's shape, of the score entries that the trace recorded."""
    seen = case.view.recorded
    assert seen is not None
    there = np.zeros(case.view.mine.shape, np.bool_)
    rows = case.rows
    there[:, rows] = True if seen.mask is None else seen.mask
    return there


# --- scale and softcap ---------------------------------------------------------------------------


def score_scale_change(patched: PatchedModel, value: float) -> Change:
    """Return the change that multiplies scores by `value` in place of the model's factor."""
    configured = f"{float(patched.hp['attn_scale']):.9g}"
    if patched.hp["attn_scale_by_layer"]:
        configured += " divided by the layer's number from 1"
    return Change(
        "attention_scale",
        f"scores are multiplied by {value:.9g}; the model says {configured}",
        ("attn_scale",),
        lambda patched, layers: change_head_fields(patched, layers, scale=value),
        {"attn_scale": value},
    )


def layer_scale_change(patched: PatchedModel, layer: int) -> Change:
    """Return the change that toggles the division of scores by the layer's number, counted from 1.

    A model that divides scores so no longer does; one that does not now does. The sentence quotes
    the model's factor in `layer`.
    """
    divides, own = bool(patched.hp["attn_scale_by_layer"]), float(patched.hp["attn_scale"])
    how = "not " * divides + "divided by a layer's number from 1"
    says = own / (layer + 1) if divides else own

    def override(op: Any, at: Any, *args: Any) -> Any:
        """Return attention's operation with the scores' factor changed by the layer's number.

        The number counts from 1. The factor is multiplied by it if the model divides by it, else
        divided.
        """
        *first, heads = args
        number = at.layer + 1
        scale = heads.scale * number if divides else heads.scale / number
        return op(*first, replace(heads, scale=scale))

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose scores have the other factor in `layers`."""
        return patched.with_ops(("scores", "probs"), override, layers, of_operands=True)

    return Change(
        "attention_scale",
        f"scores are {how}; the model multiplies them by {says:.9g} in layer {layer}",
        ("attn_scale_by_layer",),
        make,
        {"attn_scale_by_layer": not divides},
        scoped=divides,
    )


def find_score_scale(case: Mismatch) -> Iterator[Change]:
    """Yield the change to another factor on q.k, solved from the scores that the trace recorded.

    A softcap is undone first. Without recorded scores it is the best of the usual wrong factors.
    Nothing if none fits.
    """
    call = case.call("scores")
    if call is None:
        return
    heads = call.args[2]
    configured = float(heads.scale)
    d = int(case.patched.hp["head_dim"])
    # Factors that engines use by mistake.
    usual = {1.0, d**-0.5, 1 / d, configured * d**0.5, configured * d**-0.5, configured / 2,
             configured * 2, 1 / configured,
             float(case.patched.hp["hidden_size"]) ** -0.5}  # fmt: skip
    if case.patched.hp["attn_scale_by_layer"] or case.layer > 0:
        usual |= {configured * (case.layer + 1), configured / (case.layer + 1)}
    by_layer = layer_scale_change(case.patched, case.layer)
    if case.layer > 0 and case.trial(by_layer) <= case.view.tolerance:
        yield by_layer
    theirs = case.recorded_result(call)
    # Without recorded scores, try these. A softmax of one key, or of all alike, shows no way to a
    # factor far off: so a fit begins at the best of many.
    if theirs is None:
        if case.fitting:
            usual |= {configured * 4.0**power for power in range(-FAR, FAR + 1)}
        yield from case.best_number(
            lambda s: score_scale_change(case.patched, s),
            (s for s in usual if not math.isclose(s, configured)),
        )
        return
    # With them, solve the factor, softcap undone.
    products, there = (
        _query_key_products(case, call)[known_entries(case)],
        theirs[known_entries(case)].astype(np.float64),
    )
    if heads.softcap is not None:
        cap = heads.softcap
        inside = np.abs(there) < 0.99 * cap
        if not inside.any():
            return
        products, there = products[inside], cap * np.arctanh(there[inside] / cap)
    value = float(np.sum(products * there) / np.sum(products * products))
    if value and rel_l2(products * value, there) <= 20 * case.view.tolerance:
        exact = [s for s in usual if math.isclose(s, value, rel_tol=5 * case.view.tolerance)]
        if exact:
            yield score_scale_change(case.patched, exact[0])
        else:
            yield from case.rounded_change(lambda s: score_scale_change(case.patched, s), value)


def _softcap_change(case: Mismatch, value: float | None) -> Change:
    """Return the change that caps scores at `value` (softcap); None for no cap."""
    configured, scale = case.patched.hp["attn_softcap"], float(case.patched.hp["attn_scale"])
    early = (
        configured is not None
        and value is not None
        and math.isclose(value, configured * scale, rel_tol=1e-3)
    )
    return Change(
        "softcap",
        f"scores are {'not capped' if value is None else f'capped at {value:g}'}; the model "
        f"{'caps none' if configured is None else f'says {configured:g}'}"
        f"{', which is before the scale' * early}",
        ("attn_softcap",),
        lambda patched, layers: change_head_fields(patched, layers, softcap=value),
        {"attn_softcap": value},
    )


def try_softcaps(case: Mismatch) -> Iterator[Change]:
    """Yield the changes to no softcap, and to the cap solved from the trace's recorded scores.

    Without recorded scores the best of four usual wrong caps is yielded.
    """
    call = case.call("scores")
    if call is None:
        return
    configured = call.args[2].softcap
    if configured is not None:
        yield _softcap_change(case, None)
    theirs = case.recorded_result(call)
    if theirs is None:
        if configured is not None:
            yield from case.best_number(
                lambda c: _softcap_change(case, c),
                (configured / 4, configured / 2, configured * 2, configured * 4),
            )
        return
    known = known_entries(case)
    plain, capped = (_query_key_products(case, call) * call.args[2].scale)[known], theirs[known]
    found = solve_cap(plain, capped.astype(np.float64))
    if found is not None:
        yield from case.rounded_change(lambda c: _softcap_change(case, c), found)


def solve_cap(plain: Array, capped: Array) -> float | None:
    """Return c with capped = c tanh(plain / c), or None if there is no such c.

    `plain` and `capped` are 1-d; c is found by bisection on the 64 largest values.
    """
    order = np.argsort(-np.abs(plain))[:64]
    x, y = np.abs(plain[order]), np.abs(capped[order])
    use = (x > 0) & (y < x * (1 - 1e-6)) & (y > 0)
    if not use.any():
        return None
    x, y = x[use], y[use]
    low, high = np.full(len(x), 1e-6), np.full(len(x), 1e6)
    for _ in range(200):
        middle = np.sqrt(low * high)
        smaller = middle * np.tanh(x / middle) < y
        low, high = np.where(smaller, middle, low), np.where(smaller, high, middle)
    caps = np.sqrt(low * high)
    value = float(np.median(caps[: max(1, len(caps) // 4)]))
    return value if rel_l2(value * np.tanh(plain / value), capped) < 1e-2 else None


# --- which keys a query reads --------------------------------------------------------------------


def map_query_heads(mapping: Array, keys: bool = True, values: bool = True) -> Patch:
    """Return a patch that makes query head h read the key and value head mapping[h].

    `mapping` is [query heads]. `keys` and `values` say which of the two are read that way.
    """

    def read(what: str, layer: int, own: Any) -> Any:
        """Return a layer's keys ("k") or values ("v") as query heads read them: those at `mapping`.

        `own` [tokens, heads, d] is returned unchanged for the kind that is not chosen, and where
        it has too few heads.
        """
        chosen = keys if what == "k" else values
        return own[:, mapping] if chosen and mapping.max() < own.shape[1] else own

    return lambda patched, layers: patched.with_keys_and_values(read, layers)


def head_mapping_changes(
    patched: PatchedModel, chosen: Callable[[Array, int], list[Array]]
) -> Iterator[Change]:
    """Yield changes to other mappings of query heads to key heads, value heads and both.

    `chosen` is called with the model's mapping [query heads] and the number of key heads, and
    returns the mappings to try.
    """
    n_heads, n_kv = int(patched.hp["n_heads"]), int(patched.hp["n_kv_heads"])
    if not 1 < n_kv < n_heads:
        return
    own = np.arange(n_heads) // (n_heads // n_kv)
    for mapping in chosen(own, n_kv):
        for what, keys, values in (
            (("key and value", True, True), ("key", True, False), ("value", False, True))
            if not np.array_equal(mapping, own)
            else ()
        ):
            yield Change(
                "gqa_mapping",
                f"query heads read {what} heads {', '.join(map(str, mapping.tolist()))}; they "
                f"should read {', '.join(map(str, own.tolist()))}",
                ("n_kv_heads",),
                map_query_heads(mapping, keys, values),
                {"key_head_of_query_head": mapping.tolist()},
            )


def find_head_mapping(case: Mismatch) -> Iterator[Change]:
    """Yield changes to which key head each query head reads, by the recorded scores."""
    hp, layer = case.patched.hp, case.layer
    usual = layer < 0 or kv_head_count(hp, layer) == hp["n_kv_heads"]
    if usual and case.call("scores", "mix") is not None:
        yield from head_mapping_changes(
            case.patched, lambda own, n_kv: _candidate_mappings(case, own, n_kv)
        )


def _candidate_mappings(case: Mismatch, own: Array, n_kv: int) -> list[Array]:
    """Return the mappings of query heads to key heads to try, each [query heads].

    It is the one that the recorded scores show, or usual ones without scores. `own` is the
    model's mapping. [] if a query head's scores fit no key head.
    """
    n_heads = len(own)
    chosen = [np.arange(n_heads) % n_kv, own[::-1].copy()]
    call = case.call("scores")
    theirs = None if call is None else case.recorded_result(call)
    if call is not None and theirs is not None:
        q, k = (case.array(x).astype(np.float64) for x in call.args[:2])
        every = np.einsum("thd,jgd->hgtj", q, k) * call.args[2].scale
        cap = call.args[2].softcap
        every = every if cap is None else cap * np.tanh(every / cap)
        known = known_entries(case)
        away = np.array(
            [
                [rel_l2(every[h, g][known[h]], theirs[h][known[h]]) for g in range(n_kv)]
                for h in range(n_heads)
            ]
        )
        if (away.min(axis=1) > case.view.tolerance).any():
            return []
        chosen = [np.argmin(away, axis=1)]
    return chosen


def attend_with_mask(mask: Array) -> Patch:
    """Return a patch that gives attention the bool mask [tokens, keys] in place of its own."""
    return lambda patched, layers: change_head_fields(patched, layers, mask=mask)


def hide_keys(seen: Array) -> Patch:
    """Return a patch that also hides the keys that are False in the mask `seen` [tokens, keys]."""
    return lambda patched, layers: change_head_fields(
        patched, layers, mask=lambda heads: heads.mask & seen
    )


def show_keys(seen: Array) -> Patch:
    """Return a patch that also shows the keys that are True in the mask `seen` [tokens, keys]."""
    return lambda patched, layers: change_head_fields(
        patched, layers, mask=lambda heads: heads.mask | seen
    )


def mask_change(says: str, make: Patch) -> Change:
    """Return the change of attention's mask that patch `make` makes, described by `says`."""
    return Change(
        "mask", f"attention's mask is another one: {says}", ("mask",), make, {"mask": says}
    )


def forgotten_starts_change(starts: Array) -> Change:
    """Return the change to masks that ignore how many tokens are in the cache before a pass.

    Such a mask counts a pass's tokens from 0. `starts` [tokens] is where a token's pass begins, 0
    for tokens with the model's own mask.
    """
    at = np.arange(len(starts))
    begun = np.unique(starts[starts > 0]).tolist()
    passes = f"the pass{'es' * (len(begun) > 1)} from token {', '.join(map(str, begun[:8]))}"
    says = (
        f"queries of {passes} see keys as if they were the first tokens (aligned at the top left)"
    )
    found = mask_change(says, hide_keys(at[None] <= (at - starts)[:, None]))
    return replace(found, values={"passes": begun})


def _causal_mask(case: Mismatch) -> Array:
    """Return the causal bool mask [tokens, keys] of the pass's tokens."""
    query = np.arange(case.tokens)[:, None]
    return np.arange(case.tokens) <= query


def _sliding_window_change(case: Mismatch, window: int | None) -> Change:
    """Return the change to attention that sees the last `window` tokens; None for all of them."""
    configured = case.patched.hp["sliding_window"] if _layer_has_window(case) else None
    seen = _causal_mask(case)
    if window is not None:
        at = np.arange(case.tokens)
        seen = seen & (at[None, :] > at[:, None] - window)
    reach = "all earlier tokens" if window is None else f"{window} tokens"
    return Change(
        "sliding_window",
        f"attention reaches {reach}; the model says {configured or 'all'}",
        ("sliding_window",),
        attend_with_mask(seen),
        {"sliding_window": window},
    )


def _window_layers_change(case: Mismatch, both: bool = True) -> Iterator[Change]:
    """Yield the change to a window in other layers: every layer that differs has the wrong kind.

    Layers differ at the same point as the diverging layer. With `both` nothing unless layers with
    a window and layers without one differ, else nothing unless they are of one kind: what else
    goes by the kind of a layer, a base of rope, then goes with it.
    """
    own = np.asarray(case.patched.hp["window_layers"], np.bool_)
    differs = [view.layer for view in case.found.flagged if view.point == case.view.point]
    other = own.copy()
    other[[layer for layer in differs if layer >= 0]] ^= True
    if not own.any() or not other.any() or (other == own).all():
        return
    if both != bool((other & ~own).any() and (own & ~other).any()):
        return
    listed, meant = (", ".join(map(str, np.flatnonzero(x))) for x in (other, own))
    layers = tuple(other.tolist())
    yield hyper_change(
        "sliding_window", f"the window is in layers {listed}; the model says {meant}",
        window_layers=layers,
    )  # fmt: skip


def _layer_has_window(case: Mismatch) -> bool:
    """Return whether the diverging layer has a sliding window."""
    return case.layer >= 0 and bool(case.patched.hp["window_layers"][case.layer])


def _recorded_mask(case: Mismatch) -> Array | None:
    """Return the bool mask [tokens, keys] of recorded probabilities above zero.

    None unless the trace has the probabilities of all tokens and keys.
    """
    call = case.call("probs")
    theirs = None if call is None else case.recorded_result(call)
    if theirs is None or len(case.rows) != case.tokens or case.view.mine.shape[2] != case.tokens:
        return None
    return np.asarray((theirs > 0).any(axis=0))


def find_window(case: Mismatch) -> Iterator[Change]:
    """Yield the change of the window to the size that probabilities or the first wrong row show."""
    if case.call("probs") is None or case.view.mine.shape[case.view.axis] != case.tokens:
        return
    if case.patched.spec.block.attends == "all":
        return  # `try_masks` says it
    if case.patched.spec.block.window == "chunk" and _layer_has_window(case):
        yield from _try_chunks(case)
        return
    configured = case.patched.hp["sliding_window"] if _layer_has_window(case) else None
    # Recorded probabilities show the reach directly.
    pattern = _recorded_mask(case)
    if pattern is not None:
        reach = pattern.sum(axis=1)
        found = int(reach.max())
        unlimited = bool((reach == np.arange(1, case.tokens + 1)).all())
        yield _sliding_window_change(case, None if unlimited else found)
        return
    # Otherwise the first row that differs shows where windows part.
    rows = differing_rows(case)
    if not len(rows):
        return
    first = int(rows[0])
    yield from _window_layers_change(case)
    if configured is not None and first >= int(configured):
        yield _sliding_window_change(case, None)
        wide = case.attempt(_sliding_window_change(case, None), frozenset({case.layer}))
        if wide is not None:
            late = np.flatnonzero(case.distances_by_row(wide) > 2 * wide.tolerance)
            if len(late):
                yield _sliding_window_change(case, int(late[0]))
    elif first > 0:
        yield _sliding_window_change(case, first)
    yield from _window_layers_change(case, both=False)


def _try_chunks(case: Mismatch) -> Iterator[Change]:
    """Yield changes of chunked attention: no chunks, a sliding window, or chunks of another size.

    The other size is the number of the first row that differs.
    """
    configured = int(case.patched.hp["sliding_window"])
    says = f"; the model says chunks of {configured}"

    def resize_chunks(size: int | None, reach: str) -> Change:
        """Return the change of chunked attention to chunks of `size` tokens; None for no chunks.

        `reach` says in words how far attention reaches.
        """
        return Change(
            "sliding_window",
            f"attention reaches {reach}{says}",
            ("sliding_window",),
            lambda patched, layers: patched.with_hyper(layers, sliding_window=size),
            {"sliding_window": size},
        )

    yield resize_chunks(None, "all earlier tokens")
    yield Change(
        "sliding_window",
        f"attention reaches {configured} tokens{says}",
        ("sliding_window",),
        lambda patched, layers: patched.with_block(layers, window="sliding"),
        {"window": "sliding"},
    )
    differ = differing_rows(case)
    wide = case.attempt(resize_chunks(None, ""))
    late = differ[:0]
    if wide is not None:
        late = np.flatnonzero(case.distances_by_row(wide) > 2 * wide.tolerance)
    for rows in (differ, late):
        if len(rows) and rows[0] > 0:
            yield resize_chunks(int(rows[0]), f"the tokens of a chunk of {rows[0]}")


def usual_masks(n: int) -> Iterator[Change]:
    """Yield the changes to the wrong masks that causal attention over `n` tokens may get.

    These are no mask, and the diagonal off by one either way.
    """
    own = np.tril(np.ones((n, n), np.bool_), -1)
    own[0, 0] = True
    for says, mask in (
        (NOT_CAUSAL, np.ones((n, n), np.bool_)),
        ("queries do not see their own token", own),
    ):
        yield Change("mask", says, ("mask",), attend_with_mask(mask))
    yield later_keys_change(n, 1)


# --- keys after the query ------------------------------------------------------------------------


def later_keys_change(n: int, ahead: int, window: int | None = None) -> Change:
    """Return the change of attention over `n` tokens that also shows `ahead` keys after each query.

    What the layer's own mask shows stays shown. `window` is the layer's window in tokens, None
    without one.
    """
    at = np.arange(n)
    later = at[None] - at[:, None]
    says = f"queries see the {ahead} tokens after their own"
    if ahead == 1:
        says = "queries see the token after their own"
    if window is not None and ahead == window - 1:
        says = (
            f"the window of {window} tokens is open on both sides: queries see as many tokens "
            f"after their own as before it, {ahead}"
        )
    return Change(
        "mask", says, ("mask",), show_keys((later > 0) & (later <= ahead)), {"tokens_after": ahead}
    )  # fmt: skip


def open_chunks_change(n: int, size: int) -> Change:
    """Return the change of attention over `n` tokens that shows all keys of a query's own chunk.

    `size` is the number of tokens in a chunk.
    """
    chunk = np.arange(n) // size
    says = f"the chunks of {size} tokens are open on both sides: queries see later tokens of theirs"
    return Change(
        "mask", says, ("mask",), show_keys(chunk[:, None] == chunk), {"tokens_of_chunk": size}
    )


def open_window_change(patched: PatchedModel) -> Change | None:
    """Return the change that opens the model's window, or its chunks, on both sides.

    None for a model without a window, or with one of a single token.
    """
    size, n = patched.hp["sliding_window"], len(patched.ids)
    if size is None or int(size) < 2:
        return None
    if patched.spec.block.window == "chunk":
        return open_chunks_change(n, int(size))
    return later_keys_change(n, int(size) - 1, int(size))


def _changes_of_later_keys(case: Mismatch, pattern: Array) -> Iterator[Change]:
    """Yield the change that shows just the later keys that a recorded mask shows, if one does.

    `pattern` [tokens, keys] is the recorded mask.
    """
    n, seen = case.tokens, pattern & ~_causal_mask(case)
    window = int(case.patched.hp["sliding_window"]) if _layer_has_window(case) else None
    at = np.arange(n)
    later = at[None] - at[:, None]
    ahead = int(later[seen].max())
    if np.array_equal(seen, (later > 0) & (later <= ahead)):
        yield later_keys_change(n, ahead, window)
    elif window is not None:
        same = at[:, None] // window == at // window
        if np.array_equal(seen, same & (later > 0)):
            yield open_chunks_change(n, window)


def _find_later_keys(case: Mismatch) -> Iterator[Change]:
    """Yield the change that shows as many later keys to each query as the trace's rows say.

    Where queries see all later keys, those that are as near to the end as the keys that the run
    showed agree: the first of these rows says how many it showed. Nothing where the last row
    differs, which has no later keys, or where the point follows from several layers.
    """
    apart, n = case.distances_by_row(case.view) > 2 * case.view.tolerance, case.tokens
    layer = computed_layer(case) if len(apart) == n and apart[0] and not apart[-1] else -1
    if layer < 0:
        return
    opened = open_window_change(case.patched) if case.patched.hp["window_layers"][layer] else None
    if opened is not None:
        yield opened
    seen = case.attempt(later_keys_change(n, n - 1), frozenset({layer}))
    if seen is None:
        return
    late = np.flatnonzero(case.distances_by_row(seen) > 2 * seen.tolerance)
    ahead = n - 2 - int(late[-1]) if len(late) else n - 1
    if ahead > 1 and (opened is None or opened.values != {"tokens_after": ahead}):
        yield later_keys_change(n, ahead)


def try_masks(case: Mismatch) -> Iterator[Change]:
    """Yield changes of attention's mask: the recorded one if it is wrong, else `usual_masks`.

    Nothing if a window or chunks explain the recorded mask.
    """
    if case.call("probs") is None or case.view.mine.shape[case.view.axis] != case.tokens:
        return
    pattern = _recorded_mask(case)
    n = case.tokens
    # A model that sees all tokens: only another mask can be wrong.
    if case.patched.spec.block.attends == "all":
        seen = _causal_mask(case) if pattern is None else pattern
        says = "reaches other tokens than the model says"
        if np.array_equal(seen, _causal_mask(case)):
            says = "is causal: queries do not see later tokens"
        yield Change("mask", f"attention {says}", ("mask",), attend_with_mask(seen))
        return
    # A recorded mask is used, unless a window or chunks explain it.
    if pattern is not None:
        reach = pattern.sum(axis=1)
        steps = np.arange(1, n + 1)
        if (
            not (pattern & ~_causal_mask(case)).any()
            and (reach == np.minimum(steps, reach.max())).all()
        ):
            return  # a window, or none
        if case.patched.spec.block.window == "chunk" and _layer_has_window(case):
            sizes = {int(reach.max()), int(case.patched.hp["sliding_window"])}
            if any(np.array_equal(pattern, chunk_mask(0, n, n, size)) for size in sizes):
                return  # chunks, of another size or not
        if (pattern & ~_causal_mask(case)).any():
            says = NOT_CAUSAL if pattern.all() else "attention lets some queries see later tokens"
            if not pattern.all():
                yield from _changes_of_later_keys(case, pattern)
        else:
            says = "attention hides tokens that it should show"
        yield Change("mask", says, ("mask",), attend_with_mask(pattern))
        return
    yield from usual_masks(n)
    yield from _find_later_keys(case)
    late = differing_rows(case)
    if len(late) and late[0] > 0:
        at = np.arange(n)
        yield forgotten_starts_change(np.where(at >= late[0], late[0], 0))


def see_later_tokens(pair: PointPair) -> str:
    """Return that B's probabilities of later tokens are not zero; "" if they are."""
    if pair.point != "probs":
        return ""
    later = np.triu(np.ones(pair.b.shape[-2:]), 1) > 0
    seen = np.abs(pair.b[..., later]).sum() > 1e-6
    return "probabilities of later tokens are not zero" if seen else ""


def see_score_factor(pair: PointPair) -> str:
    """Return that all scores differ by one factor; "" if they do not, and at other points."""
    return pair.factor_text if pair.point == "scores" else ""


HYPOTHESES = (
    Hypothesis("gqa_mapping", find_head_mapping, 280, "which keys are read, before scores"),
    Hypothesis("attention_scale", find_score_scale, 290, "one factor of the scores"),
    Hypothesis("softcap", try_softcaps, 300, "a function of the scores, after a factor"),
    Hypothesis("sliding_window", find_window, 310, "one number says what is masked"),
    Hypothesis("mask", try_masks, 320, "any mask, after a window"),
    PointSignature("mask", see_later_tokens, 1010, "what is summed, before the sums"),
    PointSignature("attention_scale", see_score_factor, 1040, "of scores, before any other factor"),
    FittedNumber("attention_scale", score_scale_change, 2020, "scores, after what they are of"),
)
