"""Recurrent layers' operations of the CuPy backend: kernels of recurrent.cu."""

from aprfmt.errors import ArchError
from aprfmt.inference.backends.base import Array, NormCast
from aprfmt.inference.fast.cuda import memory
from aprfmt.inference.fast.cuda.ops import GROUP
from aprfmt.inference.fast.cupy_elements import CupyElements, make_contiguous
from aprfmt.inference.recurrence import LINEAR, TINY

# Keys that the 32 lanes of a warp hold: a kernel for each number a lane.
LANE_KEYS = (1, 2, 4, 8)
_WARP = 32


class CupyRecurrent(CupyElements):
    """Recurrent layers' operations as kernels, in place of the defaults that work on the host.

    The mathematics is that of recurrence.py.
    """

    def convolve(self, window: Array, kernel: Array, bias: Array | None = None) -> Array:
        """Return a causal convolution of each channel, plus bias: [tokens, channels], rounded once.

        `window` [taps - 1 + tokens, channels] begins with the rows before the first token.
        """
        window, kernel = make_contiguous(window), make_contiguous(kernel)
        channels, taps = (int(size) for size in kernel.shape)
        out = self._empty(len(window) - taps + 1, channels)
        places = (
            memory.pointer(window),
            memory.pointer(kernel),
            _address_or_zero(bias),
            memory.pointer(out),
        )
        self._ops.launch_over("convolve", int(out.size), *places, int(out.size), channels, taps)
        return out

    def decay(self, a: Array, rate: Array, shift: Array) -> Array:
        """Return -exp(rate) * softplus(a + shift) [tokens, heads], in float32 at least.

        It is the logarithm of what a delta net's state is multiplied by.
        """
        a, rate, shift = make_contiguous(a), make_contiguous(rate), make_contiguous(shift)
        out, count = memory.array_module().empty(a.shape, self._wide), int(a.size)
        places = (memory.pointer(x) for x in (a, rate, shift, out))
        self._ops.launch_over("decay", count, *places, count, int(a.shape[-1]), LINEAR)
        return out

    def delta(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array | None
    ) -> tuple[Array, Array]:
        """Return the gated delta rule's (reads [tokens, value_heads, value_dim], next state).

        Computed token by token in float32 at least, the reads rounded once. q and k are [tokens,
        key_heads, key_dim], `decay` is a logarithm [tokens, heads], or [tokens, heads, key_dim] by
        channel; a `state` of None is zeros. Keys of more than 256 numbers are computed on the host.
        """
        (tokens, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
        lane = next((n for n in LANE_KEYS if key_dim <= n * _WARP), None)
        if lane is None:
            return super().delta(q, k, v, decay, beta, state)
        read = self._empty(*v.shape)
        after = memory.array_module().empty((heads, key_dim, value_dim), self._wide)
        given = [
            make_contiguous(q),
            make_contiguous(k),
            make_contiguous(v),
            self.wide(make_contiguous(decay)),
            make_contiguous(beta),
        ]
        before = None if state is None else self.wide(state)
        self._ops.launch(
            f"delta{lane}",
            (-(-value_dim * _WARP // GROUP), heads),
            *(memory.pointer(x) for x in given),
            0 if before is None else memory.pointer(before),
            memory.pointer(read),
            memory.pointer(after),
            tokens,
            key_heads,
            key_dim,
            value_dim,
            int(decay.ndim == 3),
            TINY,
            float(key_dim**-0.5),
        )
        return read, after

    def time_step(self, raw: Array, bias: Array | None, low: float, high: float) -> Array:
        """Return softplus(raw + bias) clamped to [low, high]: [tokens, heads].

        The sum and the softplus are rounded.
        """
        raw = make_contiguous(raw)
        out, count = self._empty(*raw.shape), int(raw.size)
        places = (memory.pointer(raw), _address_or_zero(bias), memory.pointer(out))
        self._ops.launch_over(
            "time_step", count, *places, count, int(raw.shape[-1]), LINEAR, low, high
        )
        return out

    def decay_rates(self, logs: Array) -> Array:
        """Return the decay rates A = -exp(A_log) of a state space layer, in float32 at least."""
        logs = make_contiguous(logs)
        out, count = memory.array_module().empty(logs.shape, self._wide), int(logs.size)
        self._ops.launch_over("rates", count, memory.pointer(logs), memory.pointer(out), count)
        return out

    def scan(
        self,
        x: Array,
        step: Array,
        rate: Array,
        b: Array,
        c: Array,
        skip: Array,
        state: Array | None,
    ) -> tuple[Array, Array]:
        """Return a state space scan's (reads [tokens, heads, head_dim], state after them).

        x is shaped as the reads, `step` [tokens, heads], `rate` [heads] or [heads, state], b and c
        [tokens, groups, state], `skip` [heads]; a `state` of None is zeros. It is computed token by
        token in float32 at least. Raises ArchError for more than 256 numbers of state.
        """
        (tokens, heads, width), (_, groups, size) = x.shape, b.shape
        lane = next((n for n in LANE_KEYS if size <= n * _WARP), None)
        if lane is None:
            raise ArchError(
                f"ssm_state is {size}; backend cupy scans at most {LANE_KEYS[-1] * _WARP} numbers"
            )
        read = memory.array_module().empty(x.shape, self._wide)
        shape = (heads, width, size)
        after = memory.array_module().zeros(shape, self._wide) if state is None else state.copy()
        given = [
            make_contiguous(x),
            make_contiguous(step),
            self.wide(rate),
            make_contiguous(b),
            make_contiguous(c),
            make_contiguous(skip),
        ]
        self._ops.launch(
            f"scan{lane}",
            (-(-heads * width * _WARP // GROUP),),
            *(memory.pointer(y) for y in given),
            memory.pointer(read),
            memory.pointer(after),
            tokens,
            heads,
            width,
            groups,
            size,
            int(rate.ndim == 2),
        )
        return read, after

    def gated_scan(
        self, x: Array, gate: Array, weight: Array | None, *, groups: int, eps: float, first: bool
    ) -> Array:
        """Return x [tokens, width] times silu(gate), normalised by groups; rounded once.

        `first`: the norm comes before the gate. `weight` None: no norm.
        """
        x, gate = self.wide(x), make_contiguous(gate)
        out, width = self._empty(*x.shape), int(x.shape[-1]) // groups
        self._ops.launch(
            "gated_scan",
            (len(x) * groups,),
            memory.pointer(x),
            memory.pointer(gate),
            _address_or_zero(weight),
            memory.pointer(out),
            width,
            groups,
            int(first),
            eps,
        )
        return out

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Return x over its root mean square, times weight + offset, as the other backends do.

        A float32 x of a 16-bit run is multiplied by the weight alone and rounded once.
        """
        if x.dtype == self._stored:
            return super().rms_norm(x, weight, eps=eps, offset=offset, cast=cast)
        x, out = make_contiguous(x), self._empty(*x.shape)
        self._ops.launch(
            "gated_scan",
            (len(x),),
            memory.pointer(x),
            0,
            _address_or_zero(weight),
            memory.pointer(out),
            int(x.shape[-1]),
            1,
            0,
            eps,
        )
        return out


def _address_or_zero(x: Array | None) -> int:
    """Return the address of a contiguous array, 0 for None."""
    return 0 if x is None else memory.pointer(x)
