"""The weights of hyper-connections in numpy, and a compressor's sums: what runs on the host.

Sources: transformers' modeling_deepseek_v4; arXiv 2512.24880 (hyper-connections).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.measure.softmax import softmax

Numbers = NDArray[Any]


def stream_weights(
    x: Numbers,
    products: Numbers,
    scale: Numbers,
    base: Numbers,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> Numbers:
    """Return hyper-connection weights [tokens, 2n + n^2]: n of pre, n of post, n * n of comb.

    `products` [tokens, 2n + n^2] are those of the streams x [tokens, n * hidden], which are
    normalised here (`norm_eps`). `scale` [3] and `base` [2n + n^2] are factors and shifts. comb is
    normalised by rows and columns `iterations` times, with `eps` added to each sum and to pre. With
    one scale there is pre alone: n products.
    """
    products = products / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + norm_eps)
    n = products.shape[-1] if scale.size == 1 else round((products.shape[-1] + 1) ** 0.5 - 1)
    factors = np.repeat(scale, [n, n, n * n][: scale.size])
    raw = products * factors + base
    pre: Numbers = 1 / (1 + np.exp(-raw[:, :n])) + eps
    if scale.size == 1:
        return pre
    post = 2 / (1 + np.exp(-raw[:, n : 2 * n]))
    comb = raw[:, 2 * n :].reshape(-1, n, n)
    comb = softmax(comb) + eps
    comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(axis=-1, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    return np.concatenate([pre, post, comb.reshape(len(comb), -1)], axis=-1)


def compressed_windows(kv: Numbers, gate: Numbers) -> Numbers:
    """Return compressed keys [windows, width]: a window's slots summed by the softmax of gates.

    A *slot* is one of the token rows of a window. `kv` and `gate` are [windows, slots, width]; a
    gate of -inf leaves its slot out.
    """
    summed: Numbers = (kv * softmax(gate, axis=1)).sum(axis=1)
    return summed
