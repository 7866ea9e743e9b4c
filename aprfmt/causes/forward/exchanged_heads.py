"""Hypotheses that a head has what belongs to another: its keys and values, or its parameters.

Parameters of a head are its sink, its slope of ALiBi, or its decay and step in a mixer. A *source*
is the head that a head takes them from. An *order* is an int array [heads] of the sources.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from aprfmt.causes.forward.attention import map_query_heads
from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    Hypothesis,
    Layers,
    Mismatch,
    Patch,
    change_head_fields,
    differing_rows,
)
from aprfmt.causes.forward.score_bias import model_slopes, slopes_by_rule, use_slopes
from aprfmt.causes.forward.single_pass import limit_to_tokens, tokens_of_one_pass
from aprfmt.inference.layer_heads import kv_head_count
from aprfmt.inference.replay.patched_model import MOVES, OperationCall, PatchedModel

MOST_SOURCES = 512  # heads times sources that are solved for at once
MOST_EQUATIONS = 8192  # values of the point that are used for it
NAMED = 16  # sources that a sentence lists
FEW = 6  # heads of which single ones are tried where it is not known which differ
MOST_HEADS = 16  # of which single ones, and pairs of them, are tried
ONE = 0.05  # how near to 0 or 1 a head's share of a source is
STILL = 0.01  # a head's difference, of the largest head's: less is none
OF_HEADS = ("mix", "delta", "scan")  # operations whose results are [tokens, heads, width]
BOTH = (("key and value", True, True), ("key", True, False), ("value", False, True))


@dataclass(frozen=True)
class HeadResults:
    """The outputs of heads at the differing point, and the product that follows them.

    `call` is the operation that gives the outputs, its result [tokens, heads, width]. `weight` is
    the matrix of the product, [outputs, heads * width]; None if the differing point is the heads'
    outputs themselves. `apart` is the trace less the reference at that point: [tokens, outputs], or
    [tokens, heads * width] without a product.
    """

    call: OperationCall
    weight: Array | None
    apart: Array

    @property
    def shape(self) -> tuple[int, int, int]:
        """The (tokens, heads, width) of what heads give."""
        tokens, heads, width = self.call.result.shape
        return tokens, heads, width

    def differing(self) -> Array | None:
        """Return which heads differ, bool [heads].

        None if the product has fewer outputs than inputs: then its inputs cannot be solved.
        """
        tokens, heads, width = self.shape
        own = self.apart
        if self.weight is not None:
            if self.weight.shape[1] > self.weight.shape[0]:
                return None
            own = np.linalg.lstsq(self.weight, self.apart.T, rcond=1e-6)[0].T
        sizes = np.linalg.norm(own.reshape(tokens, heads, width), axis=(0, 2))
        found: Array = sizes > STILL * sizes.max()
        return found


def results_of_heads(case: Mismatch) -> HeadResults | None:
    """Return what heads give at the differing point; None where more than a product follows it."""
    call, mine = case.call(*OF_HEADS), case.view.mine
    if call is None or case.view.axis != 0 or len(case.rows) != case.tokens:
        return None
    result = _values_of(call)
    if getattr(result, "ndim", 0) != 3 or result.shape[1] < 2:
        return None
    call = replace(call, result=case.array(result))
    apart = case.view.theirs.astype(np.float64) - mine
    if mine.size == result.size and np.array_equal(mine.reshape(result.shape), result):
        return HeadResults(call, None, apart.reshape(len(mine), -1))
    calls = list(case.view.calls)
    products = [at for at, one in enumerate(calls) if one.op == "linear" and one.weights]
    after = calls[products[-1] + 1 :] if products else []
    if not products or any(one.op not in ("add", *MOVES) for one in after):
        return None
    product = calls[products[-1]]
    weight = np.asarray(product.weights[0].numpy(), np.float64)
    if weight.ndim != 2 or weight.shape[1] * case.tokens != result.size:
        return None
    if mine.shape != (case.tokens, len(weight)):
        return None
    return HeadResults(call, weight, apart)


def _values_of(call: OperationCall) -> Any:
    """Return what heads give in an operation's result, which may have a last state behind it."""
    return call.result[0] if isinstance(call.result, tuple) else call.result


