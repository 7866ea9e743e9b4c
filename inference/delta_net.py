"""A layer that mixes tokens by a gated delta net, in place of attention."""

from aprfmt.inference.backends.base import Array
from aprfmt.inference.context import Context
from aprfmt.inference.short_conv import convolution_window


def run_delta_net(c: Context, layer: int, x: Array) -> Array:
    """Return a gated delta net's result, heads joined, before the output product.

    That is the point `delta_norm`. The convolution and the state continue from the cache, where
    there is one.
    """
    hp, b = c.hp, c.backend
    key_heads, value_heads = int(hp["delta_key_heads"]), int(hp["delta_value_heads"])
    keys = key_heads * int(hp["delta_key_dim"])
    before, state = (None, None) if c.cache is None else c.cache.recurrent_state(layer)
    # q, k and v through the short convolution.
    rows = c.tap("delta_qkv", layer, c.linear(layer, "attn_qkv", x))
    window = convolution_window(c, before, rows)
    mixed = c.activate(b.convolve(window, c.vector(layer, "ssm_conv1d.weight")))
    mixed = c.tap("conv", layer, mixed)
    # Output gate, strength of writing, and decay of the state, for each head.
    gate = c.tap("delta_gate", layer, c.linear(layer, "attn_gate", x))
    product = c.tap("beta_mm", layer, c.linear(layer, "ssm_beta", x))
    beta, strength = b.sigmoid(product), float(hp["delta_strength"])
    beta = c.tap("beta", layer, beta if strength == 1 else b.scale(beta, strength))
    rate, shift = c.vector(layer, "ssm_a.weight"), c.bias(layer, "ssm_dt")
    shift = b.zeros(rate.shape) if shift is None else shift
    alpha = c.tap("alpha", layer, c.linear(layer, "ssm_alpha", x))
    decay = c.tap("decay", layer, b.decay(alpha, rate, shift))
    q, k, v = (
        part.reshape(len(x), heads, -1)
        for part, heads in (
            (mixed[:, :keys], key_heads),
            (mixed[:, keys : 2 * keys], key_heads),
            (mixed[:, 2 * keys :], value_heads),
        )
    )
    # The gated delta rule, from the cached state on; then norm and gate.
    read, state = b.delta(q, k, v, decay, beta, state)
    if c.cache is not None:
        c.cache.set_next_state(
            layer, (b.stack([window[len(x) :]]), state)
        )  # a copy: no view of the pass
    read = c.tap("delta", layer, read.reshape(len(x), -1))
    normed = b.gated_norm(
        read.reshape(len(x), value_heads, -1), c.vector(layer, "ssm_norm.weight"),
        gate.reshape(len(x), value_heads, -1), "silu", eps=float(hp["delta_norm_eps"]),
    )  # fmt: skip
    return c.tap("delta_norm", layer, normed.reshape(len(x), -1))
