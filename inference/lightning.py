"""Layers that mix tokens by lightning attention: linear attention whose state decays by head.

A head keeps a matrix S [head_dim, head_dim]. A token with key k, value v and query q changes it to
exp(-slope) S + k v and reads q S. There is no softmax and no rope. That is a state space scan with
time steps of one, keys for B and queries for C. Sources: arXiv 2401.04658 (lightning attention);
transformers' modeling_minimax, whose buffers of decays follow from the slopes.
"""

import numpy as np

from aprfmt.inference.backends.base import Array, Numbers
from aprfmt.inference.context import Context

EPS = 1e-6  # of the norm after the state, in every model
TINY = 1e-5  # keeps the last layer's slopes above zero


def decay_slopes(heads: int, layer: int, layers: int) -> Numbers:
    """Return each head's slope [heads], float64: its state is multiplied by exp(-slope) a token.

    Later heads and layers have smaller slopes, so that they forget less.
    """
    factor = 1 - layer / (layers - 1 + TINY) + TINY
    return 2.0 ** (-8.0 / heads * np.arange(1, heads + 1)) * factor


def run_lightning(c: Context, layer: int, x: Array) -> Array:
    """Return lightning attention's result, heads joined, before the output product.

    That is the point `lightning_gated`. The state continues from the cache, where there is one.
    """
    hp, b = c.hp, c.backend
    heads, tokens = int(hp["n_heads"]), len(x)
    joined = c.tap("lightning_qkv", layer, c.linear(layer, "attn_qkv", x))
    joined = c.activate(joined).reshape(tokens, heads, 3, -1)
    q, k, v = (b.stack([joined[:, :, part]]) for part in range(3))
    gate = c.tap("lightning_gate", layer, c.linear(layer, "attn_gate", x))
    before = None if c.cache is None else c.cache.recurrent_state(layer)[0]
    # A state space scan with time steps of one: keys are B, queries C, the decay is by head.
    rate = b.wide(b.constant(-decay_slopes(heads, layer, int(hp["n_layers"]))))
    step = b.shift(b.zeros((tokens, heads)), 1)
    read, state = b.scan(v, step, rate, k, q, b.zeros((heads,)), before)
    if c.cache is not None:
        c.cache.set_next_state(layer, (state,))
    read = c.tap("lightning", layer, b.narrow(read.reshape(tokens, -1)))
    normed = c.rms_norm(read, c.vector(layer, "ssm_norm.weight"), EPS)
    normed = c.tap("lightning_norm", layer, normed)
    return c.tap("lightning_gated", layer, b.mul(b.sigmoid(gate), normed))
