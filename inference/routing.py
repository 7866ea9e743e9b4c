"""Kinds of expert routers: which experts a token gets, and the weights of their outputs.

Experts may be in *groups* of equal size, as DeepSeek's: then only those in the best groups can be
chosen.

Each kind of router is written once, for numpy and for a device's arrays alike (`Maths`). Softmax
and sigmoid are float32 (float64 in float64 runs).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Array = Any  # numpy's, or a device's with the same operators
Hyper = Mapping[str, Value]


@dataclass(frozen=True)
class Routing:
    """Chosen experts and their weights [tokens, used], sorted by weight, heaviest first.

    `margin` [tokens]: score of the last chosen expert, or group, minus that of the next one;
    infinite if all are chosen. If the margin is below the arithmetic's error, another run may
    choose another expert.
    """

    experts: Array
    weights: Array
    margin: Array


class Maths(Protocol):
    """The array functions that routers need, all along the last axis."""

    def exp(self, x: Array) -> Array:
        """Return the exponential of each element."""

    def log1p(self, x: Array) -> Array:
        """Return the logarithm of 1 + x of each element."""

    def where(self, mask: Array, x: Array, other: Array | float) -> Array:
        """Return x where the mask is True, `other` elsewhere."""

    def minimum(self, a: Array, b: Array) -> Array:
        """Return the lower of two arrays, element by element."""

    def maximum(self, a: Array, b: Array) -> Array:
        """Return the higher of two arrays, element by element."""

    def highest(self, x: Array) -> Array:
        """Return the largest element of each row [..., 1]."""

    def total(self, x: Array) -> Array:
        """Return the sum of each row [..., 1]."""

    def divisor(self, weights: Array) -> Array:
        """Return what each row of chosen weights is divided by: its sum, last axis of size 1."""

    def ranked(self, x: Array) -> Array:
        """Return the indices that sort each row, largest first; equal elements keep their order."""

    def pick(self, x: Array, places: Array) -> Array:
        """Return each row's elements at its indices `places`."""

    def marked(self, places: Array, count: int) -> Array:
        """Return a mask [..., count], True at each row's indices `places` [..., n]."""

    def spread(self, x: Array, times: int) -> Array:
        """Return x with each element of its last axis repeated `times` times, next to itself."""

    def joined(self, parts: Sequence[Array]) -> Array:
        """Return the arrays joined along the last axis."""


class NumpyMaths:
    """numpy's functions under the names of Maths."""

    exp = staticmethod(np.exp)
    log1p = staticmethod(np.log1p)
    minimum = staticmethod(np.minimum)
    maximum = staticmethod(np.maximum)

    def where(self, mask: Array, x: Array, other: Array | float) -> Array:
        """Return x where the mask is True, `other` elsewhere."""
        return np.where(mask, x, other)

    def highest(self, x: Array) -> Array:
        """Return the largest element of each row, last axis kept."""
        return np.max(x, axis=-1, keepdims=True)

    def total(self, x: Array) -> Array:
        """Return the sum of each row, last axis kept."""
        return np.sum(x, axis=-1, keepdims=True)

    def divisor(self, weights: Array) -> Array:
        """Return what each row of chosen weights is divided by: its sum, last axis of size 1."""
        return self.total(weights)

    def ranked(self, x: Array) -> Array:
        """Return the indices that sort each row, largest first; equal elements keep their order."""
        return np.argsort(-x, axis=-1, kind="stable")

    def pick(self, x: Array, places: Array) -> Array:
        """Return each row's elements at its indices `places`."""
        return np.take_along_axis(x, places, -1)

    def marked(self, places: Array, count: int) -> Array:
        """Return a mask [..., count], True at each row's indices `places`."""
        found: NDArray[np.bool_] = np.zeros((*places.shape[:-1], count), np.bool_)
        np.put_along_axis(found, places, True, axis=-1)
        return found

    def spread(self, x: Array, times: int) -> Array:
        """Return x with each element of its last axis repeated `times` times, next to itself."""
        return np.repeat(x, times, axis=-1)

    def joined(self, parts: Sequence[Array]) -> Array:
        """Return the arrays joined along the last axis."""
        return np.concatenate(parts, -1)


NUMPY = NumpyMaths()


