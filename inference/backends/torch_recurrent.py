"""The operations of layers that keep a state, in torch on the device of its tensors.

The functions are those of recurrence.py; rounding is that of transformers' models. Deterministic
runs use the base class's, token by token.
"""

import torch
from torch.nn import functional

from aprfmt.inference.backends.base import Array
from aprfmt.inference.backends.tiles import Tiles
from aprfmt.inference.recurrence import CHUNK, LINEAR, TINY


class TorchRecurrent(Tiles):
    """Tiles, with torch in place of the defaults that work on the host."""

    def convolve(self, window: Array, kernel: Array) -> Array:
        """Multiply and add tap by tap, wide; rounded once."""
        taps = kernel.shape[1]
        tokens = len(window) - taps + 1
        wide, factors = self.wide(window), self.wide(kernel)
        y = wide[:tokens] * factors[:, 0]
        for tap in range(1, taps):
            y = y + wide[tap : tap + tokens] * factors[:, tap]
        return self.narrow(y)

    def decay(self, a: Array, rate: Array, shift: Array) -> Array:
        """Return the decay's logarithm, wide."""
        if self.deterministic:
            return super().decay(a, rate, shift)
        soft = functional.softplus(self.wide(a) + self.wide(shift), threshold=LINEAR)
        return -self.wide(rate).exp() * soft

    def delta(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array | None
    ) -> tuple[Array, Array]:
        """Work out CHUNK tokens at a time, wide; rounded once."""
        if self.deterministic:
            return super().delta(q, k, v, decay, beta, state)
        each = v.shape[1] // k.shape[1]
        q, k = (_unit(self.wide(x)).repeat_interleave(each, dim=1) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
        v, beta = self.wide(v), self.wide(beta)
        if state is None:
            state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        reads = []
        for start in range(0, len(q), CHUNK):
            i, j, w, g, b = (
                x[start : start + CHUNK].swapaxes(0, 1) for x in (q, k, v, decay, beta)
            )
            read, state = _chunk(i, j, w, g, b, state)
            reads.append(read.swapaxes(0, 1))
        return self.narrow(torch.cat(reads)), state

    def gated_norm(self, x: Array, weight: Array, gate: Array, kind: str, *, eps: float) -> Array:
        """Normalise, round, weigh, multiply by the wide activation of the gate, round."""
        normed = self.rms_norm(x, weight, eps=eps, offset=0, cast="before_weight")
        act = self.activate(self.wide(gate), kind, steps=False)
        return self.narrow(self.wide(normed) * self.wide(act))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + TINY)


def _chunk(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reads [heads, tokens, value_dim] of one chunk, and the state after it.

    Inputs have heads first; recurrence.py explains the system that is solved.
    """
    tokens = q.shape[1]
    total = g.cumsum(1)  # (head, token)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    between = total[:, :, None] - total[:, None, :]
    between = between.masked_fill(later, -torch.inf).exp()  # (head, i, j): the decay from j to i
    grown = total.exp()[..., None]
    turned = k.swapaxes(1, 2)
    overlap = (k @ turned) * between * beta[..., None]
    wanted = (v - (k * grown) @ state) * beta[..., None]
    change = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    read = (q * grown) @ state + ((q @ turned) * between) @ change
    last = total[:, -1:]
    left = k * (last - total).exp()[..., None]
    return read, state * last.exp()[..., None] + left.swapaxes(1, 2) @ change
