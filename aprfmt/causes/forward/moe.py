"""Hypotheses about routing, and about the order of the stored experts."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aprfmt.base.sequences import join_first
from aprfmt.causes.forward.experts import routed_scale_change, weight_side_change
from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Mismatch, hyper_change
from aprfmt.causes.forward.product import replace_weights, zero_weights_change
from aprfmt.causes.row import Cause
from aprfmt.inference.context import Context, PassFacts
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.tensors.norms import exact_norm

CAUSE_ROWS = (
    Cause(
        "moe_routing", "config", "bug",
        "Experts are chosen or weighted by another rule: not renormalised, another gate function, "
        "number of experts, grouping or scale.",
        "Router logits are equal; chosen experts or their weights differ, by more than the "
        "margins allow.",
        "Routing by the named rule gives the other side's weights.",
        keys=("n_experts_used", "norm_topk", "routed_scale", "n_expert_groups",
              "n_expert_groups_used", "router", "router_jitter", "expert_bias"),
    ),
)  # fmt: skip

STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
SHOWN = 8  # experts with other experts' weights that are listed
# Assignments of experts to a part of a token's choices that are held, those that fit best: all of
# them where 64 experts are chosen from twice, or 10 four times.
MAX_HELD = 1024
_ALIKE = 1e-12  # squared distance of two experts' outputs, in their squares, that is rounding alone


def _is_routed_layer(case: Mismatch) -> bool:
    """Return whether the differing point comes after a router of its layer."""
    return case.view.point in ("experts", "expert_w", "moe_out", "ffn_contrib", "out") and bool(
        case.layer >= 0 and case.patched.hp["moe_layers"][case.layer]
    )


def usual_routing_rules(hp: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (sentence, {hyperparameter: wrong value}) of the usual mistakes in expert choice."""
    tries: list[tuple[str, Mapping[str, Any]]] = [
        (
            "the chosen experts' weights are "
            f"{'not ' if hp['norm_topk'] else ''}renormalised to sum 1",
            {"norm_topk": not hp["norm_topk"]},
        )
    ]
    for router in ("softmax", "softmax_topk", "sigmoid_bias", "group_limited_greedy", "sigmoid"):
        if router == hp["router"]:
            continue
        says = f"the router is {router}; the model says {hp['router']}"
        if str(hp["router"]).startswith(f"{router}_bias"):  # that router less its correction
            says = "the correction is not added for the choice of experts"
        tries.append((says, {"router": router}))
    if int(hp["n_expert_groups"]) > 1:
        tries.append(
            ("groups of experts are ignored", {"n_expert_groups_used": hp["n_expert_groups"]})
        )
    used = int(hp["n_experts_used"])
    for count in {1, used - 1, used + 1, 2 * used} - {0, used}:
        if count <= int(hp["n_experts"]):
            tries.append(
                (f"a token takes {count} experts; the model says {used}", {"n_experts_used": count})
            )
    return tries


def try_routing_rules(case: Mismatch) -> Iterator[Change]:
    """Yield changes of the rules for choosing and weighting experts, for points after a router."""
    if not _is_routed_layer(case):
        return
    for says, values in usual_routing_rules(case.patched.hp):
        yield hyper_change("moe_routing", says, **values)
    yield from _find_routed_scale(case)
    yield weight_side_change(case.patched)
    if f"L{case.layer}.exp_probs_b.bias" in case.patched.weights:
        yield from without_choice_correction(case.patched)


def without_choice_correction(patched: PatchedModel) -> Iterator[Change]:
    """Yield the change that adds no correction for the choice of experts, if there is one."""
    keys = [key for key in patched.weights if key.endswith(".exp_probs_b.bias")]
    says = "the correction added for the choice of experts is left out"
    if keys:
        yield zero_weights_change("moe_routing", says, keys, patched)


def _find_routed_scale(case: Mismatch) -> Iterator[Change]:
    """Yield the change of the factor on all experts' weights to the one that the trace shows.

    Where the differing point is not the weights themselves, only a factor of 1 is tried.
    """
    configured = float(case.patched.hp["routed_scale"])

    def scale_routed(value: float) -> Change:
        """Return the change of the factor on all experts' weights to `value`."""
        return routed_scale_change(case.patched, value)

    if case.view.point == "expert_w":
        ours, theirs = case.view.mine.astype(np.float64), case.view.theirs.astype(np.float64)
        if ours.shape == theirs.shape and np.sum(ours):
            found = float(np.sum(theirs) / np.sum(ours)) * configured
            if abs(found - configured) > 1e-3 * configured:
                yield from case.rounded_change(scale_routed, found)
    elif configured != 1:
        yield scale_routed(1.0)


