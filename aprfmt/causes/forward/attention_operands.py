"""Hypotheses about the operands of attention: its gate, its keys and values, its result."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from aprfmt.arch.role_vocabulary import role_key
from aprfmt.causes.forward.mismatch import Change, Hypothesis, Layers, Mismatch, Patch
from aprfmt.causes.forward.product import remember_product, replace_weights
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "attention_gate", "forward", "bug",
        "The gate on attention's result is left out, or applied without its sigmoid.",
        "What attention mixes is equal, and differs where the gate has been applied.",
        "The pass with the other gate is equal.",
    ),
)  # fmt: skip


def _without_gate(op: Any, at: Any, x: Any, gate: Any) -> Any:
    """Override `mul`: return attention's result `x` without its gate; other products unchanged."""
    return x if at.point == "attn_mixed" else op(x, gate)


def _without_sigmoid(op: Any, at: Any, x: Any) -> Any:
    """Override `sigmoid`: return attention's gate `x` itself, and the sigmoid of any other `x`."""
    return x if at.point == "attn_mixed" else op(x)


# What is said of the gate -> the operation that is changed, and how.
GATES: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "is left out": ("mul", _without_gate),
    "is applied without its sigmoid": ("sigmoid", _without_sigmoid),
}


def try_gates(case: Mismatch) -> Iterator[Change]:
    """Yield the usual wrong changes of attention's output gate, where the point depends on one."""
    if any(call.location.point == "attn_mixed" for call in case.calls("mul")):
        for says, (op, how) in GATES.items():
            text, make = f"attention's gate {says}", override_operation(op, how)
            yield Change("attention_gate", text, ("attn_gate",), make, {"gate": says})


def override_operation(op: str, how: Callable[..., Any]) -> Patch:
    """Return a patch that replaces operation `op` by `how`, which is called with the original."""
    return lambda patched, layers: patched.with_op(op, how, layers)


# What is said of a result [tokens, heads, d] -> its axes, as it was reshaped to rows.
ORDERS: Mapping[str, tuple[int, int, int]] = {
    "heads and tokens are not exchanged back before attention's result is reshaped": (1, 0, 2),
    "a row has each element of all heads together, not the elements of each head": (0, 2, 1),
}


def result_order_changes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes that flatten attention's result in a wrong order of axes; none for one head."""
    if int(patched.hp["n_heads"]) < 2:
        return
    for says, axes in ORDERS.items():
        make = override_operation("mix", partial(_in_another_order, axes))
        yield Change("head_order", says, ("attn",), make, {"reshaped": says})


def _in_another_order(axes: tuple[int, int, int], op: Any, at: Any, probs: Any, v: Any) -> Any:
    """Override `mix`: return the mixed values [tokens, heads, d], flattened in a wrong order.

    Their axes are permuted by `axes`, then the values get the old shape.
    """
    mixed = np.asarray(op(probs, v))
    return np.ascontiguousarray(mixed.transpose(axes)).reshape(mixed.shape)


def try_result_orders(case: Mismatch) -> Iterator[Change]:
    """Yield changes that flatten attention's result in a wrong order, for points after it."""
    if case.call("mix") is not None:
        yield from result_order_changes(case.patched)


def try_split_gates(case: Mismatch) -> Iterator[Change]:
    """Yield the change that splits joined weights of q and its gate into halves, not head by head.

    A trace's points of q and gate were split by the model's order and are ignored, so that the
    pass computes them again.
    """
    if case.layer < 0 or case.patched.spec.block.attention_gate != "sigmoid":
        return
    heads = int(case.patched.hp["n_heads"])
    arrays: dict[str, Any] = {}
    for layer in range(case.patched.n_layers):
        keys = [role_key(layer, f"{role}.weight") for role in ("attn_q", "attn_q_gate")]
        if not all(key in case.patched.stored for key in keys):
            continue
        pair = [np.asarray(case.patched.stored[key].numpy()) for key in keys]
        if pair[0].shape != pair[1].shape:
            return
        rows = np.stack([x.reshape(heads, -1, x.shape[-1]) for x in pair], axis=1)
        halves = np.split(rows.reshape(-1, pair[0].shape[-1]), 2)
        arrays |= {key: np.ascontiguousarray(x) for key, x in zip(keys, halves, strict=True)}
    held = {
        key
        for key, view in case.found.views.items()
        if view.point in ("q", "attn_gate") and view.recorded is not None
    }
    change = Change(
        "fused_order",
        "q and its gate are cut from their joined rows in halves, not head by head",
        tuple(arrays),
        replace_weights(arrays),
        {"rows": "halves"},
        drop=frozenset(held),
    )
    if arrays and case.view.key not in held and case.trial(change) <= case.view.tolerance:
        yield change


def try_exchanged_keys_and_values(case: Mismatch) -> Iterator[Change]:
    """Yield the change that exchanges keys and values, where both have one shape."""
    scores, mix = case.call("scores"), case.call("mix")
    if scores is None or mix is None or scores.args[1].shape != mix.args[1].shape:
        return
    keys = tuple(role_key(case.layer, f"{name}.weight") for name in ("attn_k", "attn_v"))
    if all(key in case.patched.weights for key in keys):
        yield Change(
            "swapped_tensors", "attention takes its values for keys and its keys for values",
            ("attn_k.weight", "attn_v.weight"), exchange_keys_and_values,
        )  # fmt: skip


def exchange_keys_and_values(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose attention exchanges keys, as rotated, and values in `layers`.

    Values are those of the product `attn_v`; in the scores they are not rotated.
    """
    held: dict[str, Any] = {}
    role = "attn_v.weight"

    def add(op: Any, at: Any, a: Any, b: Any) -> Any:
        """Return the sum a + b, kept in `held` where it is the values' product plus its bias."""
        y = op(a, b)
        if held.get(role) is a:
            held[role] = y
        return y

    def scores(op: Any, at: Any, q: Any, k: Any, *rest: Any) -> Any:
        """Return the scores of `q` with the values in place of the keys `k`, which `held` keeps.

        The usual scores where `held` has no values of the keys' size.
        """
        values = held.pop(role, None)
        if values is None or values.size != k.size:
            return op(q, k, *rest)
        held["k"] = k
        return op(q, values.reshape(k.shape), *rest)

    def mix(op: Any, at: Any, probs: Any, v: Any) -> Any:
        """Return the sum of the keys weighted by `probs`, where the scores were of the values.

        Elsewhere the usual weighted sum of the values `v`.
        """
        return op(probs, held.pop("k", v))

    patched = patched.with_op("linear", remember_product(role, held), layers)
    patched = patched.with_op("add", add, layers)
    return patched.with_op("scores", scores, layers).with_op("mix", mix, layers)


HYPOTHESES = (
    Hypothesis(
        "swapped_tensors", try_exchanged_keys_and_values, 285, "what is read, before any number"
    ),
    Hypothesis("fused_order", try_split_gates, 165, "which rows are read, before a norm of them"),
    Hypothesis("attention_gate", try_gates, 328, "what multiplies attention, after attention"),
    Hypothesis("head_order", try_result_orders, 329, "known orders of what attention gives"),
)
