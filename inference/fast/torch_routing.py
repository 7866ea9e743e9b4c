"""Expert routing in torch on a device: the experts' rows in blocks.

Every shape follows from the numbers of tokens and experts, so nothing waits for the choice and
a pass can be recorded.
"""

import torch

from aprfmt.inference.backends.hosted import ExpertBlocks
from aprfmt.inference.blocked import block_shape


def lay_out_blocks(experts: torch.Tensor, weights: torch.Tensor, n_experts: int) -> ExpertBlocks:
    """Return the blocks of rows that each chosen expert multiplies, on the experts' device.

    `experts` and `weights` are the choice and its weights, both [tokens, used].
    """
    tokens, used = experts.shape
    count, size = block_shape(tokens, used, n_experts)
    device, flat = experts.device, experts.reshape(-1)

    def count_up(length: int) -> torch.Tensor:
        """Return 0 to length - 1 on the device."""
        return torch.arange(length, device=device)

    of_pair, order = torch.sort(flat, stable=True)
    pairs = torch.zeros(n_experts, dtype=torch.int64, device=device)
    pairs.scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (pairs + (size - 1)) // size
    ends = blocks.cumsum(0)
    # Where an expert's first pair lies in `rows`, less where it lies in `order`.
    ahead = (ends - blocks) * size - (pairs.cumsum(0) - pairs)
    slots = count_up(len(flat)) + ahead[of_pair]
    rows = torch.zeros(count * size, dtype=torch.int64, device=device)
    rows.scatter_(0, slots, order // used)
    padded = torch.zeros(count * size, dtype=weights.dtype, device=device)
    padded.scatter_(0, slots, weights.reshape(-1)[order])
    places = torch.empty_like(flat).scatter_(0, order, slots).reshape(tokens, used)
    # Blocks after the last one that is used may have any expert: all their rows are padding.
    owners = torch.searchsorted(ends, count_up(count), right=True).clamp(max=n_experts - 1)
    return ExpertBlocks(owners, rows, padded, places.sort(-1).values, size)
