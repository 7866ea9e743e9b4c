"""Kinds of expert routers: which experts a token gets, and how their outputs are weighed.

Each is written once, for numpy and for a device's arrays alike (`Maths`). Softmax and sigmoid are
float32 (float64 in float64 runs).
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
    """What routers need of an array library, always along the last axis."""

    def exp(self, x: Array) -> Array:
        """Return the exponential of each element."""

    def where(self, mask: Array, x: Array, other: Array | float) -> Array:
        """Return x where the mask is True, `other` elsewhere."""

    def minimum(self, a: Array, b: Array) -> Array:
        """Return the lower of two, element by element."""

    def maximum(self, a: Array, b: Array) -> Array:
        """Return the higher of two, element by element."""

    def highest(self, x: Array) -> Array:
        """Return the highest of each row [..., 1]."""

    def total(self, x: Array) -> Array:
        """Return the sum of each row [..., 1]."""

    def ranked(self, x: Array) -> Array:
        """Return the places of each row's elements, highest first; of equals the first."""

    def pick(self, x: Array, places: Array) -> Array:
        """Return each row's elements at these places."""

    def marked(self, places: Array, count: int) -> Array:
        """Return [..., count]: True at a row's places."""

    def spread(self, x: Array, times: int) -> Array:
        """Return every element so many times, side by side."""

    def joined(self, parts: Sequence[Array]) -> Array:
        """Join along the last axis."""


class NumpyMaths:
    """numpy's functions."""

    exp = staticmethod(np.exp)
    minimum = staticmethod(np.minimum)
    maximum = staticmethod(np.maximum)

    def where(self, mask: Array, x: Array, other: Array | float) -> Array:
        """Return x where the mask is True, `other` elsewhere."""
        return np.where(mask, x, other)

    def highest(self, x: Array) -> Array:
        """Return the highest of each row."""
        return np.max(x, axis=-1, keepdims=True)

    def total(self, x: Array) -> Array:
        """Return the sum of each row."""
        return np.sum(x, axis=-1, keepdims=True)

    def ranked(self, x: Array) -> Array:
        """Sort by merging, which keeps the order of equals."""
        return np.argsort(-x, axis=-1, kind="stable")

    def pick(self, x: Array, places: Array) -> Array:
        """Return each row's elements at these places."""
        return np.take_along_axis(x, places, -1)

    def marked(self, places: Array, count: int) -> Array:
        """Return True at a row's places."""
        found: NDArray[np.bool_] = np.zeros((*places.shape[:-1], count), np.bool_)
        np.put_along_axis(found, places, True, axis=-1)
        return found

    def spread(self, x: Array, times: int) -> Array:
        """Return every element so many times."""
        return np.repeat(x, times, axis=-1)

    def joined(self, parts: Sequence[Array]) -> Array:
        """Join along the last axis."""
        return np.concatenate(parts, -1)


NUMPY = NumpyMaths()


def route(
    logits: Array, bias: Array | None, hp: Hyper, m: Maths = NUMPY, scale: Array | None = None
) -> Routing:
    """Choose experts from logits [tokens, n_experts]; ArchError for an unknown router.

    `bias` [n_experts] is deepseek v3's correction, added for the choice only. `scale` [n_experts]
    multiplies the weights of those chosen (gemma4).
    """
    name = str(hp["router"])
    if name not in ROUTERS:
        raise ArchError(f"router {name!r} is not known; expected one of {', '.join(ROUTERS)}")
    with np.errstate(divide="ignore", invalid="ignore"):  # sparsemixer: of zeros alone none is far
        routing = ROUTERS[name](m, logits, bias, hp)
    weights = routing.weights
    if scale is not None:
        weights = weights * scale[routing.experts]
    order = m.ranked(weights)
    return Routing(m.pick(routing.experts, order), m.pick(weights, order), routing.margin)


def _softmax(m: Maths, x: Array) -> Array:
    e = m.exp(x - m.highest(x))
    return e / m.total(e)


def _best(m: Maths, scores: Array, count: int) -> tuple[Array, Array]:
    """Return the ids of the `count` highest scores, and the margin to the next."""
    order = m.ranked(scores)
    if count >= scores.shape[-1]:
        first = scores[:, 0]
        return order[:, :count], m.where(first != first, first, np.inf)  # not of a NaN
    edge = m.pick(scores, order[:, count - 1 : count + 1])
    return order[:, :count], edge[:, 0] - edge[:, 1]


def _weighted(m: Maths, weights: Array, hp: Hyper, tiny: float) -> Array:
    if hp["norm_topk"]:
        weights = weights / (m.total(weights) + tiny)
    return weights * float(hp["routed_scale"])


