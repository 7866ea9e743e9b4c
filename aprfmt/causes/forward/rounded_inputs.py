"""The hypothesis that products read their input rounded to 8 bits, on scales taken from the input.

Engines quantize activations that way ("W8A8", dynamic): what a product is given is divided by a
scale, rounded to int8 or float8, multiplied with codes, and multiplied by the scale again.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Layers, Mismatch, Patch
from aprfmt.causes.forward.product import Product, product_with_weight
from aprfmt.causes.forward.rounding import LARGEST, round_on_scales, round_to_type
from aprfmt.causes.forward.shards import role_of
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.measure.distances import rel_l2

COARSE = (5e-4, 0.3)  # relative L2 that rounding the input to 8 bits costs a product
TIE = 2e-3  # of a step: how near an element is to the middle of two codes that may be either
MOST_TIES = 32  # elements that are tried as the other code, of one row
CODES = ("int8", "float8_e4m3fn")
# What shares a scale -> how many elements of a row share it; 0 for all rows together.
SCALES: Mapping[str, int] = {"the whole input": 0, "each token": -1, "each 128 elements": 128,
                             "each 64 elements": 64, "each 32 elements": 32}  # fmt: skip


def round_input(x: Any, codes: str, share: int) -> Array:
    """Return x [tokens, width] quantized to `codes` and dequantized again, float32.

    `share` elements of a row share a scale: -1 for a whole row, 0 for all rows together.
    """
    values = np.asarray(x, np.float32)
    if share <= 0:
        return np.asarray(round_on_scales(values, codes, None if share == 0 else 1))
    parts = values.reshape(len(values), -1, share)
    return np.asarray(round_on_scales(parts, codes, 2)).reshape(values.shape)


def _steps(x: Array, share: int, codes: str) -> Array:
    """Return the scale of each element of x [tokens, width], by which it is divided."""
    wide = np.abs(x).reshape(len(x), -1, share) if share > 0 else np.abs(x)[:, None]
    most = wide.max(None if share == 0 else 2, keepdims=True)
    scale = np.broadcast_to(np.where(most > 0, most, 1) / LARGEST[codes], wide.shape)
    return np.asarray(scale.reshape(x.shape))


def _moved_ties(found: Product, w: Array, share: int, bound: float) -> Array | None:
    """Return what to add to the input [rows, width] so that ties round as they did in the trace.

    An element between two int8 codes rounds to either in another order of sums. `w` is the weight.
    `bound` is how far the product may then be off in a row. None where no choice of ties fits.
    """
    x, wanted = found.x.astype(np.float32), found.output_without_bias
    scale = _steps(x, share, "int8")
    steps = x / scale
    near = np.abs(np.abs(steps - np.floor(steps)) - 0.5)
    moved = np.zeros_like(x)
    made = round_input(x, "int8", share)
    for row in range(len(x)):
        left = wanted[row] - made[row] @ w.T
        size = max(float(np.linalg.norm(wanted[row])), 1e-30)
        ties = [int(at) for at in np.flatnonzero(near[row] < TIE)[:MOST_TIES]]
        while np.linalg.norm(left) > bound * size and ties:
            up = [np.sign(x[row, at] - made[row, at]) * scale[row, at] for at in ties]
            rests = [left - step * w[:, at] for step, at in zip(up, ties, strict=True)]
            best = int(np.argmin([np.linalg.norm(rest) for rest in rests]))
            if not np.linalg.norm(rests[best]) < np.linalg.norm(left):
                return None
            left = rests[best]
            at = ties.pop(best)
            moved[row, at] = np.sign(up[best]) * 2 * TIE * scale[row, at]
        if np.linalg.norm(left) > bound * size:
            return None
    return moved


def _round_inputs(role: str, codes: str, share: int, nudge: Mapping[int, Array]) -> Patch:
    """Return a patch: products with the weight `role` read their input rounded.

    `nudge` is {layer: what is added to the input [tokens, width] first}, for ties.
    """

    def override(op: Any, at: Any, x: Any, w: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the product of the rounded `x`, for the weight `role`; else as usual."""
        layer = w.key.partition(".")[0]
        if role_of(w.key) != role or (share > 0 and x.shape[-1] % share):
            return op(x, w, *args, **kwargs)
        flat = np.asarray(x, np.float32).reshape(-1, x.shape[-1])
        ties = nudge.get(int(layer[1:]) if layer[1:].isdigit() else -1)
        if ties is not None and ties.shape == flat.shape:
            return op(_rounded_with(flat, ties, codes, share).reshape(x.shape), w, *args, **kwargs)
        return op(round_input(flat, codes, share).reshape(x.shape), w, *args, **kwargs)

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose products of `role` in `layers` read rounded inputs."""
        return patched.with_ops(("linear", "router"), override, layers)

    return make


def _rounded_with(x: Array, ties: Array, codes: str, share: int) -> Array:
    """Return x [tokens, width] rounded, where `ties` say which way elements between codes go."""
    made, scale = round_input(x, codes, share), _steps(x, share, codes)
    return np.asarray(np.where(ties != 0, made + np.sign(ties) * scale, made), np.float32)


def try_rounded_inputs(case: Mismatch) -> Iterator[Change]:
    """Yield the change that a product's input is rounded to 8 bits, where it gives the point."""
    residual = case.view.residual or 0.0
    if not COARSE[0] <= residual <= COARSE[1]:
        return
    pair = product_with_weight(case)
    if pair is None:
        return
    found, w = pair
    bound, wanted = case.view.tolerance, found.output_without_bias
    for codes in (*CODES, "plain"):
        for what, share in SCALES.items():
            if (share > 0 and found.x.shape[1] % share) or (codes == "plain" and share):
                continue
            plain = codes == "plain"
            made = round_to_type(found.x, CODES[1]) if plain else round_input(found.x, codes, share)
            away = rel_l2(made @ w.T, wanted)
            if away > residual / 2:
                continue
            ties = np.zeros_like(found.x) if away <= bound else None
            if ties is None and codes == "int8":
                ties = _moved_ties(found, w, share, bound)
            if ties is not None:
                yield _rounded_input_change(case, found, codes, what, ties)
                return


def _rounded_input_change(
    case: Mismatch, found: Product, codes: str, what: str, ties: Array
) -> Change:
    """Return the change that products of one role read inputs rounded to `codes`.

    `what` shares a scale, `ties` [rows, width] say how elements between two codes round.
    """
    plain = codes == "plain"
    role = role_of(found.key)
    whole = np.zeros((case.tokens, found.x.shape[1]), np.float32)
    whole[case.rows] = ties
    scaled = "without a scale" if plain else f"on a scale of {what}"
    dtype = CODES[1] if plain else codes
    make = (
        partial(_cast_inputs, role)
        if plain
        else _round_inputs(role, codes, SCALES[what], {case.layer: whole} if ties.any() else {})
    )
    return Change(
        "rounding",
        f"the input of products is rounded to {dtype}, {scaled}",
        (role,),
        make,
        {"dtype": dtype, "scale": None if plain else what},
    )


def _cast_inputs(role: str, patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose products of `role` in `layers` read inputs cast to float8."""

    def override(op: Any, at: Any, x: Any, w: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the product of `x` cast to float8, for the weight `role`; else as usual."""
        short = round_to_type(x, CODES[1]).astype(x.dtype) if role_of(w.key) == role else x
        return op(short, w, *args, **kwargs)

    return patched.with_op("linear", override, layers)


HYPOTHESES = (
    Hypothesis("rounding", try_rounded_inputs, 119, "the right weight, of a rounded input"),
)
