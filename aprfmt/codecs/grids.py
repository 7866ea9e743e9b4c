"""A packed weight as four- or eight-bit codes and the scales of its groups, in any format.

A *group* is the elements that share one scale.

Repacking from one format to another and writing a quantized weight share it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from aprfmt.codecs import f4, fp8
from aprfmt.codecs.base import F32, U8, Array

_MIDDLE = np.float32(8)
_INTEGERS = np.arange(16, dtype=np.float32)


@dataclass(frozen=True)
class Groups:
    """The numbers that turn the codes of a weight into values, by row and group.

    `size` is the number of inputs in a group. `scale` [rows, groups] is float32, or uint8 where it
    is E8M0 (groups of 32) or E4M3 (of 16). With integers a value is (code - 8) * scale, or (code -
    `zeros`) * scale, or code * scale + `offset`, all [rows, groups]; `why` says what an offset
    comes from. With E2M1 it is code * (scale * `tensor_scale`), [1] or [experts], or code * (scale
    / `divisor`) [1]. `exact` is False where `tensor_scale` is a rounded number.
    """

    size: int
    scale: Array
    offset: F32 | None = None
    why: str = ""
    tensor_scale: F32 | None = None
    exact: bool = True
    zeros: Array | None = None
    divisor: F32 | None = None
    codes: Literal["int", "e2m1", "e4m3"] = "int"

    def rows(self, start: int, stop: int) -> "Groups":
        """Return the scales, offsets and zero points of rows [start, stop) as another `Groups`."""
        at = slice(start, stop)
        offset, zeros = (None if x is None else x[at] for x in (self.offset, self.zeros))
        return replace(self, scale=self.scale[at], offset=offset, zeros=zeros)

    def scale_zero_offset(self) -> tuple[F32, F32 | None, F32 | None]:
        """Return (scale, zero, offset), each float32 [rows, groups] or None where there is none.

        A value is (code - zero) * scale + offset, rounded in that order.
        """
        scale, zero, offset = self.scales(), None, None
        if self.codes == "int" and self.offset is None and self.zeros is None:
            zero = np.broadcast_to(_MIDDLE, scale.shape)
        elif self.zeros is not None:
            zero = self.zeros.astype(np.float32, copy=False)
        else:
            offset = self.offset
        return scale, zero, offset

    def numbers_of_codes(self) -> F32:
        """Return the numbers that the sixteen 4-bit codes stand for, float32 [16]."""
        found: F32 = f4.CODEC.values if self.codes == "e2m1" else _INTEGERS
        return found

    def scales(self) -> F32:
        """Return what a code is multiplied by, float32 [rows, groups].

        Bytes are decoded (E8M0 or E4M3), then multiplied by `tensor_scale` or divided by `divisor`.
        """
        if self.scale.dtype != np.uint8:
            found: F32 = self.scale
            return found
        found = (fp8.E4M3 if self.size == 16 else fp8.E8M0).values[self.scale]
        if self.divisor is not None:
            return found / self.divisor
        if self.tensor_scale is None:
            return found
        each = np.repeat(self.tensor_scale, len(found) // len(self.tensor_scale))
        scaled: F32 = found * each[:, None]
        return scaled

    def same(self, other: "Groups") -> bool:
        """Return whether every code has the same value under both sets of scales.

        Both weights have to have the same type of codes.
        """
        if self._equal_bytes(other):
            return True
        pairs_of = ((self.offset, other.offset), (self.zeros, other.zeros))
        return np.array_equal(self.scales(), other.scales()) and all(
            (a is None) == (b is None) and (a is None or b is None or np.array_equal(a, b))
            for a, b in pairs_of
        )

    def _equal_bytes(self, other: "Groups") -> bool:
        """Return whether both have the same scale bytes, `tensor_scale` and `divisor`.

        False where either has scales that are not bytes.
        """
        if self.scale.dtype != np.uint8 or other.scale.dtype != np.uint8 or self.size != other.size:
            return False
        for a, b in ((self.tensor_scale, other.tensor_scale), (self.divisor, other.divisor)):
            if a is None or b is None:
                if a is not b:
                    return False
            elif not np.array_equal(a, b):
                return False
        return np.array_equal(self.scale, other.scale)


@dataclass(frozen=True)
class GridWeight:
    """A weight of `shape` [..., out, in] as codes and the scales of its groups.

    `codes(start, stop)` returns rows, uint8 [rows, in/2], the low nibble first; codes of eight bits
    are [rows, in].
    """

    shape: tuple[int, ...]
    groups: Groups
    codes: Callable[[int, int], U8]

    def values(self, start: int, stop: int) -> F32:
        """Return the values of rows [start, stop), float32 [rows, in]."""
        with np.errstate(all="ignore"):
            return self._values(self.groups.rows(start, stop), self.codes(start, stop))

    def _values(self, groups: Groups, stored: U8) -> F32:
        """Return float32 [rows, in]: the values of the bytes `stored`, by the scales of their rows.

        `groups` holds the scales, offsets and zero points of these rows.
        """
        if groups.codes == "e4m3":
            codes: Array = fp8.E4M3.values[stored]
        else:
            codes = np.empty((len(stored), stored.shape[1] * 2), np.float32)
            table = groups.numbers_of_codes()
            np.take(table, stored & 15, out=codes[:, 0::2], mode="clip")
            np.take(table, stored >> 4, out=codes[:, 1::2], mode="clip")
        grouped = codes.reshape(*groups.scale.shape, groups.size)
        scale = groups.scales()[..., None]
        if (groups.codes == "int" and groups.offset is None) or groups.zeros is not None:
            zeros = _MIDDLE if groups.zeros is None else groups.zeros[..., None].astype(np.float32)
            grouped -= zeros
        grouped *= scale
        if groups.offset is not None and groups.zeros is None:
            grouped += groups.offset[..., None]
        found: F32 = grouped.reshape(len(stored), -1)
        return found
