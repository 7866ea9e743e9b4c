"""Products in tiles of fixed shape and position: the same bits for prefill, step, prefix and batch.

A *block* is ROWS token rows that are multiplied together, a *tile* a fixed range of keys whose sum
is taken together, and a *panel* some rows of a weight that are decoded at a time.

The rounding of a matrix product may depend on its number of rows, that of a sum on its number of
terms. Here every row is in a block of ROWS rows at its position modulo ROWS (missing rows are
zeros), and sums over keys run tile by tile in order, so a row's bits depend on its own inputs only.
The code uses only operations that numpy arrays and torch tensors share.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from aprfmt.inference.backends.base import ROWS, Array, Backend
from aprfmt.inference.weights import Weight

# Decoded bytes of one panel of a weight that is not held decoded.
PANEL_BYTES = 4 << 20


def panel_rows(columns: int) -> int:
    """Return how many rows of a weight are decoded at a time: a multiple of ROWS.

    It is a function of the weight's columns only, so that runs agree.
    """
    rows = PANEL_BYTES // (4 * max(columns, 1))
    return max(ROWS, rows // ROWS * ROWS)


class Tiles(Backend):
    """Products with decoded weights or panels of them, and the tiled sums of deterministic mode."""

    @abstractmethod
    def exp(self, x: Array) -> Array:
        """Return the exponential of each element of x, which is float32 at least."""

    @abstractmethod
    def dense(self, x: Array, rows: Array, bias: Array | None) -> Array:
        """Return x [tokens, in] times rows [out, in] transposed, plus bias."""

    def linear(self, x: Array, w: Weight, bias: Array | None) -> Array:
        """Return x [tokens, in] times w [out, in] transposed, plus bias [out].

        A weight that is not held decoded is decoded a panel of rows at a time.
        """
        held = self.decoded_weight(w)
        if held is not None:
            held = held.reshape(w.n_rows, w.n_columns)
            if not self.deterministic:
                return self.dense(x, held, bias)
        y = self.empty((len(x), w.n_rows))
        step = panel_rows(w.n_columns)
        for start in range(0, w.n_rows, step):
            stop = min(start + step, w.n_rows)
            panel = self.array(w.rows(start, stop)) if held is None else held[start:stop]
            y[:, start:stop] = self.tiled_linear(x, panel) if self.deterministic else x @ panel.T
        return y if bias is None else y + bias

    def decoded_weight(self, w: Weight) -> Array | None:
        """Return a weight's decoded numbers if the backend holds them, else None."""
        return w.placed_on(self)

    def empty(self, shape: Sequence[int]) -> Array:
        """Return an array of the dtype that the caller will write whole; zeros here."""
        return self.zeros(shape)

    def tiled_linear(self, x: Array, w: Array) -> Array:
        """Return x [tokens, in] times w [out, in] transposed, multiplied in blocks of ROWS rows."""
        rows, before = self._pad_rows(x)
        y = self.zeros((len(rows), w.shape[0]))
        for i in range(0, len(rows), ROWS):
            y[i : i + ROWS] = rows[i : i + ROWS] @ w.T
        return y[before : before + len(x)]

    def tiled_scores(self, q: Array, k: Array, finish: Callable[[Array], Array]) -> Array:
        """Return finish(q.k) [heads, tokens, keys] of q [tokens, heads, d], k [keys, kv_heads, d].

        `finish` scales and caps one tile of ROWS queries by ROWS keys.
        """
        rows, before = self._pad_rows(q)
        keys, kv_heads, d = k.shape
        out = self.zeros((q.shape[1], len(rows), keys))
        for i in range(0, len(rows), ROWS):
            block = self._group_heads(rows[i : i + ROWS].swapaxes(0, 1), kv_heads)
            for j in range(0, keys, ROWS):
                width = min(ROWS, keys - j)
                tile = self.wide(self.zeros((kv_heads, d, ROWS)))
                tile[..., :width] = k[j : j + width].swapaxes(0, 1).swapaxes(1, 2)
                product = self.narrow(block @ tile).reshape(q.shape[1], ROWS, ROWS)
                out[:, i : i + ROWS, j : j + width] = finish(product)[..., :width]
        return out[:, before : before + len(q)]

    def tiled_softmax(self, x: Array, highest: Array, sink: Array | None) -> Array:
        """Return exp(x - highest) divided by its sum over the keys plus exp(sink - highest).

        x [heads, tokens, keys] is float32 at least, -inf where masked; highest and sink are
        [heads, tokens, 1]. Without a sink the divisor is the sum alone.
        """
        e = self._exponentials((x - highest).swapaxes(0, 1)).swapaxes(0, 1)
        total = self.wide(self.zeros((*x.shape[:-1], 1)))
        for j in range(0, x.shape[-1], ROWS):
            tile = self.wide(self.zeros((*x.shape[:-1], ROWS)))
            tile[..., : min(ROWS, x.shape[-1] - j)] = e[..., j : j + ROWS]
            total[..., 0] += tile.sum(-1)
        if sink is not None:
            total = total + self._exponentials((sink - highest).swapaxes(0, 1)).swapaxes(0, 1)
        return self.narrow(e / total)

    def _exponentials(self, x: Array) -> Array:
        """Return exp of float32 x [tokens, heads, keys], computed a tile of ROWS keys at a time."""
        rows, before = self._pad_rows(x, widen=True)
        for i in range(0, len(rows), ROWS):
            for j in range(0, x.shape[-1], ROWS):
                width = min(ROWS, x.shape[-1] - j)
                tile = self.wide(self.zeros((ROWS, x.shape[1], ROWS)))
                tile[..., :width] = rows[i : i + ROWS, :, j : j + width]
                rows[i : i + ROWS, :, j : j + width] = self.exp(tile)[..., :width]
        return rows[before : before + len(x)]

    def by_block(self, function: Callable[..., Array], *xs: Array) -> Array:
        """Return function(*xs) of a row-wise function, called for one block of rows at a time.

        Vectorised functions use other code for the last elements of an array than for the rest,
        so the length of the array would change bits.
        """
        padded = [self._pad_rows(x) for x in xs]
        count, before = len(padded[0][0]), padded[0][1]
        blocks = [
            function(*(rows[i : i + ROWS] for rows, _ in padded)) for i in range(0, count, ROWS)
        ]
        out = self.zeros((count, *blocks[0].shape[1:]))
        for i, block in enumerate(blocks):
            out[i * ROWS : (i + 1) * ROWS] = block
        return out[before : before + len(xs[0])]

    def tiled_mix(self, probs: Array, v: Array) -> Array:
        """Return probs [heads, tokens, keys] times v [keys, kv_heads, d]: [tokens, heads, d].

        Sums over keys run tile by tile in order.
        """
        tokens = probs.shape[1]
        rows, before = self._pad_rows(probs.swapaxes(0, 1))
        keys, kv_heads, d = v.shape
        out = self.wide(self.zeros((len(rows), probs.shape[0], d)))
        for i in range(0, len(rows), ROWS):
            for j in range(0, keys, ROWS):
                width = min(ROWS, keys - j)
                weights = self.zeros((probs.shape[0], ROWS, ROWS))
                weights[..., :width] = rows[i : i + ROWS, :, j : j + width].swapaxes(0, 1)
                tile = self.wide(self.zeros((kv_heads, ROWS, d)))
                tile[:, :width] = v[j : j + width].swapaxes(0, 1)
                product = self._group_heads(weights, kv_heads) @ tile
                out[i : i + ROWS] += product.reshape(-1, ROWS, d).swapaxes(0, 1)
        return self.narrow(out[before : before + tokens])

    def _group_heads(self, x: Array, kv_heads: int) -> Array:
        """Return x [heads, ROWS, n] as a contiguous float32 copy [kv_heads, group * ROWS, n].

        `group` is the number of query heads that share a key head.
        """
        copy = self.wide(self.zeros(x.shape))
        copy[...] = x
        return copy.reshape(kv_heads, -1, x.shape[-1])

    def _pad_rows(self, x: Array, widen: bool = False) -> tuple[Array, int]:
        """Return (x padded with zero rows to whole blocks of ROWS, number of zero rows before x).

        x is [tokens, ...]. Each of its rows then stands in its block at its position modulo ROWS.
        `widen`: the copy is float32 at least.
        """
        before = self._origin % ROWS
        count = -(-(before + len(x)) // ROWS) * ROWS
        padded: Any = self.zeros((count, *x.shape[1:]))
        padded = self.wide(padded) if widen else padded
        padded[before : before + len(x)] = x
        return padded, before
