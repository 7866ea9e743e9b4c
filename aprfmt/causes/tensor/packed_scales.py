"""Faults of a packed copy's scales and minima.

A *copy* is a quantized tensor next to the tensor of the other file, its *source*. A *cell*, or
group, is the elements that share one scale. A and B are the two files that are compared; a *side*
is one of them, or its tensor.

The factor that every cell's values lack is the least-squares one. With it put right the errors must
be usual; how the factors go with the stored scales then says what was done to these.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor import lattices
from aprfmt.causes.tensor.arithmetic import fits_scaling, is_scaling
from aprfmt.causes.tensor.lattices import Grouping
from aprfmt.causes.tensor.packed_copies import (
    PackedCopy,
    copy_cells,
    explain_copy,
    holds_scale,
    scale_lattice,
    spread_over_copy,
)
from aprfmt.causes.tensor.scale_bytes import describe_misread_exponents
from aprfmt.codecs import decode, fp8
from aprfmt.measure.bounds import Fit, fit_errors
from aprfmt.measure.findings import Finding

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.codecs.minifloat import MinifloatCodec

CAUSE_ROWS = (
    Cause(
        "quant_scale", "tensor", "bug",
        "The scales of a packed weight are inverted, ignored, shared, shifted by a group, "
        "transposed, rounded to a coarser type once the codes were made, read in another way, or "
        "otherwise those of other groups.",
        "Every group is a multiple of what it should be.",
        "One factor for each group leaves errors that are usual for the encoding, and the "
        "factors have the named relation to the scales.",
    ),
    Cause(
        "quant_min", "tensor", "bug",
        "What is added to each group's values has the other sign, is lost or another group's, or "
        "d and dmin are exchanged.",
        "Every group is moved by a number that goes with its minimum.",
        "With the minima put right the errors are usual for the encoding.",
    ),
    Cause(
        "nested_offset", "tensor", "bug",
        "The offset of scales that are quantized themselves is another number, or was not added "
        "(double quantization).",
        "All scales are too small or too large by one number.",
        "Taking it away leaves errors that are usual for the encoding, and smaller ones than any "
        "one factor leaves.",
    ),
)  # fmt: skip

NEAR = 0.05  # relative: a factor that is further from 1 is wrong
OFF = 0.45  # steps, in the mean of a group: rounding gives 0.25
LEAST = 0.01  # relative: how well a factor is known at best
SURE = 4.0  # standard errors that it may be off
MOST_COUNTED = 0.5  # share of wrong groups up to which it is said which these are
E4M3_DIGITS = 16  # the numbers of this type have whole multiples of 1/16 before their exponents
EXACT_BYTES = 2.0**-7  # relative: values in 16 bits and a fitted factor show a byte's number
EXACT = 1e-6  # relative: a stored scale is a value of a type
MOST_TURNED = 0.8  # share of the scales that vary whose inverse has to stand there
TURNED = 0.25  # share of scales at least that the type cannot hold
LEAST_IN_CELL = 4.0  # values: a factor for fewer of them makes good any error
LEAST_GROUPS = 3  # groups whose scales may show one added number
CLEARER = 0.9  # share of one factor's error below which factors of each group tell more
FINE = 2.0**-8  # a step of bfloat16: groups' factors fit the rounding of values to it, too
FEW_COLUMNS = 1 << 24  # products tried to find the group of every input


def cell_factors(copy: PackedCopy, y: "Array") -> "Array":
    """Return the least-squares factor from `y` to the source for every group, [groups].

    A group's elements share one scale. It is 1 for a group of zeros.
    """
    mine, source = (np.nan_to_num(lattices.split_cells(v, copy.grouping)) for v in (y, copy.x))
    square, product = (mine * mine).sum(1), (mine * source).sum(1)
    return np.where(square > 0, product / np.where(square > 0, square, 1.0), 1.0)


def cell_factors_and_offsets(copy: PackedCopy) -> tuple["Array", "Array"]:
    """Return (factor, offset) of the least-squares line from copy to source, both [groups]."""
    mine, source = (lattices.split_cells(v, copy.grouping) for v in (copy.y, copy.x))
    m, s = np.nanmean(mine, axis=1), np.nanmean(source, axis=1)
    away = np.nan_to_num(mine - m[:, None])
    square = (away * away).sum(1)
    factor = (away * np.nan_to_num(source - s[:, None])).sum(1) / np.where(square > 0, square, 1.0)
    factor = np.where(square > 0, factor, 1.0)
    return factor, s - factor * m


def explain_scales(copy: PackedCopy, *, related: bool = True) -> Iterator[Finding]:
    """Yield the finding of wrong scales: one factor for each group makes the copy right.

    `related`: only scales whose relation to the right ones has a name; otherwise only those
    without one. Groups may be smaller than the stored scales show, which may be one number for
    all.
    """
    seen = []
    for grouping in (copy.grouping, *lattices.possible_groupings(*copy.y.shape)):
        if grouping in seen or not _cells_fit_inside(grouping, copy):
            continue
        seen.append(grouping)
        if _values_in_cell(grouping, copy) < LEAST_IN_CELL:
            continue
        finer = replace(copy, grouping=grouping, scales=_scales_of_cells(copy, grouping))
        # Repair every cell by its least-squares factor, and see whether errors become usual.
        repair = _repair_cells(finer)
        if repair is None:
            continue
        factor, after = repair
        wrong = np.abs(factor - 1) > NEAR
        if not wrong.any():
            return  # the scales are right: what is left are values of another source
        # One factor for all has fewer parts than any relation of the scales but that they are
        # inverted, of which one scale gives one factor.
        limit = _factor_limit(finer, after.relative)
        turned = _are_inverted_floats(finer, finer.scales * factor, limit)
        added = _missing_number(finer, factor)
        alike = related and not turned and not added
        found = None
        if alike:
            found = _one_factor(finer, factor, after.relative) or _factor_of_matrices(finer)
        if found is not None:
            yield found
            return
        # Name what was done to the scales by comparing them with the repaired ones.
        relation = (
            f"each is too {'small' if added > 0 else 'large'} by one number: {OF_NESTED}"
            if added
            else _scale_relation(finer, finer.scales * factor, wrong, after.relative)
        )
        if bool(relation) != related or (
            not relation and np.ptp(factor) <= NEAR * np.abs(factor).mean()
        ):
            return  # one factor for all is no fault of a packed encoding by itself
        order = _order_of_scales(copy)
        if relation in ("", SHARED) and not order and wrong.mean() <= MOST_COUNTED:
            # neither speaks of groups that are not counted: putting right the others is enough
            stated = spread_over_copy(finer, np.where(wrong, factor, 1.0))
            repaired = fit_errors(copy.x, copy.y * stated, scale_lattice(copy.lattice, stated))
            if not copy.is_repaired(repaired):
                return
        few = (
            f"by {abs(added):.3g} " * bool(added) + f"in {int(wrong.sum())} of {wrong.size} groups"
        )
        numbers = f"factors from {factor.min():.4g} to {factor.max():.4g}"
        known = relation or order or "other ones stand there"
        says = f"{copy.whose} scales are wrong: {known}"
        cause = "nested_offset" if added else "quant_scale"
        moved = wrong.sum() * (copy.y.size / wrong.size)
        yield explain_copy(
            copy, cause, (says, few, numbers, copy.scheme), after, factor.size, float(moved)
        )
        return


def _repair_cells(copy: PackedCopy) -> "tuple[Array, Fit] | None":
    """Return (factor [groups], errors left) of groups scaled one by one; None if that fails.

    Values clipped at the end of a group's range do not show its scale: a second fit leaves them
    out.
    """
    factor, y = cell_factors(copy, copy.y), copy.y
    for _ in range(2):
        if not (np.isfinite(factor).all() and factor.all()):
            return None
        wide = spread_over_copy(copy, factor)
        after = fit_errors(copy.x, copy.y * wide, scale_lattice(copy.lattice, wide))
        if copy.is_repaired(after):
            return factor, after
        top = np.nanmax(np.abs(copy_cells(copy, copy.y)), axis=1)
        ends = np.abs(copy.y) >= spread_over_copy(copy, top)
        y = np.where(ends & (np.abs(copy.x) > np.abs(copy.y * wide)), 0.0, copy.y)
        factor = cell_factors(copy, y)
    return None


def _one_factor(copy: PackedCopy, factor: "Array", least: float) -> Finding | None:
    """Return the finding that all scales are the right ones times one number; else None.

    `factor` [groups] repairs each group by itself, and varies with its rounding. If one factor on
    all values repairs them within rounding, the finding is on the values (`scale`) and None is
    returned, unless the scales are powers of two, as exponents are. `least` is the relative error
    that the factors of the groups leave. None too where one factor leaves clearly more: then the
    scales are not all off by it.
    """
    powers = lattices.are_powers_of_two(copy.scales)
    one = float(np.median(factor))
    slack = copy.case.slack(moved=False)
    if one <= 0 or (
        not powers
        and is_scaling(np.array([1 / one]), slack)
        and fits_scaling(copy.x, copy.y * one, slack)
    ):
        return None
    times = 2.0 ** float(np.rint(np.log2(one))) if powers else one
    if abs(times - 1) <= NEAR:
        return None
    after = fit_errors(copy.x, copy.y * times, scale_lattice(copy.lattice, times))
    by_chance = (1 - min(0.5, factor.size / copy.y.size)) ** 0.5  # each factor fits its group
    varying = least < CLEARER * by_chance * after.relative and after.relative > FINE
    if varying or not copy.is_repaired(after):
        return None
    says = f"{copy.whose} scales are each {1 / times:.3g} times what they should be"
    if powers:
        off = round(np.log2(times))
        says += f": their exponents are {abs(off)} too {'small' if off > 0 else 'large'}"
    elif _are_e4m3_multiples(copy.scales * times**0.5):
        says = f"{copy.whose} scale of the whole tensor is inverted: 1/s stands for s"
    numbers = f"factors from {factor.min():.4g} to {factor.max():.4g}"
    said = (says, f"in all {factor.size} groups", numbers, copy.scheme)
    return explain_copy(copy, "quant_scale", said, after, 1, float(copy.y.size))


def _missing_number(copy: PackedCopy, factor: "Array") -> float:
    """Return the number that added to every scale of a copy repairs it; 0.0 if none does.

    `factor` [groups] repairs each group by itself. The number repairs all groups, and leaves a
    smaller error than one factor on all values: scales that hardly vary do not tell the two apart.
    """
    # A code with both signs hides that of its scale, which the factor then has.
    right = np.abs(copy.scales * factor)
    signed = copy.scales * np.sign(copy.scales * factor)
    one = float(np.median(signed - right))
    if copy.scales.size < LEAST_GROUPS or np.ptp(right) <= LEAST * right.max() or not signed.all():
        return 0.0
    wide = spread_over_copy(copy, (signed - one) / signed)
    after = fit_errors(copy.x, copy.y * wide, scale_lattice(copy.lattice, wide))
    alike = float((copy.x * copy.y).sum() / (copy.y * copy.y).sum())
    scaled = fit_errors(copy.x, copy.y * alike, scale_lattice(copy.lattice, alike))
    clearer = 1 - SURE / (2 * copy.y.size) ** 0.5
    if not copy.is_repaired(after) or after.relative > clearer * scaled.relative:
        return 0.0
    return -one


def _are_e4m3_multiples(scales: "Array") -> bool:
    """Return whether scales [groups] are numbers of E4M3 up to one common factor.

    `scales` are those that are left once an inverted tensor scale is undone: of NVFP4, which
    stores bytes of E4M3 under one scale for the tensor, they are such numbers, up to powers of
    two.
    """
    digits = np.frexp(np.unique(np.abs(scales)))[0] * E4M3_DIGITS
    whole = np.rint(digits)
    near = np.abs(digits / whole - 1) < EXACT_BYTES
    return np.unique(whole).size >= E4M3_DIGITS // 2 and bool(near.all())


def _factor_of_matrices(copy: PackedCopy) -> Finding | None:
    """Return the finding that each matrix of a stack has scales off by another factor.

    None where it is no stack, or one factor for each matrix leaves more than rounding.
    """
    tall = copy.tall
    count = copy.y.shape[0] // tall
    if count < 2:
        return None
    x, y = (np.nan_to_num(part).reshape(count, -1) for part in (copy.x, copy.y))
    square = (y * y).sum(1)
    factor = np.where(square > 0, (x * y).sum(1) / np.where(square > 0, square, 1.0), 1.0)
    if not (factor > 0).all() or np.abs(factor - 1).max() <= LEAST:
        return None
    wide = np.repeat(factor, tall)[:, None]
    after = fit_errors(copy.x, copy.y * wide, scale_lattice(copy.lattice, wide))
    if not copy.is_repaired(after):
        return None
    wrong = int((np.abs(factor - 1) > LEAST).sum())
    says = f"{copy.whose} scales of each expert are off by one factor"
    numbers = f"{1 / factor.max():.4g} to {1 / factor.min():.4g} times what they should be"
    said = says, f"{numbers}, in {wrong} of {count} experts", copy.scheme
    moved = float(copy.y.size * wrong // count)
    return explain_copy(copy, "quant_scale", said, after, count, moved)


def _order_of_scales(copy: PackedCopy) -> str:
    """Return in words that the stored scales are the other side's in another order; else "".

    The whole stored tensor is compared: in a fused tensor q may have the scales of k.
    """
    mine, theirs = (side.side.stored for side in (copy.reader, copy.source))
    if len(mine) != 1 or len(theirs) != 1:
        return ""
    for suffix, part in mine[0].parts.items():
        other = theirs[0].parts.get(suffix)
        if "scale" not in suffix or other is None or part.info.shape != other.info.shape:
            continue
        x, y = (
            np.sort(decode(one.info.encoding, one.raw(), one.info.shape), axis=None)
            for one in (part, other)
        )
        if x.size > 1 and np.array_equal(x, y) and x[0] != x[-1]:
            return f"they are {copy.other} in another order, and the codes are not"
    return ""


def _cells_fit_inside(grouping: Grouping, copy: PackedCopy) -> bool:
    """Return whether groups of this size are no larger than the copy's own.

    They must not be smaller than what shares one stored scale either: no fault of a scale reaches
    less.
    """
    own = copy.grouping
    tall, wide = own.rows or copy.y.shape[0], own.columns or copy.y.shape[1]
    rows, columns = grouping.rows or copy.y.shape[0], grouping.columns or copy.y.shape[1]
    return rows <= tall and columns <= wide and holds_scale(copy.reader, columns)


def _values_in_cell(grouping: Grouping, copy: PackedCopy) -> int:
    """Return how many of the copy's values one group of this grouping has."""
    return (grouping.rows or copy.y.shape[0]) * (grouping.columns or copy.y.shape[1])


