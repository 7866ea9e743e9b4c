"""A layer that mixes tokens by a short convolution between two gates, in place of attention."""

from aprfmt.inference.backends.base import Array
from aprfmt.inference.context import Context


def run_short_conv(c: Context, layer: int, x: Array) -> Array:
    """Return a short convolution's result [tokens, hidden], before the output product.

    That is the point `conv_gated`. One product gives the gate before the convolution, the gate
    after it, and what is convolved. The cache holds the last `conv_taps` - 1 rows that the
    convolution has read. Source: transformers' modeling_lfm2.
    """
    b, width = c.backend, int(c.hp["hidden_size"])
    before = None if c.cache is None else c.cache.recurrent_state(layer)[0]
    joined = c.tap("conv_in", layer, c.linear(layer, "shortconv.in_proj", x))
    first, second, value = (joined[:, i * width : (i + 1) * width] for i in range(3))
    window = convolution_window(c, before, c.tap("conv_x", layer, b.mul(first, value)))
    mixed = b.convolve(window, c.vector(layer, "shortconv.conv.weight"))
    bias = c.bias(layer, "shortconv.conv")
    mixed = c.tap("conv", layer, mixed if bias is None else b.add(mixed, bias))
    if c.cache is not None:
        c.cache.set_next_state(layer, (b.stack([window[len(x) :]]),))  # a copy: no view of the pass
    return c.tap("conv_gated", layer, b.mul(second, mixed))


def convolution_window(c: Context, before: Array | None, rows: Array) -> Array:
    """Return `rows` [tokens, channels] with the earlier rows a convolution looks back on in front.

    `before` are these rows; None: zeros, at the beginning of a sequence.
    """
    if before is None:
        before = c.backend.zeros((int(c.hp["conv_taps"]) - 1, rows.shape[1]))
    return c.backend.stack([before, rows])
