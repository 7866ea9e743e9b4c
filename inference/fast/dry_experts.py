"""Memory of experts routed on a CUDA device, counted with ghosts: arrays without numbers.

The operations are those of torch_routing.py and batched.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.base.protocols import Value
from aprfmt.inference.backends.base import Array, Numbers
from aprfmt.inference.backends.hosted import ExpertBlocks
from aprfmt.inference.blocked import block_shape
from aprfmt.inference.fast.dry_host import DryTorch
from aprfmt.inference.fast.kept import stays_encoded
from aprfmt.inference.weights import Weight

_INDEX = 8  # bytes of an int64


class DryExperts(DryTorch):
    """Allocates what holding, routing and multiplying a layer's experts takes."""

    _decodes: bool  # cupy's kernels are available

    def _allocate_workspace(self) -> None:
        """Allocate cuBLAS's workspace if not done yet; implemented by DryCuda."""
        raise NotImplementedError

    def can_stack_experts(self, stacks: Sequence[Weight]) -> bool:
        """Return whether all these weights are decoded on the device; placed at the first call."""
        return not self.deterministic and all(self._hold_experts(w) for w in stacks)

    def route_blocks(
        self,
        logits: Array,
        bias: Numbers | None,
        hp: Mapping[str, Value],
        *,
        rounds: bool,
        scale: Numbers | None = None,
    ) -> ExpertBlocks:
        """Return ghosts of a layer's blocks of rows, one expert each.

        How many there are does not depend on what the router chooses.
        """
        self.wide(logits)
        return self._allocate_blocks(len(logits), int(hp["n_experts_used"]), logits.shape[-1])

    def pack_blocks(self, experts: Numbers, weights: Numbers, n_experts: int) -> ExpertBlocks:
        """Return ghosts of the blocks of a choice [tokens, used] made on the host."""
        tokens, used = experts.shape
        return self._allocate_blocks(tokens, used, n_experts)

    def _allocate_blocks(self, tokens: int, used: int, n_experts: int) -> ExpertBlocks:
        """Return ghosts of the blocks of `tokens` tokens with `used` of `n_experts` experts."""
        count, size = block_shape(tokens, used, n_experts)
        return ExpertBlocks(
            self.allocate((count,), _INDEX),
            self.allocate((count * size,), _INDEX),
            self.allocate((count * size,), self.wide_size),
            self.allocate((tokens, used), _INDEX),
            size,
        )

    def multiply_stack(self, x: Array, stack: Weight, experts: Any) -> Array:
        """Return a ghost [n, rows, out] for the products, and count addresses during the call."""
        self._allocate_workspace()
        addresses = self.allocate((3, len(x)), _INDEX)
        y = self.allocate((*x.shape[:2], stack.shape[1]))
        del addresses
        return y

    def combine(self, y: Array, places: Array, weights: Array | None) -> Array:
        """Return a ghost [tokens, width], and count gathered and weighted rows during the call."""
        rows = self.allocate((*places.shape[::-1], y.shape[-1]))
        if weights is not None:
            rows = self.narrow(self.allocate(rows.shape, self.wide_size))
        total = self.allocate(rows.shape[1:])
        self.account.count_briefly(total.nbytes)
        return total

    def _hold_experts(self, stack: Weight) -> bool:
        """Return whether all experts of a stack are decoded on the device.

        The first call places them, and allocates the list of their addresses.
        """
        if self in stack.notes:
            return True
        if (self._decodes and stays_encoded(stack.encoding, self.dtype)) or not stack.fits_budget(
            self
        ):
            return False
        held = [stack.expert(each).placed_on(self) for each in range(stack.shape[0])]
        if any(w is None for w in held):
            return False
        stack.notes[self] = self.allocate((len(held),), _INDEX)
        return True
