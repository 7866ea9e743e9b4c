"""The operations of layers that keep a state, by CuPy's own functions on the device."""

from abc import abstractmethod

from aprfmt.inference.backends.base import Array, Backend
from aprfmt.inference.fast.cuda import memory
from aprfmt.inference.recurrence import convolved, log_decay, ruled


class CupyRecurrent(Backend):
    """Replaces the defaults that work on the host; the functions are those of recurrence.py."""

    @abstractmethod
    def widened(self, x: Array) -> Array:
        """Return x as a contiguous wide array on the device."""

    @abstractmethod
    def stored(self, x: Array) -> Array:
        """Return a wide array rounded to the dtype, as the backend stores it."""

    def convolve(self, window: Array, kernel: Array) -> Array:
        """Multiply and add tap by tap, wide; rounded once."""
        return self.stored(convolved(self.widened(window), self.widened(kernel)))

    def decay(self, a: Array, rate: Array, shift: Array) -> Array:
        """Return the decay's logarithm, wide."""
        a, rate, shift = (self.widened(x) for x in (a, rate, shift))
        return log_decay(a, rate, shift, memory.arrays())

    def delta(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array | None
    ) -> tuple[Array, Array]:
        """Work out a chunk of tokens at a time, wide; rounded once."""
        q, k, v, decay, beta = (self.widened(x) for x in (q, k, v, decay, beta))
        steps, xp = self.deterministic, memory.arrays()
        read, state = ruled(q, k, v, decay, beta, state, steps=steps, xp=xp)
        return self.stored(read), state
