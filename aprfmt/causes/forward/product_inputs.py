"""Hypotheses that a product reads another value: another stream, or another norm's result.

A weight is no likelier than its input. So before a weight is accused, the products are made of the
other values at hand: the stream before and after attention, each as it is, after a norm of the
layer, and after a norm without a weight.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Layers, Mismatch
from aprfmt.causes.forward.product import product_of
from aprfmt.inference.context import Context, PassFacts
from aprfmt.inference.replay.patched_model import STREAM, PatchedModel

# Points of products that read one value -> their roles, and who reads it in words.
READERS: Mapping[str, Mapping[str, str]] = {
    "attention": {"q": "attn_q", "k": "attn_k", "v": "attn_v"},
    "the MLP": {"ffn_gate": "ffn_gate", "ffn_up": "ffn_up"},
    "the router": {"router": "ffn_gate_inp"},
}
SOURCES = ("the layer's input", "the stream after attention")
NORMS: Mapping[str, str] = {
    "": ", without a norm",
    "attn_norm": ", normed as attention's input is",
    "ffn_norm": ", normed as the MLP's input is",
    "plain": ", normed without a weight",
}
Read = Callable[[Context, int, Mapping[str, Any]], Any]


def _read_value(source: str, norm: str, c: Context, layer: int, held: Mapping[str, Any]) -> Any:
    """Return the value that products may read by mistake, [tokens, hidden].

    `source` is a row of SOURCES, `norm` one of NORMS. `held` are the layer's earlier points by
    name. None where the layer lacks a point or a weight for it.
    """
    x = held.get(STREAM)
    if source != SOURCES[0]:
        added = held.get("attn_contrib", held.get("attn_out"))
        x = None if x is None or added is None else c.backend.add(x, added)
    if x is None or not norm:
        return x
    if norm != "plain":
        there = c.weights.get_role(layer, f"{norm}.weight") is not None
        return c.norm(layer, norm, x) if there else None
    if c.block.norm != "layer":
        return c.plain_norm(x)
    ones = c.backend.shift(c.backend.zeros((x.shape[-1],)), 1)
    return c.backend.layer_norm(x, ones, None, eps=float(c.hp["norm_eps"]))


def _products_of(roles: Mapping[str, str], read: Read) -> Any:
    """Return a patch that computes products from the value that `read` gives.

    `roles` is {capture point: role of the product's weight}.
    """

    def tap(role: str, patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Array:
        """Return the product of the weight `role` with the value that `read` gives for it.

        `x`, the product as computed, where nothing is read, or where the sizes differ.
        """
        at = np.arange(len(patched.ids))
        facts = PassFacts(np.asarray(patched.ids), at, 0, (0,))
        c = Context(
            patched.backend, patched.spec.block, patched.hp, patched.weights, None, facts, None
        )
        value = read(c, layer, held)
        if value is None or c.weights.get_role(layer, f"{role}.weight") is None:
            return np.asarray(x)
        made = np.asarray(c.linear(layer, role, value))
        return made.reshape(x.shape) if made.size == np.size(x) else np.asarray(x)

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose products of `roles` in `layers` take what `read` gives."""
        for point, role in roles.items():
            patched = patched.with_tap(point, partial(tap, role), layers)
        return patched

    return make


def try_other_inputs(case: Mismatch) -> Iterator[Change]:
    """Yield changes in which a product reads another value, for a point that is such a product."""
    readers = [(who, roles) for who, roles in READERS.items() if case.view.point in roles]
    found = product_of(case) if readers and case.layer >= 0 else None
    if found is None or not found.key:
        return
    for who, roles in readers:
        for source in SOURCES[: 1 if who == "attention" else 2]:
            for norm in NORMS:
                yield _input_change(who, roles, source, norm)


def usual_input_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield the change to a sequence of a parallel block whose one norm attention and MLP share.

    Of two norms, the other setting of `parallel_residual` makes the sequence.
    """
    if patched.hp["parallel_residual"] and patched.spec.block.parallel_norm == "one":
        yield _input_change("the MLP", READERS["the MLP"], SOURCES[1], "attn_norm")


def _input_change(who: str, roles: Mapping[str, str], source: str, norm: str) -> Change:
    """Return the change that the products of `roles` read a row of SOURCES after one of NORMS."""
    return Change(
        "residual" if source != SOURCES[0] else "norm_skipped",
        f"{who} reads {source}{NORMS[norm]}",
        tuple(roles.values()),
        _products_of(roles, partial(_read_value, source, norm)),
        {"reads": source, "norm": norm},
    )


HYPOTHESES = (
    Hypothesis("residual", try_other_inputs, 75, "what a product reads, before its weight"),
)
