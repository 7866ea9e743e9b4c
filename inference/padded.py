"""The chosen experts of a layer at once: every one gets as many rows, those it lacks as padding.

Three products for a layer instead of three for an expert: what a GPU is given one by one takes
longer to say than to do. Numbers and their order of adding are those of moe.py's loop.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.backends.base import Array, Numbers
from aprfmt.inference.backends.hosted import grouped
from aprfmt.inference.context import Context


@dataclass(frozen=True)
class Lots:
    """Which rows each chosen expert gets.

    `experts` [n] ascend; `rows` [n, most] are tokens, padded by 0, `weights` the same, padded by 0;
    `places` [tokens, used] are each token's places in `rows` as it lies, by ascending expert.
    """

    experts: list[int]
    rows: NDArray[np.int64]
    weights: Numbers
    places: NDArray[np.int64]


def lots(experts: NDArray[np.int64], weights: Numbers) -> Lots:
    """Return the rows of the experts chosen [tokens, used] with these weights."""
    order, chosen, counts = grouped(experts)
    lot = np.repeat(np.arange(len(chosen)), counts)
    within = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.zeros((len(chosen), int(counts.max())), np.int64)
    padded = np.zeros(rows.shape, weights.dtype)
    rows[lot, within] = order // experts.shape[1]
    padded[lot, within] = weights.reshape(-1)[order]
    place = np.empty(len(order), np.int64)
    place[order] = lot * rows.shape[1] + within
    return Lots(chosen.tolist(), rows, padded, np.sort(place.reshape(experts.shape), axis=-1))


def padded(c: Context, layer: int, x: Array, found: Lots) -> Array:
    """Return the sum of the experts' outputs [tokens, width], weighted where the block says."""
    b, (n, most) = c.backend, found.rows.shape
    inputs = b.take(x, found.rows.reshape(-1))
    weighed = found.weights.reshape(-1)
    if c.block.expert_weights == "input":
        inputs, weighed = b.mul(inputs, b.column(weighed)), np.ones_like(weighed)
    inputs = inputs.reshape(n, most, -1)
    gated = c.gate(*(_products(c, layer, role, inputs, found)
                     for role in ("ffn_gate_exps", "ffn_up_exps")))  # fmt: skip
    y = _products(c, layer, "ffn_down_exps", gated, found)
    return b.combine(y.reshape(n * most, -1), found.places, weighed[found.places])


def _products(c: Context, layer: int, role: str, inputs: Array, found: Lots) -> Array:
    """Return [n, most, out]: each expert's rows times its weight, its bias added by itself."""
    b, stack = c.backend, c.weights.of(layer, f"{role}.weight")
    y = b.linears(inputs, [stack.expert(expert) for expert in found.experts])
    bias = c.weights.get_role(layer, f"{role}.bias")
    if bias is None:
        return y
    rows = [bias.expert(expert).array(b)[None, None] for expert in found.experts]
    return b.add(y, b.stack(rows))
