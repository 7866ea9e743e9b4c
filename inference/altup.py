"""Several copies of the residual stream, of which the first goes through a layer (AltUp: gemma3n).

Before a layer every copy is predicted from all of them, by coefficients that a router makes of the
first; the layer runs on the first prediction, and what it gives corrects all of them. The copies
are joined along the last axis, [tokens, altup_streams * hidden_size]. Sources: transformers'
modeling_gemma3n; Baykal et al., "Alternating Updates for Efficient Transformers" (2023).
"""

from aprfmt.inference.backends.base import Array
from aprfmt.inference.capture import WHOLE
from aprfmt.inference.context import Context
from aprfmt.inference.weights import Weight


def make_copies(c: Context, x: Array) -> Array:
    """Return AltUp's copies as they enter layer 0: [tokens, altup_streams * hidden].

    They are the embedding x [tokens, hidden], and its projections, each scaled back to the root
    mean square of x.
    """
    b = c.backend
    copies = [x, *(b.rescaled(b.linear(x, w, None), x) for w in _copy_projections(c, "altup_proj"))]
    return c.tap("altup_embd", WHOLE, b.concat(copies))


def merge_copies(c: Context, x: Array) -> Array:
    """Return the mean of the copies after the last layer, projected back: [tokens, hidden]."""
    b = c.backend
    first, *others = _copy_views(c, x)
    total = b.wide(first)
    for each, w in zip(others, _copy_projections(c, "altup_unembd_proj"), strict=True):
        total = total + b.wide(b.rescaled(b.linear(each, w, None), first))
    return c.tap("altup_merged", WHOLE, b.narrow(total / int(c.hp["altup_streams"])))


def predict_copies(c: Context, layer: int, x: Array) -> tuple[Array, Array]:
    """Return (all copies as predicted before the layer, a view of the first of them).

    x and the first result are [tokens, altup_streams * hidden]. The layer runs on the first copy
    [tokens, hidden] only.
    """
    modes = c.tap("altup_modes", layer, _router_modes(c, layer, _copy_views(c, x)[0]))
    coefs = c.linear(layer, "altup_predict_coef", modes)
    mixed = c.backend.add(c.backend.mix_copies(x, coefs), x)
    mixed = c.tap("altup_predicted", layer, mixed)
    return mixed, _copy_views(c, mixed)[0]


def correct_copies(c: Context, layer: int, predicted: Array, x: Array) -> Array:
    """Return the copies [tokens, altup_streams * hidden] after a layer changed the first one.

    The change is x minus the first predicted copy. Each predicted copy has it added, times a
    factor that the router gives for that token and copy. `predicted` are the copies before the
    layer, x [tokens, hidden] is the first copy after the layer.
    """
    b = c.backend
    modes = c.tap("altup_modes_after", layer, _router_modes(c, layer, x))
    shares = b.shift(c.linear(layer, "altup_correct_coef", modes), 1)
    copies = _copy_views(c, predicted)
    change = b.add(x, b.scale(copies[0], -1))
    moved = [b.add(b.mul(change, shares[:, i : i + 1]), copies[i]) for i in range(len(copies))]
    return c.tap("altup_corrected", layer, b.concat(moved))


def scale_first_copy(c: Context, layer: int, x: Array) -> Array:
    """Return the first copy [tokens, hidden], times its scale where the model has one.

    The result gates the layer's per-layer embedding. x are all copies [tokens, altup_streams *
    hidden].
    """
    first = _copy_views(c, x)[0]
    if not c.hp["altup_scaled"]:
        return first
    return c.backend.mul(first, c.vector(layer, "altup_correct_scale.weight"))


def add_to_others(c: Context, x: Array, y: Array) -> Array:
    """Return the copies x with y [tokens, hidden] added to all but the first."""
    first, *others = _copy_views(c, x)
    return c.backend.concat([first, *(c.backend.add(each, y) for each in others)])


def add_low_rank(c: Context, layer: int, x: Array) -> Array:
    """Return the capture point `laurel`: x [tokens, hidden] plus a low-rank product of x.

    The product is normalised before it is added (LAuReL).
    """
    low = c.linear(layer, "laurel_r", c.linear(layer, "laurel_l", x))
    return c.tap("laurel", layer, c.backend.add(x, c.norm(layer, "laurel_post_norm", low)))


def _copy_views(c: Context, x: Array) -> list[Array]:
    """Return one view [tokens, hidden] of each copy in x [tokens, altup_streams * hidden]."""
    width = int(c.hp["hidden_size"])
    return [x[:, i * width : (i + 1) * width] for i in range(int(c.hp["altup_streams"]))]


def _copy_projections(c: Context, role: str) -> list[Weight]:
    """Return the projection of each copy but the first, from the stacked weight of `role`."""
    w = c.weights.role(None, f"{role}.weight")
    return [w.expert(i) for i in range(int(c.hp["altup_streams"]) - 1)]


def _router_modes(c: Context, layer: int, x: Array) -> Array:
    """Return the AltUp router's activations for x: [tokens, altup_streams], between -1 and 1."""
    b = c.backend
    normed = c.norm(layer, "altup_router_norm", x)
    normed = b.scale(normed, b.rounded(1 / int(c.hp["hidden_size"])))
    return b.tanh(c.linear(layer, "altup_router", normed))
