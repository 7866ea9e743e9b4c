"""Plain values that are the other side's codes with scales applied to tiles of a wrong size.

A *tile* is the rows and columns that share one scale. A reader that takes another size for the tile
gives values the scales, and the zero points, of other tiles. Every such reading is executed on the
packed tensor, whose own grid of scales says what the size is: no number is free. A and B are the
two files that are compared; a *side* is one of them, or its tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.misread_codes import ROUNDED, CodedSide, nearly_equal
from aprfmt.causes.tensor.packed_copies import is_plain_float
from aprfmt.causes.tensor.proof import make_finding, prove_values
from aprfmt.codecs.weight_layout import GroupNumbers, WeightLayout
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

LARGEST = 1 << 26  # elements of a weight whose few rows are decoded anew for each size
SMALL = 1 << 18  # elements of one that is decoded whole for each
ROWS = 8  # in a row, at the beginning, the middle and the end
SIZES = (16, 32, 64, 128, 256)  # of tiles that formats have, along rows or columns


class TileReading(NamedTuple):
    """A wrong size of tiles, `tall` by `wide` elements.

    `wraps`: after the last scale the first ones are used again, else the last one.
    """

    tall: int
    wide: int
    wraps: bool


def explain_misread_tiles(case: DifferingPair) -> Iterator[Finding]:
    """Yield at most one finding: a side's floats are the other's codes with scales on wrong tiles.

    Nothing where no weight has more than one scale, or for more than LARGEST elements.
    """
    if case.numbers is not None or case.a.shape != case.b.shape or case.a.size > LARGEST:
        return
    for plain, coded, one, other in ((case.b, case.a, "B", "A"), (case.a, case.b, "A", "B")):
        if not is_plain_float(plain) or is_plain_float(coded):
            continue
        side = CodedSide(coded)
        weights = [_in_tiles(weight) for weight in side.weights]
        tiles = {weight.tile for weight in weights if weight is not None}
        if len(tiles) != 1 or None in weights:
            continue
        (own,) = tiles
        slack = ROUNDED * UNIT[plain.encoding]
        held = [weight for weight in weights if weight is not None]
        whole = not side.reader.side.layout and len(held) == 1  # its rows are the weight's
        if not whole and plain.size > SMALL:
            continue
        for reading in _readings(held[0]):
            if whole and not _fits_few_rows(plain, held[0], reading, slack):
                continue
            x = to_float64(plain.take(np.arange(plain.rows)))
            made = _decode_with_tiles(side, held, reading)
            if not nearly_equal(made.reshape(x.shape), x, slack):
                continue
            says = (
                f"{one}'s values are the codes of {other} with their scales spread over tiles of "
                f"{reading.tall} x {reading.wide}; the tiles are {own[0]} x {own[1]}"
            )
            proof = prove_values(x, plain.size, 0, slack)
            found = make_finding(
                "quant_scale", (case.key,), (says,), case.before.relative, 0.0, proof
            )
            yield replace(found, side=one)
            return


def _in_tiles(weight: WeightLayout) -> WeightLayout | None:
    """Return the layout if each scale is for adjacent columns; None where columns are reordered."""
    if weight.group is None:
        return weight
    columns, count = weight.shape[-1], int(weight.group.max()) + 1
    size = -(-columns // count)
    if not np.array_equal(weight.group, np.arange(columns) // size):
        return None
    return replace(weight, group=None, tile=(weight.tile[0], size))


def _readings(weight: WeightLayout) -> Iterator[TileReading]:
    """Yield the wrong sizes of tiles that a weight's scales may be applied to.

    Along an axis it is half, twice or four times the right size, a size that formats have, or the
    one that spreads the scales evenly.
    """
    if weight.scale is None:
        return
    grid, whole = weight.scale.array.shape[-2:], weight.shape[-2:]
    sizes = []
    for own, count, length in zip(weight.tile, grid, whole, strict=True):
        others = {own // 4, own // 2, own * 2, own * 4, -(-length // count), *SIZES}
        sizes.append([own])
        if own > 1 and count > 1:  # neither a row each, nor one for all
            sizes[-1] += sorted(n for n in others if n >= 1 and n != own)
    for tall in sizes[0]:
        for wide in sizes[1]:
            if (tall, wide) != weight.tile:
                short = tall < weight.tile[0] or wide < weight.tile[1]
                yield from (TileReading(tall, wide, wraps) for wraps in (False, True)[: 1 + short])


def _fits_few_rows(
    plain: RowReader, weight: WeightLayout, reading: TileReading, slack: float
) -> bool:
    """Return whether a few rows of a weight, its scales on wrong tiles, equal the plain floats."""
    changed = _over_tiles(weight, reading)
    last = max(0, plain.rows - ROWS)
    for start in sorted({0, last // 2, last}):
        rows = np.arange(start, min(start + ROWS, plain.rows))
        made = to_float64(changed.decode(start, start + len(rows)))
        if not nearly_equal(made, to_float64(plain.take(rows)), slack):
            return False
    return True


def _over_tiles(weight: WeightLayout, reading: TileReading) -> WeightLayout:
    """Return a weight's layout with scales, zero points and offsets applied to other tiles."""
    return replace(
        weight,
        tile=(reading.tall, reading.wide),
        scale=_rearrange_groups(weight.scale, weight, reading),
        zero=_rearrange_groups(weight.zero, weight, reading),
        offset=_rearrange_groups(weight.offset, weight, reading),
    )


def _decode_with_tiles(
    side: CodedSide, weights: Sequence[WeightLayout], reading: TileReading
) -> "Array":
    """Return the values of a side, float64, with scales and zero points applied to other tiles.

    `weights` are the layouts of its stored tensors.
    """
    made = [_over_tiles(weight, reading).decode().reshape(weight.shape) for weight in weights]
    return to_float64(np.asarray(side.reader.side.undo_layout(list(made))))


def _rearrange_groups(
    numbers: GroupNumbers | None, weight: WeightLayout, reading: TileReading
) -> GroupNumbers | None:
    """Return the numbers of groups rearranged for a grid of other tiles; None for None."""
    if numbers is None:
        return None
    array = numbers.array
    rows, columns = weight.shape[-2:]
    for axis, length, size in ((-2, rows, reading.tall), (-1, columns, reading.wide)):
        count = array.shape[axis]
        places = np.arange(-(-length // size))
        array = array.take(places % count if reading.wraps else places.clip(max=count - 1), axis)
    return GroupNumbers(np.ascontiguousarray(array), numbers.table)


HYPOTHESES = (
    PairHypothesis(
        ("quant_scale",),
        explain_misread_tiles,
        83,
        "the grid of scales gives every factor, before a factor is fitted to each group",
        facts=("two encodings",),
    ),
)
