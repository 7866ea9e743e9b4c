"""Patches of one operation: a sum, a norm, rope of queries or keys alone, the mask, cached keys.

A patch is a function from a patched model and layers (None: all) to another patched model.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from aprfmt.causes.forward.mismatch import Layers, Patch, change_head_fields
from aprfmt.causes.forward.norm_changes import NORMS
from aprfmt.inference.replay.patched_model import STREAM, PatchedModel, Tap

# Points of each sublayer after which its result is added to the stream.
POINTS_BEFORE_SUM: Mapping[str, tuple[str, ...]] = {
    "attn": ("attn", "attn_out", "attn_contrib"),
    "ffn": ("ffn_mul", "ffn_act", "ffn_out", "moe_out", "ffn_contrib"),
}
Sum = Callable[[Any, Any], Any]


# --- the stream ----------------------------------------------------------------------------------


def change_sublayer_sum(sublayer: str, how: Sum) -> Patch:
    """Return a patch: after a sublayer the residual stream becomes how(stream, result).

    `sublayer` is `attn` or `ffn`.
    """

    def override(op: Any, at: Any, a: Any, b: Any) -> Any:
        """Return the mistaken how(a, b) where `sublayer`'s result `b` is added to the stream `a`.

        Other sums are a + b.
        """
        if at.point not in POINTS_BEFORE_SUM[sublayer] or b.ndim < 2:
            return op(a, b)
        return np.asarray(how(a, b), a.dtype)

    return lambda patched, layers: patched.with_op("add", override, layers)


def share_norm_input(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose MLP norm reads the same stream as the norm before attention."""
    held: list[Any] = []

    def add(op: Any, at: Any, a: Any, b: Any) -> Any:
        """Return a + b; where attention's result is added, keep the stream `a` in `held`."""
        if at.point in POINTS_BEFORE_SUM["attn"] and b.ndim > 1:
            held[:] = [a]
        return op(a, b)

    def norm(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of `x`, or before the MLP that of the stream from before attention.

        `held` keeps that stream.
        """
        return op(held[-1] if at.point == "mid" and held else x, *args, **kwargs)

    return patched.with_ops(NORMS, norm, layers).with_op("add", add, layers)


# Sublayer -> the points whose sum is normalised, and the one that holds the norm's result.
SUMMED: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "attn": (STREAM, ("attn_out",), "attn_contrib"),
    "ffn": ("mid", ("ffn_out", "moe_out"), "ffn_contrib"),
}


def norm_sum(sublayers: Collection[str]) -> Patch:
    """Return a patch: the norm after a sublayer normalises stream plus result, as in post-norm.

    The norm's output replaces the stream. `sublayers` are `attn`, `ffn` or both.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model that normalises stream plus result after `sublayers` in `layers`."""
        last: dict[str, Callable[[Any], Any]] = {}

        def norm(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the norm of `x`.

            Norms after one of `sublayers` are kept in `last` for a tap.
            """
            for sublayer in sublayers:
                if at.point in SUMMED[sublayer][1]:
                    last[sublayer] = lambda y: op(y, *args, **kwargs)
            return op(x, *args, **kwargs)

        def tap(sublayer: str) -> Tap:
            """Return the function that replaces the norm's result after `sublayer` in a pass.

            It gives the norm of stream plus result.
            """
            stream, made, _ = SUMMED[sublayer]

            def normed(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
                """Return the norm of the stream plus the sublayer's result, in place of `x`.

                `held` has the layer's earlier points by name. `x` itself where the result was not
                recorded, or where another change has left no norm there.
                """
                result = next((held[name] for name in made if name in held), None)
                norm = last.get(sublayer)
                return x if result is None or norm is None else norm(held[stream] + result)

            return normed

        def add(op: Any, at: Any, a: Any, b: Any) -> Any:
            """Return the residual sum a + b, or `b` alone in the sum after one of `sublayers`.

            There `b` is the norm of stream plus result already.
            """
            return b if any(at.point == SUMMED[sublayer][2] for sublayer in sublayers) else op(a, b)

        # The norm's result becomes the whole stream, so the later sum adds nothing.
        patched = patched.with_ops(NORMS, norm, layers)
        for sublayer in sublayers:
            patched = patched.with_tap(SUMMED[sublayer][2], tap(sublayer), layers)
        return patched.with_op("add", add, layers)

    return make


def scale_sum_or_stream(scale: float, whole: bool) -> Patch:
    """Return a patch: the residual factor multiplies the sum (`whole`), or the stream alone."""

    def scaled(op: Any, at: Any, x: Any, value: Any) -> Any:
        """Return `x` without the residual factor where it multiplies a sublayer's result.

        Elsewhere op(x, value).
        """
        inside = any(at.point in points for points in POINTS_BEFORE_SUM.values())
        return x if inside else op(x, value)

    def add(op: Any, at: Any, a: Any, b: Any) -> Any:
        """Return the residual sum with the factor `scale` on the sum (`whole`) or on the stream.

        Other sums are a + b.
        """
        if b.ndim < 2 or not any(at.point in points for points in POINTS_BEFORE_SUM.values()):
            return op(a, b)
        factor = a.dtype.type(scale)
        return op(a, b) * factor if whole else op(a * factor, b)

    return lambda patched, layers: patched.with_op("scale", scaled, layers).with_op(
        "add", add, layers
    )


# --- norms ---------------------------------------------------------------------------------------


def add_eps_outside_root(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose norms divide by root + eps, not by the root of mean square + eps."""

    def override(op: Any, at: Any, x: Any, w: Any, *rest: Any, eps: float, **kwargs: Any) -> Any:
        """Return the norm of `x` divided by root + eps, not by the root of mean square + eps.

        A bias is added unchanged.
        """
        y = op(x, w, *rest, eps=0.0, **kwargs)
        bias = rest[0] if rest and isinstance(rest[0], np.ndarray) else None
        centred = x if op_name == "rms_norm" else x - x.mean(-1, keepdims=True)
        root = np.sqrt(np.mean(np.square(centred, dtype=np.float64), axis=-1, keepdims=True))
        share = (root / np.maximum(root + eps, 1e-300)).astype(x.dtype)
        return y * share if bias is None else (y - bias) * share + bias

    op_name = "layer_norm" if patched.spec.block.norm == "layer" else "rms_norm"
    return patched.with_op(op_name, override, layers)


def divide_by_length(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose RMS norms divide by a row's length, not by its root mean square."""

    def override(op: Any, at: Any, x: Any, w: Any, *, eps: float, **kwargs: Any) -> Any:
        """Return the RMS norm of `x` divided by its Euclidean length, times the weight."""
        width = x.shape[-1]
        return op(x, w, eps=eps / width, **kwargs) * x.dtype.type(width**-0.5)

    return patched.with_op("rms_norm", override, layers)


def norm_over_rotated_keys(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the MLA model whose latent's norm also counts the elements of `k_pe`.

    The mean square is that of latent and `k_pe` together.
    """

    def tap(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return the normed latent `x` with the mean square taken over latent and `k_pe` together.

        `held` has the layer's earlier points by name.
        """
        row = np.square(np.asarray(held["kv_a"], np.float64))
        eps = float(patched.hp["norm_eps"])
        own, whole = (part.mean(-1, keepdims=True) + eps for part in (row[:, : x.shape[-1]], row))
        return np.asarray(x * np.sqrt(own / whole), x.dtype)

    return patched.with_tap("kv_a_norm", tap, layers)


# --- rope ----------------------------------------------------------------------------------------


def parts_in_turn() -> Callable[[int], Literal["q", "k"]]:
    """Return a function from the layer of each call of rope to what it rotates: q, then k."""
    seen = {"layer": -1, "calls": 0}

    def part_of(layer: int) -> Literal["q", "k"]:
        """Return whether this call, of `layer`, rotates queries or keys."""
        if seen["layer"] != layer:
            seen["layer"], seen["calls"] = layer, 0
        seen["calls"] += 1
        return "q" if seen["calls"] % 2 else "k"

    return part_of


def rotate_times(keys: int, queries: int) -> Patch:
    """Return a patch: rope is applied to keys `keys` times and to queries `queries` times."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose rope in `layers` is applied several times, or not at all.

        It is applied `queries` times to queries and `keys` times to keys.
        """
        part_of = parts_in_turn()

        def override(op: Any, at: Any, x: Any, table: Any, **kwargs: Any) -> Any:
            """Return `x` rotated as often as queries, or keys, are to be rotated."""
            for _ in range(queries if part_of(at.layer) == "q" else keys):
                x = op(x, table, **kwargs)
            return x

        return patched.with_op("rope", override, layers)

    return make


def rotate_values(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose values are rotated by position as its keys are."""
    held: list[Callable[[Any], Any]] = []

    def rope(op: Any, at: Any, x: Any, table: Any, **kwargs: Any) -> Any:
        """Return the rotated `x`, and keep its rotation in `held` for the values."""
        held[:] = [lambda v: op(v, table, **kwargs)]
        return op(x, table, **kwargs)

    def mix(op: Any, at: Any, probs: Any, v: Any) -> Any:
        """Return the sum of the values `v`, rotated as the keys were, weighted by `probs`."""
        return op(probs, held[-1](v) if held else v)

    return patched.with_op("rope", rope, layers).with_op("mix", mix, layers)


# --- attention -----------------------------------------------------------------------------------


def cap_after_mask(cap: float) -> Patch:
    """Return a patch that applies the softcap after the mask: masked keys have score -cap."""

    def override(op: Any, at: Any, scores: Any, heads: Any) -> Any:
        """Return the softmax over all keys, in which masked keys have the score -cap."""
        shown = np.where(heads.mask, scores, scores.dtype.type(-cap))
        return op(shown, replace(heads, mask=np.ones_like(heads.mask), causal=None))

    return lambda patched, layers: patched.with_op("probs", override, layers, of_operands=True)


def mask_with_zero(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model that multiplies scores by the mask, so that masked keys have score 0."""
    return cap_after_mask(0.0)(patched, layers)


def limit_window(size: int) -> Patch:
    """Return a patch: a query sees the last `size` tokens, its own included."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose attention in `layers` sees the last `size` tokens."""
        at = np.arange(len(patched.ids))
        seen = (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - size)
        return change_head_fields(patched, layers, mask=seen)

    return make


def use_earlier_layer_cache(back: int) -> Patch:
    """Return a patch: attention reads the cache of the layer `back` before it (0: of layer 0)."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose attention in `layers` reads an earlier layer's keys and values."""
        held: dict[tuple[str, int], Any] = {}

        def read(what: str, layer: int, own: Any) -> Any:
            """Return the keys ("k") or values ("v") of the layer `back` before; 0: of layer 0.

            `own` where the shapes differ or the layer is not patched. `held` keeps each layer's
            own.
            """
            held[what, layer] = own
            there = layer - back if back else 0
            other = held.get((what, there), own)
            inside = layers is None or layer in layers
            return other if inside and other.shape == own.shape else own

        return patched.with_keys_and_values(read)

    return make


# --- activations ---------------------------------------------------------------------------------

FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "quick_gelu": lambda op, x: op(x * x.dtype.type(1.702), "silu") / x.dtype.type(1.702),
    "relu2": lambda op, x: np.square(op(x, "relu")),
    "left out": lambda op, x: x,
}


def use_activation_function(name: str) -> Patch:
    """Return a patch: the MLP's activation is the function of this name in FUNCTIONS."""

    def override(op: Any, at: Any, x: Any, configured: str, **kwargs: Any) -> Any:
        """Return the function `name` of FUNCTIONS of `x`; the `configured` one is not used."""
        return FUNCTIONS[name](lambda y, kind: op(y, kind, **kwargs), x)

    return lambda patched, layers: patched.with_op("activate", override, layers)
