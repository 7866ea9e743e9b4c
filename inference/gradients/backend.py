"""torch's arithmetic with nothing that cuts the graph: what a backward pass runs through."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from aprfmt.inference.backends.base import Array, Numbers
from aprfmt.inference.backends.hosted import ExpertRows, group_by_expert
from aprfmt.inference.backends.torch_backend import TorchBackend
from aprfmt.inference.backends.torch_maths import TORCH
from aprfmt.inference.gradients.documents import Document
from aprfmt.inference.weights import Weight

HEAD, TABLE = "output.weight", "token_embd.weight"


@dataclass(frozen=True)
class PlacedPair:
    """One LoRA pair at one weight: y + scale * (x @ a.T) @ b.T, as peft's lora.Linear computes it.

    `a` [r, in] and `b` [out, r] are leaves, or rows of leaves where projections are joined.
    `merged` is the scale by which the same product is in the frozen weight too, 0.0 for not at all.
    With `lengths` [out] (DoRA) the rows of weight and product together have these lengths.
    `lengths_in_graph` is a mistake: the lengths that they had are no constants in the backward.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    merged: float = 0.0
    lengths: torch.Tensor | None = None
    lengths_in_graph: bool = False

    def added(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the pair adds to the product of x [tokens, in]: scale * (x @ a.T) @ b.T.

        What is merged into the frozen weight already gives no gradient to `a` and `b`.
        """
        found = functional.linear(functional.linear(x, self.a), self.b) * self.scale
        if self.merged:
            inner = functional.linear(x, self.a.detach())
            found = found + functional.linear(inner, self.b.detach()) * self.merged
        return found

    def scaled(self, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the product of x with weight and pair, each row of their sum scaled to `lengths`.

        y is the product of x with the frozen `weight` alone. The lengths of the sum's rows are
        constants in the backward, as in peft's DoraLinearLayer, without the mistake.
        """
        assert self.lengths is not None
        with torch.set_grad_enabled(self.lengths_in_graph and torch.is_grad_enabled()):
            whole = weight + (self.scale + self.merged) * (self.b @ self.a).to(weight)
            divisor = torch.linalg.vector_norm(whole, dim=1)
        found: torch.Tensor = (y + self.added(x)) * (self.lengths / divisor)
        return found


class GradientBackend(TorchBackend):
    """TorchBackend on the CPU or on one GPU, differentiable in every operation of a pass.

    Routers are computed in torch, so that the experts' weights carry gradients. `pairs` are the
    LoRA pairs of a frozen base by role key, `document` is the sequence that is run. `padding_id` is
    the padding token's id, None without one; `padding` [width] is the gradient that reading the
    padding token's row of the embedding table gives, None for none. On torch's `meta` device
    nothing is computed and every shape is right (memory.py).
    """

    maths = TORCH

    def __init__(self, device: str, dtype: str) -> None:
        """Set the device (`cpu`, `cuda:0`, or `meta` for shapes alone) and the dtype; no pairs."""
        super().__init__("cpu" if device == "meta" else device, dtype)
        if device == "meta":
            self._device = torch.device("meta")
        self.device = str(self._device)
        self.pairs: Mapping[str, PlacedPair] = {}
        self.document: Document | None = None
        self.padding_id: int | None = None
        self.padding: torch.Tensor | None = None

    def facts(self) -> Mapping[str, Any]:
        """Return the backend's facts for a report, with the name of its device."""
        name = self.device
        if self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
        return {**super().facts(), "device_name": name}

    def to_numpy(self, x: Array) -> Numbers:
        """Return a tensor as a numpy array; on the meta device zeros of its shape."""
        if isinstance(x, np.ndarray):
            return x
        if x.device.type == "meta":
            return np.zeros(tuple(x.shape), np.float64 if x.is_floating_point() else np.int64)
        return super().to_numpy(x.detach())

    # products

    def embed(self, table: Weight, ids: Numbers) -> Array:
        """Return rows of an embedding table, and have the padding token's gradient summed.

        In the backward pass the gradient of every row read for the padding token is added to
        `padding`.
        """
        x: torch.Tensor = super().embed(table, ids)
        read = np.flatnonzero(ids == self.padding_id) if self.padding_id is not None else ()
        if table.key == TABLE and len(read) and x.requires_grad:
            keep: Any = x.register_hook
            keep(lambda grad: self._add_padding(grad[self._index(read)].sum(0)))
        return x

    def _add_padding(self, part: torch.Tensor) -> None:
        """Add a gradient [width] of rows read for the padding token to `padding`."""
        self.padding = part if self.padding is None else self.padding + part

    def linear(self, x: Array, w: Weight, bias: Array | None) -> Array:
        """Return the product with the weight, plus what its LoRA pair adds."""
        pair = self.pairs.get(w.key)
        if pair is None or pair.lengths is None:
            return self.adapted(super().linear(x, w, bias), x, w)
        y = self.adapted(super().linear(x, w, None), x, w)
        return y if bias is None else y + bias

    def adapted(self, y: torch.Tensor, x: torch.Tensor, w: Weight) -> torch.Tensor:
        """Return y, the product of x with a frozen weight, with the weight's LoRA pair, if any.

        For a DoRA pair, which has `lengths`, y has to be the product alone, without a bias.
        """
        pair = self.pairs.get(w.key)
        if pair is None:
            return y
        return y + pair.added(x) if pair.lengths is None else pair.scaled(y, x, w.array(self))

    def router(self, x: Array, w: Weight, bias: Array | None, *, rounded: bool) -> Array:
        """Return the router's product as TorchBackend does, plus what its LoRA pair adds.

        With `rounded`, or in deterministic mode, TorchBackend calls `linear`, which adds the LoRA
        pair's product.
        """
        y = super().router(x, w, bias, rounded=rounded)
        pair = None if rounded or self.deterministic else self.pairs.get(w.key)
        return y if pair is None else y + self.wide(pair.added(x))

    # routing

    def router_numbers(self, x: Array) -> Array:
        """Return the tensor in the router's wider dtype; it is routed in torch, not in numpy."""
        return self.wide(x)

    def router_factors(self, weight: Weight) -> Array:
        """Return a router weight as a tensor in the wider dtype, part of the graph."""
        return self.wide(weight.array(self))

    def listed_experts(self, table: Weight, ids: Numbers, n_experts: int) -> Array:
        """Return the experts [tokens, used] that a table lists for token ids, as int64."""
        return self._index(super().listed_experts(table, ids, n_experts))

    def as_logits_dtype(self, x: Array, other: Array) -> Array:
        """Return x in the dtype of `other`."""
        return x.to(other.dtype)

    def rounded_factors(self, x: Array) -> Array:
        """Return x rounded to the pass's dtype and widened again."""
        return self.wide(self.narrow(x))

    def rows_by_expert(self, experts: Numbers, weights: Array) -> Iterable[ExpertRows]:
        """Return (expert, its token rows, their weights [n]) for each expert that a token chose.

        The weights stay in the graph. On the meta device, where no choice is known, tokens are
        spread evenly.
        """
        if self._device.type == "meta":
            tokens, used = experts.shape  # all experts alike: their choice is not known
            experts = np.arange(tokens * used).reshape(tokens, used) % max(used, 1)
        order, chosen, counts = group_by_expert(experts)
        rows = self._index(order // experts.shape[1])
        factors = weights.reshape(-1)[self._index(order)]
        parts = (each.split(counts.tolist()) for each in (rows, factors))
        return list(zip(chosen.tolist(), *parts, strict=True))

    def add_weighted(self, total: Array, rows: Array, y: Array, weights: Array) -> Array:
        """Return a new tensor: `total` with y * weights added at the token indices `rows`."""
        return total.index_add(0, self._index(rows), self.narrow(y * weights[:, None]))

    def add_rows(self, total: Array, rows: Array, y: Array) -> Array:
        """Return a new tensor: `total` with y added at the token indices `rows`."""
        return total.index_add(0, self._index(rows), y)

    # activations

    def xielu_numbers(self, stored: Sequence[Weight]) -> Sequence[Any]:
        """Return xIELU's (alpha of the positive side, of the negative side, beta, eps) as tensors.

        They stay in the graph, each step rounded, as transformers' XIELUActivation does.
        """
        positive, negative, beta, eps = (weight.array(self).reshape(()) for weight in stored)
        return functional.softplus(positive), beta + functional.softplus(negative), beta, eps

    def xielu(self, x: Array, positive: Any, negative: Any, beta: Any, eps: Any) -> Array:
        """Return the xIELU activation of x, with its numbers as tensors of the graph."""
        bent = (torch.expm1(torch.minimum(x, eps)) - x) * negative + beta * x
        return torch.where(x > 0, positive * x * x + beta * x, bent)
