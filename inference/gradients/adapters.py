"""LoRA pairs beside a frozen base, at the weights that the pass reads."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from aprfmt.inference.gradients.backend import GradientBackend, PlacedPair

Array = NDArray[Any]


@dataclass(frozen=True)
class AdapterPair:
    """One LoRA pair: `a` [r, in] and `b` [out, r] under the adapter's own names.

    `rows` says by role key which rows of `b` are the role's, in the role's order; of joined
    projections there are several roles.
    """

    a_name: str
    b_name: str
    a: Array
    b: Array
    scale: float
    rows: dict[str, NDArray[Any]]


def place_pairs(
    pairs: Sequence[AdapterPair],
    backend: GradientBackend,
    factors: MutableMapping[str, torch.Tensor],
) -> Callable[[], None]:
    """Make a leaf of every factor, by name in `factors`; return what places their rows anew."""
    for pair in pairs:
        for name, values in ((pair.a_name, pair.a), (pair.b_name, pair.b)):
            factors[name] = backend.array(values).detach().clone().requires_grad_()

    def place() -> None:
        placed = {}
        for pair in pairs:
            a, b = factors[pair.a_name], factors[pair.b_name]
            for role, rows in pair.rows.items():
                placed[role] = PlacedPair(a, b[torch.from_numpy(rows).to(b.device)], pair.scale)
        backend.pairs = placed

    return place
