"""Changes of norms and sums: left out, of another kind, in another order."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Layers, Patch
from aprfmt.causes.forward.rotations import rope_frequencies, token_positions
from aprfmt.causes.forward.rounding import round_to_type
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.rope import rotation_of_layer

CAUSE_ROWS = (
    Cause(
        "norm_kind", "forward", "bug",
        "A norm is of another kind: it subtracts the mean of a row, or does not.",
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
        """Return the model whose norms in `layers` use epsilon `eps`.

        With a capture point `point`, only the norms that directly follow it.
        """

        def override(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
            """Return a norm's result with epsilon `eps` where it follows `point`, a capture point.

            Every norm is changed without a `point`.
            """
            own = not point or point_before_norm(patched, at) == point
            return op(*args, **kwargs | ({"eps": eps} if own else {}))

        return patched.with_ops(NORMS, override, layers)

    return make


def offset_norm_weights(plus: int, points: Collection[str] = ()) -> Patch:
    """Return a patch: `plus` is added to norm weights; with `points`, only after these points."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose norms in `layers` add `plus` to their weights.

        Only the norms that follow one of the capture points `points`, if there are any.
        """

        def override(op: Any, at: Any, x: Any, w: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the norm of `x` with weight w + plus, or `w` for a norm that stays.

            Norms stay that do not follow one of the capture points `points`.
            """
            own = not points or point_before_norm(patched, at) in points
            return op(x, w + plus if own else w, *args, **kwargs)

        return patched.with_ops(NORMS, override, layers)

    return make


def point_before_norm(patched: PatchedModel, at: Any) -> str:
    """Return the capture point that a norm reads, `in` for the norm before attention.

    For the norm before the MLP it is `mid`, also where attention and MLP read one stream. The last
    norm of a pass reads the last layer's `out`. The first layer's norm before attention reads the
    embedding and still gives `in`; "embd" is returned only for a norm of the embedding itself. `at`
    is the location of the norm's call.
    """
    if at.point in ("embd", "embd_scaled") and "token_embd_norm.weight" in patched.weights:
        return "embd"
    if at.point in ("out", "embd", "embd_scaled", "embd_norm"):
        return "out" if at.layer == patched.n_layers else "in"
    if at.point == "attn" and patched.spec.block.parallel_norm == "two":
        return "mid" if patched.hp["parallel_residual"] else "attn"
    return str(at.point)


