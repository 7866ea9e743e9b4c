"""A layer that mixes tokens by a state space scan, in place of attention or parallel to it.

Two kinds: mamba's mixer has a rate for each number of state and a compressed time step; mamba2's
has heads with a rate each, and groups of heads that share B and C. Sources: transformers'
modeling_mamba, modeling_mamba2 and modeling_falcon_h1.
"""

from collections.abc import Sequence

from aprfmt.inference.backends.base import Array
from aprfmt.inference.context import Context
from aprfmt.inference.short_conv import convolution_window

UNBOUNDED = float("inf")


def run_mamba(c: Context, layer: int, x: Array) -> Array:
    """Return a Mamba 1 mixer's result [tokens, ssm_size] before the output product: `ssm_gated`."""
    b, hp = c.backend, c.hp
    width, rank, size = (int(hp[name]) for name in ("ssm_size", "ssm_rank", "ssm_state"))
    joined = c.linear(layer, "ssm_in", x)
    value, gate = joined[:, :width], c.tap("ssm_gate", layer, joined[:, width:])
    window, value = _convolve(c, layer, c.tap("ssm_conv_in", layer, value))
    low, into, out = _split_columns(
        c.tap("ssm_x", layer, c.linear(layer, "ssm_x", value)), (rank, size, size)
    )
    if c.block.ssm_norms != "none":
        low, into, out = (
            _norm_part(c, layer, role, y) for role, y in (("dt", low), ("b", into), ("c", out))
        )
    raw = b.linear(low, c.weights.role(layer, "ssm_dt.weight"), None)
    read = _scan(c, layer, window, (value[:, :, None], raw, into[:, None], out[:, None]))
    return _gate(c, layer, read, gate)


def run_mamba2(c: Context, layer: int, x: Array) -> Array:
    """Return a Mamba 2 mixer's result [tokens, ssm_size] before the output product: `ssm_gated`."""
    b, hp = c.backend, c.hp
    heads, groups = int(hp["ssm_heads"]), int(hp["ssm_groups"])
    width, shared = int(hp["ssm_size"]), groups * int(hp["ssm_state"])
    if c.block.multipliers != "none":
        x = b.scale(x, float(hp["ssm_in_scale"]))
    # One product gives gate, values, B, C and time steps; some models scale each part.
    joined = c.linear(layer, "ssm_in", x)
    if c.block.multipliers != "none":
        sizes = (width, width, shared, shared, heads)
        parts = zip(_split_columns(joined, sizes), hp["ssm_scales"], strict=True)
        joined = b.concat([b.scale(part, b.rounded(float(factor))) for part, factor in parts])
    gate, rows, raw = _split_columns(joined, (width, width + 2 * shared, heads))
    gate = c.tap("ssm_gate", layer, gate)
    window, mixed = _convolve(c, layer, c.tap("ssm_conv_in", layer, rows))
    value, into, out = (
        part.reshape(len(x), count, -1)
        for part, count in zip(
            _split_columns(mixed, (width, shared, shared)), (heads, groups, groups), strict=True
        )
    )
    return _gate(c, layer, _scan(c, layer, window, (value, raw, into, out)), gate)


def _split_columns(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Return x [tokens, width] split into neighbouring columns of these widths."""
    parts, start = [], 0
    for size in sizes:
        parts.append(x[:, start : start + size])
        start += size
    return parts


def _convolve(c: Context, layer: int, rows: Array) -> tuple[Array, Array]:
    """Return (rows that the next pass looks back on, activated convolution: point `conv`)."""
    before = None if c.cache is None else c.cache.recurrent_state(layer)[0]
    window = convolution_window(c, before, rows)
    mixed = c.backend.convolve(
        window, c.vector(layer, "ssm_conv1d.weight"), c.bias(layer, "ssm_conv1d")
    )
    mixed = c.backend.activate(mixed, str(c.hp["ssm_activation"]), steps=False)
    return window[len(rows) :], c.tap("conv", layer, mixed)


def _norm_part(c: Context, layer: int, part: str, x: Array) -> Array:
    """Return the time step, B or C of a scan after its norm.

    `part` says which: dt, b or c.
    """
    b = c.backend
    if c.block.ssm_norms == "plain":
        weight, eps = b.shift(b.zeros((x.shape[-1],)), 1), float(c.hp["ssm_inner_eps"])
    else:
        weight, eps = c.vector(layer, f"ssm_{part}_norm.weight"), float(c.hp["norm_eps"])
    return c.rms_norm(x, weight, eps)


def _scan(c: Context, layer: int, window: Array, given: tuple[Array, Array, Array, Array]) -> Array:
    """Return the reads of a scan, heads joined, in float32 at least: point `ssm_scan`.

    `given` are values, raw time steps, B and C; `window` are the rows that the next pass's
    convolution looks back on, stored in the cache with the state.
    """
    b, (value, raw, into, out) = c.backend, given
    high = c.hp["ssm_step_high"]
    step = b.time_step(
        c.tap("ssm_dt", layer, raw),
        c.bias(layer, "ssm_dt"),
        float(c.hp["ssm_step_low"]),
        UNBOUNDED if high is None else float(high),
    )
    step = c.tap("ssm_step", layer, step)
    rate = b.decay_rates(c.vector(layer, "ssm_a.weight"))
    before = None if c.cache is None else c.cache.recurrent_state(layer)[1]
    skip = c.vector(layer, "ssm_d.weight")
    read, state = b.scan(value, step, rate, into, out, skip, before)
    if c.cache is not None:
        c.cache.set_next_state(layer, (b.stack([window]), state))  # a copy: no view of the pass
    return c.tap("ssm_scan", layer, read.reshape(len(value), -1))


def _gate(c: Context, layer: int, read: Array, gate: Array) -> Array:
    """Return a scan's reads gated, and normalised where the model does so: point `ssm_gated`."""
    normed = bool(c.hp["ssm_norm"])
    return c.tap(
        "ssm_gated",
        layer,
        c.backend.gated_scan(
            read,
            gate,
            c.vector(layer, "ssm_norm.weight") if normed else None,
            groups=int(c.hp["ssm_groups"]) if normed else 1,
            eps=float(c.hp["norm_eps"]),
            first=bool(c.hp["ssm_norm_first"]),
        ),
    )
