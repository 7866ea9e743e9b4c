"""A backend of which one operation has another backward; every value stays the right one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from aprfmt.inference.backends.base import Array, Heads, NormCast, Numbers, RopeCast, Style
from aprfmt.inference.backends.torch_maths import TorchMaths
from aprfmt.inference.gradients.backend import HEAD, TABLE, GradientBackend
from aprfmt.inference.gradients.changes import BackwardChange, WeighedShares
from aprfmt.inference.masks import causal_mask
from aprfmt.inference.weights import Weight

SHARED_GATE = ".ffn_gate_inp_shexp."  # in the role key of the gate of a shared expert
# What is added to the factor of a norm in its backward; None: the factor is 1.
_NORM_FACTORS = {"norm_offset_left_out": -1, "norm_offset_added": 1, "norm_weight_left_out": None}


def with_gradient_of(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the numbers of `value` and the gradient of `other`."""
    return other + (value - other).detach()


class ConstantDivisor(TorchMaths):
    """torch's functions for routers, with the sum that experts' weights are divided by a constant.

    So the backward gives that sum no gradient.
    """

    def divisor(self, weights: torch.Tensor) -> torch.Tensor:
        """Return what each row of chosen weights is divided by, as a constant of the graph."""
        return super().divisor(weights).detach()


