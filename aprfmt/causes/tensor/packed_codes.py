"""Faults of a packed copy's codes: zero points, signs, a wrong 8-bit float, a wrong order.

A *copy* is a quantized tensor next to the tensor of the other file, its *source*. A *group* is the
elements that share a scale. A and B are the two files that are compared; a *side* is one of them,
or its tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.packed_copies import (
    GONE,
    PackedCopy,
    copy_cells,
    explain_copy,
    reorder_lattice,
    scale_lattice,
    spread_over_copy,
)
from aprfmt.causes.tensor.packed_scales import cell_factors, cell_factors_and_offsets
from aprfmt.codecs import fp8
from aprfmt.codecs.lattice import Lattice
from aprfmt.codecs.weight_layout import AWQ_BACK, AWQ_ORDER
from aprfmt.measure.bounds import ON_STEPS, fit_errors
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.findings import Finding

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "zero_point", "tensor", "bug",
        "The zero points of a packed weight are off: by one (GPTQ's two formats), or by half the "
        "codes (signed for unsigned).",
        "The errors of every group are one whole number of its steps.",
        "Moving the zero points by it leaves errors that are usual for the encoding.",
    ),
    Cause(
        "packing_order", "tensor", "bug",
        "The codes of a packed weight stand in another order in their words or blocks: AWQ's for "
        "GPTQ's, the high nibble first, halves for neighbours. Or groups have those of others.",
        "Values of every word correlate with those of the other side in one fixed order.",
        "In the named order the errors are usual for the encoding.",
    ),
    Cause(
        "group_index", "tensor", "bug",
        "Inputs are scaled by other groups than theirs: g_idx ignored or lost, or another size of "
        "groups.",
        "Columns, each as a whole, have the scales of another group.",
        "With a group found for every input the errors are usual for the encoding.",
    ),
    Cause(
        "clipped_codes", "tensor", "bug",
        "Codes were carried over to a type that holds fewer, in the same steps, and cut at its "
        "ends: zero points folded into signed codes of as many bits. Or the scales are too small "
        "for the values, which saturate: an exponent rounded down. Or codes were cut after scales "
        "were chosen that hold all values.",
        "Values at the ends of their group lie further off than a rounding; all others are equal, "
        "or rounded as usual.",
        "The other side's values cut at these ends are this side's.",
    ),
    Cause(
        "fp8_variant", "tensor", "bug",
        "The bytes of one 8-bit float are read as another: E4M3, E5M2, or one of their FNUZ kin.",
        "Values of the other format's codes, or half or twice as large.",
        "Read as the named format they have errors that are usual for it.",
    ),
)  # fmt: skip

POWERS = 32  # of two: scales of floats are known up to them, as the largest that fit
ROUNDED = 2.0**-7  # relative: half a step, where scales or values were rounded to 16 bits
WORD = 8  # codes of four bits in a word
ALIKE = 0.6  # correlation from which an order is worth a fit
GROUP_SIZES = 128, 64, 32  # inputs of a group, where a scale is that of a whole row
GROUP_ROWS = 64  # rows on which the group that a group resembles is found


def _errors_in_steps(copy: PackedCopy) -> "Array":
    """Return (y - x) in quantization steps of the copy, [rows, columns]; 0 without a step."""
    step = copy.lattice.step
    return np.where(step > 0, (copy.y - copy.x) / np.where(step > 0, step, 1.0), 0.0)


def explain_zero_points(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding that zero points are off by one integer, in all or some groups."""
    if not copy.bits:
        return
    # Find the whole number of steps by which the cells are off.
    middle = np.nanmedian(copy_cells(copy, _errors_in_steps(copy)), axis=1)
    whole = np.round(middle)
    usual = int(np.median(whole[whole != 0])) if whole.any() else 0
    if not usual or abs(usual) > 1 << copy.bits:
        return
    whole = np.where(np.abs(middle - usual) <= np.abs(middle), usual, 0)
    off = spread_over_copy(copy, whole) * copy.lattice.step
    # Say it, with the usual reason for such a number.
    many, way = abs(usual), "low" if usual > 0 else "high"
    said = "one" if many == 1 else str(many)
    says = f"{copy.whose} zero points are {said} too {way}: every value is {said} step"
    says += ("s" if many > 1 else "") + (" too large" if usual > 0 else " too small")
    hint: tuple[str, ...] = ()
    if many == 1:
        hint = (
            "GPTQ's first format stores a zero point less one, its second the zero point itself",
        )
    elif many == 1 << copy.bits - 1:
        hint = ("the middle of the codes: those of signed integers were taken for unsigned ones",)
    wrong = int((whole != 0).sum())
    where = () if wrong == whole.size else (f"in {wrong} of {whole.size} groups",)
    found = copy.explain_repaired(
        "zero_point", (says, *where, *hint), copy.y - off, scale_lattice(copy.lattice, 1.0, -off), 1
    )
    if found is not None:
        yield found


