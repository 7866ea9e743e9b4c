"""Mixtures of experts: the computation of those that a router chose.

A *stack* is the weight of all experts of a layer, [n_experts, out, in].

Routing is done in numpy, and experts are computed one by one, unless a backend does both for all
tokens at once (expert_blocks.py): then nothing comes to the host. A backend whose numbers carry
gradients leaves the experts' weights on its device (`Hosted.router_numbers`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from aprfmt.inference.backends.base import Array
from aprfmt.inference.backends.hosted import ExpertRows
from aprfmt.inference.context import Context
from aprfmt.inference.expert_blocks import run_expert_blocks
from aprfmt.inference.routing import choose_experts
from aprfmt.inference.weights import Weight

STACKS = {
    "gated": ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    "plain": ("ffn_up_exps", "ffn_down_exps"),
}  # by BlockSpec.mlp
ROUTED = ("router", "experts", "expert_w", "router_margin")  # points that the host sees


def run_experts(c: Context, layer: int, x: Array, read: Array | None = None) -> Array:
    """Return the routed experts' weighted sum for x, plus the shared expert: point `moe_out`.

    The router reads `read`; None: what the experts read.
    """
    b = c.backend
    w = c.weights.role(layer, "ffn_gate_inp.weight")
    cast = c.block.router_cast
    logits = b.router(
        x if read is None else read,
        w,
        c.bias(layer, "ffn_gate_inp"),
        rounded=cast in ("weights", "logits"),
    )
    correction = c.weights.get_role(layer, "exp_probs_b.bias")
    bias = None if correction is None else b.router_factors(correction)
    per_expert = c.weights.get_role(layer, "ffn_down_exps.scale")
    scale = None if per_expert is None else b.router_factors(per_expert)
    stacks = [c.weights.role(layer, f"{role}.weight") for role in STACKS[c.block.mlp]]
    given = x
    latent = c.weights.get_role(layer, "ffn_latent_down.weight") is not None
    if latent:
        given = c.tap("latent", layer, c.linear(layer, "ffn_latent_down", x))
    table = c.weights.get_role(layer, "ffn_gate_tid2eid.weight")
    watched = any(c.wants(point, layer) for point in ROUTED)
    if watched or table is not None or not b.can_stack_experts(stacks):
        total = _run_experts_one_by_one(c, layer, given, logits, (bias, scale), stacks, table)
    else:
        rounds = cast in ("weights", "product")
        total = run_expert_blocks(
            c, layer, given, b.route_blocks(logits, bias, c.hp, rounds=rounds, scale=scale)
        )
    if latent:
        total = c.linear(layer, "ffn_latent_up", c.tap("latent_out", layer, total))
    if c.block.shared_expert != "none" and c.hp["shared_ffn_size"]:
        total = b.add(total, _shared_expert(c, layer, x))
    return c.tap("moe_out", layer, total)


def _run_experts_one_by_one(
    c: Context,
    layer: int,
    x: Array,
    logits: Array,
    factors: tuple[Any, Any],
    stacks: Sequence[Weight],
    table: Weight | None,
) -> Array:
    """Return the sum of the experts' outputs, routed on the host, where recorders see the choice.

    `factors` are (bias of the choice, the experts' factors), each None if the model has none.
    `table` lists each token id's experts [vocab, used], None where the logits choose them.
    """
    b = c.backend
    logits = b.router_numbers(c.tap("router", layer, logits))
    bias, scale = (x if x is None else b.as_logits_dtype(x, logits) for x in factors)
    fixed = None if table is None else b.listed_experts(table, c.facts.ids, int(c.hp["n_experts"]))
    routing = choose_experts(logits, bias, c.hp, b.maths, scale, fixed)
    experts = b.to_numpy(c.tap("experts", layer, routing.experts))
    applied = routing.weights
    if c.block.router_cast in ("weights", "product"):
        applied = b.rounded_factors(applied)
    weights = b.router_numbers(c.tap("expert_w", layer, applied))
    c.tap("router_margin", layer, routing.margin)
    if b.can_stack_experts(stacks):
        return run_expert_blocks(c, layer, x, b.pack_blocks(experts, weights, stacks[0].shape[0]))
    total = b.zeros(x.shape)
    for share in b.rows_by_expert(experts, weights):
        total = _ADDED[c.block.expert_weights](c, layer, share, total, x)
    return total


def _add_weighted_output(
    c: Context, layer: int, share: ExpertRows, total: Array, x: Array
) -> Array:
    """Return the sum `total` plus one expert's output, whose rows are multiplied by weights.

    `share` is what the expert gets: (its number, its rows of x, their weights).
    """
    expert, rows, weights = share
    y = _run_expert(c, layer, expert, _expert_input(c, x, rows))
    return c.backend.add_weighted(total, rows, _expert_output(c, y, rows), weights)


def _add_weighted_input(c: Context, layer: int, share: ExpertRows, total: Array, x: Array) -> Array:
    """Return the sum `total` plus one expert's output for weighted inputs.

    `share` is what the expert gets: (its number, its rows of x, the weights that multiply the rows
    before the expert).
    """
    b, (expert, rows, weights) = c.backend, share
    if b.deterministic:  # all rows: zeros where they are not the expert's
        given, weights = weights, np.zeros(len(x), weights.dtype)
        weights[rows] = given
    y = _run_expert(c, layer, expert, b.mul(_expert_input(c, x, rows), b.column(weights)))
    return b.add_rows(total, rows, _expert_output(c, y, rows))


_ADDED = {"output": _add_weighted_output, "input": _add_weighted_input}


def _expert_input(c: Context, x: Array, rows: Any) -> Array:
    """Return the rows of x that go to an expert; all rows in deterministic mode.

    A row is then multiplied at the same index whatever the other rows are, so that its bits do not
    change.
    """
    return x if c.backend.deterministic else c.backend.take(x, rows)


def _expert_output(c: Context, y: Array, rows: Any) -> Array:
    """Return those rows of an expert's output that belong to the tokens sent to it.

    `rows` are these tokens. In deterministic mode `y` has the rows of all tokens, as
    `_expert_input` gave them; else it has only these already.
    """
    return c.backend.take(y, rows) if c.backend.deterministic else y


def _run_expert(c: Context, layer: int, expert: int, inputs: Array) -> Array:
    """Return one expert's output [n, hidden] for its input rows."""
    b = c.backend

    def multiply(role: str, inputs: Array) -> Array:
        """Return `inputs` [n, in] times the expert's weight `role`, plus its bias if it has one."""
        w = c.weights.role(layer, f"{role}.weight").expert(expert)
        bias = c.weights.get_role(layer, f"{role}.bias")
        y = b.linear(inputs, w, None)  # the bias is added in a separate step, with its own rounding
        return y if bias is None else b.add(y, bias.expert(expert).array(b))

    if c.block.mlp == "plain":
        return multiply("ffn_down_exps", c.activate(multiply("ffn_up_exps", inputs)))
    gated = c.gate(multiply("ffn_gate_exps", inputs), multiply("ffn_up_exps", inputs))
    return multiply("ffn_down_exps", gated)


def _shared_expert(c: Context, layer: int, x: Array) -> Array:
    """Return the shared expert's output for x, gated where the block has a gate."""
    up = c.linear(layer, "ffn_up_shexp", x)
    plain = c.block.mlp == "plain"
    gated = c.activate(up) if plain else c.gate(c.linear(layer, "ffn_gate_shexp", x), up)
    y = c.linear(layer, "ffn_down_shexp", gated)
    if c.block.shared_expert == "plain":
        return y
    gate = c.backend.sigmoid(c.linear(layer, "ffn_gate_inp_shexp", x))
    return c.backend.mul(gate, y)