def head_orders(
    values: Array, differ: Array | None, known: Sequence[Array] = ()
) -> Iterator[tuple[str, Array]]:
    """Yield (words, order) of the usual wrong orders in which heads take their `values`.

    `values` are [heads, ...]. `differ` [heads] says which heads have another one for certain; None
    if that is not known: then single heads and pairs are tried of a FEW. Orders that give the
    same values count once, and those that give `known` values are tried elsewhere.
    """
    seen = {values.tobytes(), *(np.asarray(one, values.dtype).tobytes() for one in known)}
    for says, order in _all_orders(len(values), differ is not None or len(values) <= FEW):
        taken = np.ascontiguousarray(values[order])
        moved = (taken != values).reshape(len(values), -1).any(axis=1)
        if taken.tobytes() not in seen and (differ is None or not (differ & ~moved).any()):
            seen.add(taken.tobytes())
            listed = ", ".join(map(str, order[:NAMED].tolist())) + ", ..." * (len(order) > NAMED)
            yield f"of heads {listed}: {says}", order


def _all_orders(count: int, single: bool) -> Iterator[tuple[str, Array]]:
    """Yield (words, order) of `count` heads; with `single` those of one head and of pairs too."""
    at = np.arange(count)
    yield "the reverse order", at[::-1]
    yield "the head before", np.roll(at, 1)
    yield "the next head", np.roll(at, -1)
    for size in range(2, count):
        if count % size == 0:
            rest = count // size
            grid = at.reshape(rest, size).T.reshape(-1)
            yield f"a table of {rest} by {size} heads read by its columns", grid
            yield f"the first {size} heads in turn", at % size
            yield f"the first {size} heads, each for {rest} in a row", at // rest
    if not single or count > MOST_HEADS:
        return
    for head in range(count):
        for other in range(head):
            order = at.copy()
            order[[other, head]] = head, other
            yield f"heads {other} and {head} are exchanged", order
    for head in range(count):
        for other in range(count):
            if other != head:
                yield f"head {other} stands for head {head}", np.where(at == head, other, at)


# --- keys and values -----------------------------------------------------------------------------


def find_head_sources(case: Mismatch) -> Iterator[Change]:
    """Yield changes in which some query heads read the keys or values of another key head.

    Which ones is solved from the point: what heads give is added up by the product behind it.
    Whole mappings are tried elsewhere.
    """
    found = results_of_heads(case)
    heads, sources = int(case.patched.hp["n_heads"]), int(case.patched.hp["n_kv_heads"])
    if found is None or found.call.op != "mix" or not 1 < sources <= heads:
        return
    if found.shape[1] != heads or heads * sources > MOST_SOURCES or heads % sources:
        return
    if case.layer >= 0 and kv_head_count(case.patched.hp, case.layer) != sources:
        return
    differ = found.differing()
    if differ is not None and differ.all():
        return
    own = np.arange(heads) // (heads // sources)
    for what, keys, values in BOTH:
        givers = [map_query_heads(np.full(heads, one), keys, values) for one in range(sources)]
        order = _solved_sources(case, found, own, givers)
        if order is not None:
            yield from _also_of_one_pass(case, _key_head_change(what, own, order, keys, values))


def _key_head_change(what: str, own: Array, order: Array, keys: bool, values: bool) -> Change:
    """Return the change that query head h reads key head order[h], where own[h] is right.

    `order` and `own` are int [query heads]. `keys` and `values` say which of the two are read so,
    and `what` says it in words. The sentence names the first four heads that differ.
    """
    moved = np.flatnonzero(order != own).tolist()
    parts = [
        f"query head {head} reads {what} head {order[head]}, not {own[head]}" for head in moved
    ]
    return Change(
        "gqa_mapping",
        "; ".join(parts[:4]) + f"; and {len(parts) - 4} more" * (len(parts) > 4),
        ("n_kv_heads",),
        map_query_heads(order, keys, values),
        {"key_head_of_query_head": order.tolist()},
    )