def _scales_of_cells(copy: PackedCopy, grouping: Grouping) -> "Array":
    """Return the copy's scale for every group of a finer grouping, [groups]."""
    return np.asarray(
        np.nanmax(lattices.split_cells(spread_over_copy(copy, copy.scales), grouping), axis=1)
    )


SHARED = "several groups share one"
SMALL_SCALES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "U8")  # types of scales with few numbers
SOMEWHERE = 0.5  # share of the stored scales that are right in one of the groups that share them
OF_NESTED = "the offset of nested absmax was lost, or is another one"
INVERTED = "they are inverted: 1/s stands for s"


def _factor_limit(copy: PackedCopy, relative: float) -> float:
    """Return the relative accuracy to which a group's factor is known.

    `relative` is the relative error of the repaired copy.
    """
    return float(max(LEAST, SURE * relative / (copy.y.size / copy.scales.size) ** 0.5))


def _are_inverted_floats(copy: PackedCopy, right: "Array", limit: float) -> bool:
    """Return whether decoded 8-bit floats have the scale 1/s in place of s, in nearly all groups.

    The scale that values show is the stored one up to a power of two, 2^n. So is the `right` one
    [groups], found from it: their product is then 4^n. False for scales that are powers of two
    themselves, which do not show it.
    """
    table = _fp8_type(copy)
    if table is None or lattices.are_powers_of_two(copy.scales):
        return False
    with np.errstate(all="ignore"):
        twice = np.log2(np.abs(copy.scales * right)) / 2
        most = np.ptp(np.log2(table.values[np.isfinite(table.values) & (table.values > 0)]))
    n = np.rint(twice)
    fits = (np.abs(twice - n) < np.log2(1 + limit + EXACT_BYTES) / 2) & (n >= 0) & (n <= most)
    return bool(fits.mean() >= MOST_TURNED)