def find_expert_order(case: Mismatch) -> Iterator[Change]:
    """Yield the change that experts of a layer have each other's weights, solved from the trace."""
    if case.view.point not in ("moe_out", "ffn_contrib", "out") or not _is_routed_layer(case):
        return
    patched, layer = case.patched, case.layer
    count = int(patched.hp["n_experts"])
    calls = case.calls("add_weighted")
    keys = [f"L{layer}.{role}.weight" for role in STACKS]
    if not calls or not all(key in patched.weights for key in keys) or count > 64:
        return
    if patched.spec.block.expert_weights == "input":
        return  # what an expert gives is no multiple of one row
    mapping = _vote_expert_order(case, calls, count)
    if mapping is None or mapping == list(range(count)):
        return
    # Reorder weights and biases of all three stacks alike.
    arrays = {}
    for key in [f"L{layer}.{role}.{part}" for role in STACKS for part in ("weight", "bias")]:
        if key in patched.weights:
            arrays[key] = np.asarray(patched.weights[key].numpy())[mapping]
    yield Change(
        "expert_order",
        _order_text(layer, mapping),
        tuple(keys),
        replace_weights(arrays),
        {"order": mapping},
        scoped=False,
    )


def _order_text(layer: int, mapping: Sequence[int]) -> str:
    """Return a sentence on which expert of a layer has whose weights: expert e those of mapping[e].

    If experts share weights, as on a rank that loaded another rank's, it names each expert with
    another's weights, and the experts whose weights none has.
    """
    lost = sorted(set(range(len(mapping))) - set(mapping))
    if not lost:
        count, turn = len(mapping), mapping[0]
        says = f"experts of layer {layer} stand in the order {list(mapping)}"
        if count > 2 and mapping == [(e + turn) % count for e in range(count)]:
            step = f"+ {turn}" if turn <= count // 2 else f"- {count - turn}"
            says += f": each number runs the expert of that number {step}, counted in a ring"
        return says
    moved = [f"{e} those of {g}" for e, g in enumerate(mapping) if e != g]
    nowhere = ", ".join(map(str, lost))
    verb = "is" if len(lost) == 1 else "are"
    return (
        f"experts of layer {layer} have other experts' weights: {join_first(moved, SHOWN)}; "
        f"{nowhere} {verb} nowhere"
    )


def _vote_expert_order(case: Mismatch, calls: list[Any], count: int) -> list[int] | None:
    """Return for each expert number the stored expert that was used; None if it is not clear.

    `calls` are the calls that add an expert's output, `count` the number of experts. Every token
    votes for the experts whose weighted outputs give its value in the trace; two numbers may be one
    stored expert.
    """
    tokens = case.tokens
    outputs = _all_expert_outputs(case, count)
    if outputs is None:
        return None
    # Collect which experts each token used, and what they added in the reference.
    experts = list(_experts_in_order(case))
    chosen: dict[int, list[tuple[int, float]]] = {t: [] for t in range(tokens)}
    routed = np.zeros_like(outputs[0])
    for expert, call in zip(experts, calls, strict=True):
        _, rows, y, weights = call.args
        for row, value, weight in zip(rows, case.array(y), weights, strict=True):
            chosen[int(row)].append((expert, float(weight)))
            routed[int(row)] += value * weight
    # Anything added to the routed sum (a shared expert, the stream) is the same on both sides.
    if case.view.point != "moe_out" and not (case.view.point == "out" and _is_plain_sum(case)):
        return None
    wanted = case.view.theirs - (case.view.mine - routed)
    # A token votes for the assignment of experts that gives its value in the trace.
    votes = np.zeros((count, count))
    for token in case.rows.tolist():
        picked = chosen[token]
        if not picked:
            continue
        weights = np.array([weight for _, weight in picked])
        answer = _best_assignment(np.stack([one[token] for one in outputs]), weights, wanted[token])
        total = sum(w * outputs[g][token] for g, w in zip(answer, weights, strict=True))
        scale = max(exact_norm(wanted[token]), 1e-30)
        if exact_norm(total - wanted[token]) <= 0.01 * scale:
            for g, (e, _) in zip(answer, picked, strict=True):
                votes[e, g] += 1
    return _mapping_of_votes(votes, experts)


def _is_plain_sum(case: Mismatch) -> bool:
    """Return whether a layer's output is the stream plus what its experts give, without a norm."""
    block, hp = case.patched.spec.block, case.patched.hp
    return block.placement == "pre" and float(hp["residual_scale"]) == 1