def _solved_sources(
    case: Mismatch, found: HeadResults, own: Array, givers: Sequence[Patch]
) -> Array | None:
    """Return the source of each head, int [heads]; None where no single ones give the point.

    givers[i] is the patch in which all heads have source i. What each head then gives is passed
    through the product. The shares of all of them in the difference are solved at once; a head's
    must be one of a source, or none.
    """
    _, heads, width = found.shape
    mixed = found.call.result.astype(np.float64)
    rows = differing_rows(case)
    columns: list[Array] = []
    for giver in givers:
        given = _results_of_mix(case, giver)
        if given is None or given.shape != mixed.shape:
            return None
        moved = (given - mixed)[rows]
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            effect = np.zeros((len(rows), heads * width))
            effect[:, part] = moved[:, head]
            if found.weight is not None:
                effect = moved[:, head] @ found.weight[:, part].T
            columns.append(effect.reshape(-1))
    if not columns or not columns[0].size:
        return None
    step = max(1, columns[0].size // MOST_EQUATIONS)
    matrix, wanted = np.stack(columns, 1)[::step], found.apart[rows].reshape(-1)[::step]
    there = (own[None] != np.arange(len(givers))[:, None]).reshape(-1)
    if not there.any() or len(wanted) < there.sum():
        return None
    share = np.zeros(len(columns))
    share[there] = np.linalg.lstsq(matrix[:, there], wanted, rcond=1e-9)[0]
    shares = share.reshape(len(givers), heads)
    chosen = shares > 0.5
    if (np.abs(shares - chosen) > ONE).any() or (chosen.sum(axis=0) > 1).any() or not chosen.any():
        return None
    order: Array = np.where(chosen.any(axis=0), chosen.argmax(axis=0), own)
    return order


def _results_of_mix(case: Mismatch, patch: Patch) -> Array | None:
    """Return what attention's heads give under a patch of the point's layer; None if it fails.

    It is [tokens, heads, width].
    """
    kept: list[Array] = []

    def keep(op: Any, at: Any, probs: Any, v: Any) -> Any:
        """Return the sum of the values weighted by `probs`, which `kept` holds."""
        kept.append(case.array(op(probs, v)))
        return kept[-1]

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model with the patch, whose results are kept."""
        return patch(patched, layers).with_op("mix", keep, layers)

    layers = frozenset({case.layer}) if case.layer >= 0 else None
    seen = case.attempt(Change("gqa_mapping", "", ("n_kv_heads",), make), layers)
    return kept[-1] if seen is not None and kept else None


def _also_of_one_pass(case: Mismatch, change: Change) -> Iterator[Change]:
    """Yield a change; limited to one later pass where it holds for these rows alone."""
    passed = tokens_of_one_pass(differing_rows(case))
    if passed is None or case.trial(change) <= case.view.tolerance:
        yield change
    else:
        yield limit_to_tokens(change, *passed, case.tokens)


# --- numbers of heads ----------------------------------------------------------------------------


def find_orders_of_sinks(case: Mismatch) -> Iterator[Change]:
    """Yield changes in which heads take the sinks of other heads, or rows those of a head."""
    call = case.call("probs")
    if call is None or call.args[1].sinks is None:
        return
    sinks = case.array(call.args[1].sinks)
    found = results_of_heads(case)
    known = [np.roll(sinks, 1), np.roll(sinks, -1), sinks[::-1]]
    for says, order in head_orders(sinks, None if found is None else found.differing(), known):
        yield from _also_of_one_pass(
            case,
            Change(
                "softmax_reduction",
                f"heads take the sinks {says}",
                ("softmax",),
                partial(change_head_fields, sinks=partial(_sinks_in_order, order)),
                {"sinks": order.tolist()},
            ),
        )
    yield Change(
        "softmax_reduction",
        "each row has the sink of another head, its own number modulo that of heads, in all heads",
        ("softmax",),
        lambda patched, layers: patched.with_op("probs", _sinks_by_row, layers, of_operands=True),
        {"sinks": "by row"},
    )


def _sinks_in_order(order: Array, heads: Any) -> Any:
    """Return a layer's sinks with those of the heads `order`."""
    return heads.sinks[order]


def _sinks_by_row(op: Any, at: Any, scores: Any, heads: Any) -> Any:
    """Return the probabilities in which row t has the sink of head t modulo their number."""
    sinks = heads.sinks
    every = [
        np.asarray(op(scores, replace(heads, sinks=np.full_like(sinks, one)))) for one in sinks
    ]
    made = every[0].copy()
    for head, given in enumerate(every):
        made[:, head :: len(sinks)] = given[:, head :: len(sinks)]
    return made


def find_orders_of_slopes(case: Mismatch) -> Iterator[Change]:
    """Yield changes in which heads take the ALiBi slopes of other heads."""
    own = model_slopes(case.patched)
    if own is None or case.call("mix", "probs") is None:
        return
    found = results_of_heads(case)
    rules = slopes_by_rule(own, float(case.patched.hp["alibi_max_bias"]))
    known = [slopes for _, slopes in rules]
    for says, order in head_orders(own, None if found is None else found.differing(), known):
        yield Change(
            "positions",
            f"heads take the slopes on distances {says}",
            ("alibi_slopes",),
            use_slopes(case.patched, own, own[order]),
            {"alibi_slopes": order.tolist()},
        )


@dataclass(frozen=True)
class HeadNumbers:
    """Parameters of a mixer's heads: the operation and its operands that hold them, and words.

    `cause` and `place` are those of the finding, `name` is the parameter's.
    """

    cause: str
    name: str
    place: str
    op: str
    operands: tuple[int, ...]


NUMBERS = (
    HeadNumbers("recurrence", "dt_bias", "decay", "decay", (2,)),
    HeadNumbers("recurrence", "A_log", "decay", "decay", (1,)),
    HeadNumbers("recurrence", "dt_bias and A_log", "decay", "decay", (1, 2)),
    HeadNumbers("ssm_step", "dt_bias", "ssm_step", "time_step", (1,)),
    HeadNumbers("ssm_decay", "A", "ssm_a", "scan", (2,)),
    HeadNumbers("ssm_scan", "D", "ssm_d", "scan", (5,)),
)


def find_orders_of_numbers(case: Mismatch) -> Iterator[Change]:
    """Yield changes in which heads of a mixer take the parameters of other heads."""
    call = case.call("delta", "scan")
    if case.layer < 0 or call is None:
        return
    result = _values_of(call)
    heads, found = result.shape[1], results_of_heads(case)
    differ = None if found is None else found.differing()
    for row in NUMBERS if heads > 1 and result.shape[2] > 1 else ():
        made = case.call(row.op)
        given = [] if made is None else [case.array(made.args[i]) for i in row.operands]
        if not given or any(one.ndim == 0 or one.size % heads for one in given):
            continue
        joined = np.concatenate([one.reshape(heads, -1) for one in given], axis=1)
        for says, order in head_orders(joined, differ, [joined[::-1]] * (len(given) > 1)):
            yield Change(
                row.cause,
                f"heads take {row.name} {says}",
                (row.place,),
                _permute_head_parameters(row, order),
                {row.place: order.tolist()},
            )


def _permute_head_parameters(row: HeadNumbers, order: Array) -> Patch:
    """Return a patch in which head h has the parameters of head order[h].

    `row` names the operation, and its operands that hold a parameter for each head, heads first.
    `order` is int [heads].
    """

    def override(op: Any, at: Any, *given: Any, **how: Any) -> Any:
        """Return the operation's result with its numbers of heads in the order."""
        taken = list(given)
        for place in row.operands:
            one = np.asarray(taken[place])
            taken[place] = one.reshape(len(order), -1)[order].reshape(one.shape)
        return op(*taken, **how)

    return lambda patched, layers: patched.with_op(row.op, override, layers)


HYPOTHESES = (
    Hypothesis("positions", find_orders_of_slopes, 191, "orders, after rules of slopes"),
    Hypothesis("gqa_mapping", find_head_sources, 281, "single heads, after whole mappings"),
    Hypothesis("softmax_reduction", find_orders_of_sinks, 331, "orders, after what is added"),
    Hypothesis("recurrence", find_orders_of_numbers, 356, "orders, after rules of a state"),
)
