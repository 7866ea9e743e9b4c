"""Hypotheses about lightning attention: decays, the state, the gate, factors on the stream."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from aprfmt.causes.forward.convolution import mixer_kinds
from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    Hypothesis,
    Layers,
    Mismatch,
    Patch,
    hyper_change,
)
from aprfmt.inference.lightning import decay_slopes
from aprfmt.inference.replay.patched_model import PatchedModel

# What is said -> the rates [heads] of a layer, of the model's, heads, layer and layers.
RATES: Mapping[str, Callable[[Array, int, int, int], Array]] = {
    "nothing decays": lambda rate, heads, layer, layers: 0 * rate,
    "every layer decays as the first": lambda rate, heads, layer, layers: (
        -decay_slopes(heads, 0, layers)
    ),
    "a layer decays as the next one": lambda rate, heads, layer, layers: (
        -decay_slopes(heads, min(layer + 1, layers - 1), layers)
    ),
    "heads decay in the reverse order": lambda rate, heads, layer, layers: rate[::-1],
    "the decay is applied twice": lambda rate, heads, layer, layers: 2 * rate,
}
# What is said -> queries, keys and values, of the model's.
OPERANDS: Mapping[str, Callable[[Any, Any, Any], tuple[Any, Any, Any]]] = {
    "queries and keys are exchanged": lambda q, k, v: (k, q, v),
    "keys and values are exchanged": lambda q, k, v: (q, v, k),
}


def _patch_rates(rates: Callable[[Array, int, int, int], Array]) -> Patch:
    """Return a patch that replaces the decay rates by rates(own rates, heads, layer, layers)."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose lightning attention in `layers` has mistaken decays, `rates`."""

        def override(op: Any, at: Any, x: Any, step: Any, rate: Any, *rest: Any) -> Any:
            """Return the result of lightning attention's scan with mistaken decays, `rates`."""
            made = rates(np.asarray(rate), x.shape[1], at.layer, patched.n_layers)
            return op(x, step, np.asarray(made, rate.dtype), *rest)

        return patched.with_op("scan", override, layers)

    return make


def _patch_operands(taken: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> Patch:
    """Return a patch: the scan gets taken(queries, keys, values) as its operands."""

    def override(op: Any, at: Any, v: Any, step: Any, rate: Any, k: Any, q: Any, *rest: Any) -> Any:
        """Return the result of lightning attention's scan with the operands of the mistake `taken`.

        It maps (queries, keys, values) to the three that are used.
        """
        q, k, v = taken(q, k, v)
        return op(v, step, rate, k, q, *rest)

    return lambda patched, layers: patched.with_op("scan", override, layers)


def _without_state(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose lightning attention carries no state between tokens."""

    def override(op: Any, at: Any, v: Any, *rest: Any) -> Any:
        """Return (values read by each token from itself alone, last state of the real scan).

        What is read is the product of query and key times the token's value.
        """
        _, _, k, q, _, _ = rest
        read, after = op(v, *rest)
        alone = np.einsum("thd,thd->th", np.asarray(q), np.asarray(k))
        return (alone[..., None] * v).astype(read.dtype), after

    return patched.with_op("scan", override, layers)


def _without_gate(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model without the gate on lightning attention's norm."""

    def plain(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return the result of lightning attention's norm, in place of the gated `x`.

        `held` has the layer's earlier points by name.
        """
        return np.array(held["lightning_norm"])

    return patched.with_tap("lightning_gated", plain, layers)


def _without_norm(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model without the norm of lightning attention."""

    def plain(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return the values that lightning attention reads from its state, in place of their norm.

        `held` has the layer's earlier points by name.
        """
        return np.array(held["lightning"])

    return patched.with_tap("lightning_norm", plain, layers)


def usual_lightning_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for usual mistakes of lightning attention and of residual factors."""
    if patched.spec.block.residual == "norm":
        # Residual factors left out, in pairs and all together.
        configured = tuple(float(factor) for factor in patched.hp["residual_scales"])
        for at, name in ((0, "with attention"), (2, "with lightning attention"), (4, "of experts")):
            if configured[at : at + 2] != (1.0, 1.0):
                other = (*configured[:at], 1.0, 1.0, *configured[at + 2 :])
                says = f"the stream and what is added have no factors after halves {name}"
                yield hyper_change("multiplier", says, residual_scales=other)
        if any(factor != 1 for factor in configured):
            says = "the stream and what is added to it have no factors"
            yield hyper_change("multiplier", says, residual_scales=(1.0,) * len(configured))
    if "lightning" not in mixer_kinds(patched):
        return
    for says, rates in RATES.items():
        yield _lightning_change("ssm_decay", says, "lightning", _patch_rates(rates))
    for says, taken in OPERANDS.items():
        yield _lightning_change("ssm_scan", says, "lightning", _patch_operands(taken))
    yield _lightning_change("ssm_state", "no state is carried: a token reads what it wrote alone",
                  "lightning", _without_state)  # fmt: skip
    yield _lightning_change("ssm_gate", "the gate is left out", "lightning_gated", _without_gate)
    yield _lightning_change(
        "ssm_gate", "the norm after the state is left out", "lightning_norm", _without_norm
    )


def _lightning_change(cause: str, says: str, point: str, make: Patch) -> Change:
    """Return the change that patch `make` makes to lightning attention.

    `point` is the capture point it names; `says` completes "in lightning attention ...".
    """
    return Change(cause, f"in lightning attention {says}", (point,), make, {point: says})


def try_lightning_mistakes(case: Mismatch) -> Iterator[Change]:
    """Yield changes for the usual mistakes of lightning attention, for points in a layer."""
    if case.layer >= 0:
        yield from usual_lightning_mistakes(case.patched)


HYPOTHESES = (
    Hypothesis(
        "ssm_decay", try_lightning_mistakes, 341, "lightning attention, before other recurrences"
    ),
)
