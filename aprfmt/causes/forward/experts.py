"""Hypotheses about what experts add: the shared one, exchanged weights, a capacity, lost ones."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    Hypothesis,
    Mismatch,
    Patch,
    differing_rows,
    hyper_change,
)
from aprfmt.causes.forward.shards import COUNTS
from aprfmt.inference.moe import ROUTED
from aprfmt.inference.replay.patched_model import PatchedModel

SHARED = ("moe_out", "ffn_contrib", "out", "logits")
# Places by which weights of chosen experts are exchanged; 0 for all turned round.
TURNED = {
    0: "the largest that of the smallest",
    1: "each that of the next larger one",
    -1: "each that of the next smaller one",
}
SAME = 1e-3  # relative: how far a fitted factor is from 1 where it is none
FACTORS = (1.0, 1.25, 1.5, 2.0)  # capacities over an even share of the tokens
# What is said -> the shared expert's gate, of the product before its sigmoid.
GATES: Mapping[str, Callable[[Any, Array], Array]] = {
    "is left out": lambda op, x: 0 * x + 1,
    "has no sigmoid": lambda op, x: x,
    "is silu, not a sigmoid": lambda op, x: x * op(x),
    "is a tanh, not a sigmoid": lambda op, x: np.tanh(x),
}


def weight_side_change(patched: PatchedModel) -> Change:
    """Return the change that multiplies an expert's input, not its output, by its weight.

    The reverse for a model that multiplies inputs.
    """
    own = patched.spec.block.expert_weights
    other = "output" if own == "input" else "input"
    return Change(
        "moe_routing",
        f"an expert's weight multiplies its {other}; the model says its {own}",
        ("expert_weights",),
        lambda patched, layers: patched.with_block(layers, expert_weights=other),
        {"expert_weights": other},
    )


def routed_scale_change(patched: PatchedModel, value: float) -> Change:
    """Return the change of `routed_scale`, the common factor on experts' weights, to `value`."""
    configured = float(patched.hp["routed_scale"])
    twice = configured != 1 and math.isclose(value, configured**2, rel_tol=1e-3)
    more = ": it is applied twice" if twice else ""
    says = f"routed experts are weighted by {value:g}; the model says {configured:g}{more}"
    return hyper_change("moe_routing", says, routed_scale=value)


def usual_shared_expert_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for the usual mistakes of the shared expert; none for models without one."""
    if patched.spec.block.shared_expert == "none" or not patched.hp["shared_ffn_size"]:
        return
    # Another weight of the shared expert, then other gates.
    scale = float(patched.hp["routed_scale"])
    factors = {2.0: "is added twice", 0.5: "is halved"}
    if scale != 1:
        factors[scale] = f"is multiplied by the routed experts' factor {scale:g}, too"
    for factor, says in factors.items():
        yield _shared_factor_change(says, factor)
    if patched.spec.block.shared_expert != "plain":
        for says, gate in GATES.items():
            yield Change(
                "moe_routing",
                f"the shared expert's gate {says}",
                ("ffn_gate_inp_shexp",),
                _gate_shared_expert(gate),
                {"shared_gate": says},
            )


def _shared_factor_change(says: str, factor: float) -> Change:
    """Return the change that multiplies the shared expert's result by `factor`.

    `says` ends the sentence on it.
    """
    return Change(
        "moe_routing",
        f"the shared expert {says}",
        ("shared_expert",),
        _scale_shared_expert(factor),
        {"shared_expert": factor},
    )


def _scale_shared_expert(factor: float) -> Patch:
    """Return a patch function: the shared expert's result is multiplied by `factor`."""

    def override(op: Any, at: Any, a: Any, b: Any) -> Any:
        """Return a + factor * b where `b` is the shared expert's result, and a + b elsewhere."""
        inside = at.point in ROUTED and b.ndim > 1
        return op(a, b * b.dtype.type(factor)) if inside else op(a, b)

    return lambda patched, layers: patched.with_op("add", override, layers)


def _gate_shared_expert(how: Callable[[Any, Array], Array]) -> Patch:
    """Return a patch that replaces sigmoids in the experts by how(operation, input)."""

    def override(op: Any, at: Any, x: Any) -> Any:
        """Return the shared expert's gate of `x` by the mistaken formula how(op, x).

        Elsewhere the operation's own sigmoid.
        """
        return np.asarray(how(op, x), x.dtype) if at.point in ROUTED else op(x)

    return lambda patched, layers: patched.with_op("sigmoid", override, layers)


