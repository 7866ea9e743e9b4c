"""Compute the values that each element of a packed weight could take; error bounds use them.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes. A *group* is the elements that share one scale.

Every code of a group has one value; neighbouring ones are a step apart. Both ends follow from
decoding the weight with all codes at the lowest and at the highest, so that a dialect says no more
than what its codes count as.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from aprfmt.codecs.base import F32, Array
from aprfmt.codecs.dialect import CodeTable, Config, Dialect, Parts
from aprfmt.codecs.dialects import decode_weight, lay_out
from aprfmt.codecs.weight_layout import WeightLayout


class Lattice(NamedTuple):
    """The values that each element of a packed weight could take, as float32 arrays of its shape.

    `step` is the larger distance to a neighbouring value, `low` and `high` are the lowest and
    highest value of the element's group: what lay beyond them was clipped. `room` is how much more
    than a step an honest value may be off, because scale and offset were rounded after its code was
    chosen; None where that is nothing.
    """

    step: Array
    low: Array
    high: Array
    room: Array | None = None

    @property
    def bound(self) -> Array:
        """The largest error that this encoding may make of each element, float32 of its shape.

        It is one step, plus what the rounding of scales and offsets adds.
        """
        return self.step if self.room is None else self.step + self.room

    def map_parts(self, change: Callable[[Array], Array]) -> "Lattice":
        """Return the lattice with `change` applied to each of its arrays."""
        room = None if self.room is None else change(self.room)
        return Lattice(change(self.step), change(self.low), change(self.high), room)


def join_lattices(lattices: Sequence[Lattice], join: Callable[[list[Array]], Array]) -> Lattice:
    """Return one lattice, whose arrays `join` makes of the same arrays of all `lattices`."""
    room = None
    if any(one.room is not None for one in lattices):
        room = join([np.zeros_like(x.step) if x.room is None else x.room for x in lattices])
    low, high = join([one.low for one in lattices]), join([one.high for one in lattices])
    return Lattice(join([one.step for one in lattices]), low, high, room)


def fill_codes(dialect: Dialect, parts: Parts, code: int, bits: int) -> Parts:
    """Return the parts with every code of the main part replaced by `code` of `bits` bits."""
    main = parts[dialect.main]
    eight = sum(code << bits * i for i in range(8)).to_bytes(bits, "little")
    size = len(memoryview(main.raw).cast("B"))
    raw = (eight * -(-size // bits))[:size]
    return {**parts, dialect.main: main._replace(raw=raw)}


def lattice_of(dialect: Dialect, parts: Parts, config: Config, values: F32) -> Lattice | None:
    """Return the step, lowest and highest value of each element; None where codes are unknown.

    The step is the distance to a neighbouring value, of uneven ones the larger. The lowest and
    highest value are those that the element would have with the lowest and with the highest code.
    `parts` are the stored tensors of the packed weight, `config` its quantization section, `values`
    the decoded weight.
    """
    codes = dialect.codes(parts, config) if dialect.codes is not None else None
    if codes is None:
        return None
    table = np.where(np.isfinite(codes.values), codes.values, 0.0).astype(np.float64)
    with np.errstate(all="ignore"):
        low, high = (
            decode_weight(dialect, fill_codes(dialect, parts, code, codes.bits), config)
            for code in (int(table.argmin()), int(table.argmax()))
        )
        unit = (high - low) / np.float32(table.max() - table.min())
        levels = np.unique(table)
        gaps = np.diff(levels)
        if np.ptp(gaps) == 0:
            step = np.abs(unit) * np.float32(gaps[0])
            return Lattice(step, low, high, _room_of_rounding(dialect, parts, config, values, step))
        numbers = np.nan_to_num((values - low) / unit + np.float32(table.min()))
        level = np.searchsorted((levels[:-1] + levels[1:]) / 2, numbers)
        larger_gap = np.maximum(np.append(gaps, 0), np.insert(gaps, 0, 0)).astype(np.float32)
        return Lattice(np.abs(unit) * larger_gap[level], low, high)


def _room_of_rounding(
    dialect: Dialect, parts: Parts, config: Config, values: F32, step: Array
) -> Array | None:
    """Return how much each element's error may exceed a step because scales were rounded, or None.

    A code is the nearest one by a scale and an offset that are rounded only when they are stored.
    The error is at most half a step, half a unit in the last place of the scale times the code, and
    half a unit of the offset. None where that is nowhere more than a step, or cannot be bounded:
    the scales are not known, are codes of a table, or are not finite.
    """
    laid = lay_out(dialect, parts, config)
    if laid is None or laid.scale is None or laid.scale.table is not None:
        return None
    unit = np.float32(_unit_of(laid.scale.array))
    if laid.offset is None:
        slack = unit * np.abs(values)
    else:
        none = laid.scale._replace(array=np.zeros_like(laid.scale.array))
        offset = replace(laid, scale=none).decode(threads=1).reshape(values.shape)
        slack = unit * np.abs(values - offset)
        slack += np.float32(_unit_of(laid.offset.array)) * np.abs(offset)
    room: Array = np.maximum(slack - step / 2, 0)
    return room if np.isfinite(room).all() and room.any() else None


def _unit_of(numbers: Array) -> float:
    """Return the relative rounding error of the float type in which numbers were made.

    Numbers that are all BF16 (or F16) values are taken as made in that type, else in float32.
    """
    held = np.ascontiguousarray(numbers, np.float32)
    if not (held.view(np.uint32) & 0xFFFF).any():
        return 2.0**-8
    return 2.0**-11 if (held.astype(np.float16) == held).all() else 2.0**-24


class PackedWeight(NamedTuple):
    """A packed weight as stored: its dialect, its parts by suffix, its section of config.json.

    A *band* is some rows of a weight: it has `rows` [start, stop), and `laid`, the weight's layout.
    """

    dialect: Dialect
    parts: Parts
    config: Config
    rows: tuple[int, int] | None = None
    laid: WeightLayout | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape, or [rows, columns] where this is a band of it.

        Raises CodecError where parts do not fit.
        """
        if self.laid is not None and self.rows is not None:
            return self.rows[1] - self.rows[0], self.laid.shape[-1]
        return self.dialect.shape_of(self.parts, self.config)

    def decode(self) -> F32:
        """Return the weight, or this band of it, as float32.

        Raises CodecError where parts do not fit.
        """
        if self.laid is not None and self.rows is not None:
            return self.laid.decode(*self.rows)
        return decode_weight(self.dialect, self.parts, self.config)

    def recodes(self, encoding: str) -> bool:
        """Return whether `recode_into` can make an encoding; CodecError where parts do not fit."""
        laid = self.laid_out()
        return laid is not None and laid.recodes(encoding)

    def recode_into(
        self, encoding: str, out: memoryview, threads: int
    ) -> list[tuple[int, int, int]]:
        """Fill `out` with the weight's bytes in an encoding for which `recodes` is True.

        Returns the counts of `WeightLayout.recode_into`.
        """
        laid = self.laid_out()
        assert laid is not None
        return laid.recode_into(encoding, out, *(self.rows or (0, laid.rows)), threads=threads)

    def split_bands(self, elements: int) -> "list[PackedWeight]":
        """Return the weight as bands of consecutive rows, about `elements` elements each.

        The list is [self] for a weight without elements. Raises CodecError where parts do not fit.
        """
        laid = self.laid_out()
        if laid is None:
            return [self]
        tall, step = laid.shape[-2], max(1, elements // laid.shape[-1])
        return [
            self._replace(laid=laid, rows=(first + start, first + min(start + step, tall)))
            for first in range(0, laid.rows, tall)
            for start in range(0, tall, step)
        ]

    def laid_out(self) -> WeightLayout | None:
        """Return the weight's layout, to decode it by rows; None for a weight without elements.

        Raises CodecError where parts do not fit.
        """
        return self.laid or lay_out(self.dialect, self.parts, self.config)

    def lattice(self, values: F32) -> Lattice | None:
        """Return the step, lowest and highest value of each element of the weight.

        The step is the distance to a neighbouring value, the other two are those of the lowest and
        the highest code. `values` is the decoded weight. None where the weight's codes are unknown.
        """
        return lattice_of(self.dialect, self.parts, self.config, values)

    def codes(self) -> CodeTable | None:
        """Return the table of the codes' numbers; None where the dialect does not define them."""
        return None if self.dialect.codes is None else self.dialect.codes(self.parts, self.config)

    def replace_parts(self, parts: Parts | None = None, **config: object) -> "PackedWeight":
        """Return a copy with some parts replaced, and with other values of configuration keys."""
        return self._replace(
            parts={**self.parts, **(parts or {})}, config={**self.config, **config}
        )