def skip_norms(points: Collection[str]) -> Patch:
    """Return a patch: norms that directly follow these capture points return their input."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model without the norms in `layers` after a capture point of `points`."""

        def override(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            """Return `x` unchanged for a norm after a capture point of `points`, else its norm."""
            return x if point_before_norm(patched, at) in points else op(x, *args, **kwargs)

        return patched.with_ops(NORMS, override, layers)

    return make


def repeat_norms(points: Collection[str]) -> Patch:
    """Return a patch: norms that directly follow these capture points are applied twice."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose norms after a capture point of `points` act twice, in `layers`."""

        def override(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the norm of `x`, taken twice after a capture point of `points`."""
            y = op(x, *args, **kwargs)
            return op(y, *args, **kwargs) if point_before_norm(patched, at) in points else y

        return patched.with_ops(NORMS, override, layers)

    return make


def round_before_weight(dtype: str) -> Patch:
    """Return a patch that rounds a norm's result to `dtype` before the weight multiplies it."""

    def override(op: Any, at: Any, x: Any, w: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of `x`, rounded to `dtype` before the weight multiplies it.

        The weight includes its offset; a bias in `args` is added last.
        """
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
        """Return the RMS norm of `x` with each step rounded to `dtype`, in the dtype of `x`.

        What the operation itself rounds (`kwargs`) is not used.
        """

        def short(values: Any) -> Any:
            """Return values rounded to the float type `dtype`, in the dtype of `x`."""
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
        """Return the model whose RMS norms subtract the mean, and whose layer norms do not.

        Only the norms of `layers` that follow one of the capture points `points`, if there are
        any.
        """

        def is_chosen(at: Any) -> bool:
            """Return whether the norm at the location `at` follows a capture point of `points`.

            True without any points.
            """
            return not points or point_before_norm(patched, at) in points

        def centred(op: Any, at: Any, x: Any, w: Any, **kwargs: Any) -> Any:
            """Return the RMS norm of `x` less its mean, or of `x` itself if it is not chosen."""
            return op(x - x.mean(-1, keepdims=True) if is_chosen(at) else x, w, **kwargs)

        def without_mean(op: Any, at: Any, x: Any, w: Any, bias: Any, *, eps: float) -> Any:
            """Return the layer norm of `x` without subtracting the mean.

            For a norm that is not chosen it is the usual one.
            """
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
    """Return a patch that divides layer norms by another number.

    `whole`: by the root mean square of `x` before its mean is subtracted. Otherwise it divides by
    the standard deviation with n - 1 in place of n. Both subtract the mean in the numerator.
    """

    def override(op: Any, at: Any, x: Any, w: Any, bias: Any, *, eps: float) -> Any:
        """Return the layer norm of `x`, its numerator centred as usual, by another divisor.

        The divisor is the root mean square of `x` itself (`whole`), else the deviation with n -
        1.
        """
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
        """Return `x` itself for a norm of q or k, which is put into `waiting` for the next rope.

        Other norms are computed at once.
        """
        if not _is_query_key_norm(at):
            return op(x, *args, **kwargs)
        if at.point == "v":
            waiting.clear()
        waiting.append(lambda y: op(y.reshape(x.shape), *args, **kwargs).reshape(y.shape))
        return x

    def rope(op: Any, at: Any, x: Any, table: Any, **kwargs: Any) -> Any:
        """Return the rotated `x`, normalised by the next norm in `waiting` if there is one."""
        y = op(x, table, **kwargs)
        return waiting.pop(0)(y) if waiting else y

    return patched.with_ops(NORMS, norm, layers).with_op("rope", rope, layers)


def norm_of_rotated(parts: Collection[str], *, before: bool) -> Patch:
    """Return a patch: q_norm and k_norm are norms of the rotated q and k, and attention reads them.

    `parts` are "q", "k" or both: the others are normalised first and rotated after. `before`:
    q_rope and k_rope are the rotated values before the norm, else what the norm gives.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model that rotates `parts` in `layers` before it normalises them."""
        held: dict[str, tuple[Any, Callable[[Any], Any]]] = {}  # part: (rotated, its norm)
        turned: list[int] = []  # the layer of each rotation so far in the layer at work
        style, cast = str(patched.hp["rope_style"]), patched.spec.block.rope_cast

        def norm(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the norm of the rotated `x` for a norm of `parts`, else that of `x`."""
            if not _is_query_key_norm(at):
                return op(x, *args, **kwargs)
            turned.clear()
            part = "q" if at.point == "v" else "k"
            kind = rotation_of_layer(patched.hp, at.layer)
            if part not in parts or kind is None:
                return op(x, *args, **kwargs)
            own = rope_frequencies(patched, kind)
            table = patched.backend.rope_table(
                token_positions(patched), own.inv_freq, factor=own.factor, cast=cast
            )
            wide = x.reshape(len(x), -1, int(patched.hp["head_dim"]))
            y = patched.backend.rope(wide, table, style=style, cast=cast)
            held[part] = y, lambda z: op(z.reshape(x.shape), *args, **kwargs)
            return held[part][1](y)

        def rope(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            """Return `x`, which is rotated already, or what was rotated before the norm."""
            turned[:] = [*turned, at.layer] if turned[-1:] == [at.layer] else [at.layer]
            part = "q" if len(turned) % 2 else "k"  # a layer rotates q, then k
            if part not in held:
                return op(x, *args, **kwargs)
            return held[part][0].reshape(x.shape) if before else x

        def scores(op: Any, at: Any, q: Any, k: Any, heads: Any) -> Any:
            """Return the scores of q and k after their norms."""
            norms = {part: held.pop(part)[1] for part in parts if part in held}
            q, k = (
                norms[p](x).reshape(x.shape) if p in norms else x for p, x in (("q", q), ("k", k))
            )
            return op(q, k, heads)

        patched = patched.with_ops(NORMS, norm, layers).with_op("rope", rope, layers)
        return patched.with_op("scores", scores, layers) if before else patched

    return make


def norm_heads_jointly(whole: bool) -> Patch:
    """Return a patch that normalises q and k over all heads together, or head by head.

    `whole`: over all heads together.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model that normalises q and k in `layers` over all heads, or head by head."""
        d = int(patched.hp["head_dim"])

        def override(op: Any, at: Any, x: Any, w: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the norm of q or k over all heads together (`whole`), or over each head.

            Other norms are computed as usual.
            """
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


def add_to_normed(sublayers: Collection[str]) -> Patch:
    """Return a patch that adds a sublayer's result to the norm's output, not to the stream.

    `sublayers` are `attn`, `ffn` or both. The norm is the one right before the sublayer.
    """
    # Points that a sublayer's norm reads, and points of the sublayer's result.
    before = {"attn": ("in", "out", "embd", "embd_scaled"), "ffn": ("mid",)}
    after = {"attn": ("attn", "attn_out"), "ffn": ("ffn_mul", "ffn_act", "ffn_out", "moe_out")}

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose `sublayers` in `layers` add their result to the norm's output."""
        held: dict[str, Any] = {}

        def norm(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the norm of `x`, and keep it in `held` if one of `sublayers` reads it."""
            y = op(x, *args, **kwargs)
            for sublayer in sublayers:
                if at.point in before[sublayer]:
                    held[sublayer] = y
            return y

        def add(op: Any, at: Any, a: Any, b: Any) -> Any:
            """Return the residual sum after one of `sublayers` as its norm's output plus b.

            Other sums are a + b.
            """
            for sublayer in sublayers:
                if at.point in after[sublayer] and b.ndim > 1 and sublayer in held:
                    return op(held.pop(sublayer), b)
            return op(a, b)

        return patched.with_ops(NORMS, norm, layers).with_op("add", add, layers)

    return make
