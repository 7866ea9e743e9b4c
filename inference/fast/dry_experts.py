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
from aprfmt.inference.fast.kept import keeps
from aprfmt.inference.weights import Weight

_INDEX = 8  # bytes of an int64


class DryExperts(DryTorch):
    """Allocates what holding, routing and multiplying a layer's experts takes."""

    _decodes: bool  # cupy's kernels are available

    def _cublas(self) -> None:
        """Allocate cuBLAS's workspace if not done yet; DryCuda has it."""
        raise NotImplementedError

    def all_held(self, stacks: Sequence[Weight]) -> bool:
        """Return whether all these weights are decoded on the device; placed at the first call."""
        return not self.deterministic and all(self._addressed(w) for w in stacks)

    def blocks(
        self,
        logits: Array,
        bias: Numbers | None,
        hp: Mapping[str, Value],
        *,
        rounds: bool,
        scale: Numbers | None = None,
    ) -> ExpertBlocks:
        """Return ghosts of a layer's blocks; how many there are does not depend on the choice."""
        self.wide(logits)
        return self._blocks(len(logits), int(hp["n_experts_used"]), logits.shape[-1])

    def packed(self, experts: Numbers, weights: Numbers, n_experts: int) -> ExpertBlocks:
        """Return ghosts of the blocks of a choice [tokens, used] made on the host."""
        tokens, used = experts.shape
        return self._blocks(tokens, used, n_experts)

    def _blocks(self, tokens: int, used: int, n_experts: int) -> ExpertBlocks:
        """Return ghosts of the blocks of `tokens` tokens with `used` of `n_experts` experts."""
        count, size = block_shape(tokens, used, n_experts)
        return ExpertBlocks(
            self.new((count,), _INDEX),
            self.new((count * size,), _INDEX),
            self.new((count * size,), self.wide_size),
            self.new((tokens, used), _INDEX),
            size,
        )

    def stacked(self, x: Array, stack: Weight, experts: Any) -> Array:
        """Return a ghost [n, rows, out] for the products, and count their addresses meanwhile."""
        self._cublas()
        addresses = self.new((3, len(x)), _INDEX)
        y = self.new((*x.shape[:2], stack.shape[1]))
        del addresses
        return y

    def combine(self, y: Array, places: Array, weights: Array | None) -> Array:
        """Return a ghost [tokens, width], and count gathered and weighted rows meanwhile."""
        rows = self.new((*places.shape[::-1], y.shape[-1]))
        if weights is not None:
            rows = self.narrow(self.new(rows.shape, self.wide_size))
        total = self.new(rows.shape[1:])
        self.account.during(total.nbytes)
        return total

    def _addressed(self, stack: Weight) -> bool:
        """Return whether all experts of a stack are decoded on the device.

        The first call places them, and allocates the list of their addresses.
        """
        if self in stack.notes:
            return True
        if (self._decodes and keeps(stack.encoding, self.dtype)) or not stack.fits(self):
            return False
        held = [stack.expert(each).held(self) for each in range(stack.shape[0])]
        if any(w is None for w in held):
            return False
        stack.notes[self] = self.new((len(held),), _INDEX)
        return True