def explain_group_zero_points(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding that zero points are off by integers that differ between groups."""
    if not copy.bits:
        return
    whole = np.round(np.nanmedian(copy_cells(copy, _errors_in_steps(copy)), axis=1))
    if not whole.any():
        return
    # Move every cell by its own number of steps.
    off = spread_over_copy(copy, whole) * copy.lattice.step
    says = f"{copy.whose} zero points are those of other groups, or other numbers"
    numbers = f"off by {whole.min():+.0f} to {whole.max():+.0f} steps"
    where = f"in {int((whole != 0).sum())} of {whole.size} groups"
    found = copy.explain_repaired(
        "zero_point",
        (says, numbers, where),
        copy.y - off,
        scale_lattice(copy.lattice, 1.0, -off),
        whole.size,
    )
    if found is not None:
        yield found


def explain_signs(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding that signed codes were read as codes with an offset, or the reverse."""
    if not copy.bits:
        return
    half = 1 << copy.bits - 1
    errors = _errors_in_steps(copy)
    if np.mean(np.abs(np.abs(errors) - half) < 1.0) < 0.9:
        return
    off = np.sign(errors) * half * copy.lattice.step
    # The lower half of the codes is too low, the upper too high, in every group, or the reverse.
    split = copy_cells(copy, copy.y), copy_cells(copy, np.sign(errors))
    for sign in (1, -1):
        upper = np.nanmin(np.where(split[1] == sign, split[0], np.inf), axis=1)
        lower = np.nanmax(np.where(split[1] == -sign, split[0], -np.inf), axis=1)
        if (upper > lower).all():
            wide = scale_lattice(copy.lattice, 1.0)._replace(
                low=-np.full(off.shape, np.inf), high=np.full(off.shape, np.inf)
            )
            says = f"{copy.whose} codes are signed where they have an offset of {half}, or reverse"
            found = copy.explain_repaired("zero_point", (says,), copy.y - off, wide)
            if found is not None:
                yield found


def explain_cut_codes(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding that codes beyond their type's range were clipped, all others equal."""
    fit = copy.fit()
    if not fit.cut:
        return
    after = fit_errors(_cut_at_ends(copy), copy.y, copy.lattice)
    if not after.how or after.rms > ON_STEPS:
        return
    off = np.abs(_errors_in_steps(copy))
    says = f"{copy.whose} codes are {copy.other} in the same steps, cut at the ends of their type"
    many = f"{fit.cut} of {fit.count} values, by up to {off.max():.0f} steps"
    said = says, many, copy.scheme
    yield explain_copy(copy, "clipped_codes", said, after, 0, float(fit.cut))


def _cut_at_ends(copy: PackedCopy) -> "Array":
    """Return the other side's values [rows, columns], clipped to the range of the copy's groups."""
    low, high = copy.lattice.low, copy.lattice.high
    return np.clip(copy.x, np.minimum(low, high), np.maximum(low, high))


def explain_needless_cuts(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding that codes were cut after scales were chosen that held all the values.

    The other side's values, rounded with the copy's steps and clipped to the same range, must be
    the copy's.
    """
    fit = copy.fit()
    if not fit.needless:
        return
    after = fit_errors(_cut_at_ends(copy), copy.y, copy.lattice)
    if not after.how:
        return
    off = np.abs(_errors_in_steps(copy))
    ends = []
    for end, sign in ((copy.lattice.low, -1), (copy.lattice.high, 1)):
        there = sign * (copy.x - end) > copy.lattice.step
        if there.any():
            ends.append(f"{np.median(end[there] / copy.lattice.step[there]):z.0f}")
    says = (
        f"{copy.whose} codes are cut at {' and '.join(ends)} steps, after scales were chosen by "
        "another range"
    )
    many = f"{fit.needless} of {fit.count} values are cut, by up to {off.max():.3g} steps"
    said = says, many, copy.scheme
    yield explain_copy(copy, "clipped_codes", said, after, 0, float(fit.needless))


def explain_saturation(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding that scales are too small for the values, which were clipped.

    The other side's values, clipped to the same range, must be the copy's within half a step; if
    the other side is quantized, too, within half a step of both.
    """
    fit = copy.fit()
    if not fit.saturates:
        return
    held = _cut_at_ends(copy)
    after = fit_errors(held, copy.y, copy.lattice)
    own = copy.source.side.lattice
    room = copy.lattice.step / 2
    if own is not None:
        steps = np.asarray(own.step, np.float64).reshape(-1, copy.source.columns)
        room = room + (steps if copy.rows is None else steps[copy.rows]) / 2
    if not (np.abs(held - copy.y) <= room * (1 + ROUNDED)).all():
        return
    beyond = (copy.x != held) & (np.abs(copy.x - copy.y) > copy.lattice.step / 2)
    off = np.abs(_errors_in_steps(copy))
    says = f"{copy.whose} scales are too small: values beyond the ends of their groups were cut"
    many = f"{int(beyond.sum())} of {fit.count} values, by up to {off.max():.3g} steps"
    worse = (
        f"twice the scales are nearer to {copy.other} in {100 * fit.saturated:.0f} % of the runs"
    )
    yield explain_copy(
        copy, "clipped_codes", (says, many, worse, copy.scheme), after, 0, float(beyond.sum())
    )


# --- other 8-bit floats ---------------------------------------------------------------------------


def explain_fp8_variant(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding that bytes of one 8-bit float were decoded as another, then scaled.

    Nothing where one factor for each group explains the values as they were read: two tables may
    differ by a factor alone (E4M3FNUZ is half of E4M3 but for one code), which a scale absorbs.
    """
    kinds = {kind.name: kind.values.astype(np.float64) for kind in fp8.OF_TWO_SIGNS}
    read = next((name for name in kinds if name.removeprefix("F8_") in copy.scheme), "")
    if not read or not copy.again:
        return
    factor = spread_over_copy(copy, cell_factors(copy, copy.y))
    scaled = fit_errors(copy.x, copy.y * factor, scale_lattice(copy.lattice, factor))
    if copy.is_repaired(scaled):
        return
    for name, other in kinds.items():
        if name == read:
            continue
        y, lattice = _reread_codes(copy, kinds[read], other)
        if not rel_l2(y, copy.x) <= GONE * scaled.relative:
            continue  # no nearer than the factors alone bring the values as they were read
        says = f"{copy.whose} bytes are {name} and were read as {read}"
        found = copy.explain_repaired("fp8_variant", (says,), y, lattice)
        if found is not None:
            yield found
            return


def _reread_codes(copy: PackedCopy, read: "Array", table: "Array") -> tuple["Array", Lattice]:
    """Return (values, lattice) of a copy with its codes' bytes read by another table.

    `read` is the table that they were read by, `table` the other one: the value of each byte. A
    group's scale is known up to a power of two, and each gives other bytes: for each group the
    one nearest to the source is used. A group without any is infinite.
    """
    finite = np.flatnonzero(np.isfinite(read))
    order = finite[np.argsort(read[finite], kind="stable")]
    levels = read[order]
    best = np.full(copy.y.shape, np.inf)
    step, least = np.ones(copy.y.shape), np.full(copy.scales.size, np.inf)
    # Try each power of two as the factor on the cells' scales.
    for power in range(-POWERS, POWERS // 8):
        unit = spread_over_copy(copy, np.where(copy.scales != 0, copy.scales * 2.0**power, 1.0))
        near = np.searchsorted((levels[:-1] + levels[1:]) / 2, copy.y / unit)
        values = table[order[near]]
        # A cell counts only if all its values are numbers of the table.
        right = np.isclose(levels[near] * unit, copy.y, rtol=2.0**-6, atol=0)
        values = np.where(right, values, np.nan)
        valid = np.isfinite(
            np.where(np.isnan(copy_cells(copy, copy.y)), 0, copy_cells(copy, values))
        ).all(1)
        if not valid.any():
            continue
        values = np.nan_to_num(values)
        factor = spread_over_copy(copy, cell_factors(copy, values))
        # Keep for each cell the power that comes nearest to the source.
        apart = np.nansum(
            (copy_cells(copy, values * factor) - copy_cells(copy, copy.x)) ** 2, axis=1
        )
        nearer = valid & (apart < least)
        least[nearer] = apart[nearer]
        chosen = spread_over_copy(copy, nearer)
        best = np.where(chosen, values * factor, best)
        step = np.where(chosen, _float_lattice(values, table, factor).step, step)
    far = np.full(step.shape, np.inf)
    return best, Lattice(step, -far, far)


def _float_lattice(values: "Array", table: "Array", factor: "Array") -> Lattice:
    """Return the Lattice of 8-bit float `values` times `factor`: their gaps, without a range.

    `table` has all values of the type. A gap is the larger of those to both neighbours.
    """
    levels = np.unique(table[np.isfinite(table)])
    near = np.minimum(np.searchsorted(levels, values), len(levels) - 1)  # above all: no value
    gaps = np.diff(levels)
    step = np.maximum(np.append(gaps, 0), np.insert(gaps, 0, 0))[near] * np.abs(factor)
    far = np.full(step.shape, np.inf)
    return Lattice(step, -far, far)


# --- orders ---------------------------------------------------------------------------------------


@cache
def _known_orders() -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (words, order) of the wrong orders that writers give the codes of a word or block."""
    rows = [
        ("AWQ's order of eight codes in a word was not undone", AWQ_BACK),
        (
            "AWQ's order of eight codes in a word was undone twice, or where codes stand in plain "
            "order",
            AWQ_ORDER,
        ),
        ("the two halves of each byte are exchanged", (1, 0)),
        ("the codes of a word stand in reverse", tuple(range(7, -1, -1))),
    ]
    for width in (16, 32, 64, 128):
        half = width // 2
        mixed = tuple(i // 2 + half * (i % 2) for i in range(width))
        rows += [
            (f"the low halves of {half} bytes are one run, not every second value", mixed),
            (
                f"the low halves of {half} bytes are every second value, not one run",
                tuple(sorted(range(width), key=mixed.__getitem__)),
            ),
        ]
    return tuple(rows)


def explain_input_order(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding of codes in another order along the inputs, if a known one fits."""
    yield from _explain_orders(copy, 1, _known_orders())


def explain_output_order(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding of codes in another order along the outputs, if a known one fits."""
    if copy.rows is None:
        yield from _explain_orders(copy, 0, [row for row in _known_orders() if len(row[1]) <= WORD])


def _explain_orders(
    copy: PackedCopy, axis: int, patterns: Sequence[tuple[str, tuple[int, ...]]]
) -> Iterator[Finding]:
    """Yield the finding that codes are in one of some wrong orders along an axis.

    `axis` is 0 for outputs and 1 for inputs; `patterns` are (words, order).
    """
    size, apart = copy.y.shape[axis], 1 - _row_correlation(copy.x, copy.y)
    for text, pattern in patterns:
        if size % len(pattern):
            continue
        order = (np.arange(size).reshape(-1, len(pattern))[:, list(pattern)]).reshape(-1)
        rows, columns = (order, slice(None)) if axis == 0 else (slice(None), order)
        y = copy.y[rows][:, columns]
        near = _row_correlation(copy.x, y)
        if near < ALIKE or 1 - near > apart / 2:  # neighbours that are alike have no order
            continue
        what = "inputs" if axis else "outputs"
        says = f"{copy.whose} codes stand in another order along the {what}: {text}"
        moved = replace(copy, y=y, lattice=reorder_lattice(copy.lattice, rows, columns))
        found = _confirm_order(copy, moved, says)
        if found is not None:
            yield found
            return


def _confirm_order(copy: PackedCopy, moved: PackedCopy, says: str) -> Finding | None:
    """Return the finding of a copy whose codes are in another order; None if that is not so.

    `moved` is the copy with its codes put in order. It is also tried with new scales, then with new
    zero points too, as those may have stayed in place.
    """
    found = copy.explain_repaired("packing_order", (says,), moved.y, moved.lattice)
    if found is None:
        factor = spread_over_copy(copy, cell_factors(copy, moved.y))
        said = says, "the scales did not move with them"
        y, lattice = moved.y * factor, scale_lattice(moved.lattice, factor)
        found = copy.explain_repaired("packing_order", said, y, lattice)
    if found is None:
        factor, offset = (spread_over_copy(copy, part) for part in cell_factors_and_offsets(moved))
        said = says, "scales and zero points did not move with them"
        y, lattice = moved.y * factor + offset, scale_lattice(moved.lattice, factor, offset)
        found = copy.explain_repaired("packing_order", said, y, lattice)
    return found


def explain_copied_groups(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding that groups of inputs hold the codes, or the values, of other groups.

    The group of the other side that each group resembles is found on some rows. Then the other
    side's values of these groups, with the copy's scales and offsets or as they are, must be the
    copy's.
    """
    if copy.grouping.rows != 1:
        return
    columns = copy.y.shape[1]
    for size in (copy.grouping.columns,) if copy.grouping.columns else GROUP_SIZES:
        if columns % size == 0 and columns > size:
            found = _explain_groups(copy, size)
            if found is not None:
                yield found
                return


def _explain_groups(copy: PackedCopy, size: int) -> Finding | None:
    """Return the finding that groups of `size` inputs hold those of other groups; None if not."""
    source = _resembled_groups(copy.x, copy.y, size)
    if source is None:
        return None
    inputs = (source[:, None] * size + np.arange(size)).reshape(-1)
    scales = spread_over_copy(copy, copy.scales)
    low = np.minimum(copy.lattice.low, copy.lattice.high)
    there = copy.x[:, inputs]
    with np.errstate(all="ignore"):
        codes = np.nan_to_num((there - low[:, inputs]) / scales[:, inputs])
    moved = float(copy.y.size * np.mean(source != np.arange(len(source))))
    for what, x in (("values", there), ("codes", low + codes * scales)):
        after = fit_errors(x, copy.y, copy.lattice)
        if copy.is_repaired(after):
            said = f"{copy.whose} groups of {size} inputs have the {what} of other groups"
            says = f"{said}: {_groups_text(source)}", copy.scheme
            return explain_copy(copy, "packing_order", says, after, len(source), moved)
    return None


def _resembled_groups(x: "Array", y: "Array", size: int) -> "Array | None":
    """Return the group of x that each group of `size` columns of y resembles most, [groups].

    None if that is each group itself, or if some group resembles none. A group without values
    counts as itself.
    """
    few = np.unique(np.linspace(0, len(x) - 1, GROUP_ROWS).astype(np.int64))

    def normalized_groups(values: "Array") -> "Array":
        """Return the rows looked at as [groups, rows * size], each group of a row of L2 norm 1.

        `values` are [rows, columns]. A group of zeros stays zero.
        """
        cells = values[few].reshape(len(few), -1, size)
        norm = np.linalg.norm(cells, axis=-1, keepdims=True)
        cells = cells / np.where(norm > 0, norm, 1.0)
        found: Array = cells.swapaxes(0, 1).reshape(cells.shape[1], -1)
        return found

    mine, other = normalized_groups(y), normalized_groups(x)
    norms = [np.maximum(np.linalg.norm(part, axis=1), 1e-30) for part in (mine, other)]
    alike = (mine @ other.T) / norms[0][:, None] / norms[1]
    source, own = alike.argmax(axis=1), np.arange(len(mine))
    source = np.where(mine.any(axis=1), source, own)
    found: Array = source
    if (source == own).all() or alike[own, source][mine.any(axis=1)].min() < ALIKE:
        return None
    return found


def _groups_text(source: "Array") -> str:
    """Return in words which group each has the codes of, `source` [groups]."""
    count, own = len(source), np.arange(len(source))
    other = np.flatnonzero(source != own)
    if len(np.unique(source)) == 1:
        known = {0: "the first one", count - 1: "the last one"}
        return f"all have those of {known.get(int(source[0]), f'group {source[0]}')}"
    if (source == own[::-1]).all():
        return "they stand in reverse"
    for many in range(2, count + 1):
        if (source == own // many).all():
            return f"each {many} have those of one"
        if (source == own // many * many).all():
            return f"each {many} have those of their first"
        if count % many == 0 and (source == own % (count // many)).all():
            return f"those of the first 1/{many} of the inputs stand {many} times"
    which = "each has" if len(other) >= count - 1 else f"{len(other)} of {count} have"
    for by, side in ((1, "after"), (-1, "before")):
        if (source[other] == (other + by) % count).all():
            return f"{which} those of the one {side}"
    return f"{len(other)} of {count} have those of {len(np.unique(source[other]))} others"


def _row_correlation(x: "Array", y: "Array") -> float:
    """Return the correlation of `x` and `y` over a few evenly spaced rows."""
    few = np.unique(np.linspace(0, len(x) - 1, 32).astype(np.int64))
    return float(np.corrcoef(x[few].reshape(-1), y[few].reshape(-1))[0, 1])