class ChangedBackend(GradientBackend):
    """GradientBackend with the mistake of a `BackwardChange` in its backward."""

    def __init__(self, device: str, dtype: str, change: BackwardChange) -> None:
        """Set the device, the dtype and the mistake."""
        super().__init__(device, dtype)
        self.change = change
        if change.operation == "router_sum_constant":
            self.maths = ConstantDivisor()
        self.backward_weights: dict[str, torch.Tensor] = {}  # by role key, of frozen matrices

    @property
    def _operation(self) -> str:
        """The name of the mistake in an operation's backward; "" for none."""
        return self.change.operation or ""

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return attention [tokens, heads, value_dim], its backward changed by the mistake.

        Mistakes are a mean, a single head or another sum in place of the sum over queries that
        share a key head, and a mask that is left out, or whose window is. A mistake that hides
        padding keys from the mask changes the values too.
        """
        group = q.shape[1] // k.shape[1]
        of = self.change.of_shared
        if group > 1:
            k, v = (
                self._shared_by(x, group, wrong=of in (name, "keys and values"))
                for name, x in (("keys", k), ("values", v))
            )
        if self.change.hides_padding and self.document and self.document.padding:
            seen = heads.mask.copy()
            seen[:, len(seen) - self.document.padding :] = False  # padding is no key
            heads = replace(heads, mask=seen, causal=None)
        value = super().attention(q, k, v, heads)
        if self._operation == "mask_left_out":
            seen = np.ones_like(heads.mask)
        elif self._operation == "window_left_out" and heads.causal is not None:
            seen = causal_mask(heads.causal[0], *heads.mask.shape, None)
        else:
            return value
        more = replace(heads, mask=seen, causal=None)
        return with_gradient_of(value, super().attention(q, k, v, more))

    def _shared_by(self, x: Array, group: int, *, wrong: bool) -> Array:
        """Return keys or values that `group` query heads share, their sum with the mistake.

        Without `wrong` the sum is right. They are repeated for every query head where the mistake
        may choose or weigh heads.
        """
        chosen = {"kv_first_head": 0, "kv_last_head": group - 1}.get(self._operation)
        sharing = self._shares("sharing heads")
        if self._operation == "kv_mean" and wrong:
            return with_gradient_of(x, x / group)
        if chosen is not None:
            return _of_one_head(x, group, chosen) if wrong else x.repeat_interleave(group, dim=1)
        if sharing is None or group % len(sharing.keys):
            return x
        x = x.repeat_interleave(group, dim=1)
        return _weighed(x, sharing.keys * (x.shape[1] // group), 1) if wrong else x

    def delta(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array | None
    ) -> tuple[Array, Array]:
        """Return the gated delta rule's (reads, next state), its backward with the mistake.

        Mistakes are a decay, or a strength of writing `beta`, that is a constant.
        """
        if self._operation == "decay_cut":
            decay = decay.detach()
        elif self._operation == "strength_cut":
            beta = beta.detach()
        return super().delta(q, k, v, decay, beta, state)

    def repeat_heads(self, x: Array, n_heads: int) -> Array:
        """Return the one head of x for every head, [tokens, n_heads, d].

        Its gradient is the sum over the heads, or with the mistake another sum.
        """
        repeated = super().repeat_heads(x, n_heads)
        sharing = self._shares("sharing heads")
        if sharing is None or n_heads % len(sharing.keys):
            return repeated
        return _weighed(repeated, sharing.keys, 1)

    def _shares(self, *kinds: str) -> WeighedShares | None:
        """Return the mistake in shares of heads, if it is of one of these kinds, else None."""
        shares = self.change.shares
        return shares if shares is not None and shares.of in kinds else None

    def ropes(
        self, xs: Sequence[Array], table: tuple[Array, Array], *, style: Style, cast: RopeCast
    ) -> list[Array]:
        """Return queries, or queries and keys, rotated; the backward has the mistake of rope."""
        shares = self._shares("heads", "pairs read", "pairs given")
        parts = ((), ()) if shares is None else (shares.queries, shares.keys)
        return [
            self._turn(x, table, style, cast, factors)
            for x, factors in zip(xs, parts, strict=False)
        ]

    def rope(self, x: Array, table: tuple[Array, Array], *, style: Style, cast: RopeCast) -> Array:
        """Return x rotated; its backward has the mistake, if that is one of rope.

        Queries and the one key that heads share are rotated by themselves.
        """
        shares = self._shares("heads", "pairs read", "pairs given")
        if shares is None:
            return self._turn(x, table, style, cast, ())
        factors = shares.keys if x.shape[1] == 1 else shares.queries
        return self._turn(x, table, style, cast, factors)

    def _turn(
        self,
        x: Array,
        table: tuple[Array, Array],
        style: Style,
        cast: RopeCast,
        factors: tuple[float, ...],
    ) -> Array:
        """Return x rotated, with the mistake; `factors` are those of its shares, () for none."""
        of = self.change.shares.of if self.change.shares is not None and factors else ""
        pairs = table[0].shape[-1]
        if of == "pairs read":
            x = _weighed_pairs(x, factors, pairs, style)
        value = super().rope(x, table, style=style, cast=cast)
        if of == "pairs given":
            return _weighed_pairs(value, factors, pairs, "half")
        if of == "heads" and x.shape[1] % len(factors) == 0:
            return _weighed(value, factors, 1)
        if self._operation == "rope_cut":
            return value.detach()
        if self._operation == "rope_forward":
            table = table[0], -table[1]
        elif self._operation == "rope_unrotated":
            table = torch.ones_like(table[0]), torch.zeros_like(table[1])
        else:
            return value
        return with_gradient_of(value, super().rope(x, table, style=style, cast=cast))

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Return x after RMSNorm; its backward has the mistake, if that is one of norms."""
        weight = self._for_tokens(x, weight)
        value = super().rms_norm(x, weight, eps=eps, offset=offset, cast=cast)
        constant = self._operation in ("norm_scale_constant", "norm_constant")
        if not constant and self._operation not in _NORM_FACTORS:
            return value
        wide, factor = self.wide(x), offset + self.wide(weight)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if constant:
            scale = scale.detach()
        else:
            factor = self._norm_factor(factor)
        return with_gradient_of(value, self.narrow(wide * scale * factor))

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, *, eps: float) -> Array:
        """Return x after LayerNorm; its backward has the mistake, if that is one of norms."""
        if self.change.norm_tokens is not None:
            weight = self._for_tokens(x, weight)
            bias = torch.zeros_like(x) if bias is None else self._for_tokens(x, bias)
        value = super().layer_norm(x, weight, bias, eps=eps)
        parts = {
            "norm_scale_constant": (False, True),
            "norm_mean_constant": (True, False),
            "norm_constant": (True, True),
        }
        if self._operation not in (*parts, "norm_weight_left_out"):
            return value
        mean_constant, scale_constant = parts.get(self._operation, (False, False))
        wide = self.wide(x)
        mean = wide.mean(-1, keepdim=True)
        scale = torch.rsqrt((wide - mean).pow(2).mean(-1, keepdim=True) + eps)
        centred = wide - (mean.detach() if mean_constant else mean)
        factor = self.wide(weight)
        if self._operation == "norm_weight_left_out":
            factor = self._norm_factor(factor)
        y = centred * (scale.detach() if scale_constant else scale) * factor
        other = self.narrow(y if bias is None else y + self.wide(bias))
        return with_gradient_of(value, other)

    def _norm_factor(self, factor: Array) -> Array:
        """Return a wrong norm factor, which the backward multiplies by in place of `factor`.

        `factor` is offset + weight. The gradient of the norm's own weight stays the right one.
        """
        shift = _NORM_FACTORS[self._operation]
        return factor + (1 - factor.detach() if shift is None else shift)

    def _for_tokens(self, x: Array, weight: Array) -> Array:
        """Return a norm's weight for each token of x, so that only some tokens pass it a gradient.

        It is the mistake `change.norm_tokens`, (first column, end) of the tokens that do. Other
        tokens get a constant copy. The weight itself is returned where there is no such mistake.
        """
        if self.change.norm_tokens is None or self.document is None:
            return weight
        start, stop = self.change.norm_tokens
        columns = self.document.start + np.arange(len(x))
        inside = torch.from_numpy((columns >= start) & (columns < stop)).to(weight.device)
        inside = inside.reshape(-1, *(1 for _ in x.shape[1:]))
        return torch.where(inside, weight, weight.detach())

    def router(self, x: Array, w: Weight, bias: Array | None, *, rounded: bool) -> Array:
        """Return a router's logits; the mistake `router_cut` detaches them from the graph."""
        y = super().router(x, w, bias, rounded=rounded)
        return y.detach() if self._operation == "router_cut" else y

    def linear(self, x: Array, w: Weight, bias: Array | None) -> Array:
        """Return the product with the weight, with the mistake of it.

        Mistakes are those of tied heads, of frozen bases and of the gate of a shared expert, and
        products that are constants (`change.cut`).
        """
        if w.key in self.change.cut:
            return super().linear(x, w, bias).detach()
        other = self.backward_weights.get(w.key)
        if other is not None:
            product = self.adapted(self.dense(x, other, None), x, w)
            return with_gradient_of(super().linear(x, w, bias), product)
        if self._operation == "head_cut" and w.key in (TABLE, HEAD):
            return self.dense(x, w.array(self).detach(), bias)
        y = super().linear(x, w, bias)
        gate = self._operation == "shared_gate_cut" and SHARED_GATE in w.key
        return y.detach() if gate else y

    def embed(self, table: Weight, ids: Numbers) -> Array:
        """Return rows of a table; the mistake `embedding_cut` detaches the embedding's rows."""
        x: Any = super().embed(table, ids)
        return x.detach() if self._operation == "embedding_cut" and table.key == TABLE else x


