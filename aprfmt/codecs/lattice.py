"""The values that each element of a packed weight could have taken; error bounds go by them.

Every code of a group has one value; neighbouring ones are a step apart. Both ends follow from
decoding the weight with all codes at the lowest and at the highest, so that a dialect says no more
than what its codes count as.
"""

from typing import NamedTuple

import numpy as np

from aprfmt.codecs.base import F32, Array
from aprfmt.codecs.dialect import CodeTable, Config, Dialect, Parts
from aprfmt.codecs.dialects import decode_weight


class Lattice(NamedTuple):
    """Float32 arrays of the weight's shape.

    `step` is the larger distance to a neighbouring value, `low` and `high` are the ends of the
    element's group: what lay beyond them was clipped.
    """

    step: Array
    low: Array
    high: Array


def filled(dialect: Dialect, parts: Parts, code: int, bits: int) -> Parts:
    """Return the parts with every code of the main part replaced by `code`."""
    main = parts[dialect.main]
    eight = sum(code << bits * i for i in range(8)).to_bytes(bits, "little")
    size = len(memoryview(main.raw).cast("B"))
    raw = (eight * -(-size // bits))[:size]
    return {**parts, dialect.main: main._replace(raw=raw)}


def lattice_of(dialect: Dialect, parts: Parts, config: Config, values: F32) -> Lattice | None:
    """Return the lattice of a weight's decoded `values`; None where its codes are not known."""
    codes = dialect.codes(parts, config) if dialect.codes is not None else None
    if codes is None:
        return None
    table = np.where(np.isfinite(codes.values), codes.values, 0.0).astype(np.float64)
    low, high = np.empty(values.shape, np.float32), np.empty(values.shape, np.float32)
    with np.errstate(all="ignore"):
        for out, code in ((low, int(table.argmin())), (high, int(table.argmax()))):
            dialect.decode(filled(dialect, parts, code, codes.bits), config, out)
        unit = (high - low) / np.float32(table.max() - table.min())
        levels = np.unique(table)
        gaps = np.diff(levels)
        if np.ptp(gaps) == 0:
            return Lattice(np.abs(unit) * np.float32(gaps[0]), low, high)
        at = np.nan_to_num((values - low) / unit + np.float32(table.min()))
        near = np.searchsorted((levels[:-1] + levels[1:]) / 2, at)
        wide = np.maximum(np.append(gaps, 0), np.insert(gaps, 0, 0)).astype(np.float32)
        return Lattice(np.abs(unit) * wide[near], low, high)


class PackedWeight(NamedTuple):
    """A weight as it is stored: its dialect, its parts by suffix, what config.json says of it."""

    dialect: Dialect
    parts: Parts
    config: Config

    def decode(self) -> F32:
        """Return the weight (float32). Raises CodecError where parts do not fit."""
        return decode_weight(self.dialect, self.parts, self.config)

    def lattice(self, values: F32) -> Lattice | None:
        """Return the lattice of its decoded values, None where it is not known."""
        return lattice_of(self.dialect, self.parts, self.config, values)

    def codes(self) -> CodeTable | None:
        """Return what its codes count as."""
        return None if self.dialect.codes is None else self.dialect.codes(self.parts, self.config)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape. Raises CodecError where parts do not fit."""
        return self.dialect.shape_of(self.parts, self.config)

    def bands(self, elements: int) -> "list[PackedWeight]":
        """Return the weight in matrices of about so many elements, in order; itself if it is one.

        Raises CodecError where parts do not fit.
        """
        cut = self.dialect.bands
        rows = max(1, elements // max(1, *self.shape[-1:], 1))
        found = cut(self.parts, self.config, rows) if cut is not None else ()
        return [self._replace(parts=parts) for parts in found] or [self]

    def altered(self, parts: Parts | None = None, **config: object) -> "PackedWeight":
        """Return the weight with other parts, or read by another configuration."""
        return self._replace(
            parts={**self.parts, **(parts or {})}, config={**self.config, **config}
        )
