"""The layout step of fused projections whose heads come in groups: q, k and v of each in turn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from aprfmt.arch.moves import Moves
from aprfmt.arch.sizes import size_of
from aprfmt.arch.spec import Array, Move
from aprfmt.arch.steps import Shape, Shapes, Sizes, joined, only
from aprfmt.errors import ArchError


@dataclass(frozen=True, slots=True)
class Grouped:
    """One stored tensor holds q, k and v, group by group of the key heads.

    A group has the rows of its query heads, then of its key head, then of its value head. With as
    many key heads as query heads that is q, k and v head by head (bloom, gpt_neox); falcon has
    groups of several query heads. Used for weights and biases.
    """

    permutes: ClassVar[bool] = True

    def _sizes(self, hp: Sizes) -> tuple[int, int, int]:
        """Return groups, rows of q a group, rows of k (and of v) a group."""
        heads, kv, dim = (size_of(name, hp) for name in ("n_heads", "n_kv_heads", "head_dim"))
        if kv < 1 or heads % kv:
            raise ArchError(f"{self}: {heads} query heads on {kv} key heads; expected whole groups")
        return kv, heads // kv * dim, dim

    def shapes(self, stored: Shapes, hp: Sizes) -> list[Shape]:
        """Return the shapes of q, k and v; ArchError unless the rows are whole groups."""
        shape = only(stored, self)
        groups, query, key = self._sizes(hp)
        rows = shape[0] if shape else 0
        if not shape or rows != groups * (query + 2 * key):
            raise ArchError(
                f"{self}: shape {list(shape)} has {rows} rows; expected {groups} groups of "
                f"{query} + {key} + {key}"
            )
        return [(groups * part, *shape[1:]) for part in (query, key, key)]

    def stored_shapes(self, logical: Shapes, hp: Sizes, count: int) -> list[Shape]:
        """Return the shape of the joined tensor."""
        if len(logical) != 3 or not all(logical):
            raise ArchError(f"{self}: got {len(logical)} tensors; expected q, k and v")
        return [joined(self, logical, 0, hp)]

    def moves(self, stored: Shapes, hp: Sizes) -> Moves | None:
        """One run a group and part."""
        groups, query, key = self._sizes(hp)
        self.shapes(stored, hp)
        row = math.prod(stored[0][1:])
        each = query + 2 * key
        return [
            [Move(0, (group * each + before) * row, part * row) for group in range(groups)]
            for before, part in ((0, query), (query, key), (query + key, key))
        ]

    def undo(self, stored: Sequence[Array], hp: Sizes) -> list[Array]:
        """Cut every group and join its parts with those of the others."""
        x = stored[0]
        shapes = self.shapes([x.shape], hp)
        groups, query, key = self._sizes(hp)
        split = x.reshape(groups, query + 2 * key, *x.shape[1:])
        parts = (split[:, :query], split[:, query : query + key], split[:, query + key :])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def apply(self, logical: Sequence[Array], hp: Sizes) -> list[Array]:
        """Join the parts group by group."""
        import numpy as np

        whole = self.stored_shapes([x.shape for x in logical], hp, 1)[0]
        groups = self._sizes(hp)[0]
        split = [x.reshape(groups, x.shape[0] // groups, *x.shape[1:]) for x in logical]
        return [np.concatenate(split, axis=1).reshape(whole)]

    def __str__(self) -> str:
        return "Grouped(q, k, v)"
