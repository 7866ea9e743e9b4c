"""LoRA pairs placed as leaves at the weights that a pass reads."""

from collections.abc import Callable, MutableMapping, Sequence

import torch

from aprfmt.inference.gradients.adapter_pairs import AdapterPair
from aprfmt.inference.gradients.backend import GradientBackend, PlacedPair
from aprfmt.inference.gradients.changes import RIGHT, BackwardChange


def place_pairs(
    pairs: Sequence[AdapterPair],
    backend: GradientBackend,
    factors: MutableMapping[str, torch.Tensor],
    change: BackwardChange = RIGHT,
) -> Callable[[], None]:
    """Put a leaf of every LoRA factor in `factors`, by stored name; return a function.

    The function sets `backend.pairs` from the leaves, by role. It has to run before every graph, as
    rows taken of a leaf are part of one. `change` is a mistake: it says how the factors are taken,
    and how often their product is in the frozen weight too.
    """
    for pair in pairs:
        values = (pair.a, pair.b)
        if change.factors == "exchanged, gradients by name":
            values = (pair.b, pair.a)
        for name, each in zip(pair.names.values(), values, strict=True):
            factors[name] = backend.array(each).detach().clone().requires_grad_()

    def place() -> None:
        """Set the backend's pairs by role, each with the rows of `b` that are the role's."""
        placed = {}
        for pair in pairs:
            a, b = (factors[name] for name in pair.names.values())
            if change.factors == "exchanged":
                a, b = b, a
            elif change.factors == "transposed":
                a, b = b.T, a.T
            for role, rows in pair.rows.items():
                own = b[torch.from_numpy(rows).to(b.device)]
                placed[role] = PlacedPair(a, own, pair.scale, change.merged * pair.scale)
        backend.pairs = placed

    return place
