"""torch's functions for expert routers (routing.py), in place of numpy's."""

from collections.abc import Sequence

import torch


class TorchMaths:
    """torch's functions under the names of routing.Maths."""

    exp = staticmethod(torch.exp)
    log1p = staticmethod(torch.log1p)
    minimum = staticmethod(torch.minimum)
    maximum = staticmethod(torch.maximum)

    def where(
        self, mask: torch.Tensor, x: torch.Tensor, other: torch.Tensor | float
    ) -> torch.Tensor:
        """Return x where the mask is True, `other` elsewhere."""
        return torch.where(mask, x, other)

    def highest(self, x: torch.Tensor) -> torch.Tensor:
        """Return the largest element of each row, last axis kept."""
        return x.amax(-1, keepdim=True)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of each row, last axis kept."""
        return x.sum(-1, keepdim=True)

    def divisor(self, weights: torch.Tensor) -> torch.Tensor:
        """Return what each row of chosen weights is divided by: its sum, last axis of size 1."""
        return self.total(weights)

    def ranked(self, x: torch.Tensor) -> torch.Tensor:
        """Return the indices that sort each row, largest first; equal elements keep their order."""
        return torch.sort(-x, dim=-1, stable=True).indices

    def pick(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return each row's elements at its indices `places`."""
        return x.gather(-1, places)

    def marked(self, places: torch.Tensor, count: int) -> torch.Tensor:
        """Return a mask [..., count] that is True at each row's indices `places` [..., n]."""
        shape = (*places.shape[:-1], count)
        found = torch.zeros(shape, dtype=torch.bool, device=places.device)
        return found.scatter_(-1, places, True)

    def spread(self, x: torch.Tensor, times: int) -> torch.Tensor:
        """Return x with each element of its last axis repeated `times` times, next to itself."""
        return x[..., None].expand(*x.shape, times).flatten(-2)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensors joined along the last axis."""
        return torch.cat(tuple(parts), -1)


TORCH = TorchMaths()