def _all(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Softmax over all experts, then the best (mixtral, qwen, deepseek v2 greedy)."""
    scores = _softmax(m, logits)
    chosen, margin = _best(m, scores, int(hp["n_experts_used"]))
    return Routing(chosen, _weighted(m, m.pick(scores, chosen), hp, 0.0), margin)


def _chosen_only(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Choose the best logits, then softmax over these (gpt-oss)."""
    chosen, margin = _best(m, logits, int(hp["n_experts_used"]))
    weights = _softmax(m, m.pick(logits, chosen))
    return Routing(chosen, weights * float(hp["routed_scale"]), margin)


def _in_groups(
    m: Maths, choice: Array, group_scores: Callable[[Array], Array], hp: Hyper
) -> tuple[Array, Array]:
    """Return a mask [tokens, n_experts] of experts in the best groups, and the groups' margin."""
    groups = int(hp["n_expert_groups"])
    if choice.shape[-1] % groups:
        raise ArchError(
            f"n_expert_groups is {groups}; expected a number that divides the "
            f"{choice.shape[-1]} experts"
        )
    split = choice.reshape(len(choice), groups, -1)
    best, margin = _best(m, group_scores(split)[..., 0], int(hp["n_expert_groups_used"]))
    return m.spread(m.marked(best, groups), split.shape[-1]), margin


def _group_limited(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Softmax over all; groups ranked by their best expert (deepseek v2)."""
    scores = _softmax(m, logits)
    kept, group_margin = _in_groups(m, scores, m.highest, hp)
    chosen, margin = _best(m, m.where(kept, scores, 0.0), int(hp["n_experts_used"]))
    weights = _weighted(m, m.pick(scores, chosen), hp, 0.0)
    return Routing(chosen, weights, m.minimum(margin, group_margin))


def _sigmoid_bias(
    m: Maths, logits: Array, bias: Array | None, hp: Hyper, tiny: float = 1e-20
) -> Routing:
    """Sigmoid; a bias is added for choosing only, groups ranked by their two best (v3)."""
    scores = 1 / (1 + m.exp(-logits))
    choice = scores if bias is None else scores + bias

    def best_two(split: Array) -> Array:
        return m.total(m.pick(split, m.ranked(split)[..., :2]))

    kept, group_margin = _in_groups(m, choice, best_two, hp)
    chosen, margin = _best(m, m.where(kept, choice, -np.inf), int(hp["n_experts_used"]))
    weights = _weighted(m, m.pick(scores, chosen), hp, tiny)
    return Routing(chosen, weights, m.minimum(margin, group_margin))


def _softmax_bias(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Softmax over all; a bias is added for choosing only (ernie)."""
    scores = _softmax(m, logits)
    choice = scores if bias is None else scores + bias
    chosen, margin = _best(m, choice, int(hp["n_experts_used"]))
    return Routing(chosen, _weighted(m, m.pick(scores, chosen), hp, 0.0), margin)


def _sparsemixer(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Choose the best one by one; its weight is a softmax over those close behind it (phimoe)."""
    used, far = int(hp["n_experts_used"]), 2 * float(hp["router_jitter"])
    left, weights = logits, []
    chosen, margin = _best(m, logits, used)
    for rank in range(used):
        best = chosen[:, rank : rank + 1]
        top = m.pick(left, best)
        apart = (top - logits) / m.maximum(abs(logits), top)
        kept = m.where(~(apart > far), left, -np.inf)
        weights.append(m.pick(_softmax(m, kept), best))
        left = m.where(~m.marked(best, logits.shape[-1]), left, -np.inf)
    return Routing(chosen, m.joined(weights), margin)


def _sigmoid(m: Maths, logits: Array, bias: Array | None, hp: Hyper) -> Routing:
    """Choose the best logits; an expert's weight is the sigmoid of its own (llama4)."""
    chosen, margin = _best(m, logits, int(hp["n_experts_used"]))
    weights = 1 / (1 + m.exp(-m.pick(logits, chosen)))
    return Routing(chosen, _weighted(m, weights, hp, 0.0), margin)


ROUTERS: Mapping[str, Callable[[Maths, Array, Array | None, Hyper], Routing]] = {
    "softmax": _all,
    "softmax_topk": _chosen_only,
    "group_limited_greedy": _group_limited,
    "sigmoid_bias": _sigmoid_bias,
    "sigmoid_bias_eps": partial(_sigmoid_bias, tiny=1e-6),  # transformers' modeling_lfm2_moe
    "softmax_bias": _softmax_bias,
    "sparsemixer": _sparsemixer,
    "sigmoid": _sigmoid,
}