def choose_experts(
    logits: Array,
    bias: Array | None,
    hp: Hyper,
    m: Maths = NUMPY,
    scale: Array | None = None,
    fixed: Array | None = None,
) -> Routing:
    """Return the experts chosen by logits [tokens, n_experts], their weights and margins.

    `bias` [n_experts] is deepseek v3's correction, added for the choice only. `scale` [n_experts]
    multiplies the weights of those chosen (gemma4). `fixed` [tokens, used] are experts that do not
    follow from the logits, as a table lists them by token (deepseek_v4): the logits weigh them. `m`
    has the functions for the arrays' type. Raises ArchError for an unknown router.
    """
    name = str(hp["router"])
    if name not in ROUTERS:
        raise ArchError(f"router {name!r} is not known; expected one of {', '.join(ROUTERS)}")
    with np.errstate(divide="ignore", invalid="ignore"):  # sparsemixer: of zeros alone none is far
        if fixed is None:
            routing = ROUTERS[name](m, logits, bias, hp)
        else:
            routing = _weigh_fixed(m, logits, fixed, hp)
    weights = routing.weights
    if scale is not None:
        weights = weights * scale[routing.experts]
    order = m.ranked(weights)
    return Routing(m.pick(routing.experts, order), m.pick(weights, order), routing.margin)


def _softmax(m: Maths, x: Array) -> Array:
    """Return the softmax of each row."""
    e = m.exp(x - m.highest(x))
    return e / m.total(e)


def _sigmoid(m: Maths, x: Array) -> Array:
    """Return the sigmoid of each element."""
    return 1 / (1 + m.exp(-x))


def _root_softplus(m: Maths, x: Array) -> Array:
    """Return the square root of softplus of each element."""
    return (m.maximum(x, 0 * x) + m.log1p(m.exp(-abs(x)))) ** 0.5


# Kinds of scores that routers make of their logits.
_SCORES: Mapping[str, Callable[[Maths, Array], Array]] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "root of softplus": _root_softplus,
}


def router_scores(kind: str, logits: NDArray[Any]) -> NDArray[Any]:
    """Return a router's scores [tokens, experts] of its logits, in their dtype.

    `kind` is "softmax", "sigmoid" or "root of softplus".
    """
    return np.asarray(_SCORES[kind](NUMPY, logits))


def _choose_best(m: Maths, scores: Array, count: int) -> tuple[Array, Array]:
    """Return (indices [tokens, count] of each row's highest scores, margin [tokens] to the next).

    The margin is infinite if all are chosen, NaN if the row's first score is.
    """
    order = m.ranked(scores)
    if count >= scores.shape[-1]:
        first = scores[:, 0]
        return order[:, :count], m.where(first != first, first, np.inf)  # not of a NaN
    edge = m.pick(scores, order[:, count - 1 : count + 1])
    return order[:, :count], edge[:, 0] - edge[:, 1]


def _finish_weights(m: Maths, weights: Array, hp: Hyper, tiny: float) -> Array:
    """Return the experts' weights, divided by their sum if `norm_topk`, times `routed_scale`.

    `tiny` is added to the sum, so that it is not zero.
    """
    if hp["norm_topk"]:
        weights = weights / (m.divisor(weights) + tiny)
    return weights * float(hp["routed_scale"])


