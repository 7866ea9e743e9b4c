"""Counts how re-encoding changed values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.codecs import native_kernels

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array


def _plain(before: "Array", after: "Array") -> bool:
    """Say whether two chunks are float32 of one shape, in order."""
    return before.shape == after.shape and all(
        one.dtype == np.float32 and one.flags.c_contiguous for one in (before, after)
    )


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
        native = native_kernels()
        if native is not None and _plain(before, after):
            changed, overflowed, underflowed = native.changes(before, after)
            self.join(Counts(changed, overflowed, underflowed))
            return
        differs = before != after
        if not differs.any():
            return
        differs &= ~(np.isnan(before) & np.isnan(after))
        self.changed += int(differs.sum())
        self.overflowed += int((np.isfinite(before) & ~np.isfinite(after)).sum())
        self.underflowed += int(((before != 0) & (after == 0)).sum())
