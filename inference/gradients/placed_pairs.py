"""LoRA pairs placed as leaves at the weights that a pass reads."""

from collections.abc import Callable, MutableMapping, Sequence

import torch

from aprfmt.inference.gradients.adapter_pairs import AdapterPair
from aprfmt.inference.gradients.backend import GradientBackend, PlacedPair


def place_pairs(
    pairs: Sequence[AdapterPair],
    backend: GradientBackend,
    factors: MutableMapping[str, torch.Tensor],
) -> Callable[[], None]:
    """Put a leaf of every LoRA factor in `factors`, by stored name; return a function.

    The function sets `backend.pairs` from the leaves, by role. It has to run before every graph, as
    rows taken of a leaf are part of one.
    """
    for pair in pairs:
        for name, values in zip(pair.names.values(), (pair.a, pair.b), strict=True):
            factors[name] = backend.array(values).detach().clone().requires_grad_()

    def place() -> None:
        """Set the backend's pairs by role, each with the rows of `b` that are the role's."""
        placed = {}
        for pair in pairs:
            a, b = (factors[name] for name in pair.names.values())
            for role, rows in pair.rows.items():
                placed[role] = PlacedPair(a, b[torch.from_numpy(rows).to(b.device)], pair.scale)
        backend.pairs = placed

    return place
