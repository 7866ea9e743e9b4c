"""Mixtures of experts: each kind of router, and the computation of the chosen experts.

Routing is done in numpy on every backend: [tokens, n_experts] is small, and the experts' ids are
needed on the host. Softmax and sigmoid are float32 (float64 in float64 runs).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError
from aprfmt.inference.backends.base import Array
from aprfmt.inference.backends.hosted import ExpertRows
from aprfmt.inference.context import Context
from aprfmt.inference.padded import lots, padded

Numbers = NDArray[Any]


@dataclass(frozen=True)
class Routing:
    """Chosen experts and their weights [tokens, used], sorted by weight, heaviest first.

    `margin` [tokens]: score of the last chosen expert, or group, minus that of the next one;
    infinite if all are chosen. If the margin is below the arithmetic's error, another run may
    choose another expert.
    """

    experts: NDArray[np.int64]
    weights: Numbers
    margin: Numbers


def route(logits: Numbers, bias: Numbers | None, hp: Mapping[str, Value]) -> Routing:
    """Choose experts from logits [tokens, n_experts]; ArchError for an unknown router.

    `bias` [n_experts] is deepseek v3's correction, added for the choice only.
    """
    name = str(hp["router"])
    if name not in ROUTERS:
        raise ArchError(f"router {name!r} is not known; expected one of {', '.join(ROUTERS)}")
    routing = ROUTERS[name](logits, bias, hp)
    order = np.argsort(-routing.weights, axis=-1, kind="stable")
    return Routing(
        np.take_along_axis(routing.experts, order, -1),
        np.take_along_axis(routing.weights, order, -1),
        routing.margin,
    )


def _softmax(x: Numbers) -> Numbers:
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    result: Numbers = e / np.sum(e, axis=-1, keepdims=True)
    return result


def _best(scores: Numbers, count: int) -> tuple[NDArray[np.int64], Numbers]:
    """Return the ids of the `count` highest scores, and the margin to the next."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    chosen = order[:, :count]
    if count >= scores.shape[-1]:
        return chosen, np.full(len(scores), np.inf, scores.dtype)
    ranked = np.take_along_axis(scores, order, -1)
    return chosen, ranked[:, count - 1] - ranked[:, count]


def _weighted(weights: Numbers, hp: Mapping[str, Value], tiny: float) -> Numbers:
    if hp["norm_topk"]:
        weights = weights / (np.sum(weights, axis=-1, keepdims=True) + weights.dtype.type(tiny))
    scaled: Numbers = weights * weights.dtype.type(hp["routed_scale"])
    return scaled


def _all(logits: Numbers, bias: Numbers | None, hp: Mapping[str, Value]) -> Routing:
    """Softmax over all experts, then the best (mixtral, qwen, deepseek v2 greedy)."""
    scores = _softmax(logits)
    chosen, margin = _best(scores, int(hp["n_experts_used"]))
    weights = np.take_along_axis(scores, chosen, -1)
    return Routing(chosen, _weighted(weights, hp, 0.0), margin)


def _chosen_only(logits: Numbers, bias: Numbers | None, hp: Mapping[str, Value]) -> Routing:
    """Choose the best logits, then softmax over these (gpt-oss)."""
    chosen, margin = _best(logits, int(hp["n_experts_used"]))
    weights = _softmax(np.take_along_axis(logits, chosen, -1))
    return Routing(chosen, weights * weights.dtype.type(hp["routed_scale"]), margin)


def _in_groups(
    choice: Numbers, group_scores: Callable[[Numbers], Numbers], hp: Mapping[str, Value]
) -> tuple[Numbers, Numbers]:
    """Return a mask [tokens, n_experts] of experts in the best groups, and the groups' margin."""
    groups = int(hp["n_expert_groups"])
    if choice.shape[-1] % groups:
        raise ArchError(
            f"n_expert_groups is {groups}; expected a number that divides the "
            f"{choice.shape[-1]} experts"
        )
    split = choice.reshape(len(choice), groups, -1)
    best, margin = _best(group_scores(split), int(hp["n_expert_groups_used"]))
    kept = np.zeros((len(choice), groups), np.bool_)
    np.put_along_axis(kept, best, True, axis=-1)
    return np.repeat(kept, split.shape[-1], axis=-1), margin