def _route_softmax(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Return the routing by softmax over all experts (mixtral, qwen, deepseek v2 greedy)."""
    scores = _softmax(m, logits)
    chosen, margin = _choose_best(m, scores, int(hp["n_experts_used"]))
    return Routing(chosen, _finish_weights(m, m.pick(scores, chosen), hp, 0.0), margin)


def _route_softmax_of_chosen(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Return the routing by the best logits, softmax over these only (gpt-oss)."""
    chosen, margin = _choose_best(m, logits, int(hp["n_experts_used"]))
    weights = _softmax(m, m.pick(logits, chosen))
    return Routing(chosen, weights * float(hp["routed_scale"]), margin)


def _best_groups_mask(
    m: Maths, choice: Array, group_scores: Callable[[Array], Array], hp: Hyper
) -> tuple[Array, Array]:
    """Return (mask [tokens, n_experts] of experts in the best groups, the groups' margin).

    `choice` [tokens, n_experts] are scores. `group_scores` maps [tokens, groups, experts] to one
    score a group [tokens, groups, 1]. Raises ArchError if groups do not divide the experts.
    """
    groups = int(hp["n_expert_groups"])
    if choice.shape[-1] % groups:
        raise ArchError(
            f"n_expert_groups is {groups}; expected a number that divides the "
            f"{choice.shape[-1]} experts"
        )
    split = choice.reshape(len(choice), groups, -1)
    best, margin = _choose_best(m, group_scores(split)[..., 0], int(hp["n_expert_groups_used"]))
    return m.spread(m.marked(best, groups), split.shape[-1]), margin


def _route_group_limited(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Return the routing by softmax, within the groups that have the best expert (deepseek v2)."""
    scores = _softmax(m, logits)
    kept, group_margin = _best_groups_mask(m, scores, m.highest, hp)
    chosen, margin = _choose_best(m, m.where(kept, scores, 0.0), int(hp["n_experts_used"]))
    weights = _finish_weights(m, m.pick(scores, chosen), hp, 0.0)
    return Routing(chosen, weights, m.minimum(margin, group_margin))


def _route_sigmoid_bias(
    m: Maths, logits: Array, bias: Array | None, hp: Hyper, tiny: float = 1e-20
) -> Routing:
    """Return the routing by sigmoid, within the groups whose best two experts score most.

    It is deepseek v3's. A bias is added for the choice only. `tiny` is added to the sum that
    weights are divided by.
    """
    scores = _sigmoid(m, logits)
    choice = scores if bias is None else scores + bias

    def sum_best_two(split: Array) -> Array:
        """Return the sum of the two highest scores of each group of experts, [..., groups, 1]."""
        return m.total(m.pick(split, m.ranked(split)[..., :2]))

    kept, group_margin = _best_groups_mask(m, choice, sum_best_two, hp)
    chosen, margin = _choose_best(m, m.where(kept, choice, -np.inf), int(hp["n_experts_used"]))
    weights = _finish_weights(m, m.pick(scores, chosen), hp, tiny)
    return Routing(chosen, weights, m.minimum(margin, group_margin))


def _route_sqrtsoftplus_bias(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Return the routing by the root of softplus; a bias is added for the choice only."""
    scores = _root_softplus(m, logits)
    choice = scores if bias is None else scores + bias
    chosen, margin = _choose_best(m, choice, int(hp["n_experts_used"]))
    return Routing(chosen, _finish_weights(m, m.pick(scores, chosen), hp, 1e-20), margin)


def _weigh_fixed(m: Maths, logits: Array, fixed: Array, hp: Hyper) -> Routing:
    """Return the routing to the experts `fixed` [tokens, used], weighed by the root of softplus.

    The margin is infinite: no logit changes the choice.
    """
    weights = m.pick(_root_softplus(m, logits), fixed)
    endless = m.where(weights[:, 0] < 0, weights[:, 0], np.inf)
    return Routing(fixed, _finish_weights(m, weights, hp, 1e-20), endless)


def _route_softmax_bias(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Return the routing by softmax; a bias is added for the choice only (ernie)."""
    scores = _softmax(m, logits)
    choice = scores if bias is None else scores + bias
    chosen, margin = _choose_best(m, choice, int(hp["n_experts_used"]))
    return Routing(chosen, _finish_weights(m, m.pick(scores, chosen), hp, 0.0), margin)


def _route_sparsemixer(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Return the routing that picks experts one by one, best first (phimoe).

    An expert's weight is its softmax over the experts left whose logits are near the best:
    within 2 * router_jitter of it, relatively.
    """
    used, limit = int(hp["n_experts_used"]), 2 * float(hp["router_jitter"])
    remaining, weights = logits, []
    chosen, margin = _choose_best(m, logits, used)
    for rank in range(used):
        best = chosen[:, rank : rank + 1]
        top = m.pick(remaining, best)
        apart = (top - logits) / m.maximum(abs(logits), top)
        kept = m.where(~(apart > limit), remaining, -np.inf)
        weights.append(m.pick(_softmax(m, kept), best))
        remaining = m.where(~m.marked(best, logits.shape[-1]), remaining, -np.inf)
    return Routing(chosen, m.joined(weights), margin)


def _route_sigmoid(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Return the routing by the best logits, weighted by the sigmoid of each (llama4)."""
    chosen, margin = _choose_best(m, logits, int(hp["n_experts_used"]))
    weights = _sigmoid(m, m.pick(logits, chosen))
    return Routing(chosen, _finish_weights(m, weights, hp, 0.0), margin)


ROUTERS: Mapping[str, Callable[[Maths, Array, Array | None, Hyper], Routing]] = {
    "softmax": _route_softmax,
    "softmax_topk": _route_softmax_of_chosen,
    "group_limited_greedy": _route_group_limited,
    "sigmoid_bias": _route_sigmoid_bias,
    "sigmoid_bias_eps": partial(_route_sigmoid_bias, tiny=1e-6),  # transformers' modeling_lfm2_moe
    "softmax_bias": _route_softmax_bias,
    "sqrtsoftplus_bias": _route_sqrtsoftplus_bias,
    "sparsemixer": _route_sparsemixer,
    "sigmoid": _route_sigmoid,
}
