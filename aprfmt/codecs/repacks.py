"""Repack weights: put codes and scales into the blocks of another encoding, without decoding.

A *group* is the elements that share one scale.

A row of the table is a pair of encodings: the one that is read and the one that is written. The
source side gives codes two a byte, the low nibble first, and the scales of its groups; the target
side puts both into blocks. Codes never change. A scale may not fit (BF16 in F16, say): then values
change, which `judged` counts.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import decode, native_kernels
from aprfmt.codecs.base import F32, U8
from aprfmt.codecs.grids import GridWeight
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.codecs.parallel import run_tasks
from aprfmt.codecs.repack_sources import (
    read_awq,
    read_compressed_integers,
    read_compressed_micro,
    read_fp8_micro,
    read_gpt_oss,
    read_gptq,
    read_mlx_affine,
    read_mlx_micro,
    read_modelopt,
    read_modelopt_experts,
)
from aprfmt.codecs.repack_targets import TARGETS, RepackTarget
from aprfmt.errors import CodecError

# `native.regroup`: codes, size of a group, numbers of codes, those of groups before and after
# (scale, zero, offset), the change known -> groups that change, the largest change
Regroup = Callable[..., tuple[int, float]]

_ELEMENTS = 1 << 18  # values compared at a time: they stay in the cache
_ROWS = 64  # rows at least: fewer are turned more slowly


@dataclass(frozen=True)
class Repack:
    """A possible repack: the encoding that is read, the one written, and how the source is read."""

    source: str
    target: str
    read: Callable[[PackedWeight, str], GridWeight]

    @property
    def into(self) -> RepackTarget:
        """How blocks of the target encoding are made."""
        return TARGETS[self.target]


# In the order of preference: what has no zero points is Q4_0.
REPACKS: tuple[Repack, ...] = (
    Repack("MODELOPT", "NVFP4", read_modelopt),
    Repack("MODELOPT", "MXFP4", read_modelopt),
    Repack("MODELOPT_EXPERTS", "NVFP4", read_modelopt_experts),
    Repack("COMPRESSED_PACKED_FLOAT", "NVFP4", read_compressed_micro),
    Repack("COMPRESSED_PACKED_FLOAT", "MXFP4", read_compressed_micro),
    Repack("COMPRESSED_PACKED", "Q4_0", read_compressed_integers),
    Repack("COMPRESSED_PACKED", "Q4_1", read_compressed_integers),
    Repack("GPT_OSS", "MXFP4", read_gpt_oss),
    Repack("FP8_BLOCK", "MXFP4", read_fp8_micro),
    Repack("GPTQ", "Q4_0", read_gptq),
    Repack("GPTQ", "Q4_1", read_gptq),
    Repack("AWQ", "Q4_0", read_awq),
    Repack("AWQ", "Q4_1", read_awq),
    Repack("MLX", "Q4_1", read_mlx_affine),
    Repack("MLX", "MXFP4", read_mlx_micro),
    Repack("MLX", "NVFP4", read_mlx_micro),
)


class GroupCounts(NamedTuple):
    """Counts of a repack: all groups, those in which a value changes, the largest change."""

    groups: int
    inexact: int
    largest: float


class Repacked:
    """One weight in the blocks of another encoding; rows are made when they are asked for.

    `shape` is the weight's, `whole` [1] or [experts] the scale to be stored as another tensor, None
    where there is none. Raises CodecError with the reason where this weight cannot be repacked so.
    """

    def __init__(self, row: Repack, packed: PackedWeight) -> None:
        """Read `packed` as the table's `row` says and check that the target's blocks can hold it.

        Raises CodecError with the reason where they cannot.
        """
        self.row, self._packed = row, packed
        self.source = row.read(packed, row.target)
        self.shape = self.source.shape
        self.whole: F32 | None = self.source.groups.tensor_scale
        columns, block = self.shape[-1], ENCODINGS[row.target].block_size
        if columns % block:
            raise CodecError(f"rows of {columns} are no whole number of {row.target} blocks")
        if columns % self.source.groups.size:
            raise CodecError(f"rows of {columns} end within a group of {self.source.groups.size}")
        if self.source.groups.size % row.into.group:
            raise CodecError(
                f"groups of {self.source.groups.size} inputs are no whole number of "
                f"{row.target}'s, of {row.into.group}"
            )
        if not self.source.groups.scale[:1].any() or not (self.whole is None or self.whole.any()):
            packed.laid_out()  # refuses scales that are lost
        self._numbers = row.into.numbers(self.source.groups)

    @property
    def rows(self) -> int:
        """Number of rows of the weight, all axes but the last together."""
        return len(self.source.groups.scale)

    def blocks(self, start: int, stop: int) -> U8:
        """Return the bytes of rows [start, stop) in the target encoding, uint8 [rows, bytes]."""
        numbers = {name: held[start:stop] for name, held in self._numbers.items()}
        return self.row.into.blocks(self.source.codes(start, stop), numbers)

    def values(self) -> F32:
        """Return the values of the repacked weight, decoded by the target's codec."""
        return self._values(0, self.rows).reshape(self.shape)

    def _values(self, start: int, stop: int) -> F32:
        """Return the values [rows, columns] of rows [start, stop), by the target's codec."""
        parts: dict[str, bytes | memoryview] = {"": self.blocks(start, stop).tobytes()}
        if self.whole is not None:
            each = np.arange(start, stop) * len(self.whole) // self.rows
            scales = self.whole if len(self.whole) == 1 else self.whole[each]
            parts["scale"] = scales.astype("<f4").tobytes()
        found: F32 = decode(self.row.target, parts, (stop - start, self.shape[-1]))
        return found

    def judged(self, threads: int = 1) -> GroupCounts:
        """Return the number of groups, of those in which a value changes, and the largest change.

        Codes are only read if a scale or minimum was rounded. Bands of rows are shared among
        `threads`.
        """
        groups = self.source.groups
        count = groups.scale.size
        if self.row.into.fits(groups, self._numbers):
            return GroupCounts(count, 0, 0.0)
        step = max(_ROWS, _ELEMENTS // max(self.shape[-1], 1))
        bands = [(at, min(at + step, self.rows)) for at in range(0, self.rows, step)]
        found: list[tuple[int, float]] = []
        native = native_kernels()

        def count_band(start: int, stop: int) -> None:
            """Append (groups in which a value changes, largest change) of some rows to `found`.

            These are rows [start, stop).
            """
            changed = (
                self._count_by_decoding
                if native is None
                else partial(self._count_by_kernel, native.regroup)
            )
            found.append(changed(start, stop))

        run_tasks([partial(count_band, *each) for each in bands], threads)
        return GroupCounts(
            count, sum(each[0] for each in found), max((each[1] for each in found), default=0.0)
        )

    def _count_by_kernel(self, regroup: Regroup, start: int, stop: int) -> tuple[int, float]:
        """Return (number of groups with other values, largest error) of rows [start, stop).

        The error is the absolute distance between a decoded value before and after the repack. A
        native kernel computes it.
        """
        before = self.source.groups.rows(start, stop)
        made = {name: values[start:stop] for name, values in self._numbers.items()}
        with np.errstate(all="ignore"):
            numbers = (
                before.scale_zero_offset(),
                self.row.into.stored(before, made).scale_zero_offset(),
            )
        codes = self.source.codes(start, stop)
        return regroup(codes, before.size, before.numbers_of_codes(), *numbers, 0.0)

    def _count_by_decoding(self, start: int, stop: int) -> tuple[int, float]:
        """Return (groups that change, largest change) of rows [start, stop), by decoding them.

        They are decoded as stored and as repacked. The native kernel has to give the same counts.
        """
        laid, size = self._packed.laid_out(), self.source.groups.size
        assert laid is not None
        before, after = laid.decode(start, stop), self._values(start, stop)
        changed = int(np.count_nonzero((before != after).reshape(-1, size).any(axis=1)))
        off = np.abs(before.astype(np.float64) - after)
        return changed, float(off.max(initial=0.0))


def repack(packed: PackedWeight, source: str, targets: Container[str]) -> "Repacked | str":
    """Return a weight in the first of the encodings that can hold it, else a text: why none can.

    `source` is the weight's encoding, `targets` are the encodings that may be used. The text is ""
    where no pair of encodings is in the table.
    """
    why = ""
    for row in REPACKS:
        if row.source == source and row.target in targets:
            try:
                return Repacked(row, packed)
            except CodecError as error:
                why = why or f"{row.target}: {error}"
    return why


def repack_targets(source: str) -> tuple[str, ...]:
    """Return the encodings to which weights of the encoding `source` can be repacked."""
    return tuple(row.target for row in REPACKS if row.source == source)
