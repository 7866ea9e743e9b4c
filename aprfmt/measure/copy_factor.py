"""The factor by which all scales of a quantized copy are off, where its codes show it.

A *block* is the elements that are encoded together. A *copy* is the quantized tensor, its *source*
the tensor of the other file.

A factor of a few percent leaves every value of a coarse encoding within one step. Rounding alone
does not tell it from an honest copy: how far the errors go with the values depends on the
quantizer. The source encoded again does: its codes are the copy's, and one number is between the
values of both, in every block.
"""

from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import find_encoding
from aprfmt.base.shapes import matrix_shape
from aprfmt.codecs import CODECS, decode, encode
from aprfmt.errors import AprfmtError
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.records import ValueStats
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

ENOUGH = 1 << 16  # values that are encoded again
FEWEST = 16  # blocks that have to show a factor
NEARLY_ALL = 0.95  # share of values with the same code
ROUNDED = 2.0**-9  # relative: what a block's two scales in 16 bits may be off
LEAST = 2.0**-8  # relative: a factor nearer to 1 is the rounding of scales
AS_NEAR = 1.1  # times the squared errors of a block, by other codes
USUAL = 0.5  # times the squared distance: errors of rounding go with the values by about as much
SURE = 4.0  # standard errors


def may_have_factor(stats: ValueStats, swapped: bool) -> bool:
    """Return whether a copy's errors go with its values by more than rounding usually makes.

    `stats` compare A and B; `swapped` says that A is the copy. It costs nothing, and proves
    nothing.
    """
    copy, source = (stats.norm_a, stats.norm_b) if swapped else (stats.norm_b, stats.norm_a)
    if not (copy and source and stats.count and np.isfinite(stats.cosine)):
        return False
    slope = 1 - stats.cosine * source / copy
    squared = stats.rel_l2**2
    return bool(abs(slope) > USUAL * squared + SURE * (squared / stats.count) ** 0.5)


def has_encoder(encoding: str) -> bool:
    """Return whether blocks of an encoding, stored as one tensor, can be encoded here."""
    if encoding not in CODECS:
        return False
    return CODECS[encoding].has_encoder and CODECS[encoding].parts == ("",)


def find_copy_factor(source: View, copy: View) -> float | None:
    """Return the number that a copy's values are times those of its source encoded again.

    None where the number is 1 or not the same in every block, and for encodings without blocks or
    without an encoder. Some rows from the middle are read.
    """
    encoding, block = copy.encoding, find_encoding(copy.encoding.split("+")[0]).block_size
    rows, columns = matrix_shape(copy.shape)
    if block == 1 or not has_encoder(encoding) or not columns or columns % block or not rows:
        return None
    count = min(rows, max(1, ENOUGH // columns))
    start = (rows - count) // 2
    x, y = (side.rows(start, start + count) for side in (source, copy))
    x = np.ascontiguousarray(x, np.float32)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    try:
        again = decode(encoding, encode(encoding, x), x.shape)
    except AprfmtError:
        return None  # values that the encoding cannot hold
    return factor_of_blocks(*(to_float64(part).reshape(-1, block) for part in (again, y, x)))


def factor_of_blocks(again: "Array", held: "Array", source: "Array") -> float | None:
    """Return the one number by which blocks `again` become `held`; None for none but 1.

    It is found on every second block and judged on the others. A number that brings the values
    nearer to the `source` is a better encoder's. All are float64 [blocks, values].
    """
    told = again.any(1)
    again, held, source = again[told], held[told], source[told]
    if len(again) < FEWEST:
        return None
    factors = (again * held).sum(1) / (again * again).sum(1)
    factor = float(np.median(factors[::2]))
    if not factor > 0 or abs(factor - 1) <= LEAST:
        return None
    mine, own = (float(np.square(part - source).sum()) for part in (held, again))
    if mine <= own:
        return None
    again, held = again[1::2], held[1::2]
    return factor if share_of_times(again, held, factor) >= NEARLY_ALL else None


def share_of_times(again: "Array", held: "Array", factor: float) -> float:
    """Return the share of the values that are not 0 of which `held` is `factor` times `again`.

    Both are float64 [blocks, values].
    """
    told = again != 0
    away = np.abs(held - factor * again) <= ROUNDED * np.abs(held).max(1, keepdims=True)
    return float(away[told].mean()) if told.any() else 0.0


def are_as_near(again: "Array", held: "Array", factor: float, source: "Array") -> "Array":
    """Return for each block whether `held` is `factor` times `again`, or as near to the source.

    Encoders choose either of two codes that are equally near. All are float64 [blocks, values];
    `source` has what `again` encodes.
    """
    away = np.abs(held - factor * again).max(1) <= ROUNDED * np.abs(held).max(1)
    mine, own = (np.square(part - factor * source).sum(1) for part in (held, factor * again))
    return np.asarray(away | (mine <= AS_NEAR * own))
