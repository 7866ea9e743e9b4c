"""Rules of choosing and weighting experts that engines apply by mistake.

A model's own rule is read from its hyperparameters; a mistake is that rule with one part of it
exchanged. The rule runs on the router's logits of the pass and replaces the points `experts` and
`expert_w`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Layers, Patch
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.routing import Routing, router_scores
from aprfmt.measure.softmax import softmax

Scores = Literal["softmax", "sigmoid", "root of softplus", "softmax over tokens"]
Ranking = Literal["none", "best", "two", "mean"]
MixedBy = Literal[
    "scores", "biased", "logits", "softmax of the chosen", "softmax of the scores", "shares",
    "biased shares", "one each", "equal shares", "softmax of the chosen over tokens",
]  # fmt: skip
OfToken = Literal[
    "own", "token before", "token after", "token before in a ring", "token after in a ring",
    "first token", "last token",
]  # fmt: skip
GivenTo = Literal[OfToken, "by number"]


@dataclass(frozen=True)
class RoutingRule:
    """How a router chooses and weights experts.

    `biased`: the correction is added for the choice. `groups`: how groups of experts are ranked.
    `weights`: what the chosen experts are weighted by; "shares" are scores divided by the sum of
    all experts' scores, "biased shares" corrected scores divided by the sum of the chosen experts'
    scores without the correction; "one each" and "equal shares" of 1 read no logits. `sums`: the
    weights are divided by their sum. `scaled`: the model's factor is applied. `early`: the
    correction is added to the logits. `given`: what the weights are given to: the experts that they
    were computed for ("own"), these in another order, or those of another token. `chosen`: whose
    experts a token has, weighted by its own scores. `routed`: whose logits a token has.
    `by_tokens`: the weights are divided by the sum of all tokens' weights of the same choice (the
    first, the second), not by a token's own.
    """

    scores: Scores
    biased: bool
    groups: Ranking
    weights: MixedBy
    sums: bool
    scaled: bool
    early: bool = False
    given: GivenTo = "own"
    chosen: OfToken = "own"
    routed: OfToken = "own"
    by_tokens: bool = False


# Routers that choose by corrected scores, and llama4's, whose scores have no correction.
_SCORED_BY: Mapping[str, tuple[Scores, bool]] = {
    "softmax_bias": ("softmax", True),
    "sqrtsoftplus_bias": ("root of softplus", True),
    "sigmoid_bias": ("sigmoid", True),
    "sigmoid_bias_eps": ("sigmoid", True),
    "sigmoid": ("sigmoid", False),
}


def routing_rule_of(hp: Mapping[str, Any]) -> RoutingRule:
    """Return the rule (RoutingRule) of choosing and weighting experts that a model's `hp` states.

    `hp` are its hyperparameters.
    """
    name, split = str(hp["router"]), int(hp["n_expert_groups"]) > 1
    if name == "softmax_topk":
        return RoutingRule("softmax", False, "none", "softmax of the chosen", False, True)
    if name in _SCORED_BY:
        scores, biased = _SCORED_BY[name]
        groups: Ranking = "two" if split and name.startswith("sigmoid_bias") else "none"
        return RoutingRule(scores, biased, groups, "scores", bool(hp["norm_topk"]), True)
    ranked: Ranking = "best" if name == "group_limited_greedy" and split else "none"
    return RoutingRule("softmax", False, ranked, "scores", bool(hp["norm_topk"]), True)


def route_by_rule(
    rule: RoutingRule, logits: Array, bias: Array | None, hp: Mapping[str, Any]
) -> Routing:
    """Return the experts that a router chooses by `rule`, their weights and margin, heaviest first.

    `logits` are [tokens, experts]; `bias` [experts] is the correction for the choice, or None. The
    margin is the choice score of the last chosen expert less that of the best one not chosen.
    """
    # Choose experts by their corrected scores, in the allowed groups.
    logits = logits[_token_rows(rule.routed, len(logits))]
    if rule.early and bias is not None:
        logits = logits + bias
    scores = _scores_of(rule.scores, logits)
    ranked = scores + bias if bias is not None and rule.biased else scores
    choice = _scores_of_chosen_groups(ranked, rule.groups, hp)
    used = int(hp["n_experts_used"])
    chosen = np.argsort(-choice, axis=-1, kind="stable")[:, :used]
    chosen = chosen[_token_rows(rule.chosen, len(chosen))]
    # Weight the chosen ones.
    weights = _expert_weights(rule, logits, scores, bias, chosen)
    if rule.sums:
        weights = weights / (weights.sum(-1, keepdims=True) + weights.dtype.type(1e-20))
    if rule.by_tokens:
        weights = weights / (weights.sum(0, keepdims=True) + weights.dtype.type(1e-20))
    if rule.scaled:
        weights = weights * weights.dtype.type(hp["routed_scale"])
    weights = _give_weights(rule.given, weights, chosen)
    # Sort by weight, and measure the margin of the choice.
    order = np.argsort(-weights, axis=-1, kind="stable")
    margin = np.full(len(logits), np.inf, logits.dtype)
    if used < logits.shape[-1]:
        highest = -np.sort(-choice, axis=-1)
        margin = highest[:, used - 1] - highest[:, used]
    return Routing(
        np.take_along_axis(chosen, order, -1), np.take_along_axis(weights, order, -1), margin
    )


def _scores_of(kind: Scores, logits: Array) -> Array:
    """Return the scores [tokens, experts] that a router makes of its logits, in their dtype."""
    if kind == "softmax over tokens":
        return softmax(logits, axis=0)
    return np.asarray(router_scores(kind, logits))


def _scores_of_chosen_groups(ranked: Array, groups: Ranking, hp: Mapping[str, Any]) -> Array:
    """Return scores [tokens, experts], -inf for experts in groups that are not chosen.

    `ranked` are the scores; `groups` says how groups are ranked: by the best expert, the two
    best, or the mean.
    """
    count = int(hp["n_expert_groups"])
    if groups == "none" or count < 2 or ranked.shape[-1] % count:
        return ranked
    split = ranked.reshape(len(ranked), count, -1)
    best = np.sort(split, axis=-1)
    value = {"best": best[..., -1], "two": best[..., -2:].sum(-1), "mean": split.mean(-1)}[groups]
    chosen = np.argsort(-value, axis=-1, kind="stable")[:, : int(hp["n_expert_groups_used"])]
    kept = np.zeros(value.shape, np.bool_)
    np.put_along_axis(kept, chosen, True, axis=-1)
    inside = np.repeat(kept, split.shape[-1], axis=-1)
    return np.where(inside, ranked, ranked.dtype.type(-np.inf))


def _expert_weights(
    rule: RoutingRule, logits: Array, scores: Array, bias: Array | None, chosen: Array
) -> Array:
    """Return the weights [tokens, used] of the `chosen` experts as `rule.weights` makes them.

    They come from the router's `logits`, its `scores`, or the scores with `bias`, before any
    division by their sum.
    """
    if rule.weights in ("one each", "equal shares"):
        each = 1 if rule.weights == "one each" else 1 / chosen.shape[-1]
        return np.full(chosen.shape, each, logits.dtype)
    if rule.weights == "softmax of the chosen":
        return softmax(np.take_along_axis(logits, chosen, -1))
    if rule.weights == "softmax of the chosen over tokens":
        return softmax(np.take_along_axis(logits, chosen, -1), axis=0)
    if rule.weights == "softmax of the scores":
        return softmax(np.take_along_axis(scores, chosen, -1))
    source = logits if rule.weights == "logits" else scores
    if rule.weights in ("biased", "biased shares") and bias is not None:
        source = scores + bias
    weights = np.asarray(np.take_along_axis(source, chosen, -1))
    if rule.weights == "shares":
        return np.asarray(weights / scores.sum(-1, keepdims=True))
    if rule.weights == "biased shares":
        return np.asarray(weights / np.take_along_axis(scores, chosen, -1).sum(-1, keepdims=True))
    return weights


def _give_weights(given: GivenTo, weights: Array, chosen: Array) -> Array:
    """Return the weights [tokens, used] that an engine gives to the `chosen` experts.

    `weights` are in the order of `chosen`, the experts' numbers, the first choice first.
    """
    if given == "by number":  # the numbers were sorted, and their weights stayed in place
        places = np.argsort(np.argsort(chosen, axis=-1, kind="stable"), axis=-1, kind="stable")
        return np.take_along_axis(weights, places, -1)
    return weights[_token_rows(given, len(weights))]


def _token_rows(which: OfToken, tokens: int) -> Array:
    """Return, for each token, the number of the token that `which` names, int array.

    A token at an end of the run, which has none before or after it, names itself, or in a ring the
    token at the other end.
    """
    own = np.arange(tokens)
    if which in ("first token", "last token"):
        return np.full(tokens, 0 if which == "first token" else tokens - 1)
    step = {"token before": -1, "token after": 1}.get(which.removesuffix(" in a ring"), 0)
    moved = own + step
    return moved % tokens if which.endswith("ring") else np.clip(moved, 0, tokens - 1)


# --- mistakes ------------------------------------------------------------------------------------


def wrong_routing_rules(patched: PatchedModel) -> Iterator[tuple[str, RoutingRule]]:
    """Yield (sentence, rule) of the usual mistakes in choosing and weighting a model's experts."""
    # Other sources of the experts' weights.
    hp, own = patched.hp, routing_rule_of(patched.hp)
    corrected = any(key.endswith(".exp_probs_b.bias") for key in patched.weights)
    yield "the router's logits are the experts' weights", replace(own, weights="logits", sums=False)
    yield (
        "the router's logits are the experts' weights, divided by their sum",
        replace(own, weights="logits", sums=True),
    )
    # The softmax over other experts, or another function of the scores.
    if own.weights == "softmax of the chosen":
        for sums in (False, True):
            words = ", divided by their sum" if sums else ""
            yield (
                f"the softmax is over all experts, not over the chosen ones{words}",
                replace(own, weights="scores", sums=sums),
            )
    else:
        yield (
            "the weights are the softmax of the chosen experts' logits",
            replace(own, weights="softmax of the chosen", sums=False),
        )
        other: Scores = "sigmoid" if own.scores == "softmax" else "softmax"
        if own.scores != "softmax":
            yield (
                "the weights are divided by the sum of all experts' scores",
                replace(own, weights="shares", sums=False),
            )
        for sums in dict.fromkeys((own.sums, not own.sums)):
            words = (
                ""
                if sums == own.sums
                else (", divided by their sum" if sums else ", not divided by their sum")
            )
            yield (
                f"the scores are a {other}{words}; the model says {own.scores}",
                replace(own, scores=other, sums=sums),
            )
    yield (
        "the weights are a softmax of the chosen experts' scores: twice normalised",
        replace(own, weights="softmax of the scores", sums=False),
    )
    # The correction for the choice used elsewhere, or not at all.
    if corrected:
        yield (
            "the correction for the choice of experts is in their weights, too",
            replace(own, weights="biased"),
        )
        yield ("the correction is not added for the choice of experts", replace(own, biased=False))
        yield (
            "the correction is in the experts' weights, which are not divided by their sum",
            replace(own, weights="biased", sums=not own.sums),
        )
        yield (
            "the correction is added to the router's logits",
            replace(own, biased=False, early=True),
        )
        if own.sums:
            yield (
                "the correction is in the experts' weights, and not in the sum that divides them",
                replace(own, weights="biased shares", sums=False),
            )
    yield from _wrong_axes(hp, own)
    yield from _wrong_rankings(hp, own)
    yield from _unused_weights(hp, own)
    yield from _experts_of_other_tokens(own)
    if float(hp["routed_scale"]) != 1:
        yield "the factor on the experts' weights is left out", replace(own, scaled=False)


