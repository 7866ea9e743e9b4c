"""The operations of layers that keep a state, on the device: kernels of recurrent.cu."""

from aprfmt.inference.backends.base import Array
from aprfmt.inference.fast.cuda import memory
from aprfmt.inference.fast.cuda.ops import GROUP
from aprfmt.inference.fast.cupy_elements import CupyElements, whole
from aprfmt.inference.recurrence import LINEAR, TINY

# Keys that the 32 lanes of a warp hold: a kernel for each number a lane.
LANE_KEYS = (1, 2, 4, 8)
_WARP = 32


class CupyRecurrent(CupyElements):
    """Replaces the defaults that work on the host; the mathematics is that of recurrence.py."""

    def convolve(self, window: Array, kernel: Array) -> Array:
        """Multiply and add tap by tap, wide; rounded once."""
        window, kernel = whole(window), whole(kernel)
        channels, taps = (int(size) for size in kernel.shape)
        out = self._empty(len(window) - taps + 1, channels)
        places = (memory.pointer(x) for x in (window, kernel, out))
        self._ops.over("convolve", int(out.size), *places, int(out.size), channels, taps)
        return out

    def decay(self, a: Array, rate: Array, shift: Array) -> Array:
        """Return the decay's logarithm, wide."""
        a, rate, shift = whole(a), whole(rate), whole(shift)
        out, count = memory.arrays().empty(a.shape, self._wide), int(a.size)
        places = (memory.pointer(x) for x in (a, rate, shift, out))
        self._ops.over("decay", count, *places, count, int(a.shape[-1]), LINEAR)
        return out

    def delta(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array | None
    ) -> tuple[Array, Array]:
        """Go token by token, wide; rounded once. Keys of more than 256 numbers are the host's."""
        (tokens, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
        lane = next((n for n in LANE_KEYS if key_dim <= n * _WARP), None)
        if lane is None:
            return super().delta(q, k, v, decay, beta, state)
        read = self._empty(*v.shape)
        after = memory.arrays().empty((heads, key_dim, value_dim), self._wide)
        given = [whole(q), whole(k), whole(v), self.wide(decay), whole(beta)]
        before = None if state is None else self.wide(state)
        self._ops.run(
            f"delta{lane}", (-(-value_dim * _WARP // GROUP), heads),
            *(memory.pointer(x) for x in given), 0 if before is None else memory.pointer(before),
            memory.pointer(read), memory.pointer(after), tokens, key_heads, key_dim, value_dim,
            TINY, float(key_dim**-0.5),
        )  # fmt: skip
        return read, after