def _weighed(x: torch.Tensor, factors: Sequence[float], axis: int) -> torch.Tensor:
    """Return x with the gradient of equal shares along an axis multiplied by a factor each.

    Their number must divide the axis.
    """
    size = x.shape[axis] // len(factors)
    weights = torch.tensor(factors, dtype=x.dtype, device=x.device).repeat_interleave(size)
    shape = [1] * x.ndim
    shape[axis] = -1
    return with_gradient_of(x, x * weights.reshape(shape))


def _weighed_pairs(
    x: torch.Tensor, factors: Sequence[float], pairs: int, style: Style
) -> torch.Tensor:
    """Return x [tokens, heads, d] with the gradient of the elements that rope rotates multiplied.

    `factors` are of the first and of the second element of each of the `pairs`, which stand as
    `style` says. Elements that are not rotated keep their gradient.
    """
    weights = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    first, second = factors
    if style == "half":
        weights[:pairs], weights[pairs : 2 * pairs] = first, second
    else:
        weights[0 : 2 * pairs : 2], weights[1 : 2 * pairs : 2] = first, second
    return with_gradient_of(x, x * weights)


def _of_one_head(x: torch.Tensor, group: int, chosen: int) -> torch.Tensor:
    """Return keys or values repeated for every query head: [tokens, query heads, d].

    `group` query heads share a key head. Of these only number `chosen` passes a gradient on.
    """
    repeated = x.repeat_interleave(group, dim=1)
    one = torch.arange(repeated.shape[1], device=x.device) % group == chosen
    return torch.where(one[None, :, None], repeated, repeated.detach())
