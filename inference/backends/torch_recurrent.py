"""The operations of layers that keep a state, in torch on the device of its tensors.

A *chunk* is CHUNK tokens that follow each other and are computed by one product.

The functions are those of recurrence.py; rounding is that of transformers' models. Deterministic
runs use the base class's, token by token.
"""

import torch
from torch.nn import functional

from aprfmt.inference.backends.base import Array
from aprfmt.inference.backends.tiles import Tiles
from aprfmt.inference.recurrence import CHUNK, LINEAR, SUBCHUNK, TINY, by_channel


class TorchRecurrent(Tiles):
    """Recurrent layers' operations in torch, in place of the defaults that work on the host."""

    def convolve(self, window: Array, kernel: Array, bias: Array | None = None) -> Array:
        """Return a causal convolution of each channel, plus bias: [tokens, channels], rounded once.

        `window` [taps - 1 + tokens, channels] begins with the rows before the first token; `kernel`
        is [channels, taps]. Sums are float32 at least, tap by tap.
        """
        taps = kernel.shape[1]
        tokens = len(window) - taps + 1
        wide, factors = self.wide(window), self.wide(kernel)
        y = wide[:tokens] * factors[:, 0]
        for tap in range(1, taps):
            y = y + wide[tap : tap + tokens] * factors[:, tap]
        return self.narrow(y if bias is None else y + self.wide(bias))

    def decay(self, a: Array, rate: Array, shift: Array) -> Array:
        """Return -exp(rate) * softplus(a + shift) [tokens, heads], in float32 at least.

        It is the logarithm of what a delta net's state is multiplied by.
        """
        if self.deterministic:
            return super().decay(a, rate, shift)
        soft = functional.softplus(self.wide(a) + self.wide(shift), threshold=LINEAR)
        return -self.wide(rate).exp() * soft

    def delta(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array | None
    ) -> tuple[Array, Array]:
        """Return the gated delta rule's (reads [tokens, value_heads, value_dim], next state).

        CHUNK tokens are computed at a time in float32 at least; the reads are rounded once. q and k
        are [tokens, key_heads, key_dim], v is shaped as the result; `decay` (a logarithm) and
        `beta` are [tokens, value_heads], `state` [value_heads, key_dim, value_dim], None for zeros.
        """
        if self.deterministic:
            return super().delta(q, k, v, decay, beta, state)
        each = v.shape[1] // k.shape[1]
        q, k = (_unit_length(self.wide(x)).repeat_interleave(each, dim=1) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
        v, beta = self.wide(v), self.wide(beta)
        if state is None:
            state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        reads = []
        for start in range(0, len(q), CHUNK):
            i, j, w, g, b = (
                x[start : start + CHUNK].swapaxes(0, 1) for x in (q, k, v, decay, beta)
            )
            read, state = _delta_chunk(i, j, w, g, b, state)
            reads.append(read.swapaxes(0, 1))
        return self.narrow(torch.cat(reads)), state

    def gated_norm(self, x: Array, weight: Array, gate: Array, kind: str, *, eps: float) -> Array:
        """Return RMSNorm of x times weight, rounded, then times act(gate), rounded.

        act(gate) is float32 at least. `kind` names the activation; with "sigmoid" (Kimi delta
        attention) only the result is rounded.
        """
        if kind == "sigmoid" and not self.deterministic:
            y = self.wide(x)
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * self.wide(weight)
            return self.narrow(y * self.wide(gate).sigmoid())
        normed = self.rms_norm(x, weight, eps=eps, offset=0, cast="before_weight")
        if kind == "sigmoid":
            return self.mul(normed, self.sigmoid(gate))
        act = self.activate(self.wide(gate), kind, steps=False)
        return self.narrow(self.wide(normed) * self.wide(act))

    def time_step(self, raw: Array, bias: Array | None, low: float, high: float) -> Array:
        """Return softplus(raw + bias) clamped to [low, high]: [tokens, heads].

        Each step is rounded, as in transformers.
        """
        if self.deterministic:
            return super().time_step(raw, bias, low, high)
        x = raw if bias is None else raw + bias
        return functional.softplus(x, threshold=LINEAR).clamp(low, high)

    def decay_rates(self, logs: Array) -> Array:
        """Return the decay rates A = -exp(A_log) of a state space layer, in float32 at least."""
        return -self.wide(logs).exp()

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

        CHUNK tokens are computed at a time; both results are float32 at least. x is shaped as the
        reads, `step` [tokens, heads], `rate` [heads] or [heads, state], b and c [tokens, groups,
        state], `skip` [heads], `state` [heads, head_dim, state], None for zeros.
        """
        x, step, b, c, skip = (self.wide(y) for y in (x, step, b, c, skip))
        if self.deterministic:
            read, after = super().scan(x, step, rate, b, c, skip, _to_host(state))
            return torch.from_numpy(read).to(x), torch.from_numpy(after).to(x)
        if state is None:
            state = x.new_zeros(*x.shape[1:], b.shape[2])
        scanned = _scan_mamba1 if rate.ndim == 2 else _scan_by_head
        read, state = scanned(x, step, rate, b, c, state)
        return read + skip[:, None] * x, state

    def gated_scan(
        self, x: Array, gate: Array, weight: Array | None, *, groups: int, eps: float, first: bool
    ) -> Array:
        """Return x [tokens, width] times silu(gate), normalised by groups; rounded once.

        `first`: the norm comes before the gate. `weight` None: no norm.
        """
        if self.deterministic:
            return super().gated_scan(x, gate, weight, groups=groups, eps=eps, first=first)
        opened = functional.silu(self.wide(gate))
        if weight is None:
            return self.narrow(self.wide(x) * opened)
        y = self.wide(x) if first else self.wide(x) * opened
        y = y.reshape(len(x), groups, -1)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
        y = y.reshape(x.shape) * self.wide(weight)
        return self.narrow(y * opened if first else y)

    def hyper_weights(
        self,
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

        With one `scale` the result is pre alone [tokens, n].
        """
        if self.deterministic:
            return super().hyper_weights(
                x, products, scale, base, iterations=iterations, eps=eps, norm_eps=norm_eps
            )
        wide, scale, base = self.wide(x), self.wide(scale), self.wide(base)
        products = self.wide(products) * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm_eps)
        if len(scale) == 1:
            return torch.sigmoid(products * scale + base) + eps
        n = round((products.shape[-1] + 1) ** 0.5 - 1)
        sizes = [n, n, n * n]
        parts = zip(products.split(sizes, -1), scale.unbind(), base.split(sizes), strict=True)
        pre, post, comb = (part * factor + shift for part, factor, shift in parts)
        comb = torch.softmax(comb.unflatten(-1, (n, n)), -1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        weights = torch.sigmoid(pre) + eps, 2 * torch.sigmoid(post), comb.flatten(-2)
        return torch.cat(weights, -1)

    def compress(self, kv: Array, gate: Array) -> Array:
        """Return compressed keys [windows, width]: a window's slots summed by the softmax of gates.

        A *slot* is one of the token rows of a window; `kv` and `gate` are [windows, slots, width].
        The softmax over the slots and each product are rounded, as in transformers.
        """
        if self.deterministic:
            return super().compress(kv, gate)
        return (kv * self.narrow(torch.softmax(self.wide(gate), 1))).sum(1)


def _to_host(state: Array | None) -> Array:
    """Return a state as a numpy array; None for None."""
    return None if state is None else state.cpu().numpy()


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    """Return vectors over the last axis scaled to length one (TINY is added to the squares)."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + TINY)


def _delta_chunk(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reads [heads, tokens, value_dim] of one chunk, and the state after it.

    Inputs have heads first: q, k [heads, tokens, key_dim], v [heads, tokens, value_dim], log decay
    g [heads, tokens], or [heads, tokens, key_dim] by channel, beta [heads, tokens], state [heads,
    key_dim, value_dim]. recurrence.py explains the system that is solved.
    """
    total = g.cumsum(1)  # (head, token) or (head, token, key_dim)
    within = _products_by_channel if g.ndim == 3 else _products_by_head
    overlap, seen = within(k, total, k) * beta[..., None], within(q, total, k)
    grown = by_channel(total).exp()
    wanted = (v - (k * grown) @ state) * beta[..., None]
    change = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    read = (q * grown) @ state + seen @ change
    last = by_channel(total[:, -1:])
    left = k * (last - by_channel(total)).exp()
    return read, state * last.exp().swapaxes(1, 2) + left.swapaxes(1, 2) @ change


def _later_mask(tokens: int, x: torch.Tensor) -> torch.Tensor:
    """Return where column j is after row i: booleans [tokens, tokens] on the device of x."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)


def _products_by_head(x: Array, total: Array, k: Array) -> torch.Tensor:
    """Return exp(c_i - c_j) (x_i . k_j) [heads, i, j], zero for j after i.

    x and k are [heads, tokens, key_dim]. `total` is c [heads, tokens], the log decay summed up to
    each token.
    """
    between = total[:, :, None] - total[:, None, :]
    between = between.masked_fill(_later_mask(x.shape[1], x), -torch.inf).exp()
    found: torch.Tensor = (x @ k.swapaxes(1, 2)) * between
    return found


def _products_by_channel(x: Array, total: Array, k: Array) -> torch.Tensor:
    """Return the sum over d of exp(c_id - c_jd) x_id k_jd [heads, i, j], zero for j after i.

    x and k are [heads, tokens, key_dim]. `total` is c [heads, tokens, key_dim], the log decay
    summed up to each token. recurrence.py explains the blocks of SUBCHUNK rows.
    """
    heads, tokens, _ = x.shape
    blocks = []
    for start in range(0, tokens, SUBCHUNK):
        rows = slice(start, min(start + SUBCHUNK, tokens))
        here = total[:, rows]
        size, keys = here.shape[1], k[:, rows]
        between = here[:, :, None] - here[:, None]
        between = between.masked_fill(_later_mask(size, x)[..., None], -torch.inf).exp()
        parts = [(x[:, rows, None] * between * keys[:, None]).sum(-1)]
        if start:
            first = total[:, start : start + 1]
            earlier = k[:, :start] * (first - total[:, :start]).exp()
            parts.insert(0, (x[:, rows] * (here - first).exp()) @ earlier.mT)
        parts.append(x.new_zeros(heads, size, tokens - rows.stop))
        blocks.append(torch.cat(parts, dim=2))
    return torch.cat(blocks, dim=1)


def _scan_mamba1(
    x: Array, step: Array, rate: Array, b: Array, c: Array, state: Array
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (outputs [tokens, heads, head_dim], last state) of a selective scan as in Mamba 1.

    In Mamba 1 each element of the state has a decay rate: `rate` is [heads, state], and the state
    [heads, head_dim, state] is carried from token to token. What does not depend on it is computed
    for CHUNK tokens at once. x is shaped as the outputs, `step` is [tokens, heads], b and c are
    [tokens, groups, state].
    """
    each = x.shape[1] // b.shape[1]
    reads = []
    for start in range(0, len(x), CHUNK):
        y, t, i, o = (part[start : start + CHUNK] for part in (x, step, b, c))
        kept = (t[..., None] * rate).exp()[:, :, None]  # (token, head, 1, state)
        i, o = (part.repeat_interleave(each, dim=1) for part in (i, o))
        states = list(((t[..., None] * y)[..., None] * i[:, :, None]).unbind())
        for token, decay in enumerate(kept.unbind()):
            state = states[token] = torch.addcmul(states[token], decay, state)
        reads.append((torch.stack(states) @ o[..., None])[..., 0])
    return torch.cat(reads), state


def _scan_by_head(
    x: Array, step: Array, rate: Array, b: Array, c: Array, state: Array
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (outputs [tokens, heads, head_dim], last state) of a selective scan as in Mamba 2.

    There each head has one decay rate: `rate` is [heads], and `step`, the time steps, [tokens,
    heads]. x is [tokens, heads, head_dim], b and c [tokens, groups, state], `state` [heads,
    head_dim, state]. CHUNK tokens are computed at once; state_space_scan.py explains the products.
    """
    groups = b.shape[1]
    each = x.shape[1] // groups
    rate, state = rate.reshape(groups, each), state.reshape(groups, each, *state.shape[1:])
    reads = []
    for start in range(0, len(x), CHUNK):
        y, t, i, o = (part[start : start + CHUNK].swapaxes(0, 1) for part in (x, step, b, c))
        y, t = y.reshape(groups, each, *y.shape[1:]), t.reshape(groups, each, -1)
        read, state = _scan_chunk(y, t, rate, i[:, None], o[:, None], state)
        reads.append(read.flatten(0, 1).swapaxes(0, 1))
    return torch.cat(reads), state.flatten(0, 1)


def _scan_chunk(
    x: Array, step: Array, rate: Array, b: Array, c: Array, state: Array
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (reads [groups, heads of each, tokens, head_dim], state) of one chunk of a scan.

    Inputs have groups and heads first. `_scan_chunk` of state_space_scan.py explains the products.
    """
    decay = step * rate[..., None]  # (group, head, token)
    tokens = decay.shape[-1]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu()
    between = decay[..., None].expand(*decay.shape, tokens).masked_fill(later, 0).cumsum(-2)
    between = between.masked_fill(later.triu(1), -torch.inf).exp()
    grown = decay.cumsum(-1).exp()[..., None]
    value = x * step[..., None]
    read = (c @ b.mT * between) @ value + grown * (c @ state.mT)
    left = value * between[..., -1, :, None]
    return read, state * grown[..., -1:, :] + left.mT @ b
