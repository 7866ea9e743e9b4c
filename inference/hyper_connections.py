"""Several residual streams that hyper-connections collapse before a branch and mix after it.

The streams are joined along the last axis, [tokens, hc_streams * hidden_size]. Before attention,
and before the MLP, a product of all streams gives three sets of weights: `pre` collapses the
streams into what the branch reads, `post` says how much of its output each stream gets, `comb`
mixes the streams; its rows and columns sum to 1 (Sinkhorn and Knopp's iteration). Sources: Xie et
al., "mHC: Manifold-Constrained Hyper-Connections" (arXiv 2512.24880); transformers'
modeling_deepseek_v4.
"""

from aprfmt.inference.backends.base import Array
from aprfmt.inference.capture import WHOLE
from aprfmt.inference.context import Context


def copy_streams(c: Context, x: Array) -> Array:
    """Return the streams that enter layer 0 [tokens, hc_streams * hidden]: copies of x."""
    copies = [x] * int(c.hp["hc_streams"])
    return c.tap("hc_embd", WHOLE, c.backend.concat(copies))


def collapse_streams(c: Context, layer: int, x: Array, branch: str) -> tuple[Array, Array, Array]:
    """Return (what a branch reads [tokens, hidden], post [tokens, n], comb [tokens, n * n]).

    `x` [tokens, n * hidden] are the n streams, `branch` is "attn" or "ffn". Column i of post says
    how much of the branch's result is added to stream i. Row j, column i of a token's comb says how
    much of stream j goes to stream i.
    """
    n, name = int(c.hp["hc_streams"]), f"hc_{branch}"
    weights = _stream_weights(c, layer, name, x)
    pre = c.tap(f"{name}_pre", layer, weights[:, :n])
    post = c.tap(f"{name}_post", layer, weights[:, n : 2 * n])
    comb = c.tap(f"{name}_comb", layer, weights[:, 2 * n :])
    return c.tap(f"{name}_in", layer, _weighted_sum(c, x, pre)), post, comb


def mix_streams(c: Context, x: Array, y: Array, post: Array, comb: Array) -> Array:
    """Return the streams [tokens, n * hidden] after a branch's output y [tokens, hidden].

    They are the streams x mixed by `comb`, plus y times each stream's weight of `post`.
    """
    b, n = c.backend, int(c.hp["hc_streams"])
    post, comb = b.narrow(post), b.narrow(comb)
    turned = b.concat([comb[:, i::n] for i in range(n)])
    mixed = _stream_views(c, b.mix_copies(x, turned))
    return b.concat([b.add(b.mul(y, post[:, i : i + 1]), mixed[i]) for i in range(n)])


def merge_streams(c: Context, x: Array) -> Array:
    """Return the weighted sum [tokens, hidden] of the streams x, which the last norm reads."""
    pre = c.tap("hc_head_pre", WHOLE, _stream_weights(c, None, "output_hc", x))
    return c.tap("hc_merged", WHOLE, _weighted_sum(c, x, pre))


def _stream_weights(c: Context, layer: int | None, name: str, x: Array) -> Array:
    """Return the weights of hyper-connection `name` for the streams x, in float32 at least.

    They are [tokens, 2n + n^2] in a layer, and [tokens, n] at the head (layer None).
    """
    b, hp = c.backend, c.hp
    w = c.weights.role(layer, f"{name}_fn.weight")
    return b.hyper_weights(
        x,
        b.router(x, w, None, rounded=False),
        c.vector(layer, f"{name}_scale.weight"),
        c.vector(layer, f"{name}_base.weight"),
        iterations=int(hp["hc_iterations"]),
        eps=float(hp["hc_eps"]),
        norm_eps=float(hp["norm_eps"]),
    )


def _stream_views(c: Context, x: Array) -> list[Array]:
    """Return views of the streams, [tokens, hidden] each."""
    width = int(c.hp["hidden_size"])
    return [x[:, i * width : (i + 1) * width] for i in range(int(c.hp["hc_streams"]))]


def _weighted_sum(c: Context, x: Array, weights: Array) -> Array:
    """Return the sum [tokens, hidden] of the streams x times `weights` [tokens, n]."""
    b = c.backend
    terms = [b.wide(part) * weights[:, i : i + 1] for i, part in enumerate(_stream_views(c, x))]
    return b.narrow(sum(terms[1:], start=terms[0]))
