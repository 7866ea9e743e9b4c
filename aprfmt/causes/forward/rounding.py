"""Rounding of values to short float types and quantized codes, and passes with such rounding."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Layers, Patch
from aprfmt.codecs import CODECS, decode, encode
from aprfmt.inference.replay.patched_model import PatchedModel

# Bits of a float32 that a shorter type of the same exponent lacks.
LACKS = {"bfloat16": 16, "tf32": 13}


def round_to_type(x: Any, dtype: str) -> Any:
    """Return float32 values rounded to a shorter float type, to nearest and ties to even.

    `dtype` is bfloat16, tf32, float16, float8_e4m3fn or float8_e5m2. Values beyond the largest
    float8 become that, not infinity.
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


def cut_to_type(x: Any, dtype: str) -> Any:
    """Return float32 values cut to a shorter float type: rounded toward zero, not to nearest.

    `dtype` is bfloat16, tf32 or float16.
    """
    values = np.ascontiguousarray(x, np.float32)
    if dtype in LACKS:
        kept = values.view(np.uint32) & np.uint32(-1 << LACKS[dtype] & 0xFFFFFFFF)
        return kept.view(np.float32).reshape(values.shape)
    short = round_to_type(values, dtype).astype(np.float16)
    less = np.where(np.abs(short) > np.abs(values), np.nextafter(short, np.float16(0)), short)
    return less.astype(np.float32)


# Codes of 8 and 4 bits -> their largest number. "uint4" has a zero point of its own.
LARGEST: Mapping[str, float] = {"int8": 127, "int4": 7, "uint4": 15, "float8_e4m3fn": 448}


def round_on_scales(
    x: Any, codes: str, axes: int | tuple[int, ...] | None, scales: str = "float32"
) -> Any:
    """Return float32 values `x` quantized to the type `codes` and dequantized again.

    `codes` is a key of LARGEST. Values along `axes` share a scale, which makes the largest of them
    the largest code; None: all share one. `scales` is the type that scales are rounded to.
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
    """Return float32 values [rows, ...] quantized by `encoding` row by row and dequantized again.

    They are returned as they are if rows have no whole number of blocks.
    """
    rows = np.asarray(x, np.float32).reshape(len(x), -1)
    if rows.shape[1] % CODECS[encoding].block_size:
        return x
    return decode(encoding, encode(encoding, rows), rows.shape).reshape(x.shape)


def round_operations(
    ops: Collection[str], dtype: str, short: Callable[[Any, str], Any] = round_to_type
) -> Patch:
    """Return a patch: the results of operations `ops` are rounded to a shorter float type.

    `short(values, dtype)` rounds them: to nearest, or by `cut_to_type` toward zero.
    """

    def override(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an operation's result rounded to the float type `dtype`, kept in its own dtype."""
        y = op(*args, **kwargs)
        return short(y, dtype).astype(y.dtype)

    return lambda patched, layers: patched.with_ops(ops, override, layers)


def round_rope_table(dtype: str) -> Patch:
    """Return a patch: rope's cos and sin are rounded to a shorter float type."""

    def override(op: Any, at: Any, x: Any, table: Any, **kwargs: Any) -> Any:
        """Return `x` rotated by cos and sin that are rounded to the float type `dtype`."""
        short = tuple(round_to_type(part, dtype).astype(part.dtype) for part in table)
        return op(x, short, **kwargs)

    return lambda patched, layers: patched.with_op("rope", override, layers)


def round_keys_and_values(rounded: Callable[[Any], Any], ops: Collection[str]) -> Patch:
    """Return a patch: attention reads rounded(keys) and rounded(values), each [tokens, heads, d].

    `ops` are the operations that read rounded ones: `scores` reads the keys, `mix` the values.
    """

    def scores(op: Any, at: Any, q: Any, k: Any, *rest: Any) -> Any:
        """Return the attention scores of `q` with rounded keys."""
        return op(q, rounded(k).astype(k.dtype), *rest)

    def mix(op: Any, at: Any, probs: Any, v: Any) -> Any:
        """Return the sum of rounded values `v`, weighted by `probs`."""
        return op(probs, rounded(v).astype(v.dtype))

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose attention in `layers` reads rounded keys, values, or both."""
        for name, override in (("scores", scores), ("mix", mix)):
            patched = patched.with_op(name, override, layers) if name in ops else patched
        return patched

    return make
