"""The auxiliary losses of routers: what a trainer adds to the loss of a model with experts.

Load balancing, as transformers' `load_balancing_loss_func` has it: the number of experts times the
sum, over experts, of the share of tokens that chose the expert and the mean probability that it
got; over all layers together, or (Megatron-LM, DeepSpeed) the mean of each layer's own. The z-loss
is the mean of log(sum(exp(router logits)))^2. Padding is no token. Sources: Fedus et al. 2021
(Switch Transformer), Zoph et al. 2022 (ST-MoE).
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from aprfmt.inference.capture import key_name
from aprfmt.inference.context import PassFacts, Recorder
from aprfmt.inference.gradients.changes import RouterFactors

ROUTER = "router"


@dataclass
class RouterCounts:
    """A recorder that counts, of every router, the tokens and how many chose each expert.

    `used` is the number of experts that a token chooses: those with the highest logits. `counts`
    are float64 [n_experts] by the router's key, `tokens` how many tokens a router saw.
    """

    used: int
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: int = 0

    def begin(self, facts: PassFacts) -> None:
        """Add the tokens of a pass."""
        self.tokens += len(facts.ids)

    def wants(self, point: str, layer: int) -> bool:
        """Return whether a point is a router's logits."""
        return point == ROUTER

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Add the choices of a router's logits [tokens, n_experts]; return them."""
        chosen = x.detach().topk(min(self.used, x.shape[-1]), dim=-1).indices.reshape(-1)
        found = torch.bincount(chosen, minlength=x.shape[-1]).double()
        key = key_name(point, layer)
        self.counts[key] = self.counts[key] + found if key in self.counts else found
        return x


@dataclass
class RouterTerms:
    """A recorder that adds the auxiliary losses of each router of a pass to `terms`.

    `counts` are those of the whole batch: the losses multiply the fraction of all tokens that chose
    an expert, which has no gradient, by probabilities. So what each document adds can be computed
    alone. Points are also given to `inner`.
    """

    factors: RouterFactors
    counts: RouterCounts
    inner: Recorder | None = None
    terms: list[torch.Tensor] = field(default_factory=list)

    def begin(self, facts: PassFacts) -> None:
        """Begin a pass."""
        if self.inner is not None:
            self.inner.begin(facts)

    def wants(self, point: str, layer: int) -> bool:
        """Return whether a point is a router's logits, or wanted by `inner`."""
        return point == ROUTER or (self.inner is not None and self.inner.wants(point, layer))

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Add the losses of a router's logits; return what the pass goes on with."""
        if self.inner is not None and self.inner.wants(point, layer):
            x = self.inner.capture(point, layer, x)
        if point == ROUTER and torch.is_grad_enabled():
            self.terms.append(self._loss(x, self.counts.counts[key_name(point, layer)]))
        return x

    def taken(self) -> torch.Tensor | None:
        """Return the sum of `terms` and clear them; None if there are none."""
        found = sum(self.terms[1:], start=self.terms[0]) if self.terms else None
        self.terms.clear()
        return found

    @cached_property
    def _expert_fractions(self) -> torch.Tensor:
        """The fraction of tokens that each expert got [n_experts], over all layers' routers."""
        counts = self.counts.counts
        return torch.stack([*counts.values()]).sum(0) / (self.counts.tokens * len(counts))

    def _loss(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return what one router's logits [tokens, n_experts] add to the losses of the batch.

        `own` are the router's counts of tokens by expert.
        """
        tokens, routers = self.counts.tokens, len(self.counts.counts)
        joint = torch.as_tensor(self._expert_fractions, dtype=x.dtype, device=x.device)
        alone = (own / tokens).to(x)
        sums = torch.softmax(x, -1).sum(0) * x.shape[-1] / (tokens * routers)
        squares = x.logsumexp(-1).square().sum() / (tokens * routers)
        balance = self.factors.balance * (joint * sums).sum()
        by_layer = self.factors.by_layer * (alone * sums).sum()
        found: torch.Tensor = balance + by_layer + self.factors.z * squares
        return found
