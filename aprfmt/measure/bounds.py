"""Tolerances of quantized values: steps of the encoding, and errors measured in such steps.

A *run* is neighbouring values of a row. A *group* is the elements that share a scale; a value
beyond its ends is clipped. A *copy* is the quantized tensor, its *source* the tensor that it was
made from.

A step is the distance between neighbouring representable values, the largest of the block's (of the
256-element superblock's, for K-quants). Measured on clean files without an importance matrix: no
element is further than one step from its source, while one moved weight is 2.7 steps off and more;
half a step of an element's own sub-block is the wrong bound.

Where the values that a weight could have had are known (`codecs.lattice`), its errors are measured
in its own steps. Rounding to the nearest gives half a step at most. GPTQ makes up for the error of
each column in those after it, so that values end up further away; measured on normal and heavy
tails, 2 to 8 bits, with and without order of activation: root mean square 0.28 to 0.42 steps, up to
2.3 % beyond one step, mean within 0.02, any 32 neighbours within 0.4 in the mean. Where inputs
depend on each other more, errors grow, up to a step and more, but the volume that they fill does
not (`_are_made_up_for`). AWQ and searches for the mean square clip: what lies beyond the ends of
its group may be any distance away. A zero point off by one is 1 in the mean; a wrong scale is a
slope. Where twice the steps would be nearer to the source, the scales are too small and no search
has chosen them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.codecs import CODECS
from aprfmt.codecs.base import is_padded
from aprfmt.codecs.lattice import Lattice
from aprfmt.formats.mapped_file import Buffer
from aprfmt.measure.coarse_steps import cell_size, split_blocks

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

# Typical NMSE (sum of squared errors over sum of squares) on heavy-tailed weights; with an
# importance matrix a single element proves nothing, so this and the share beyond a step decide.
NMSE: Mapping[str, float] = {
    "Q8_0": 7.4e-5, "Q6_K": 6.6e-4, "Q5_K": 2.2e-3, "Q5_0": 4.3e-3, "Q5_1": 4.3e-3,
    "Q4_K": 8.4e-3, "Q4_0": 1.6e-2, "Q4_1": 1.6e-2, "Q3_K": 5.0e-2, "Q2_K": 1.2e-1,
    "IQ4_NL": 1.2e-2, "IQ4_XS": 1.2e-2, "NF4": 1.6e-2, "FP4": 3.0e-2, "MXFP4": 3.0e-2,
    "APR_Q4": 2.0e-2,
}  # fmt: skip
NMSE_SLACK = 2.0  # a file twice as bad as the worst measured is worth a look
BEYOND_SHARE = 0.01  # share of elements beyond one step that importance matrices were seen to cause


def quantization_steps(
    encoding: str,
    parts: Mapping[str, Buffer],
    count: int,
    part: slice = slice(None),
    *,
    columns: int = 0,
    row_bytes: int | None = None,
) -> "Array | None":
    """Return the step of each of `count` elements, or of a slice of them (float32); or None.

    A step is the distance of neighbouring values of the encoding. None where it is not known.
    `parts` are the stored bytes of a weight by suffix, `part` is the slice. With `columns`, the
    elements of a row, only the bytes of a slice's blocks are read. `row_bytes` is given where rows
    may end in a padded block; the padding is no element.
    """
    if encoding not in CODECS:
        return None
    codec = CODECS[encoding].of_rows(columns) if columns else CODECS[encoding]
    if columns and row_bytes is not None and is_padded(codec.row, columns, row_bytes):
        rows, width = count // columns, row_bytes // codec.type_size * codec.block_size
        padded = codec.steps(parts, rows * width)
        return None if padded is None else padded.reshape(rows, width)[:, :columns].ravel()[part]
    start, stop, _ = part.indices(count)
    if columns and (start, stop) != (0, count) and start % codec.granule(parts, count) == 0:
        return codec.steps(codec.cut(parts, start, stop), stop - start)
    whole = codec.steps(parts, count)
    return None if whole is None else whole[part]


NEAR = 0.6  # steps: half of one, and the rounding of scales
NEARLY_ALL = 0.985  # with this share near, a copy was rounded to the nearest: nothing is far
FED_BACK_SHARE, FED_BACK_RMS = 0.05, 0.55  # about twice, and 1.3 times, the largest measured
MADE_UP_RMS = 1.0  # steps: as large when the inputs of a calibration depend on each other
MADE_UP_RUN = 3.0  # times the root mean square of all errors: of RUN neighbours
MADE_UP = 0.25  # nats a column: measured 0.13 and less, and 0.7 of values changed by a tenth
CALIBRATED = 512  # columns at most of which this is computed
FEWEST_ROWS = 32
ON_STEPS = 0.15  # steps: half of what rounding to the nearest makes, of values that are codes
CUT, FEWEST_CUT = 0.6, 3  # steps that codes are off which were cut, and how many at least
SAME_STEPS = 2.0**-7  # relative: by more, rounding to 16 bits moves no code off its step
OFF_STEP = 0.3  # steps: a value further off was rounded to the step, whatever its size
NEAREST_RMS = 0.5  # steps: 0.29 of rounding to the nearest, 0.58 of cutting off low bits
MEAN = 0.15  # of all errors, in steps
RUN, RUN_MEAN, RUN_RMS = 32, 0.75, 1.2  # neighbours in a row, and their errors
CLIPPED = 4.0  # times the end of its group: nothing that was clipped lay further out
SLOPE = 0.002  # systematic error of the size that rounded scales make
SURE = 4.0  # standard errors
MOST_ENDS = 0.75  # share of values that may be clipped: of one sign and a size, half of them are
MOST_FAR = 0.1  # share that may lie further beyond an end than its group is wide
MOST_SATURATED = 0.1  # share of runs that twice the steps would bring nearer to the source
SATURATED = 1.5  # times the squared errors of such steps: outliers are clipped for less
OUTSIDE = 1.6  # times the end of a group: by less, values are clipped on purpose
OWN_STEP = 2.0**-7  # relative: a step this near is that of rounding the whole range of a group
FEWEST_OWN, MOSTLY_OWN = 3, 0.9  # groups that were cut and have such a step; share of those cut
ONE_FACTOR, FEWEST_GROUPS = 0.97, 16  # share of the groups that have one factor, and of how many
WORSE = 1.05  # times the squared errors of rounding without the factor
FEWEST_LEVELS = 4  # steps of a group at least: of fewer, the values at the ends are most of them
WIDE_RUN = 256  # values of a row among which errors are no multiple of the copy
LITTLE = 0.25  # of the squared errors of a matrix that are no multiple of it
FOLLOWS = 0.7  # share of the errors that such a multiple is
MULTIPLE = 0.35  # share of the copy that it is: scales that are powers of two clip 0.33 of a run
UNLIKE = 0.4  # correlation below which such a run of the copy is no run of the source


@dataclass(frozen=True, slots=True)
class Fit:
    """Errors of a quantized copy in steps of its codes, without those of clipped values.

    `near` and `beyond` are the fractions of values within NEAR steps and beyond one. `mean` and
    `rms` are of all errors, `run_mean` and `run_rms` the largest of RUN neighbours. `slope` is the
    factor of the copy's values in the errors, `slope_limit` what rounding alone may make of it.
    `relative` is the relative L2 distance, `ends` the fraction of clipped values, `far` of those
    that lay further out than their group is wide. `multiple`: in WIDE_RUN values of a row the
    errors are a multiple of the copy, as of a wrong scale. `likeness` is the least cosine of such a
    run and the source. `cut` counts the values beyond the ends of their group where all others
    equal the copy, so that nothing was rounded. `saturated` is the fraction of RUN neighbours that
    steps twice as wide would bring nearer. `needless` counts the values that were cut by more than
    a step though their groups have the steps of plain rounding. `made_up`: large errors depend on
    each other as those do that GPTQ makes up for; `in_part`: that was seen of some columns only.
    `room` is the root mean square of what rounded scales may add to an error beyond a step; it is
    left out of `near`, `beyond` and `largest`.
    """

    count: int
    near: float
    beyond: float
    largest: float
    mean: float
    rms: float
    run_mean: float
    run_rms: float
    slope: float
    slope_limit: float
    relative: float
    ends: float = 0.0
    far: float = 0.0
    multiple: bool = False
    likeness: float = 1.0
    made_up: bool = False
    cut: int = 0
    in_part: bool = False
    saturated: float = 0.0
    room: float = 0.0
    needless: int = 0

    @property
    def saturates(self) -> bool:
        """Whether the scales are too small: more values were clipped than by any quantizer."""
        return self.saturated > MOST_SATURATED

    @property
    def how(self) -> str:
        """How the copy was quantized: to the nearest code, or with errors made up for, as by GPTQ.

        It is judged by the copy's errors, and given as a phrase; "" for errors that neither way
        makes.
        """
        lost = self.ends > MOST_ENDS or self.far > MOST_FAR or self.saturates
        if lost or self.multiple or self.cut or self.needless:
            return ""  # a copy whose codes are lost has ends alone, and ends bound any error
        steady = abs(self.slope) <= self.slope_limit
        chance = self.rms + self.room * WIDE_RUN**0.5  # a group's rounding is that of all of it
        centred = abs(self.mean) <= MEAN + SURE * chance / max(self.count, 1) ** 0.5
        if not (steady and centred):
            return ""
        if self.largest <= 1.0 and self.rms <= NEAREST_RMS + self.room:
            return "rounded to the nearest"
        most = max(RUN_RMS, MADE_UP_RUN * self.rms) if self.made_up else RUN_RMS
        if self.near >= NEARLY_ALL or self.run_mean > RUN_MEAN or self.run_rms > most:
            return ""
        if self.likeness < UNLIKE:
            return ""  # values of three levels are hardly more than a step from any others
        few = self.beyond <= FED_BACK_SHARE and self.rms <= FED_BACK_RMS
        few = few or (self.made_up and self.rms <= MADE_UP_RMS)
        return "rounded with the errors made up for, as GPTQ does" if few else ""

    def text(self) -> str:
        """Return as text the errors' root mean square, mean, largest, and fraction above a step."""
        return (
            f"errors in its own steps: root mean square {self.rms:.2g}, mean {self.mean:+.2g}, "
            f"largest {self.largest:.3g}, {100 * self.beyond:.2g} % beyond one"
        )


