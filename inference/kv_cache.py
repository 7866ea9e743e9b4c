"""Keys and values of the positions seen so far, per layer, in buffers that grow by doubling.

The keys of indexers are held too, and keys that are the values (`extend_one`). Recurrent layers and
compressors have a state (`state`, `set_next_state`), that of the last valid position only: such a
cache can be emptied, not cut.

Every layer holds all positions, also windowed layers: the mask decides which are visible. Keys are
stored rotated; if the frequencies depend on the length (dynamic, longrope), a longer sequence may
have to be run again from the start (`rope.keys_stay_valid`).
"""

from collections.abc import Mapping
from typing import Any

from aprfmt.errors import UsageError
from aprfmt.inference.backends.base import ROWS, Array, Backend

# Rows that a convolution looks back on, then the state of a recurrence, if there is one.
State = tuple[Array, ...]


class KVCache:
    """`length` positions are valid; a forward pass writes after them, then calls `commit`."""

    def __init__(self, backend: Backend, n_layers: int) -> None:
        """Start with no positions and no buffers, for `n_layers` layers."""
        self._backend = backend
        self._keys: list[Any] = [None] * n_layers
        self._values: list[Any] = [None] * n_layers
        self._single: list[Any] = [None] * n_layers  # keys without values
        self._states: dict[int, State] = {}
        self._next: dict[int, State] = {}  # of the pass that is not committed yet
        self.length = 0
        self._capacity, self._measured = 0, -1  # rows of the smallest buffer, its generation
        self._was_used = False  # a pass was committed
        self.generation = 0  # counts new buffers: recordings made with old ones are invalid

    def extend(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Write k and v [tokens, kv_heads, d] after the valid positions; return (all k, all v)."""
        stop = self.length + int(k.shape[0])
        keys = self._keys[layer] = self._ensure_rows(self._keys[layer], k, stop)
        values = self._values[layer] = self._ensure_rows(self._values[layer], v, stop)
        k, v = self._backend.append((keys, values), (k, v), self.length)
        return k, v

    def extend_one(self, layer: int, k: Array) -> Array:
        """Write keys k [tokens, 1, d] without values after the valid positions; return all rows."""
        stop = self.length + int(k.shape[0])
        keys = self._single[layer] = self._ensure_rows(self._single[layer], k, stop)
        return self._backend.append((keys,), (k,), self.length)[0]

    def recurrent_state(self, layer: int) -> State | tuple[None, None]:
        """Return what a layer with a convolution or recurrence carries to the next position.

        That is (rows that its convolution looks back on, state of its recurrence) after the last
        valid position; (None, None) before the first.
        """
        return self._states.get(layer, (None, None))

    def set_next_state(self, layer: int, state: State) -> None:
        """Store a layer's state after the pass's last position; `commit` makes it valid."""
        self._next[layer] = state

    def states(self) -> Mapping[int, State]:
        """Return {layer: state} after the last valid position."""
        return dict(self._states)

    @property
    def can_truncate(self) -> bool:
        """Whether positions can be removed one by one: no layer has a recurrent state."""
        return not self._states

    def fits(self, tokens: int) -> bool:
        """Return whether `tokens` more positions fit without new buffers.

        Before the first pass none do. States alone take no more room for more positions.
        """
        if self._measured != self.generation:
            sizes = [
                int(buffer.shape[0])
                for buffer in (*self._keys, *self._values, *self._single)
                if buffer is not None
            ]
            self._measured, self._capacity = self.generation, min(sizes, default=0)
        states_only = not self.generation and self._was_used
        return states_only or self.length + tokens <= self._capacity

    def _ensure_rows(self, buffer: Array | None, x: Array, stop: int) -> Array:
        """Return a buffer of at least `stop` rows like x's: `buffer` itself, or a larger copy."""
        if buffer is not None and buffer.shape[0] >= stop:
            return buffer
        capacity = ROWS
        while capacity < stop:
            capacity *= 2
        grown = self._backend.zeros((capacity, *x.shape[1:]))
        if buffer is not None:
            grown[: self.length] = buffer[: self.length]
        self.generation += 1
        return grown

    def commit(self, tokens: int, states: Mapping[int, State] | None = None) -> None:
        """Make the `tokens` positions written last valid; called once all layers have written.

        `states` are those of a pass that was replayed: it calls no `set_next_state`.
        """
        self.length += tokens
        self._was_used = True
        self._states.update(self._next if states is None else states)
        self._next.clear()

    def truncate(self, length: int) -> None:
        """Remove the positions from `length` on.

        Raises UsageError for a length above the cache's, or if it has a recurrent state, which
        cannot be cut back.
        """
        if not 0 <= length <= self.length:
            raise UsageError(
                f"the cache holds {self.length} positions; it cannot be cut to {length}"
            )
        if 0 < length < self.length and not self.can_truncate:
            raise UsageError(
                f"the cache holds the state after {self.length} positions; it cannot be cut to "
                f"{length}, only emptied"
            )
        if not length:
            self._states.clear()
        self._next.clear()
        self.length = length

    def arrays(self) -> list[Any]:
        """Return all buffers and states that are allocated."""
        states = [part for state in self._states.values() for part in state]
        every = (*self._keys, *self._values, *self._single, *states)
        return [one for one in every if one is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that the buffers and states take."""
        return sum(int(one.nbytes) for one in self.arrays())
