"""Fused operations made of plain ones, for backends without a kernel for them.

A fused operation has capture points only before and after it; if a point inside is wanted,
forward.py calls the plain operations.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aprfmt.inference.backends.base import Array, RopeCast, Style

if TYPE_CHECKING:
    from aprfmt.inference.weights import Weight


class Composed:
    """Base of backends: every fused operation made of the Backend protocol's plain ones."""

    def projections(
        self: Any, x: Array, parts: "Sequence[tuple[Weight, Array | None]]"
    ) -> list[Array]:
        """Return x [tokens, in] times each weight, plus its bias."""
        return [self.linear(x, w, bias) for w, bias in parts]

    def add_linear(self: Any, residual: Array, x: Array, w: "Weight", bias: Array | None) -> Array:
        """Return residual + linear(x, w, bias)."""
        return self.add(residual, self.linear(x, w, bias))

    def ropes(
        self: Any,
        xs: Sequence[Array],
        table: tuple[Array, Array],
        *,
        style: Style,
        cast: RopeCast,
    ) -> list[Array]:
        """Rotate several tensors by one table."""
        return [self.rope(x, table, style=style, cast=cast) for x in xs]

    def gated(
        self: Any,
        x: Array,
        gate: "tuple[Weight, Array | None]",
        up: "tuple[Weight, Array | None]",
        kind: str,
        *,
        steps: bool,
    ) -> Array:
        """Return act(x gate) times x up, each rounded; `kind` and `steps` as in `activate`."""
        act = self.activate(self.linear(x, *gate), kind, steps=steps)
        return self.mul(act, self.linear(x, *up))

    def append(
        self: Any, buffers: tuple[Array, Array], k: Array, v: Array, start: int
    ) -> tuple[Array, Array]:
        """Write k and v [tokens, kv_heads, d] to rows `start` on; return the rows up to their end.

        A backend that records passes uses the position stored on the device instead of `start`, and
        returns whole buffers, whose invalid rows attention's mask hides.
        """
        stop = start + int(k.shape[0])
        for buffer, x in zip(buffers, (k, v), strict=True):
            buffer[start:stop] = x
        return buffers[0][:stop], buffers[1][:stop]

    def at_layer(self: Any, layer: int, n_layers: int, x: Array) -> Array:
        """Return x on the device of the layer's weights."""
        return x

    def graphs(self) -> Any | None:
        """Return a recorder of passes; None if there is none."""
        return None

    def slots(self) -> Any | None:
        """Return Slots for a trace's statistics; None if each one is computed at once."""
        return None

    def host_row(self: Any, x: Array, best: Any | None) -> Any:
        """Return logits [vocab] for a sampler: a numpy array, or an object that converts to one."""
        return self.to_numpy(x)

    def place(self, weight: "Weight") -> Array | None:
        """Return None: weights are decoded and placed by `array`."""
        return None

    def budget(self) -> int | None:
        """Return the byte budget for weights on the device; None: a share of free host memory."""
        return None
