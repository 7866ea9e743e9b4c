"""A layer that mixes tokens by Kimi delta attention (KDA), in place of attention."""

from aprfmt.inference.backends.base import Array
from aprfmt.inference.context import Context
from aprfmt.inference.short_conv import convolution_window

PARTS = ("q", "k", "v")


def run_kimi_delta(c: Context, layer: int, x: Array) -> Array:
    """Return the result of Kimi delta attention, heads joined, before the output product.

    `x` is [tokens, hidden]. The result [tokens, heads * width] is the point `delta_norm`. It is a
    gated delta net whose state decays by channel of the key. Its decay and its output gate are
    products of low rank. The convolutions and the state continue from the cache, where there is
    one. Source: transformers' modeling_kimi_linear.
    """
    hp, b = c.hp, c.backend
    tokens, heads, width = len(x), int(hp["delta_value_heads"]), int(hp["delta_value_dim"])
    before, state = (None, None) if c.cache is None else c.cache.recurrent_state(layer)
    # q, k and v side by side through their short convolutions.
    matrices = [(c.weights.role(layer, f"attn_{part}.weight"), None) for part in PARTS]
    products = zip(PARTS, b.projections(x, matrices), strict=True)
    rows = b.concat([c.tap(f"delta_{part}", layer, y) for part, y in products])
    window = convolution_window(c, before, rows)
    kernel = b.stack([c.vector(layer, f"ssm_conv1d_{part}.weight") for part in PARTS])
    mixed = c.tap("conv", layer, c.activate(b.convolve(window, kernel)))
    # Output gate, strength of writing, and decay of every channel of the state.
    low = c.tap("delta_gate_low", layer, c.linear(layer, "ssm_g_a", x))
    gate = c.tap("delta_gate", layer, c.linear(layer, "ssm_g_b", low))
    beta = c.tap("beta_mm", layer, c.linear(layer, "ssm_beta", x))
    beta = c.tap("beta", layer, b.sigmoid(beta))
    low = c.tap("forget_low", layer, c.linear(layer, "ssm_f_a", x))
    forget = c.tap("forget", layer, c.linear(layer, "ssm_f_b", low))
    ones = b.shift(b.zeros((heads, width)), 1)
    rate = b.mul(ones, c.vector(layer, "ssm_a.weight")[:, None]).reshape(-1)
    shift = c.bias(layer, "ssm_dt")
    shift = b.zeros(rate.shape) if shift is None else shift
    decay = c.tap("decay", layer, b.decay(forget, rate, shift))
    # The gated delta rule, from the cached state on; then norm and gate.
    q, k, v = (
        mixed[:, part * heads * width : (part + 1) * heads * width].reshape(tokens, heads, width)
        for part in range(3)
    )
    read, state = b.delta(q, k, v, decay.reshape(tokens, heads, width), beta, state)
    if c.cache is not None:
        c.cache.set_next_state(
            layer, (b.stack([window[tokens:]]), state)
        )  # a copy: no view of the pass
    read = c.tap("delta", layer, read.reshape(tokens, -1))
    headed = read.reshape(tokens, heads, width), gate.reshape(tokens, heads, width)
    weight, eps = c.vector(layer, "ssm_norm.weight"), float(hp["delta_norm_eps"])
    normed = b.gated_norm(headed[0], weight, headed[1], "sigmoid", eps=eps)
    return c.tap("delta_norm", layer, normed.reshape(tokens, -1))
