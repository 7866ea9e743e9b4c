"""Routing on a device: torch's functions for routers, and the experts' rows in blocks.

Every shape follows from the numbers of tokens and experts, so nothing waits for the choice and a
pass can be recorded.
"""

from collections.abc import Sequence

import torch

from aprfmt.inference.backends.hosted import ExpertBlocks
from aprfmt.inference.blocked import block_shape


class TorchMaths:
    """torch's functions."""

    exp = staticmethod(torch.exp)
    minimum = staticmethod(torch.minimum)
    maximum = staticmethod(torch.maximum)

    def where(
        self, mask: torch.Tensor, x: torch.Tensor, other: torch.Tensor | float
    ) -> torch.Tensor:
        """Return x where the mask is True, `other` elsewhere."""
        return torch.where(mask, x, other)

    def highest(self, x: torch.Tensor) -> torch.Tensor:
        """Return the highest of each row."""
        return x.amax(-1, keepdim=True)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of each row."""
        return x.sum(-1, keepdim=True)

    def ranked(self, x: torch.Tensor) -> torch.Tensor:
        """Sort so that equals keep their order."""
        return torch.sort(-x, dim=-1, stable=True).indices

    def pick(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return each row's elements at these places."""
        return x.gather(-1, places)

    def marked(self, places: torch.Tensor, count: int) -> torch.Tensor:
        """Return True at a row's places."""
        shape = (*places.shape[:-1], count)
        found = torch.zeros(shape, dtype=torch.bool, device=places.device)
        return found.scatter_(-1, places, True)

    def spread(self, x: torch.Tensor, times: int) -> torch.Tensor:
        """Return every element so many times."""
        return x[..., None].expand(*x.shape, times).flatten(-2)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join along the last axis."""
        return torch.cat(tuple(parts), -1)


TORCH = TorchMaths()


def in_blocks(experts: torch.Tensor, weights: torch.Tensor, n_experts: int) -> ExpertBlocks:
    """Return the rows of the experts chosen [tokens, used] with these weights."""
    tokens, used = experts.shape
    count, size = block_shape(tokens, used, n_experts)
    device, flat = experts.device, experts.reshape(-1)

    def numbers(length: int) -> torch.Tensor:
        return torch.arange(length, device=device)

    of_pair, order = torch.sort(flat, stable=True)
    pairs = torch.zeros(n_experts, dtype=torch.int64, device=device)
    pairs.scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (pairs + (size - 1)) // size
    ends = blocks.cumsum(0)
    # Where an expert's first pair lies in `rows`, less where it lies in `order`.
    ahead = (ends - blocks) * size - (pairs.cumsum(0) - pairs)
    slots = numbers(len(flat)) + ahead[of_pair]
    rows = torch.zeros(count * size, dtype=torch.int64, device=device)
    rows.scatter_(0, slots, order // used)
    padded = torch.zeros(count * size, dtype=weights.dtype, device=device)
    padded.scatter_(0, slots, weights.reshape(-1)[order])
    places = torch.empty_like(flat).scatter_(0, order, slots).reshape(tokens, used)
    # Blocks behind the last one that is used are anybody's: all their rows are padding.
    owners = torch.searchsorted(ends, numbers(count), right=True).clamp(max=n_experts - 1)
    return ExpertBlocks(owners, rows, padded, places.sort(-1).values, size)
