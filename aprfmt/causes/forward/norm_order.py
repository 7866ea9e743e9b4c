"""Changes of norms and sums: left out, of another kind, in another order."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Layers, Patch
from aprfmt.causes.row import Cause
from aprfmt.codecs import CODECS, decode, encode
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "norm_kind", "forward", "bug",
        "A norm is of another kind: with the mean of a row taken away, or without.",
        "Rows differ by a multiple of the norm's weight from the first norm on.",
        "The pass with the other kind of norm is equal.",
    ),
    Cause(
        "norm_skipped", "forward", "bug",
        "A norm is left out or applied twice: around attention or the MLP, or before the head.",
        "The norm's input stands where its result should, or the norm of its result.",
        "The pass without the named norm, or with it twice, is equal.",
    ),
)  # fmt: skip

NORMS = ("rms_norm", "layer_norm")


def use_eps(eps: float, point: str = "") -> Patch:
    """Return a patch: norms use epsilon `eps`; with `point`, only the norm that follows it."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose norms in `layers` use the other epsilon."""

        def override(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the norm of its arguments, with the other epsilon where the patch applies."""
            own = not point or point_before_norm(patched, at) == point
            return op(*args, **kwargs | ({"eps": eps} if own else {}))

        return patched.with_ops(NORMS, override, layers)

    return make


def offset_norm_weights(plus: int, points: Collection[str] = ()) -> Patch:
    """Return a patch: `plus` is added to norm weights; with `points`, only after these points."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose norms in `layers` use the shifted weights."""

        def override(op: Any, at: Any, x: Any, w: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the norm of `x`, by `w + plus` where the patch applies, else by `w`."""
            own = not points or point_before_norm(patched, at) in points
            return op(x, w + plus if own else w, *args, **kwargs)

        return patched.with_ops(NORMS, override, layers)

    return make


def point_before_norm(patched: PatchedModel, at: Any) -> str:
    """Return the capture point that a norm reads: `in` for the norm before attention.

    The last norm of a pass reads the last layer's `out`. The norm before attention of the first
    layer reads the embedding; "embd" is returned only for a norm of the embedding itself. `at` is
    the location of the norm's call.
    """
    if at.point in ("embd", "embd_scaled") and "token_embd_norm.weight" in patched.weights:
        return "embd"
    if at.point in ("out", "embd", "embd_scaled", "embd_norm"):
        return "out" if at.layer == patched.n_layers else "in"
    return str(at.point)


def skip_norms(points: Collection[str]) -> Patch:
    """Return a patch: norms that directly follow these capture points return their input."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model without these norms in `layers`."""

        def override(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            """Return `x` unchanged for a norm that is skipped, else the norm of `x`."""
            return x if point_before_norm(patched, at) in points else op(x, *args, **kwargs)

        return patched.with_ops(NORMS, override, layers)

    return make


def repeat_norms(points: Collection[str]) -> Patch:
    """Return a patch: norms that directly follow these capture points are applied twice."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model with these norms applied twice in `layers`."""

        def override(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the norm of the norm of `x` where the patch applies, else the norm of `x`."""
            y = op(x, *args, **kwargs)
            return op(y, *args, **kwargs) if point_before_norm(patched, at) in points else y

        return patched.with_ops(NORMS, override, layers)

    return make


def round_before_weight(dtype: str) -> Patch:
    """Return a patch: what norms multiply by their weight is rounded to `dtype` before."""

    def override(op: Any, at: Any, x: Any, w: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the weight, its offset added, times the rounded result without a weight."""
        factor = w + w.dtype.type(kwargs.get("offset", 0))
        none = [None for _ in args]  # no bias yet
        plain = op(x, np.ones_like(w), *none, **kwargs | ({"offset": 0.0} if not args else {}))
        y = round_to_type(plain, dtype).astype(plain.dtype) * factor
        return y if not args or args[0] is None else y + args[0]

    return lambda patched, layers: patched.with_ops(NORMS, override, layers)


def round_norm_steps(dtype: str) -> Patch:
    """Return a patch: every step of RMS norms is rounded to `dtype`, from the square on."""

    def override(
        op: Any, at: Any, x: Any, w: Any, *, eps: float, offset: float = 0.0, **kwargs: Any
    ) -> Any:
        """Return the norm of `x` in these steps; how the operation casts is not used."""

        def short(values: Any) -> Any:
            return round_to_type(values, dtype).astype(x.dtype)

        square = short(np.mean(short(np.square(x)), axis=-1, keepdims=True))
        root = short(1 / np.sqrt(short(square + x.dtype.type(eps))))
        return short(short(x * root) * short(w + w.dtype.type(offset)))

    return lambda patched, layers: patched.with_op("rms_norm", override, layers)


def exchange_norm_kind(points: Collection[str] = ()) -> Patch:
    """Return a patch: RMS norms subtract the mean first, and layer norms no longer do.

    It acts on all norms, or only on those after the capture points `points`.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model with the other kind of norm in `layers`."""

        def is_chosen(at: Any) -> bool:
            """Return whether the norm at this location is one that the patch changes."""
            return not points or point_before_norm(patched, at) in points

        def centred(op: Any, at: Any, x: Any, w: Any, **kwargs: Any) -> Any:
            """Return the RMS norm of `x` less its mean; of `x` for a norm that is not chosen."""
            return op(x - x.mean(-1, keepdims=True) if is_chosen(at) else x, w, **kwargs)

        def without_mean(op: Any, at: Any, x: Any, w: Any, bias: Any, *, eps: float) -> Any:
            """Return a layer norm that subtracts no mean; the usual one if not chosen."""
            if not is_chosen(at):
                return op(x, w, bias, eps=eps)
            size = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + x.dtype.type(eps))
            y = x / size * w
            return y if bias is None else y + bias

        return patched.with_op("rms_norm", centred, layers).with_op(
            "layer_norm", without_mean, layers
        )

    return make


def divide_layer_norm_by(whole: bool) -> Patch:
    """Return a patch: layer norms divide by another root of a mean square.

    `whole`: of the root mean square of `x` before the mean is subtracted. Otherwise: of the
    standard deviation with n - 1 in place of n. Both subtract the mean in the numerator.
    """

    def override(op: Any, at: Any, x: Any, w: Any, bias: Any, *, eps: float) -> Any:
        """Return the layer norm of `x` with the other divisor."""
        centred = x - x.mean(-1, keepdims=True)
        count = x.shape[-1]
        square = np.mean(np.square(x if whole else centred), axis=-1, keepdims=True)
        square = square if whole else square * x.dtype.type(count / (count - 1))
        y = centred / np.sqrt(square + x.dtype.type(eps)) * w
        return y if bias is None else y + bias

    return lambda patched, layers: patched.with_op("layer_norm", override, layers)


def _is_query_key_norm(at: Any) -> bool:
    """Return whether the norm here is that of q or k: right after v, or after q's norm."""
    return at.point in ("v", "q_norm")


def norm_after_rope(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model that rotates q and k first and normalises them after."""
    waiting: list[Callable[[Any], Any]] = []

    def norm(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `x` unnormalised for q and k, and queue its norm for the next call of rope."""
        if not _is_query_key_norm(at):
            return op(x, *args, **kwargs)
        if at.point == "v":
            waiting.clear()
        waiting.append(lambda y: op(y.reshape(x.shape), *args, **kwargs).reshape(y.shape))
        return x

    def rope(op: Any, at: Any, x: Any, table: Any, **kwargs: Any) -> Any:
        """Return the rotated `x`, normalised by the next queued norm if there is one."""
        y = op(x, table, **kwargs)
        return waiting.pop(0)(y) if waiting else y

    return patched.with_ops(NORMS, norm, layers).with_op("rope", rope, layers)


def norm_heads_jointly(whole: bool) -> Patch:
    """Return a patch: q and k are normalised over all heads together, or head by head.

    `whole`: over all heads together.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model with this norm of q and k in `layers`."""
        d = int(patched.hp["head_dim"])

        def override(op: Any, at: Any, x: Any, w: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the norm of q or k over all heads or by head; other norms unchanged."""
            if not _is_query_key_norm(at):
                return op(x, w, *args, **kwargs)
            if whole:
                wide = np.tile(w, x.shape[-2]) if w.ndim == 1 else w.reshape(-1)
                rest = [None if arg is None else np.reshape(arg, -1) for arg in args]
                return op(x.reshape(len(x), -1), wide, *rest, **kwargs).reshape(x.shape)
            parted = x.reshape(len(x), -1, d)
            return op(parted, w.reshape(-1, d), *args, **kwargs).reshape(x.shape)

        return patched.with_ops(NORMS, override, layers)

    return make


# Bits of a float32 that a shorter type of the same exponent lacks.
LACKS = {"bfloat16": 16, "tf32": 13}


def round_to_type(x: Any, dtype: str) -> Any:
    """Return float32 values rounded to a shorter type, to nearest and ties to even.

    `dtype` is bfloat16, tf32, float16, float8_e4m3fn or float8_e5m2. A float8 has no infinity
    here: what is beyond its largest value becomes that.
    """
    values = np.asarray(x, np.float32)
    if dtype.startswith("float8"):
        import ml_dtypes

        facts: Any = ml_dtypes.finfo  # which has no types
        most = float(facts(dtype).max)
        short = np.clip(values, -most, most).astype(getattr(ml_dtypes, dtype))
        return np.asarray(short.astype(np.float32))
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    lacks = LACKS[dtype]
    bits = values.view(np.uint32)
    even = (bits >> np.uint32(lacks)) & np.uint32(1)
    kept = (bits + np.uint32((1 << (lacks - 1)) - 1) + even) & np.uint32(-1 << lacks & 0xFFFFFFFF)
    return kept.view(np.float32).reshape(values.shape)


# Codes of 8 and 4 bits -> their largest number. "uint4" has a zero point of its own.
LARGEST: Mapping[str, float] = {
    "int8": 127,
    "int4": 7,
    "uint4": 15,
    "float8_e4m3fn": 448,
    "float8_e5m2": 57344,
}


def round_on_scales(
    x: Any, codes: str, axes: int | tuple[int, ...] | None, scales: str = "float32"
) -> Any:
    """Return float32 values `x` rounded to `codes`, a row of LARGEST, on scales.

    Values along `axes` share the scale that makes their largest one the largest code; None: all do.
    `scales` is the type that scales are rounded to.
    """
    values, most = np.asarray(x, np.float32), np.float32(LARGEST[codes])
    wide, low = np.abs(values).max(axes, keepdims=True), np.float32(0)
    if codes == "uint4":
        low = np.minimum(values.min(axes, keepdims=True), 0)
        wide = np.maximum(values.max(axes, keepdims=True), 0) - low
    scale = np.where(wide > 0, wide, 1).astype(np.float32) / most
    scale = scale if scales == "float32" else round_to_type(scale, scales)
    steps = values / scale
    if codes == "uint4":
        zero = np.rint(-low / scale)
        return (np.clip(np.rint(steps) + zero, 0, most) - zero) * scale
    if not codes.startswith("int"):
        return round_to_type(steps, codes) * scale
    return np.clip(np.rint(steps), -most - 1, most) * scale


def round_to_blocks(x: Any, encoding: str) -> Any:
    """Return float32 values [rows, ...] as `encoding` holds each row; as they are if it cannot."""
    rows = np.asarray(x, np.float32).reshape(len(x), -1)
    if rows.shape[1] % CODECS[encoding].block_size:
        return x
    return decode(encoding, encode(encoding, rows), rows.shape).reshape(x.shape)


def round_operations(ops: Collection[str], dtype: str) -> Patch:
    """Return a patch: the results of operations `ops` are rounded to a shorter float type."""

    def override(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the operation's result rounded to `dtype`, in its old dtype."""
        y = op(*args, **kwargs)
        return round_to_type(y, dtype).astype(y.dtype)

    return lambda patched, layers: patched.with_ops(ops, override, layers)


def round_rope_table(dtype: str) -> Patch:
    """Return a patch: rope's cos and sin are rounded to a shorter float type."""

    def override(op: Any, at: Any, x: Any, table: Any, **kwargs: Any) -> Any:
        """Return rope of `x` by the rounded cos and sin."""
        short = tuple(round_to_type(part, dtype).astype(part.dtype) for part in table)
        return op(x, short, **kwargs)

    return lambda patched, layers: patched.with_op("rope", override, layers)


def round_keys_and_values(rounded: Callable[[Any], Any], ops: Collection[str]) -> Patch:
    """Return a patch: attention reads rounded keys and values [tokens, heads, d].

    `ops` are those that read rounded ones: `scores` reads the keys, `mix` the values.
    """

    def scores(op: Any, at: Any, q: Any, k: Any, *rest: Any) -> Any:
        """Return the scores of `q` with rounded keys."""
        return op(q, rounded(k).astype(k.dtype), *rest)

    def mix(op: Any, at: Any, probs: Any, v: Any) -> Any:
        """Return the sum of rounded values, weighted by `probs`."""
        return op(probs, rounded(v).astype(v.dtype))

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model with these operations in `layers`."""
        for name, override in (("scores", scores), ("mix", mix)):
            patched = patched.with_op(name, override, layers) if name in ops else patched
        return patched

    return make


def add_to_normed(sublayers: Collection[str]) -> Patch:
    """Return a patch: sublayer results are added to the norm's output, not to the stream.

    `sublayers` are `attn`, `ffn` or both. The norm meant is the one right before the sublayer.
    """
    # Points that a sublayer's norm reads, and points of the sublayer's result.
    before = {"attn": ("in", "out", "embd", "embd_scaled"), "ffn": ("mid",)}
    behind = {"attn": ("attn", "attn_out"), "ffn": ("ffn_mul", "ffn_act", "ffn_out", "moe_out")}

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model with this residual sum in `layers`."""
        held: dict[str, Any] = {}

        def norm(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the norm of `x`; remember it if a chosen sublayer reads it."""
            y = op(x, *args, **kwargs)
            for sublayer in sublayers:
                if at.point in before[sublayer]:
                    held[sublayer] = y
            return y

        def add(op: Any, at: Any, a: Any, b: Any) -> Any:
            """Return a + b; after a chosen sublayer, the remembered norm plus b."""
            for sublayer in sublayers:
                if at.point in behind[sublayer] and b.ndim > 1 and sublayer in held:
                    return op(held.pop(sublayer), b)
            return op(a, b)

        return patched.with_ops(NORMS, norm, layers).with_op("add", add, layers)

    return make