def _group_limited(logits: Numbers, bias: Numbers | None, hp: Mapping[str, Value]) -> Routing:
    """Softmax over all; groups ranked by their best expert (deepseek v2)."""
    scores = _softmax(logits)
    kept, group_margin = _in_groups(scores, lambda split: np.max(split, axis=-1), hp)
    chosen, margin = _best(np.where(kept, scores, 0), int(hp["n_experts_used"]))
    weights = np.take_along_axis(scores, chosen, -1)
    return Routing(chosen, _weighted(weights, hp, 0.0), np.minimum(margin, group_margin))


def _sigmoid_bias(logits: Numbers, bias: Numbers | None, hp: Mapping[str, Value]) -> Routing:
    """Sigmoid; a bias is added for choosing only, groups ranked by their two best (v3)."""
    scores = 1 / (1 + np.exp(-logits))
    choice = scores if bias is None else scores + bias
    kept, group_margin = _in_groups(choice, _best_two, hp)
    chosen, margin = _best(np.where(kept, choice, -np.inf), int(hp["n_experts_used"]))
    weights = np.take_along_axis(scores, chosen, -1)
    return Routing(chosen, _weighted(weights, hp, 1e-20), np.minimum(margin, group_margin))


def _softmax_bias(logits: Numbers, bias: Numbers | None, hp: Mapping[str, Value]) -> Routing:
    """Softmax over all; a bias is added for choosing only (ernie)."""
    scores = _softmax(logits)
    chosen, margin = _best(scores if bias is None else scores + bias, int(hp["n_experts_used"]))
    weights = np.take_along_axis(scores, chosen, -1)
    return Routing(chosen, _weighted(weights, hp, 0.0), margin)


def _sparsemixer(logits: Numbers, bias: Numbers | None, hp: Mapping[str, Value]) -> Routing:
    """Choose the best one by one; its weight is a softmax over those close behind it (phimoe)."""
    used, far = int(hp["n_experts_used"]), logits.dtype.type(2 * float(hp["router_jitter"]))
    left, weights = logits.copy(), []
    chosen, margin = _best(logits, used)
    for rank in range(used):
        best = chosen[:, rank : rank + 1]
        top = np.take_along_axis(left, best, -1)
        with np.errstate(divide="ignore", invalid="ignore"):  # of zeros alone none is far
            apart = (top - logits) / np.maximum(np.abs(logits), top)
        kept = np.where(apart > far, -np.inf, left)
        weights.append(np.take_along_axis(_softmax(kept), best, -1))
        np.put_along_axis(left, best, -np.inf, axis=-1)
    return Routing(chosen, np.concatenate(weights, -1), margin)


def _sigmoid(logits: Numbers, bias: Numbers | None, hp: Mapping[str, Value]) -> Routing:
    """Choose the best logits; an expert's weight is the sigmoid of its own (llama4)."""
    chosen, margin = _best(logits, int(hp["n_experts_used"]))
    weights = 1 / (1 + np.exp(-np.take_along_axis(logits, chosen, -1)))
    return Routing(chosen, _weighted(weights, hp, 0.0), margin)


def _best_two(split: Numbers) -> Numbers:
    best: Numbers = np.sum(np.sort(split, axis=-1)[..., -2:], axis=-1)
    return best


ROUTERS: Mapping[str, Callable[[Numbers, Numbers | None, Mapping[str, Value]], Routing]] = {
    "softmax": _all,
    "softmax_topk": _chosen_only,
    "group_limited_greedy": _group_limited,
    "sigmoid_bias": _sigmoid_bias,
    "softmax_bias": _softmax_bias,
    "sparsemixer": _sparsemixer,
    "sigmoid": _sigmoid,
}


STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def moe(c: Context, layer: int, x: Array) -> Array:
    """Return the routed experts' weighted sum plus the shared expert: point `moe_out`."""
    b = c.backend
    w = c.weights.of(layer, "ffn_gate_inp.weight")
    rounded = c.block.router_cast in ("weights", "logits")
    logits = b.router(x, w, c.bias(layer, "ffn_gate_inp"), rounded=rounded)
    logits = b.to_numpy(c.tap("router", layer, logits))
    correction = c.weights.get_role(layer, "exp_probs_b.bias")
    bias = None if correction is None else correction.numpy().astype(logits.dtype, copy=False)
    routing = route(logits, bias, c.hp)
    experts = b.to_numpy(c.tap("experts", layer, routing.experts))
    applied = routing.weights
    if c.block.router_cast in ("weights", "product"):
        applied = b.to_numpy(b.array(applied))
    weights = b.to_numpy(c.tap("expert_w", layer, applied))
    c.tap("router_margin", layer, routing.margin)
    if b.pads(experts, [c.weights.of(layer, f"{role}.weight") for role in STACKS]):
        total = padded(c, layer, x, lots(experts, weights))
    else:
        total = b.zeros(x.shape)
        for share in b.shares(experts, weights):
            total = _ADDED[c.block.expert_weights](c, layer, share, total, x)
    if c.block.shared_expert != "none" and c.hp["shared_ffn_size"]:
        total = b.add(total, _shared(c, layer, x))
    return c.tap("moe_out", layer, total)


def _weighted_output(c: Context, layer: int, share: ExpertRows, total: Array, x: Array) -> Array:
    """Return the sum so far with an expert's output times its weights."""
    expert, rows, weights = share
    y = _expert(c, layer, expert, _rows(c, x, rows))
    return c.backend.add_weighted(total, rows, _own(c, y, rows), weights)


def _weighted_input(c: Context, layer: int, share: ExpertRows, total: Array, x: Array) -> Array:
    """Return the sum so far with an expert's output for its input times its weights."""
    b, (expert, rows, weights) = c.backend, share
    if b.deterministic:  # all rows: zeros where they are not the expert's
        given, weights = weights, np.zeros(len(x), weights.dtype)
        weights[rows] = given
    y = _expert(c, layer, expert, b.mul(_rows(c, x, rows), b.column(weights)))
    return b.add_rows(total, rows, _own(c, y, rows))


_ADDED = {"output": _weighted_output, "input": _weighted_input}


def _rows(c: Context, x: Array, rows: Any) -> Array:
    """Return an expert's rows; in deterministic mode all, so that each keeps its place."""
    return x if c.backend.deterministic else c.backend.take(x, rows)


def _own(c: Context, y: Array, rows: Any) -> Array:
    """Return the rows that are an expert's of those that were computed."""
    return c.backend.take(y, rows) if c.backend.deterministic else y


def _expert(c: Context, layer: int, expert: int, inputs: Array) -> Array:
    """Return one expert's output for these rows."""
    b = c.backend

    def product(role: str, inputs: Array) -> Array:
        w = c.weights.of(layer, f"{role}.weight").expert(expert)
        bias = c.weights.get_role(layer, f"{role}.bias")
        y = b.linear(inputs, w, None)  # the bias is added in a separate step, with its own rounding
        return y if bias is None else b.add(y, bias.expert(expert).array(b))

    gated = c.gate(product("ffn_gate_exps", inputs), product("ffn_up_exps", inputs))
    return product("ffn_down_exps", gated)


def _shared(c: Context, layer: int, x: Array) -> Array:
    gated = c.gate(c.linear(layer, "ffn_gate_shexp", x), c.linear(layer, "ffn_up_shexp", x))
    y = c.linear(layer, "ffn_down_shexp", gated)
    if c.block.shared_expert == "plain":
        return y
    gate = c.backend.sigmoid(c.linear(layer, "ffn_gate_inp_shexp", x))
    return c.backend.mul(gate, y)