def _scale_relation(copy: PackedCopy, right: "Array", wrong: "Array", relative: float) -> str:
    """Return in words how stored scales relate to the right ones; "" if no known way fits.

    `right` are the right scales [groups], `wrong` marks the groups whose factor is not 1, and
    `relative` is the copy's relative error, which limits how well a factor is known.
    """
    # Scales that have no effect.
    if _are_fp8_codes(copy):
        return "they are ignored, as if each were 1"
    stored = copy.scales
    limit = _factor_limit(copy, relative)
    apart = float(np.median(np.abs(right / stored - 1)))

    def near(x: "Array", y: "Array") -> bool:
        """Return whether stored scales x are y up to `limit` in their median relative error.

        They must also be clearly nearer to y than the stored scales are to the right ones
        (`apart`).
        """
        off = float(np.median(np.abs(x / y - 1)))
        return off < limit and off < 0.5 * apart

    if np.ptp(stored) <= LEAST * stored.max() and near(stored, np.ones_like(stored)):
        return "they are ignored, as if each were 1"
    if np.abs(stored - 1).max() < LEAST:
        return "they are ignored, as if each were 1"
    # Bytes of scales that were read as other numbers.
    misread = describe_misread_exponents(stored, right / stored)
    if misread:
        return misread
    # Scales that were rounded once the codes were made.
    rounded = _describe_scale_rounding(stored, right, limit)
    if rounded:
        return rounded
    # Scales that are inverted.
    product = stored * right
    if near(product, np.ones_like(right)) or _are_inverted_floats(copy, right, limit):
        return INVERTED
    # Up to one factor it is seen only where the scales vary: equal ones are their own inverse.
    if stored.size > 2 and near(product, np.full_like(right, np.median(product))):
        varied = np.abs(stored / np.median(stored) - 1) > max(NEAR, 2 * limit)
        turned = np.abs(product[varied] / np.median(product) - 1) < limit
        if turned.sum() > TURNED * stored.size and turned.mean() >= MOST_TURNED:
            return "they are inverted, up to one factor"
    # Scales at other places of the grid.
    rows = -(-copy.y.shape[0] // (copy.grouping.rows or copy.y.shape[0]))
    grid, true = stored.reshape(rows, -1), right.reshape(rows, -1)
    moved = _scale_move(grid, true, near)
    if moved:
        return moved
    if wrong.any() and wrong.sum() <= 0.5 * wrong.size:
        return ""
    # A number that stands everywhere is a shared scale only if it is right in one of the places.
    own = np.abs(true / grid - 1) <= limit
    most = _count_distinct_scales(copy)  # scales that are near each other are not one
    if np.ptp(stored) <= LEAST * stored.max() and stored.size > 1 and own.any() and most <= 1:
        return "one scale is shared by all"
    for axis, what in ((0, "rows"), (1, "groups of a row")):
        same = grid.shape[axis] > 1 and np.ptp(grid, axis=axis) <= LEAST * grid.max(axis)
        if np.all(same) and own.any(axis).all() and most <= grid.shape[1 - axis]:
            return f"one scale is shared by all {what}"
    held = max(np.unique(stored).size, most)
    if _scales_are_few_numbers(copy) or _crowd_their_type(copy, stored):
        return ""  # of such a type, the right scales of many groups are equal
    right_ones = np.unique(stored[own.reshape(-1)]).size  # few are right by accident
    if right_ones >= max(1, SOMEWHERE * held) and 4 * held < stored.size:
        return SHARED
    return ""


def _scales_are_few_numbers(copy: PackedCopy) -> bool:
    """Return whether a copy's scales are of a type with few values: 8 bits, or powers of two."""
    parts = [part for one in copy.reader.side.stored for part in one.parts.items()]
    small = any(
        ("scale" in name or "absmax" in name) and part.info.encoding in SMALL_SCALES
        for name, part in parts
    )
    return small or "NVFP4" in copy.reader.encoding or lattices.are_powers_of_two(copy.scales)


def _count_distinct_scales(copy: PackedCopy) -> int:
    """Return how many distinct scales are stored for a copy's groups; 0 where it is not known.

    The copy's values may be of a type that shows distinct scales as equal ones.
    """
    cell = copy.y.size // max(copy.scales.size, 1)
    for part in (part for one in copy.reader.side.stored for part in one.parts.values()):
        if math.prod(part.info.shape) * cell == copy.reader.rows * copy.reader.columns:
            return int(np.unique(decode(part.info.encoding, part.raw(), part.info.shape)).size)
    return 0


def _crowd_their_type(copy: PackedCopy, scales: "Array") -> bool:
    """Return whether `scales` use over half of the 16-bit floats in their range.

    Then equal scales may be distinct ones that the values' 16-bit type made equal. For scales of
    both signs the range counts twice; scales of 0, of groups without a value, are left out. False
    if the values are not of a 16-bit type.
    """
    used = scales[scales != 0]
    if not used.size:
        return False
    size, signs = np.abs(used), np.unique(np.sign(used)).size
    bits = np.array([size.min(), size.max()], np.float32).view(np.uint32)
    digits = np.ascontiguousarray(copy.y, np.float32).view(np.uint32)
    unused = next((n for n in (16, 13) if not (digits & np.uint32((1 << n) - 1)).any()), 0)
    low, high = (int(end) >> unused for end in bits)
    return bool(unused) and 2 * np.unique(used).size > signs * (high - low + 1)


@cache
def _scale_types() -> "tuple[tuple[str, Array], ...]":
    """Return (name in words, positive values ascending) of the types that scales are rounded to.

    The coarsest is first: UE8M0 of the OCP microscaling formats, which has powers of two only.
    """
    powers = 2.0 ** np.arange(-127, 128)
    floats = ((kind.name, kind.values.astype(np.float64)) for kind in (fp8.E5M2, fp8.E4M3))
    return (
        ("a power of two", powers),
        *((name, np.unique(v[np.isfinite(v) & (v > 0)])) for name, v in floats),
    )


def _neighbours(values: "Array", x: "Array") -> "tuple[Array, Array]":
    """Return (largest of the ascending `values` below each of `x`, smallest that is not below)."""
    above = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    return values[above - 1], values[above]


def _round_up(values: "Array", x: "Array") -> "Array":
    """Return `x` rounded up to the next of the ascending `values`."""
    return _neighbours(values, x)[1]


def _round_down(values: "Array", x: "Array") -> "Array":
    """Return `x` rounded down to the next of the ascending `values`."""
    low, high = _neighbours(values, x)
    return np.where(x == high, high, low)


def _round_nearest(values: "Array", x: "Array") -> "Array":
    """Return `x` rounded to the nearest of the ascending `values`."""
    low, high = _neighbours(values, x)
    return np.where(x - low < high - x, low, high)


def _describe_scale_rounding(stored: "Array", right: "Array", limit: float) -> str:
    """Return a phrase such as "each was rounded to F8_E8M0 after the codes were made", or "".

    Rounding the `right` scales [groups] to a coarser type, all up, all down or all to the
    nearest, must give every `stored` one. Right scales that are of that type already prove
    nothing. A right scale is known to the relative distance `limit`: within that of a rounding
    boundary either result counts.
    """
    known = right > 0
    if not known.all() or not (stored > 0).all():
        return ""
    for name, values in _scale_types():
        held = _round_nearest(values, stored)
        if (np.abs(stored / held - 1) > EXACT).any():
            continue
        # Scales that are all of this type themselves were not rounded to it.
        low, high = _neighbours(values, right)
        apart = np.minimum(right / low - 1, 1 - right / high)
        if not (apart > max(NEAR / 2, 2 * limit)).mean() >= TURNED:
            continue
        ends = right * (1 - limit), right * (1 + limit)
        for rounded in (_round_up, _round_down, _round_nearest):
            if np.logical_or(*(rounded(values, end) == held for end in ends)).all():
                return f"each was rounded to {name} after the codes were made"
    return ""


def _are_fp8_codes(copy: PackedCopy) -> bool:
    """Return whether all values are unscaled numbers of the copy's 8-bit float type.

    Values show the scale of float codes only up to a power of two, so that a scale of 1 may be
    found as 2 or 4.
    """
    table = _fp8_type(copy)
    return table is not None and bool(np.isin(copy.y, table.values).all())


def _fp8_type(copy: PackedCopy) -> "MinifloatCodec | None":
    """Return the 8-bit float type of a decoded copy's codes; None for any other copy."""
    tables = (kind for kind in fp8.OF_TWO_SIGNS if kind.name.removeprefix("F8_") in copy.scheme)
    return next(tables, None) if copy.again else None


def _scale_move(grid: "Array", true: "Array", near: "Callable[[Array, Array], bool]") -> str:
    """Return in words how scales are misplaced: shifted, transposed or reversed; else "".

    `grid` are the stored scales and `true` the right ones, [group rows, group columns]. `near` says
    whether two such grids are equal.
    """
    for shift in (1, -1):
        for axis, what in ((1, "group"), (0, "row of groups"), (None, "group")):
            size = grid.size if axis is None else grid.shape[axis]
            if size > 2 and near(np.roll(true, shift, axis), grid):
                return f"each is that of the {what} {'before' if shift > 0 else 'after'}"
    if min(grid.shape) > 1:
        if near(true.T.reshape(grid.shape), grid) or near(true.reshape(grid.shape[::-1]).T, grid):
            return "they are transposed"
    for axis, what in ((1, "groups"), (0, "rows")):
        if grid.shape[axis] > 2 and near(np.flip(true, axis), grid):
            return f"those of the {what} stand in reverse"
    return ""


# --- minima ---------------------------------------------------------------------------------------


def explain_minima(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding that minima are negated, lost or shifted, or exchanged with scales."""
    factor, offset = cell_factors_and_offsets(copy)
    if not (np.isfinite(factor).all() and np.isfinite(offset).all() and (factor > 0).all()):
        return
    # At least half of the cells must be clearly off.
    off_by = np.nanmean(copy_cells(copy, np.abs(copy.x - copy.y) / copy.lattice.step), axis=1)
    if not (off_by > OFF).mean() >= 0.5:
        return  # damage of some groups, which no relation of all explains
    # Repair offsets alone, then factors and offsets together.
    only = np.nanmean(copy_cells(copy, copy.x - copy.y), axis=1)
    for k, h in ((np.ones_like(only), only), (factor, offset)):
        wide, off = spread_over_copy(copy, k), spread_over_copy(copy, h)
        y, lattice = copy.y * wide + off, scale_lattice(copy.lattice, wide, off)
        if not copy.is_repaired(fit_errors(copy.x, y, lattice)):
            continue
        says = _minima_relation(copy, k, h)
        if says:
            said = f"{copy.whose} {says}", copy.scheme
            found = copy.explain_repaired("quant_min", said, y, lattice, 2 * factor.size)
            if found is not None:
                yield found
        return


def explain_scales_above_minima(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding of wrong scales with right minima: a factor on value minus minimum."""
    low = np.nanmin(copy_cells(copy, copy.lattice.low), axis=1)
    if not low.any() or not np.isfinite(low).all():
        return
    # Fit one factor to what lies above the minimum of each cell.
    base = spread_over_copy(copy, low)
    mine, source = (np.nan_to_num(copy_cells(copy, values - base)) for values in (copy.y, copy.x))
    square = (mine * mine).sum(1)
    factor = np.where(square > 0, (mine * source).sum(1) / np.where(square > 0, square, 1.0), 1.0)
    if not (np.isfinite(factor).all() and factor.all()):
        return
    wide = spread_over_copy(copy, factor)
    off = base * (1 - wide)
    after = fit_errors(copy.x, copy.y * wide + off, scale_lattice(copy.lattice, wide, off))
    wrong = np.abs(factor - 1) > NEAR
    if not copy.is_repaired(after) or wrong.mean() < 0.5:
        return
    relation = _scale_relation(copy, copy.scales * factor, wrong, after.relative)
    says = (
        f"{copy.whose} scales are wrong, their minima right: {relation or 'other ones stand there'}"
    )
    numbers = f"factors from {factor.min():.4g} to {factor.max():.4g}"
    yield explain_copy(copy, "quant_scale", (says, numbers, copy.scheme), after, factor.size)


def _minima_relation(copy: PackedCopy, factor: "Array", offset: "Array") -> str:
    """Return in words what was done to the stored minima; "" if nothing known fits.

    `factor` and `offset` [groups] are those that repair the copy.
    """
    low = np.nanmin(copy_cells(copy, copy.lattice.low), axis=1)
    step = np.nanmedian(copy_cells(copy, copy.lattice.step), axis=1)
    wrong = (np.abs(factor - 1) > NEAR) | (np.abs(offset) > step / 2)
    if wrong.mean() < 0.5:
        return ""  # damage of some blocks: nothing that was done to all

    def near(x: "Array", y: "Array") -> bool:
        """Return whether minima x and y are within 0.3 quantization steps in the median."""
        return bool(np.median(np.abs(x - y)) < 0.3 * np.median(step) * np.median(factor))

    # Only offsets are wrong: the minima themselves.
    if near(factor, np.ones_like(factor)) and (factor == 1).all():
        if near(offset, -2 * low):
            return "minima have the other sign: added where they are taken away"
        if near(low, np.zeros_like(low)):
            return "minima are lost: each group starts at 0"
        rows = -(-copy.y.shape[0] // (copy.grouping.rows or copy.y.shape[0]))
        right = (low + offset).reshape(rows, -1)
        for shift in (1, -1):
            if near(np.roll(right, shift, 1).reshape(-1), low):
                return f"minima are each that of the group {'before' if shift > 0 else 'after'}"
        return ""
    # Where every minimum is as many steps, no scale of the minima is seen.
    if near(offset, low * (1 / factor - factor)) and np.ptp(low / step) > 1:
        return (
            "scales are too large by the factors by which the minima are too small: the two are "
            "exchanged, those of groups or of blocks"
        )
    return ""


# --- groups of inputs -----------------------------------------------------------------------------


def explain_input_scales(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding that inputs have the scales of other groups: g_idx was ignored."""
    rows, count = copy.y.shape
    wide = copy.grouping.columns
    if copy.grouping.rows != 1 or not wide or not copy.bits or count % wide:
        return
    groups = count // wide
    if groups < 2 or rows * count * groups > FEW_COLUMNS:
        return
    # Find for every input the group whose scale fits it best.
    stored = copy.scales.reshape(rows, groups)
    own = np.arange(count) // wide
    best, least = own.copy(), np.full(count, np.inf)
    for group in range(groups):
        ratio = stored[:, group, None] / stored[:, own]
        error = ((copy.y * ratio - copy.x) ** 2).sum(0)
        better = error < least
        best[better], least[better] = group, error[better]
    # Repair all inputs at once and judge the errors.
    ratio = stored[:, best] / stored[:, own]
    found = copy.explain_repaired(
        "group_index",
        (f"{copy.whose} inputs have the scales of other groups: g_idx was ignored",
         f"{int((best != own).sum())} of {count} inputs"),
        copy.y * ratio, scale_lattice(copy.lattice, ratio), count,
    )  # fmt: skip
    if found is not None:
        yield found