def _wrong_axes(hp: Mapping[str, Any], own: RoutingRule) -> Iterator[tuple[str, RoutingRule]]:
    """Yield (sentence, rule) of the ways to normalise over the tokens for over the experts.

    `own` is the model's rule, `hp` are the hyperparameters.
    """
    chosen = own.weights == "softmax of the chosen"
    yield (
        "the experts' weights are divided by their sum over the tokens, not over a token's experts",
        replace(own, weights="scores", sums=False, by_tokens=True),
    )
    if int(hp["n_experts_used"]) > 1 and (own.sums or chosen):
        yield (
            "the experts' weights are divided by their sum over the tokens as well",
            replace(own, by_tokens=True),
        )
    says = "the router's softmax is over the tokens, not over the experts"
    if chosen:
        yield says, replace(own, weights="softmax of the chosen over tokens")
    elif own.scores == "softmax":
        yield says, replace(own, scores="softmax over tokens")


# Whose experts or weights a token has, in words.
OF_TOKENS: Mapping[OfToken, str] = {
    "token before": "the token before",
    "token after": "the token after",
    "token before in a ring": "the token before, the first those of the last",
    "token after in a ring": "the token after, the last those of the first",
    "first token": "the first token",
    "last token": "the last token",
}


def _unused_weights(hp: Mapping[str, Any], own: RoutingRule) -> Iterator[tuple[str, RoutingRule]]:
    """Yield (sentence, rule) of the ways in which the router chooses and its weights are not used.

    They are a number that is no output of the router, and the weights of other experts or tokens.
    `own` is the model's rule, `hp` are the hyperparameters.
    """
    used, factor = int(hp["n_experts_used"]), float(hp["routed_scale"])
    for scaled in (True, False) if factor != 1 else (own.scaled,):
        words = f" times the factor {factor:g}" if scaled and factor != 1 else ""
        yield (
            f"the router's weights are not applied: every chosen expert's weight is 1{words}",
            replace(own, weights="one each", sums=False, scaled=scaled),
        )
        if used > 1:
            yield (
                "the router's weights are not applied: every chosen expert's weight is "
                f"1/{used}{words}",
                replace(own, weights="equal shares", sums=False, scaled=scaled),
            )
    if used > 1:
        says = "the chosen experts are sorted by number, and their weights are not"
        yield says, replace(own, given="by number")
    for which, words in OF_TOKENS.items():
        yield f"each token's experts have the weights of {words}", replace(own, given=which)


