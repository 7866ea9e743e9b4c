"""Operations of layers that keep a state, and of hyper-connections: defaults on the host."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.registry import LazyFunction

# Loaded by the first layer that has a recurrence, a scan, or several streams.
convolve_causal = LazyFunction("aprfmt.inference.recurrence:convolve_causal")
delta_rule = LazyFunction("aprfmt.inference.recurrence:delta_rule")
log_decay = LazyFunction("aprfmt.inference.recurrence:log_decay")
gate_and_norm = LazyFunction("aprfmt.inference.state_space_scan:gate_and_norm")
run_scan = LazyFunction("aprfmt.inference.state_space_scan:run_scan")
time_steps = LazyFunction("aprfmt.inference.state_space_scan:time_steps")
compressed_windows = LazyFunction("aprfmt.inference.stream_weights:compressed_windows")
stream_weights = LazyFunction("aprfmt.inference.stream_weights:stream_weights")

Array = Any  # the backend's own
Numbers = NDArray[Any]  # numpy's


class _Operations(Protocol):
    """The operations of a backend that the defaults below call."""

    deterministic: bool

    def array(self, x: Numbers) -> Array:
        """Return numpy floats placed on the device, rounded to the dtype."""

    def to_numpy(self, x: Array) -> Numbers:
        """Return an array as numpy on the host."""

    def wide(self, x: Array) -> Array:
        """Return x in float32 if the dtype has 16 bits, else x itself."""

    def mul(self, a: Array, b: Array) -> Array:
        """Return a * b, broadcasting."""

    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        """Return act(x) for the activation `kind`."""

    def sigmoid(self, x: Array) -> Array:
        """Return 1 / (1 + exp(-x))."""

    def rms_norm(self, x: Array, weight: Array, *, eps: float, offset: int, cast: Any) -> Array:
        """Return the RMS norm of x over the last axis, times weight + offset."""


class Recurrent:
    """Short convolution, gated delta rule, state space scan, and their norms and gates.

    They are computed by numpy from copies on the host, in float32 (float64 if that is the dtype);
    `gated_norm` is made of other operations. A state is whatever `delta` or `scan` returned, in
    float32 at least; None before the first token.
    """

    def convolve(
        self: _Operations, window: Array, kernel: Array, bias: Array | None = None
    ) -> Array:
        """Return a causal convolution of each channel, plus bias: [tokens, channels], rounded once.

        `window` [taps - 1 + tokens, channels] begins with the rows before the first token. `kernel`
        is [channels, taps]; the last tap multiplies the row of the token itself.
        """
        mixed = convolve_causal(self.to_numpy(window), self.to_numpy(kernel))
        return self.array(mixed if bias is None else mixed + self.to_numpy(bias))

    def decay(self: _Operations, a: Array, rate: Array, shift: Array) -> Array:
        """Return -exp(rate) * softplus(a + shift) [tokens, heads], in float32 at least.

        It is the logarithm of what a delta net's state is multiplied by.
        """
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
        """Return the gated delta rule's (reads [tokens, value_heads, value_dim], next state).

        q and k [tokens, key_heads, key_dim] are scaled to length one, q then divided by
        sqrt(key_dim). Each key head serves as many value heads in a row. `decay` [tokens,
        value_heads] is the logarithm of what the state is multiplied by ([tokens, value_heads,
        key_dim]: by channel), `beta` how much of a value's error is written. Computed in float32 at
        least, the result is rounded once. Deterministic mode computes token by token.
        """
        q, k, v, decay, beta = (self.to_numpy(x) for x in (q, k, v, decay, beta))
        with np.errstate(over="ignore", invalid="ignore"):
            read, state = delta_rule(q, k, v, decay, beta, state, steps=self.deterministic)
        return self.array(read), state

    def gated_norm(
        self: _Operations, x: Array, weight: Array, gate: Array, kind: str, *, eps: float
    ) -> Array:
        """Return RMSNorm of x over the last axis, times weight, times act(gate).

        `kind` is an activation, or "sigmoid". Only the norm and the result are rounded where a
        backend can; here act(gate) is too.
        """
        normed = self.rms_norm(x, weight, eps=eps, offset=0, cast="before_weight")
        if kind == "sigmoid":
            return self.mul(normed, self.sigmoid(gate))
        return self.mul(normed, self.activate(gate, kind, steps=False))

    def time_step(
        self: _Operations, raw: Array, bias: Array | None, low: float, high: float
    ) -> Array:
        """Return softplus(raw + bias) clamped to [low, high]: [tokens, heads].

        The sum and the result are rounded where a backend can; here the result only.
        """
        shift = None if bias is None else self.to_numpy(bias)
        return self.array(time_steps(self.to_numpy(raw), shift, low, high))

    def decay_rates(self: _Operations, logs: Array) -> Array:
        """Return the decay rates A = -exp(A_log) of a state space layer, in float32 at least."""
        rates: Array = -np.exp(self.to_numpy(logs))
        return rates

    def scan(
        self: _Operations,
        x: Array,
        step: Array,
        rate: Array,
        b: Array,
        c: Array,
        skip: Array,
        state: Array | None,
    ) -> tuple[Array, Array]:
        """Return a state space scan's (reads [tokens, heads, head_dim], state after them).

        x is shaped as the result, `step` [tokens, heads], `rate` [heads] or [heads, state] of
        `decay_rates`, b and c [tokens, groups, state], `skip` [heads]: how much of x is added.
        Heads that follow each other share the B and C of one group. All is float32 at least.
        Deterministic mode computes token by token.
        """
        x, step, rate, b, c, skip = (self.to_numpy(y) for y in (x, step, rate, b, c, skip))
        with np.errstate(over="ignore", invalid="ignore"):
            read, after = run_scan(x, step, rate, b, c, skip, state, steps=self.deterministic)
        return read, after

    def gated_scan(
        self: _Operations,
        x: Array,
        gate: Array,
        weight: Array | None,
        *,
        groups: int,
        eps: float,
        first: bool,
    ) -> Array:
        """Return x [tokens, width] times silu(gate), normalised by groups; rounded once.

        x is float32 at least. RMSNorm runs over each group's width, times weight [width]. It comes
        before the gate if `first`, else after it; there is none where weight is None.
        """
        factors = None if weight is None else self.to_numpy(weight)
        y = gate_and_norm(
            self.to_numpy(x), self.to_numpy(gate), factors, groups=groups, eps=eps, first=first
        )
        return self.array(y)

    def hyper_weights(
        self: _Operations,
        x: Array,
        products: Array,
        scale: Array,
        base: Array,
        *,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> Array:
        """Return hyper-connection weights [tokens, 2n + n^2], in float32 at least: pre, post, comb.

        x [tokens, n * hidden] are the streams, `products` [tokens, 2n + n^2] those of x before its
        RMS norm (`norm_eps`). `scale` [3] and `base` [2n + n^2] are factors and shifts; with one
        scale the result is pre alone [tokens, n]. `iterations` normalise rows and columns of comb.
        """
        found = stream_weights(
            *(self.to_numpy(part) for part in (x, products, scale, base)),
            iterations=iterations,
            eps=eps,
            norm_eps=norm_eps,
        )
        return self.wide(self.array(found))

    def compress(self: _Operations, kv: Array, gate: Array) -> Array:
        """Return compressed keys [windows, width]: a window's slots summed by the softmax of gates.

        A *slot* is one of the token rows that a window is made of. `kv` and `gate` are [windows,
        slots, width], `gate` in float32 at least. The weights are the softmax of `gate` over the
        slots; a gate of -inf leaves its slot out. The sum is rounded once.
        """
        return self.array(compressed_windows(self.to_numpy(kv), self.to_numpy(gate)))