def _best_assignment(outputs: Array, weights: Array, wanted: Array) -> list[int]:
    """Return an expert for each choice of a token whose weighted outputs sum up to `wanted` best.

    `outputs` [experts, hidden], `weights` [choices], `wanted` [hidden], all float64. Choices are
    assigned one after another, the largest weight first; after each the MAX_HELD best partial
    assignments are kept. An expert may be assigned more than once. Of experts with equal outputs
    the first is returned.
    """
    order = np.argsort(-np.abs(weights), kind="stable")
    products = outputs @ outputs.T
    sizes = np.diag(products)
    held = np.zeros((1, 0), np.int64)  # the experts of the choices so far
    left = (outputs @ wanted)[None]  # what is left of `wanted`, times each expert's output
    away = np.array([wanted @ wanted])  # the squared distance that is left
    for weight in weights[order]:
        squared = away[:, None] - 2 * weight * left + weight * weight * sizes
        best = np.argsort(squared, axis=None, kind="stable")[:MAX_HELD]
        before, expert = np.divmod(best, len(outputs))
        held = np.concatenate([held[before], expert[:, None]], axis=1)
        left = left[before] - weight * products[expert]
        away = squared.reshape(-1)[best]
    both = sizes[:, None] + sizes
    first_alike = np.argmax(both - 2 * products <= _ALIKE * both, axis=1)
    answer = np.empty(len(weights), np.int64)
    answer[order] = first_alike[held[0]]
    return [int(expert) for expert in answer]


def _mapping_of_votes(votes: Array, used: Collection[int]) -> list[int] | None:
    """Return the stored expert for each expert number, from votes [expert, stored expert].

    `used` are the experts that any token chose. A used expert without votes keeps its number, as
    only tokens that agree chose it. So does an unused one, unless its number was given to another
    expert in a one-to-one mapping: then it gets a number that is left over. None with fewer than
    two votes.
    """
    if votes.sum() < 2:
        return None
    count = len(votes)
    mapping = [int(np.argmax(row)) if row.any() else -1 for row in votes]
    mapping = [e if g < 0 and e in used else g for e, g in enumerate(mapping)]
    known = [g for g in mapping if g >= 0]
    one_to_one = len(set(known)) == len(known)
    left = [g for g in range(count) if g not in known]
    for e in range(count):
        if mapping[e] < 0 and (e in left or not one_to_one):
            mapping[e] = e
    left = [g for g in left if g not in mapping]
    return [g if g >= 0 else left.pop(0) for g in mapping]


def _experts_in_order(case: Mismatch) -> list[int]:
    """Return the numbers of the experts whose outputs the pass added, in that order."""
    found: list[int] = []
    for call in case.view.calls:
        if call.op == "linear" and "ffn_down_exps.weight[" in call.args[1].key:
            found.append(int(call.args[1].key.partition("[")[2].rstrip("]")))
    return found


def _all_expert_outputs(case: Mismatch, count: int) -> list[Array] | None:
    """Return every expert's output [tokens, hidden], float64; None if its input is not known."""
    patched, layer = case.patched, case.layer
    view = case.found.views.get(f"L{layer}.ffn_norm") or case.found.views.get(f"L{layer}.mid")
    if view is None:
        return None
    x = view.theirs if view.recorded is not None else view.mine
    gated = case.call("swiglu_oai", "mul", "activate")
    if gated is None:
        return None

    # A context is needed for the gated activation of the reference.
    ids = np.asarray(patched.ids)
    facts = PassFacts(ids, np.arange(len(ids)), 0, (0,))
    context = Context(
        patched.backend, patched.spec.block, patched.hp, patched.weights, None, facts, None
    )

    def product(role: str, expert: int, inputs: Any) -> Any:
        """Return the product of one expert's weight `role` with `inputs`, its bias added."""
        y = patched.backend.linear(
            inputs, patched.weights.role(layer, f"{role}.weight").expert(expert), None
        )
        bias = patched.weights.get_role(layer, f"{role}.bias")
        return (
            y
            if bias is None
            else patched.backend.add(y, bias.expert(expert).array(patched.backend))
        )

    # Run the MLP of every expert on all tokens.
    outputs = []
    for expert in range(count):
        inner = context.gate(
            product("ffn_gate_exps", expert, patched.backend.array(x)),
            product("ffn_up_exps", expert, patched.backend.array(x)),
        )
        outputs.append(np.asarray(case.array(product("ffn_down_exps", expert, inner)), np.float64))
    return outputs


HYPOTHESES = (
    Hypothesis("moe_routing", try_routing_rules, 410, "which experts, before their order"),
    Hypothesis("expert_order", find_expert_order, 420, "any order of the stored experts"),
)