def _experts_of_other_tokens(own: RoutingRule) -> Iterator[tuple[str, RoutingRule]]:
    """Yield (sentence, rule) of the ways in which a token has the experts of another token.

    They are weighted by the token's own scores, or as that token weights them. `own` is the model's
    rule.
    """
    for which, words in OF_TOKENS.items():
        says = f"each token has the experts of {words}"
        yield f"{says}, weighted by its own scores", replace(own, chosen=which)
        yield f"{says}, with their weights", replace(own, routed=which)


RANKED: Mapping[Ranking, str] = {
    "best": "their best expert", "two": "their two best experts", "mean": "the mean of all",
    "none": "nothing: all groups are open",
}  # fmt: skip


def _wrong_rankings(hp: Mapping[str, Any], own: RoutingRule) -> Iterator[tuple[str, RoutingRule]]:
    """Yield (sentence, rule) for each other way of ranking groups of experts; none without groups.

    `own` is the model's rule.
    """
    if int(hp["n_expert_groups"]) < 2:
        return
    for groups, words in RANKED.items():
        if groups != own.groups:
            yield (
                f"groups of experts are ranked by {words}; the model says by {RANKED[own.groups]}",
                replace(own, groups=groups),
            )


def routing_rule_changes(patched: PatchedModel) -> Iterator[Change]:
    """Yield the change to each usual wrong rule of choosing and weighting experts."""
    for says, rule in wrong_routing_rules(patched):
        yield Change(
            "moe_routing", says, ("router",), use_routing_rule(rule), {"rule": says}, scoped=True
        )


