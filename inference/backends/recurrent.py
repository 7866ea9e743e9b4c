"""Operations of layers that keep a state: defaults that work on the host, for every backend."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.recurrence import convolved, log_decay, ruled

Array = Any  # the backend's own
Numbers = NDArray[Any]  # numpy's


class _Operations(Protocol):
    """What a backend gives to the defaults below."""

    deterministic: bool

    def array(self, x: Numbers) -> Array: ...
    def to_numpy(self, x: Array) -> Numbers: ...
    def mul(self, a: Array, b: Array) -> Array: ...
    def activate(self, x: Array, kind: str, *, steps: bool) -> Array: ...
    def rms_norm(self, x: Array, weight: Array, *, eps: float, offset: int, cast: Any) -> Array: ...


class Recurrent:
    """A short convolution, a decay, the gated delta rule and a gated norm, made of others.

    The first three are computed by numpy from copies on the host, in float32 (float64 if that is
    the dtype), as expert routing is. A state is whatever `delta` returned, wide; None before the
    first token.
    """

    def convolve(self: _Operations, window: Array, kernel: Array) -> Array:
        """Return a causal convolution a channel: [tokens, channels], rounded once.

        `window` [taps - 1 + tokens, channels] begins with the rows before the first token; `kernel`
        [channels, taps], the last tap is the token's own.
        """
        return self.array(convolved(self.to_numpy(window), self.to_numpy(kernel)))

    def decay(self: _Operations, a: Array, rate: Array, shift: Array) -> Array:
        """Return -exp(rate) * softplus(a + shift) [tokens, heads], wide."""
        return log_decay(*(self.to_numpy(x) for x in (a, rate, shift)))

    def delta(
        self: _Operations,
        q: Array,
        k: Array,
        v: Array,
        decay: Array,
        beta: Array,
        state: Array | None,
    ) -> tuple[Array, Array]:
        """Return what the gated delta rule reads [tokens, value_heads, value_dim], and the state.

        q and k [tokens, key_heads, key_dim] are brought to length one, q then divided by
        sqrt(key_dim); each key head serves as many value heads in a row. `decay` [tokens,
        value_heads] is the logarithm of what the state is multiplied by, `beta` how much of a
        value's error is written. Wide inside, the result is rounded once. Token by token in
        deterministic mode.
        """
        q, k, v, decay, beta = (self.to_numpy(x) for x in (q, k, v, decay, beta))
        with np.errstate(over="ignore", invalid="ignore"):
            read, state = ruled(q, k, v, decay, beta, state, steps=self.deterministic)
        return self.array(read), state

    def gated_norm(
        self: _Operations, x: Array, weight: Array, gate: Array, kind: str, *, eps: float
    ) -> Array:
        """Return RMSNorm of x over the last axis, times weight, times act(gate).

        Only the norm and the result are rounded where a backend can; here act(gate) is too.
        """
        normed = self.rms_norm(x, weight, eps=eps, offset=0, cast="before_weight")
        return self.mul(normed, self.activate(gate, kind, steps=False))
