"""Counts how re-encoding changed values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array


@dataclass
class Counts:
    """How re-encoding changed the values of one tensor."""

    changed: int = 0
    overflowed: int = 0
    underflowed: int = 0

    def join(self, other: "Counts") -> None:
        """Add what was counted of another part of the tensor."""
        self.changed += other.changed
        self.overflowed += other.overflowed
        self.underflowed += other.underflowed

    def add(self, before: "Array", after: "Array") -> None:
        """Count one chunk; NaN stays equal to NaN."""
        differs = before != after
        if not differs.any():
            return
        differs &= ~(np.isnan(before) & np.isnan(after))
        self.changed += int(differs.sum())
        self.overflowed += int((np.isfinite(before) & ~np.isfinite(after)).sum())
        self.underflowed += int(((before != 0) & (after == 0)).sum())
