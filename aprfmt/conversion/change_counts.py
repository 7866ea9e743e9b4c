"""Count how many values of a tensor re-encoding changed, some rows (a *chunk*) at a time."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.codecs import codec, native_kernels
from aprfmt.codecs.base import Codec
from aprfmt.codecs.parallel import run_tasks, split_range

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array, Bytes


def _same_float32(before: "Array", after: "Array") -> bool:
    """Return whether two chunks are contiguous float32 arrays of one shape."""
    return before.shape == after.shape and all(
        one.dtype == np.float32 and one.flags.c_contiguous for one in (before, after)
    )


def is_block_encoding(encoding: str) -> bool:
    """Return whether a native kernel decodes an encoding's blocks from consecutive bytes alone.

    False for encodings whose scales or zero points are in separate tensors, and for those whose
    codec has a decoder in Python.
    """
    kind = type(codec(encoding))
    return all(
        getattr(kind, name) is getattr(Codec, name) for name in ("decode_native", "main", "finish")
    )


@dataclass
class ChangeCounts:
    """How many values of one tensor re-encoding changed, made infinite, or made zero."""

    changed: int = 0
    overflowed: int = 0
    underflowed: int = 0

    def join(self, other: "ChangeCounts") -> None:
        """Add the counts of other elements of the same tensor."""
        self.changed += other.changed
        self.overflowed += other.overflowed
        self.underflowed += other.underflowed

    def add_encoded(
        self, before: "Array", encoding: str, data: "Bytes", block_size: int, threads: int
    ) -> bool:
        """Add what encoding a chunk changed, and return whether it could be counted.

        `before` are the values, `data` their encoding in blocks of `block_size` elements. Nothing
        decoded is stored. False where there is no native kernel that decodes these blocks alone.
        """
        native = native_kernels()
        plain = before.dtype == np.float32 and before.flags.c_contiguous
        if native is None or not plain or not is_block_encoding(encoding):
            return False
        values, view = before.reshape(-1), memoryview(data)
        width = len(view) // max(1, -(-values.size // block_size))
        found: list[tuple[int, int, int]] = []

        def count_part(start: int, stop: int) -> None:
            """Append the counts of values that encoding changed in a range of elements to `found`.

            The range is [start, stop); `start` begins a block.
            """
            blocks = view[start // block_size * width : -(-stop // block_size) * width]
            found.append(native.changes_of(encoding, values[start:stop], blocks))

        try:
            parts = split_range(values.size, block_size, threads)
            run_tasks([partial(count_part, start, stop) for start, stop in parts], threads)
        except KeyError:
            return False
        for counted in found:
            self.join(ChangeCounts(*counted))
        return True

    def add(self, before: "Array", after: "Array") -> None:
        """Add how many values of a chunk differ between `before` and `after`; two NaN are equal."""
        native = native_kernels()
        if native is not None and _same_float32(before, after):
            changed, overflowed, underflowed = native.changes(before, after)
            self.join(ChangeCounts(changed, overflowed, underflowed))
            return
        differs = before != after
        if not differs.any():
            return
        differs &= ~(np.isnan(before) & np.isnan(after))
        self.changed += int(differs.sum())
        self.overflowed += int((np.isfinite(before) & ~np.isfinite(after)).sum())
        self.underflowed += int(((before != 0) & (after == 0)).sum())
