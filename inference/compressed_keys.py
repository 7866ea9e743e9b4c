"""Keys that stand for windows of tokens: a compressor's, and those that an indexer scores.

Two products of a layer's input give each token values and gates. A window of `rate` tokens becomes
one key: the sum of the values by the softmax of the gates, channel by channel, normalised and
rotated by the position of the window's first token. In layers with an indexer a token has two
series, and a key is made of the first one of the window before and the second one of its own.
Source: transformers' modeling_deepseek_v4.
"""

import math
from dataclasses import dataclass

import numpy as np

from aprfmt.inference.backends.base import Array
from aprfmt.inference.context import Context
from aprfmt.inference.rope import compute_frequencies, rotation_of_layer


@dataclass(frozen=True)
class Compressor:
    """One compressor of a layer: its roles, its points, and the keys that it makes.

    `role` is the prefix of its roles, `point` that of its points, `width` the elements of a key.
    `rate` are the tokens of a window; `overlaps`: keys are made of two windows.
    """

    role: str
    point: str
    width: int
    rate: int
    overlaps: bool

    @property
    def series(self) -> int:
        """How many numbers a token gives: `width`, or twice as many where windows overlap."""
        return self.width * (2 if self.overlaps else 1)


# What a compressor keeps of the tokens before a pass: rows [n, 2 * series * width], the values and
# gates of tokens that the next window needs, and the keys [windows, 1, width] of all windows that
# are over. Either may have no rows.
WindowState = tuple[Array, Array]


def empty_state(c: Context, compressor: Compressor) -> WindowState:
    """Return a compressor's state before the first token: (no rows, no keys)."""
    b = c.backend
    return b.zeros((0, 2 * compressor.series)), b.zeros((0, 1, compressor.width))


def compress_keys(
    c: Context, layer: int, x: Array, compressor: Compressor, before: WindowState
) -> WindowState:
    """Return a compressor's state, (rows, keys), after the tokens x [tokens, hidden] of a pass.

    `before` is the state before these tokens. Rows are those of tokens whose window is not
    complete. Keys [windows, 1, width] are those of all complete windows, earlier passes' first:
    the point `compressed_k`, or `index_compressed_k`.
    """
    b, rate, (rows, keys) = c.backend, compressor.rate, before
    kv = c.tap(f"{compressor.point}compress_kv", layer, c.linear(layer, f"{compressor.role}_kv", x))
    gate = c.tap(
        f"{compressor.point}compress_gate", layer, c.linear(layer, f"{compressor.role}_gate", x)
    )
    new = b.concat([kv, gate])
    rows = b.stack([rows, new]) if len(rows) else new
    first = c.facts.cached // rate
    count = (c.facts.cached + len(x)) // rate - first
    if count:
        # The window before the first one has no tokens: their gates leave them out.
        begins = compressor.overlaps and not first
        if begins:
            empty = b.zeros((rate, compressor.series))
            rows = b.stack([b.concat([empty, b.shift(empty, -math.inf)]), rows])
        over = _compress_windows(c, layer, rows, compressor, count)
        over = _rotate_windows(c, layer, over, first, rate)
        keys = b.stack([keys, over]) if len(keys) else over
        rows = rows[count * rate :]
    if len(keys):
        keys = c.tap(f"{compressor.point}compressed_k", layer, keys)
    return (
        b.stack([rows]) if len(rows) else empty_state(c, compressor)[0]
    ), keys  # no view of the pass


def _compress_windows(c: Context, layer: int, rows: Array, made: Compressor, count: int) -> Array:
    """Return the normalised keys [count, 1, width] of the first `count` windows of tokens.

    They are not rotated yet. `rows` are the [kv | gate] of tokens. Where windows overlap, they
    begin with the tokens of the window before the first one.
    """
    b, rate, width = c.backend, made.rate, made.width
    bias = b.wide(c.vector(layer, f"{made.role}_ape.weight"))
    values, gates = [], []
    # A key's slots: the first series of the window before, then the last series of its own.
    for part in range(made.series // width):
        window = rows[part * rate : (part + count) * rate]
        columns = slice(part * width, (part + 1) * width)
        values.append(window[:, : made.series][:, columns])
        gate = b.wide(window[:, made.series :][:, columns]).reshape(count, rate, width)
        gates.append(gate + bias[:, columns])
    slots = len(values) * rate
    kv = [part.reshape(count, rate * width) for part in values]
    weights = [part.reshape(count, rate * width) for part in gates]
    if len(kv) > 1:
        kv, weights = [b.concat(kv)], [b.concat(weights)]
    summed = b.compress(kv[0].reshape(count, slots, width), weights[0].reshape(count, slots, width))
    eps = float(c.hp["norm_eps"])
    normed = c.rms_norm(summed, c.vector(layer, f"{made.role}_norm.weight"), eps)
    return normed.reshape(count, 1, width)


def _rotate_windows(c: Context, layer: int, keys: Array, first: int, rate: int) -> Array:
    """Return keys [windows, 1, width] rotated by the positions of their windows' first tokens.

    `first` is the number of the first window; windows are `rate` tokens long.
    """
    kind = rotation_of_layer(c.hp, layer)
    if kind is None:
        return keys
    places = (first + np.arange(len(keys))) * rate
    rope = compute_frequencies(c.hp, kind, int(places[-1]) + rate)
    table = c.backend.rope_table(places, rope.inv_freq, factor=rope.factor, cast=c.block.rope_cast)
    return rotate_last(c, keys, table)


def rotate_last(c: Context, x: Array, table: tuple[Array, Array]) -> Array:
    """Return x [tokens, heads, d] with the last elements of each head rotated.

    `table` is (cos, sin) [tokens, pairs]; elements rotated together are adjacent in x and in split
    halves in the result.
    """
    before = x.shape[-1] - 2 * table[0].shape[-1]
    turned = c.backend.rope(x[..., before:], table, style="interleaved", cast=c.block.rope_cast)
    return c.backend.concat([x[..., :before], turned]) if before else turned


def rotate_last_back(c: Context, x: Array, table: tuple[Array, Array]) -> Array:
    """Return x [tokens, heads, d] with the rotation of `rotate_last` undone.

    Elements rotated together are adjacent again. `table` is (cos, sin) [tokens, pairs] of the
    positions.
    """
    b, (cos, sin) = c.backend, table
    pairs = cos.shape[-1]
    before = x.shape[-1] - 2 * pairs
    back = cos, b.scale(sin, -1)
    turned = b.rope(x[..., before:], back, style="half", cast=c.block.rope_cast)
    flat = turned.reshape(-1, 2 * pairs)
    halves = flat[:, :pairs].reshape(-1, 1), flat[:, pairs:].reshape(-1, 1)
    adjacent = b.concat(halves).reshape(*x.shape[:-1], 2 * pairs)
    return b.concat([x[..., :before], adjacent]) if before else adjacent