# --- weights of other experts --------------------------------------------------------------------


def exchanged_weights_change(turns: int) -> Change:
    """Return the change that gives each chosen expert the weight of another chosen one.

    Experts are sorted by weight, the largest first. Each gets the weight of the expert `turns` (1
    or -1) before it in that order; with 0 the order is reversed.
    """

    def tap(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return the chosen experts' weights `x` [tokens, used] in another order among the experts.

        Sorted by size, each expert gets the weight `turns` before its own; with 0 the order is
        reversed.
        """
        order = np.argsort(-np.asarray(x), axis=-1, kind="stable")
        other = np.roll(order, turns, axis=-1) if turns else order[..., ::-1]
        moved = np.array(x)
        np.put_along_axis(moved, order, np.take_along_axis(moved, other, -1), -1)
        return moved

    words = TURNED[turns]
    return Change(
        "moe_routing",
        f"the experts that a token chose have each other's weights, {words}",
        ("expert_w",),
        lambda patched, layers: patched.with_tap("expert_w", tap, layers),
        {"expert_w": words},
    )


def usual_exchanged_weights(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes to the weights of other chosen experts; none where a token has one expert."""
    used = int(patched.hp["n_experts_used"])
    for turns in TURNED:
        if used > 2 or (used == 2 and not turns):  # of two all exchanges are one
            yield exchanged_weights_change(turns)


def usual_bias_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield the change that adds the chosen experts' output biases without their weights.

    Nothing for models whose experts have no such bias. Nothing either where weights multiply the
    inputs, since biases are rightly unweighted there.
    """
    role = "ffn_down_exps.bias"
    if patched.spec.block.expert_weights == "input" or not any(
        split_key(key)[1] == role for key in patched.weights
    ):
        return

    def tap(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return the experts' sum `x` [tokens, hidden] with their output biases added unweighted.

        `x` unchanged in a layer without such biases or without recorded experts in `held`.
        """
        biases = patched.weights.get_role(layer, role)
        if biases is None or "experts" not in held or "expert_w" not in held:
            return x
        experts, weights = (np.asarray(held[name]) for name in ("experts", "expert_w"))
        rows = np.stack(
            [
                np.asarray(biases.expert(i).array(patched.backend), np.float32)
                for i in range(int(patched.hp["n_experts"]))
            ]
        )
        taken = (1 - weights)[..., None] * rows[experts.astype(np.int64)]
        return x + taken.sum(-2).astype(np.asarray(x).dtype)

    yield Change(
        "moe_routing",
        "the output biases of experts are added whole, not times the experts' weights",
        ("ffn_down_exps.bias",),
        lambda patched, layers: patched.with_tap("moe_out", tap, layers),
        {"ffn_down_exps.bias": "not weighted"},
    )


# --- capacity ------------------------------------------------------------------------------------


# Which tokens an expert keeps that has more than its capacity -> sorting keys of the places
# (token, choice) at which it is chosen, of its weights [places] there. The first are kept.
KEPT: Mapping[str, Callable[[Array, Array], tuple[Array, ...]]] = {
    "the first ones": lambda places, weights: (places[:, 1], places[:, 0]),
    "those with the highest weights": lambda places, weights: (places[:, 0], -weights),
    "all first choices of tokens before the second ones": lambda places, weights: (
        places[:, 0],
        places[:, 1],
    ),
}


def drop_over_capacity(
    experts: Array, weights: Array, capacity: int, which: str, *, renormalised: bool = False
) -> Array:
    """Return experts' weights [tokens, used], zero where an expert has more than `capacity` tokens.

    `experts` [tokens, used] are the chosen experts' numbers, the heaviest of a token first. `which`
    is the key of KEPT that says what an expert keeps. With `renormalised` the weights that a token
    keeps are multiplied until their sum is what it was; a token that keeps none has zeros.
    """
    kept = np.array(weights)
    # Drop the places of an expert beyond its capacity.
    for expert in np.unique(experts):
        places = np.argwhere(experts == expert)
        order = np.lexsort(KEPT[which](places, weights[tuple(places.T)]))
        kept[tuple(places[order[capacity:]].T)] = 0
    if renormalised:
        left = kept.sum(-1, keepdims=True)
        kept *= np.divide(weights.sum(-1, keepdims=True), left, np.ones_like(left), where=left != 0)
    return kept


def _capacity_rules(used: int) -> Iterator[tuple[str, bool]]:
    """Yield (which tokens are kept, whether weights are renormalised), the usual ones first.

    Of a token with one expert (`used` = 1) no weight is left to renormalise, and no choice is a
    second one.
    """
    for renormalised in (False, True) if used > 1 else (False,):
        for which in list(KEPT) if used > 1 else list(KEPT)[:2]:
            yield which, renormalised


def capacity_change(capacity: int, which: str, *, renormalised: bool) -> Change:
    """Return the change to experts that take at most `capacity` tokens.

    `which` is a key of KEPT. `renormalised`: the weights a token keeps have the sum of all of its
    weights.
    """
    also = ", and the weights that a token keeps are renormalised" if renormalised else ""
    return Change(
        "moe_routing",
        f"an expert takes {capacity} tokens at most, {which}; the others are dropped{also}",
        ("expert_capacity",),
        _limit_capacity(capacity, which, renormalised),
        {"expert_capacity": capacity, "kept": which, "renormalised": renormalised},
    )


def _limit_capacity(capacity: int, which: str, renormalised: bool) -> Patch:
    """Return a patch function: every expert takes `capacity` tokens, those that `which` names."""

    def tap(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return the experts' weights `x` [tokens, used], 0 for tokens over their capacity."""
        chosen = np.asarray(held["experts"])
        return drop_over_capacity(chosen, x, capacity, which, renormalised=renormalised)

    return lambda patched, layers: patched.with_tap("expert_w", tap, layers)


def usual_capacities(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes to the capacities that trainers' usual factors give, by each usual rule."""
    share = len(patched.ids) * int(patched.hp["n_experts_used"]) / int(patched.hp["n_experts"])
    found = [round_(share * factor) for factor in FACTORS for round_ in (np.floor, np.ceil)]
    for which, renormalised in _capacity_rules(int(patched.hp["n_experts_used"])):
        for capacity in dict.fromkeys(int(value) for value in found if value >= 1):
            yield capacity_change(capacity, which, renormalised=renormalised)


def find_capacity(case: Mismatch) -> Iterator[Change]:
    """Yield changes to each capacity that would drop just the tokens whose rows differ.

    At the points of one layer these are all rows that differ; at later points only the first of
    them is compared.
    """
    late = differing_rows(case)
    if not len(late):
        return
    here = case.layer >= 0 and "add_weighted" in {call.op for call in case.view.calls}
    routing = _recorded_routing(case)
    for which, renormalised in _capacity_rules(max((x.shape[1] for x, _ in routing), default=0)):
        tried: dict[int, None] = {}
        for chosen, weights in routing:
            used = np.bincount(chosen.reshape(-1))
            # A capacity fits if it drops just these tokens.
            for number in range(1, int(used.max())):
                kept = drop_over_capacity(chosen, weights, number, which, renormalised=renormalised)
                lost = np.flatnonzero((kept != weights).any(-1))
                lost = lost[np.isin(lost, case.rows)]
                if np.array_equal(lost, late) if here else len(lost) and lost[0] == late[0]:
                    tried[number] = None
        for number in tried:
            yield capacity_change(number, which, renormalised=renormalised)


def lost_experts_change(rank: int, ranks: int, n_experts: int) -> Change:
    """Return the change that the experts of one rank add nothing.

    The experts are divided evenly among `ranks` ranks, of which `rank` is the one.
    """
    lost = np.arange(n_experts).reshape(ranks, -1)[rank]

    def tap(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return the experts' weights `x` [tokens, used], 0 for the lost rank's experts."""
        return np.where(np.isin(np.asarray(held["experts"]), lost), x.dtype.type(0), x)

    which = f"experts {lost[0]} to {lost[-1]}" if len(lost) > 1 else f"expert {lost[0]}"
    return Change(
        "moe_routing",
        f"{which} of {n_experts}, the share of rank {rank} of {ranks}, count for nothing",
        ("expert_w",),
        lambda patched, layers: patched.with_tap("expert_w", tap, layers),
        {"ranks": ranks, "lost": rank},
    )


def find_lost_experts(case: Mismatch) -> Iterator[Change]:
    """Yield changes that one rank's experts add nothing, if just their tokens' rows differ."""
    late = differing_rows(case)
    if "add_weighted" not in {call.op for call in case.view.calls}:
        return
    n_experts = int(case.patched.hp["n_experts"])
    for chosen, _ in _recorded_routing(case):
        for ranks in dict.fromkeys((*COUNTS, n_experts)):
            for rank in range(ranks if n_experts % ranks == 0 else 0):
                theirs = (chosen * ranks // n_experts == rank).any(-1)
                if np.array_equal(case.rows[theirs[case.rows]], late):
                    yield lost_experts_change(rank, ranks, n_experts)


def _recorded_routing(case: Mismatch) -> list[tuple[Array, Array]]:
    """Return (experts, weights), both [tokens, used], of the point's layer.

    For a point outside the layers, of all layers.
    """
    found: dict[int, tuple[Array, Array]] = {}

    def record_routing(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return `x` unchanged, and put the layer's (experts, weights) into `found`.

        Both are [tokens, used]; `x` are the weights.
        """
        found[layer] = np.array(held["experts"], np.int64), np.array(x)
        return x

    looking = Change(
        "moe_routing",
        "",
        (),
        lambda patched, layers: patched.with_tap("expert_w", record_routing, layers),
    )
    case.attempt(looking)
    return [found[layer] for layer in sorted(found) if case.layer in (-1, layer)]


def try_expert_mistakes(case: Mismatch) -> Iterator[Change]:
    """Yield changes for the usual mistakes of experts, if they lie before the point."""
    moe = case.layer >= 0 and case.patched.hp["moe_layers"][case.layer]
    if not moe or case.view.point not in ("expert_w", *SHARED):
        return
    if case.view.point != "expert_w":
        yield from usual_shared_expert_mistakes(case.patched)
        yield from usual_bias_mistakes(case.patched)
    yield from usual_exchanged_weights(case.patched)
    yield from find_capacity(case)
    yield from find_lost_experts(case)


def solve_shared_factor(case: Mismatch) -> Iterator[Change]:
    """Yield the change of the factor on the shared expert, alone or with one on the routed sum.

    Both are fitted to every second row of what the trace adds to the reference's own parts.
    The routed part is what is gone where experts are weighted by 0.
    """
    moe = case.layer >= 0 and case.patched.hp["moe_layers"][case.layer]
    if not moe or case.view.point not in SHARED or case.view.theirs.ndim < 2:
        return
    if case.patched.spec.block.shared_expert == "none" or not case.patched.hp["shared_ffn_size"]:
        return
    lost = routed_scale_change(case.patched, 0.0), _shared_factor_change("is left out", 0.0)
    parts = [_part_without(case, change) for change in lost]
    known = [part for part in parts if part is not None and part.any()]
    if len(known) < len(parts):
        return
    mine, theirs = (np.asarray(x, np.float64) for x in (case.view.mine, case.view.theirs))
    left = theirs - mine + sum(known)
    columns = np.stack([part[::2].reshape(-1) for part in known], axis=1)
    routed, added = np.linalg.lstsq(columns, left[::2].reshape(-1), rcond=None)[0].tolist()
    if min(abs(added), abs(added - 1), abs(added - routed)) < SAME:
        return  # it adds nothing, adds as it should, or as the routed experts do
    if abs(routed - 1) < SAME:
        yield from case.rounded_change(
            lambda value: _shared_factor_change(f"is multiplied by {value:g}", value), added
        )
    else:
        configured = float(case.patched.hp["routed_scale"])
        yield _both_factors_change(case.patched, routed * configured, added)


def _part_without(case: Mismatch, change: Change) -> Array | None:
    """Return what a change takes away from the point's value, float64; None if not computed."""
    view = case.attempt(change)
    if view is None or view.mine.shape != case.view.mine.shape:
        return None
    left: Array = np.asarray(case.view.mine, np.float64) - np.asarray(view.mine, np.float64)
    return left


def _both_factors_change(patched: PatchedModel, routed: float, added: float) -> Change:
    """Return the change that weights routed experts by `routed` and the shared one by `added`."""
    first, second = routed_scale_change(patched, routed), _scale_shared_expert(added)
    return Change(
        "moe_routing",
        f"{first.says}; and the shared expert is multiplied by {added:g}",
        ("routed_scale", "shared_expert"),
        lambda patched, layers: second(first.make(patched, layers), layers),
        {"routed_scale": routed, "shared_expert": added},
    )


def usual_expert_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for the usual mistakes of experts; none for models without them."""
    if any(patched.hp["moe_layers"]):
        yield from usual_shared_expert_mistakes(patched)
        yield weight_side_change(patched)
        yield from usual_bias_mistakes(patched)
        yield from usual_exchanged_weights(patched)
        yield from usual_capacities(patched)


HYPOTHESES = (
    Hypothesis(
        "moe_routing", try_expert_mistakes, 415, "parts of single experts, after which are chosen"
    ),
    Hypothesis("moe_routing", solve_shared_factor, 418, "two numbers, after mistakes without any"),
)