def use_routing_rule(rule: RoutingRule) -> Patch:
    """Return a patch function: experts are chosen and weighted by another rule."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose experts in `layers` are chosen and weighted by `rule`."""

        def routed(patched: PatchedModel, layer: int, held: Mapping[str, Any]) -> Routing:
            """Return a layer's experts, their weights and the choice's margin by `rule`.

            They are computed from the router's logits; `held` has the layer's earlier points by
            name.
            """
            stored = patched.weights.get_role(layer, "exp_probs_b.bias")
            logits = np.asarray(patched.backend.to_numpy(held["router"]))
            bias = None if stored is None else stored.numpy().astype(logits.dtype, copy=False)
            return route_by_rule(rule, logits, bias, patched.hp)

        def experts(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
            """Return the expert numbers [tokens, used] that `rule` chooses, in place of `x`."""
            return routed(patched, layer, held).experts

        def weights(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
            """Return the experts' weights [tokens, used] by `rule`, in place of `x`."""
            return routed(patched, layer, held).weights

        def margin(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
            """Return how far `rule`'s choice is from the next expert [tokens], in place of `x`."""
            return routed(patched, layer, held).margin

        for point, tap in (("experts", experts), ("expert_w", weights), ("router_margin", margin)):
            patched = patched.with_tap(point, tap, layers)
        return patched

    return make
