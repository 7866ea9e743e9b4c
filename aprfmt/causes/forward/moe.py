"""Hypotheses about routing, and about the order of the stored experts."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from aprfmt.causes.forward.experts import weight_side_change
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
MAX_TRIES = 5000  # assignments of experts to choices tried for a token


def _is_routed_layer(case: Mismatch) -> bool:
    """Return whether the differing point comes after a router of its layer."""
    return case.view.point in ("experts", "expert_w", "moe_out", "ffn_contrib", "out") and bool(
        case.layer >= 0 and case.patched.hp["moe_layers"][case.layer]
    )


def usual_routing_rules(hp: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (sentence, {hyperparameter: value}) of each usual wrong rule of choosing experts."""
    tries: list[tuple[str, Mapping[str, Any]]] = [
        (
            "the chosen experts' weights are "
            f"{'not ' if hp['norm_topk'] else ''}renormalised to sum 1",
            {"norm_topk": not hp["norm_topk"]},
        )
    ]
    for router in ("softmax", "softmax_topk", "sigmoid_bias", "group_limited_greedy", "sigmoid"):
        if router != hp["router"]:
            tries.append(
                (f"the router is {router}; the model says {hp['router']}", {"router": router})
            )
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


def routed_scale_change(patched: PatchedModel, value: float) -> Change:
    """Return the change of the common factor on the experts' weights to `value`."""
    configured = float(patched.hp["routed_scale"])
    says = f"routed experts are weighted by {value:g}; the model says {configured:g}"
    return hyper_change("moe_routing", says, routed_scale=value)


def _find_routed_scale(case: Mismatch) -> Iterator[Change]:
    """Yield the change to the common factor on the experts' weights that the trace shows."""
    configured = float(case.patched.hp["routed_scale"])

    def scale_routed(value: float) -> Change:
        """Return the change of the common factor to `value`."""
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
    """Yield the change to the order of a layer's experts that the trace's value shows."""
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
        f"experts of layer {layer} stand in the order {mapping}",
        tuple(keys),
        replace_weights(arrays),
        {"order": mapping},
        scoped=False,
    )


def _vote_expert_order(case: Mismatch, calls: list[Any], count: int) -> list[int] | None:
    """Return for each expert number the stored expert that was used; None if it is not clear.

    `calls` are the calls that add an expert's output, `count` the number of experts. Every token
    votes for the experts whose weighted outputs give its value in the trace. Experts that no token
    chose keep their number, or get one that is left.
    """
    tokens = case.tokens
    outputs = _all_expert_outputs(case, count)
    if outputs is None:
        return None
    # Collect which experts each token used, and what they added in the reference.
    chosen: dict[int, list[tuple[int, float]]] = {t: [] for t in range(tokens)}
    routed = np.zeros_like(outputs[0])
    for expert, call in zip(_experts_in_order(case), calls, strict=True):
        _, rows, y, weights = call.args
        for row, value, weight in zip(rows, case.array(y), weights, strict=True):
            chosen[int(row)].append((expert, float(weight)))
            routed[int(row)] += value * weight
    # Anything added to the routed sum (a shared expert) is the same on both sides.
    point = case.view.mine if case.view.point == "moe_out" else None
    if point is None:
        return None
    wanted = case.view.theirs - (point - routed)
    # A token votes for the assignment of experts that gives its value in the trace.
    votes = np.zeros((count, count))
    for token in case.rows.tolist():
        picked = chosen[token]
        if not picked or count ** len(picked) > MAX_TRIES:
            continue
        best, answer = np.inf, None
        for guess in itertools.permutations(range(count), len(picked)):
            total = sum(w * outputs[g][token] for g, (_, w) in zip(guess, picked, strict=True))
            away = exact_norm(total - wanted[token])
            if away < best:
                best, answer = away, guess
        scale = max(exact_norm(wanted[token]), 1e-30)
        if answer is not None and best <= 0.01 * scale:
            for g, (e, _) in zip(answer, picked, strict=True):
                votes[e, g] += 1
    # Turn votes into a mapping; it must be one to one.
    mapping = [int(np.argmax(row)) if row.any() else -1 for row in votes]
    left = [g for g in range(count) if g not in mapping]
    if len(set(mapping) - {-1}) + len(left) != count:
        return None
    if mapping.count(-1) == len(left) and int(votes.any(axis=1).sum()) >= 2:
        own = [e for e in range(count) if mapping[e] < 0]
        for e in own:  # experts that no token chose keep their number, or get one that is left
            mapping[e] = e if e in left else -1
            if mapping[e] >= 0:
                left.remove(e)
        return [m if m >= 0 else left.pop(0) for m in mapping]
    return None


def _experts_in_order(case: Mismatch) -> list[int]:
    """Return the numbers of the experts in the order in which the pass added their outputs."""
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
        """Return the product of an expert's weight of this role with inputs, bias added."""
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