def fit_errors(x: "Array", y: "Array", lattice: Lattice) -> Fit:
    """Return the errors of a quantized copy `y` of `x`, in steps of the copy, summed up as a Fit.

    They tell whether the copy is an honest rounding. Both arrays are [..., columns]. `lattice` has
    the step, lowest and highest value of each element. A value clipped at these ends has no error,
    unless it lay far beyond them; an error that rounded scales explain (`room`) does not count.
    """
    # Errors in steps; without a step only equal values have none.
    matrices = math.prod(x.shape[:-2])
    columns = x.shape[-1] if x.ndim > 1 else x.size
    x, y = (np.asarray(v, np.float64).reshape(-1, columns) for v in (x, y))
    step, low, high = (np.asarray(v, np.float64).reshape(x.shape) for v in lattice[:3])
    low, high = np.minimum(low, high), np.maximum(low, high)
    delta = y - x
    with np.errstate(all="ignore"):
        error = np.where(delta == 0, 0.0, delta / step)
        # What the rounding of scales may make of a value, and then of all of them.
        slack = 0.0 if lattice.room is None else np.reshape(lattice.room, x.shape) / step
    error = np.where(np.isfinite(error), error, np.inf)
    room = float(np.mean(np.square(slack)) ** 0.5)
    # Values beyond the ends of their group were clipped: they do not count.
    reach = CLIPPED * np.maximum(np.abs(low), np.abs(high))
    above, below = y >= high - step / 4, y <= low + step / 4
    clipped = (above & (delta < 0)) | (below & (delta > 0))
    error[clipped & (np.abs(x) <= reach)] = 0.0
    # Shares and moments of what is left, and the systematic part (slope).
    inner = ~clipped & np.isfinite(error)
    size = np.maximum(np.abs(error) - slack, 0.0)
    finite = np.where(np.isfinite(error), error, 1e6)
    # At an end only values that were rounded outwards are left: alone they are a slope.
    inside = inner & ~above & ~below
    if not clipped.any() or 2 * int(inside.sum()) < inner.size:
        inside = inner
    norm = float((x * x).sum())
    apart = np.where(inside, delta, 0.0)
    slope, limit = _fit_slope(apart, y, step, inside, max(matrices, 1))
    mean, rms = _worst_runs(finite)
    multiple, likeness = _worst_wide_runs(x, y)
    far = clipped & (np.abs(delta) > high - low)
    beyond = float((size > 1).mean())
    spread = float((finite[inner] ** 2).mean() ** 0.5) if inner.any() else 0.0
    large = beyond > FED_BACK_SHARE or spread > FED_BACK_RMS or rms > RUN_RMS
    made_up = large and spread <= MADE_UP_RMS and _are_made_up_for(delta, step, matrices)
    return Fit(
        x.size,
        float((size <= NEAR).mean()),
        beyond,
        float(size.max(initial=0.0)),
        float(finite.mean()),
        spread,
        mean,
        rms,
        slope,
        limit,
        float((delta**2).sum() / norm) ** 0.5 if norm else 0.0,
        float((clipped & (delta != 0)).mean()) if x.size else 0.0,
        float(far.mean()) if x.size else 0.0,
        multiple,
        likeness,
        made_up,
        _count_cut_codes(
            x,
            np.where(np.abs(error) <= slack, 0.0, error),
            clipped,
            np.abs(delta) > CUT * step,
            np.maximum(np.abs(low), np.abs(high)) / np.where(step > 0, step, 1.0),
        ),
        made_up and columns > _most_columns(len(x) // max(matrices, 1)),
        _share_of_saturated(delta, step, clipped & _lie_outside(x, low, high), high - low),
        room if math.isfinite(room) else 0.0,
        _count_needless_cuts(x, y, Lattice(step, low, high), slack),
    )


def _fit_slope(
    apart: "Array", y: "Array", step: "Array", inside: "Array", matrices: int
) -> tuple[float, float]:
    """Return (slope of the errors over the copy's values, the limit for it).

    A slope beyond the limit is more than rounding makes: the copy has a wrong scale. Of several
    matrices it is the one whose slope is furthest beyond its limit. All arrays are [rows of all
    matrices, columns]. `apart` are the errors, 0 except at the values marked `inside`, which are
    counted; `step` are the steps.
    """
    steepest = 0.0, SLOPE
    for errors, copy, steps, those in zip(
        *(np.split(one, matrices) for one in (apart, y, step, inside)), strict=True
    ):
        copied = float((copy * copy)[those].sum())
        if not copied:
            continue
        slope = float((errors * copy).sum()) / copied
        # Where the same codes have another scale, the errors are a multiple of the copy.
        whole = float((errors**2).sum())
        rest = max(whole - slope**2 * copied, 0.0)
        size = whole if rest > LITTLE * whole else rest
        usual = min(size, 0.25 * float((steps[those] ** 2).sum()))
        # Of what is not an end of its group: in small groups the ends hold most of the norm.
        relative, many = usual / copied, max(int(those.sum()), 1)
        limit = 2 * relative + SLOPE + SURE * (relative / many) ** 0.5
        if abs(slope) * steepest[1] > abs(steepest[0]) * limit or matrices == 1:
            steepest = slope, limit
    return steepest


def _count_cut_codes(
    x: "Array", error: "Array", clipped: "Array", off: "Array", reach: "Array"
) -> int:
    """Return the number of values cut at the ends of their group, if nothing else differs; else 0.

    0 if any other value was rounded, or too few values are nonzero. `clipped` marks the values at
    the ends, `off` those more than CUT steps away. `error`, and `reach`, the larger end of the
    group, are in steps. An error beyond what 16-bit storage explains counts as rounding.
    """
    cut = int((clipped & off).sum())
    told = ~clipped & (x != 0)
    if cut < FEWEST_CUT or 2 * int(told.sum()) < x.size - int((x == 0).sum()):
        return 0
    rounded = np.abs(error) > np.minimum(SAME_STEPS * reach, OFF_STEP)
    on_steps = float((error[told] ** 2).mean()) <= ON_STEPS**2
    return cut if on_steps and not (rounded & told).any() else 0


def _count_needless_cuts(x: "Array", y: "Array", lattice: Lattice, slack: "Array | float") -> int:
    """Return the number of values cut by more than a step at the ends of a group for nothing; or 0.

    Whoever clips on purpose gets smaller steps for it, of another size in every group. Here all
    other values are rounded to the nearest, and the steps of the groups are those of rounding
    their whole range, with an offset (or, with more errors in all, one factor of those without an
    offset). So the codes were cut after the steps were chosen. All arrays are [rows, columns];
    `slack` is what rounded scales may add to an error, in steps.
    """
    step, low, high, _ = lattice
    with np.errstate(all="ignore"):
        # Ends are as far off as the scale was rounded, which codes of 8 bits see as steps.
        cut = np.maximum(x - high, low - x) > (1 + slack) * step + OWN_STEP * (high - low)
    if int(cut.sum()) < FEWEST_CUT or not (step > 0).all() or not np.isfinite(high - low).all():
        return 0
    off = np.abs(np.clip(x, low, high) - y)
    if float((off <= (NEAR + slack) * step).mean()) < NEARLY_ALL:
        return 0
    tall, wide = (size or whole for size, whole in zip(cell_size(lattice), x.shape, strict=True))
    if x.shape[0] % tall or x.shape[1] % wide:
        return 0

    cells = partial(split_blocks, tall=tall, wide=wide)  # [groups, elements]
    steps = cells(step)
    own = steps[:, 0]
    if not np.allclose(steps, own[:, None], rtol=OWN_STEP, atol=0):
        return 0  # floats, or codes of a table: their ends are where their steps are widest
    source, was_cut = cells(x), cells(cut).any(axis=1)
    levels = float(np.rint((cells(high - low)[:, 0] / own).max()))
    bits = math.ceil(math.log2(levels + 1)) if levels >= 1 else 1
    least, most = source.min(axis=1), source.max(axis=1)
    # With an offset: the steps divide the range of the group, with or without zero in it.
    ranges = most - least, np.maximum(most, 0) - np.minimum(least, 0)
    plain = np.zeros(len(own), bool)
    for each in ranges:
        plain |= np.abs(each / ((2**bits - 1) * own) - 1) <= OWN_STEP
    if int((plain & was_cut).sum()) >= FEWEST_OWN and plain[was_cut].mean() >= MOSTLY_OWN:
        return int(cut.sum())
    # Without one: the steps divide the largest value, all by the same number.
    size = np.maximum(np.abs(least), np.abs(most))
    times = size / own
    alike = np.abs(times / np.median(times) - 1) <= OWN_STEP
    if bits < 2 or len(own) < FEWEST_GROUPS or float(alike.mean()) < ONE_FACTOR:
        return 0
    usual = np.square(size / (2 ** (bits - 1) - 1)).sum() * tall * wide / 12
    return int(cut.sum()) if float(np.square(x - y).sum()) > WORSE * float(usual) else 0


def _lie_outside(x: "Array", low: "Array", high: "Array") -> "Array":
    """Return a bool array: True where a value is further from its group's middle than it may be.

    The limit is a multiple of the group's width, `high` less `low`.
    """
    found: Array = np.abs(2 * x - high - low) > OUTSIDE * (high - low)
    return found


def _share_of_saturated(delta: "Array", step: "Array", clipped: "Array", width: "Array") -> float:
    """Return the fraction of runs of RUN values that steps twice as wide would bring nearer.

    `delta` are errors, `step` the steps, `clipped` marks values far beyond the ends of their group
    and `width` is the distance of these ends, all [rows, columns]. A run counts whose squared
    errors are far above those of rounding to the nearest with twice the step.
    """
    whole = delta.shape[1] // RUN * RUN
    if not whole or not clipped.any():
        return 0.0
    told = clipped & (width >= FEWEST_LEVELS * step)
    errors, wider, any_told = (
        part[:, :whole].reshape(-1, RUN) for part in (delta**2, (2 * step) ** 2 / 12, told)
    )
    worse = any_told.any(1) & (errors.sum(1) > SATURATED * wider.sum(1))
    return float(worse.mean())


def _are_made_up_for(delta: "Array", step: "Array", matrices: int) -> bool:
    """Return whether errors are those of rounding with later columns making up for it, as in GPTQ.

    Each column's own rounding is up to half a step, and the columns after it are changed to
    compensate for it: the errors are these roundings times one triangular matrix with ones on the
    diagonal. So the determinant of their covariance is that of the roundings, in whatever order the
    columns were rounded, while any other change makes it larger. `delta` are errors and `step`
    their steps, [rows of all matrices, columns]; each matrix had its own inputs.
    """
    if not matrices or not np.isfinite(delta).all():
        return False
    each = zip(np.split(delta, matrices), np.split(step, matrices), strict=True)
    return all(_excess_of_errors(*one) <= MADE_UP for one in each)


def _most_columns(rows: int) -> int:
    """Return the largest number of columns whose covariance `rows` rows of errors determine."""
    return min(rows // 2, CALIBRATED)


def _excess_of_errors(delta: "Array", step: "Array") -> float:
    """Return log(determinant of the errors' covariance / that of roundings) / number of columns.

    With few rows only the columns with the smallest errors count, those that were rounded first.
    Infinite where it cannot be computed. `delta` are errors and `step` their steps, [rows,
    columns].
    """
    unit = np.median(step, axis=1)
    rows = np.isfinite(unit) & (unit > 0)
    count = int(rows.sum())
    few = min(delta.shape[1], _most_columns(count))
    if count < FEWEST_ROWS or few < FEWEST_ROWS // 2:
        return math.inf
    errors, steps = (part[rows] / unit[rows, None] for part in (delta, step))
    usual = np.sqrt((steps**2).mean(0) / 12)  # of a rounding to the nearest
    if not (np.isfinite(usual).all() and usual.all()):
        return math.inf
    errors = errors / usual
    errors = errors[:, np.argsort((errors**2).mean(0), kind="stable")[:few]]
    sign, volume = np.linalg.slogdet(errors.T @ errors / count)
    biased = float(np.log1p(-np.arange(few) / count).sum())  # of so many rows
    return (float(volume) - biased) / few if sign > 0 else math.inf


def _worst_wide_runs(x: "Array", y: "Array") -> tuple[bool, float]:
    """Return (whether a wrong scale explains some run's error, smallest cosine of any run).

    A run is WIDE_RUN values of a row, or all of a shorter row of at least RUN. `x` is the source
    and `y` the copy, [rows, columns]; the cosine is that between both. A scale is wrong where the
    error is mostly a multiple of the copy, as rounding errors are not. Runs that are zero in one of
    the two are left out.
    """
    columns = x.shape[1]
    wide = min(WIDE_RUN, columns)
    if wide < RUN or not x.size:
        return False, 1.0
    cut = columns // wide * wide
    source, copy = (part[:, :cut].reshape(-1, wide) for part in (x, y))
    xx, yy, xy = (
        np.einsum("ij,ij->i", *two) for two in ((source, source), (copy, copy), (source, copy))
    )
    known = (xx > 0) & (yy > 0) & np.isfinite(xx) & np.isfinite(yy)
    if not known.any():
        return False, 1.0
    xx, yy, xy = xx[known], yy[known], xy[known]
    error, along = np.maximum(xx + yy - 2 * xy, 0.0), yy - xy
    multiple = (along**2 > FOLLOWS * error * yy) & (np.abs(along) > MULTIPLE * yy)
    return bool(multiple.any()), float((xy / np.sqrt(xx * yy)).min())


def _worst_runs(error: "Array") -> tuple[float, float]:
    """Return (largest absolute mean, largest root mean square) of RUN consecutive errors.

    `error` is [rows, columns]; both are 0.0 if rows are shorter than RUN.
    """
    whole = error.shape[1] // RUN * RUN
    if not whole or not error.size:
        return 0.0, 0.0
    runs = error[:, :whole].reshape(-1, RUN)
    return float(np.abs(runs.mean(1)).max()), float((runs**2).mean(1).max() ** 0.5)
