"""Hypotheses with arithmetic: 1 added, a factor, rounding, quantization.

A and B are the two files that are compared; a *side* is one of them, or its tensor. A *guess* is a
change of one tensor of a pair after which both should be equal.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.sequences import join_first
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.differing_pair import DifferingPair, row_distances
from aprfmt.causes.tensor.guess import Guess, PairHypothesis, Take
from aprfmt.causes.tensor.packed_copies import packed_copies, scale_lattice
from aprfmt.causes.tensor.proof import accused_proof, make_finding, prove_values
from aprfmt.codecs import codec, decode, encode
from aprfmt.errors import AprfmtError
from aprfmt.measure.bounds import RUN, fit_errors
from aprfmt.measure.encoding_noise import UNIT, storage_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader
from aprfmt.measure.tensors import largest_steps
from aprfmt.quantizing.row_encoding import encode_rows
from aprfmt.tensors.norms import exact_dot

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "norm_offset", "tensor", "bug",
        "Norm weights with one added where they should not be, or without where they should "
        "(gemma stores w and multiplies by 1 + w; GGUF stores 1 + w).",
        "Norm weights or the norms' factors differ by a constant 1.",
        "Adding the printed offset makes them equal.",
    ),
    Cause(
        "scale", "tensor", "bug",
        "A tensor multiplied by a constant, or by one constant a row.",
        "The ratio of the values is constant; cosine is 1.",
        "Dividing by the printed factor makes them equal.",
    ),
    Cause(
        "rounding", "forward", "precision",
        "The same computation rounded otherwise: another dtype, another order of summation, an "
        "expert flipped by a margin inside the rounding.",
        "Small differences without a first jump, of the size the coarser arithmetic makes.",
        "Recomputing in the coarser arithmetic, or one operation on the other's input, stays "
        "inside the tolerance everywhere.",
        by_place=True,
    ),
    Cause(
        "quantisation", "tensor", "precision",
        "One side is a quantized copy: every value is within its block's step.",
        "Another encoding, no outlier beyond a step, the usual mean square error.",
        "Quantizing the other side gives these bytes, or every value is inside the bound.",
        by_place=True,
    ),
)  # fmt: skip

LOOSE = 0.25  # rounding beyond which a factor proves nothing
LEEWAY = 1.05  # roundings that a value may be off, for two that fall on each other
SURE = 4.0  # standard errors that a measured factor may be off
NARROW = 16  # columns below which a factor a row explains too little
EQUAL_CODES = 2.0**-7  # relative: codes under one scale each, rounded to 16 bits
OTHER_SCALE = 0.22  # log of 1.25: no search for a scale goes so far with the same codes
TINY = 1e-30
REQUANTIZED = 1 << 22  # elements encoded again to confirm
SHORT_RUN = 16  # values of a block, or part of one, whose errors are judged together
MUCH_WORSE = 2.0  # times the sum of squared errors
MOST_APART = 0.01  # share of blocks that an encoder of other arithmetic makes otherwise
FEW_SUMS = 8  # values up to which a difference below the rounding of the largest is named damage
# Encodings that a float file's values may have gone through.
THROUGH = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K")


def guess_norm_offset(case: DifferingPair) -> Iterator[Guess]:
    """Yield guesses that one side's vector is the other's plus or minus 1; none for matrices.

    For a norm's weight also plus or minus 2, as when a converted model is converted again.
    """
    if case.a.columns != 1:
        return
    apart = to_float64(case.sample_b) - to_float64(case.sample_a)
    offset = float(np.median(apart)) if np.isfinite(apart).all() else 0.0
    for times in (1, 2) if "norm" in case.role else (1,):
        if abs(abs(offset) - times) > 0.05:
            continue
        # Adding, storing and subtracting round three times, relative to a size of 1.
        slack = 4 * times * case.slack(moved=False)
        # Add to the smaller side: the values stored with 1 added were rounded at that size.
        smaller, side, way = ("A", case.a, "plus") if offset > 0 else ("B", case.b, "minus")
        made = _apply_after(side.take, partial(np.add, np.float32(times)))
        twice = "" if times == 1 else ", twice the 1 that norms add"
        says = (f"B's values are A's {way} {times}{twice}",)
        yield case.guess("norm_offset", says, smaller, made, slack, free=1)


def guess_scale(case: DifferingPair) -> Iterator[Guess]:
    """Yield guesses of a factor: a single one, one for each row, or one for each column."""
    x, y = to_float64(case.sample_a), to_float64(case.sample_b)
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or not x.any() or not y.any():
        return
    slack = case.slack(moved=False)
    if slack > LOOSE:
        return  # values this coarse would fit any factor
    a, b = case.a, case.b
    # Free numbers are found on one half of the values, and judged on all or on the other half.
    half_x, half_y = (x[::2], y[::2]) if len(x) > 1 else (x[:, ::2], y[:, ::2])
    square = exact_dot(half_x, half_x)
    factor = exact_dot(half_x, half_y) / square if square else 1.0
    if is_scaling(np.array([factor]), slack):
        turned = abs(factor + 1.0) <= 4 * slack
        told = "-1: the sign is turned" if turned else _factor_text(case, factor, half_x, half_y)
        says = f"B's values are A's times {told}"
        made = case.guess(
            "scale", (says,), "A", lambda rows: to_float64(a.take(rows)) * factor, slack, free=1
        )
        yield replace(made, within=_margin(half_x.size))
    if a.columns < NARROW:
        return
    # One factor for each row, found on every second column.
    factors = _least_squares_factors(x[:, ::2], y[:, ::2], 1)
    if (
        is_scaling(factors, max(slack, _norm_rounding(a.columns) / 4))
        and fits_scaling(x * factors[:, None], y, slack)
        and _leave_usual_errors(case, 1)
    ):

        def scale_rows(rows: "Array") -> "Array":
            """Return rows of A, each times its least-squares factor towards B.

            `rows` are numbers.
            """
            mine, other = to_float64(a.take(rows)), to_float64(b.take(rows))
            return mine * _least_squares_factors(mine[:, ::2], other[:, ::2], 1)[:, None]

        low, high = float(factors.min()), float(factors.max())
        said = f"factors from {low:.6g} to {high:.6g} in the rows looked at"
        text = "every row of B is A's times a factor of its own"
        if np.abs(np.abs(factors) - 1.0).max() <= 4 * slack:
            rows_turned = int((factors < 0).sum())
            text = "the sign of whole rows is turned, and nothing else differs"
            said = f"{rows_turned} of {len(factors)} rows looked at"
        made = case.guess("scale", (text, said), "A", scale_rows, slack, free=a.rows)
        yield replace(made, within=_margin(a.columns // 2))
    # One factor for each column, found on every second row.
    across = _least_squares_factors(x[::2], y[::2], 0)
    if (
        len(x) >= NARROW
        and is_scaling(across, max(slack, _norm_rounding(a.rows) / 4))
        and fits_scaling(x * across[None, :], y, slack)
        and _leave_usual_errors(case, 0)
    ):
        low, high = float(across.min()), float(across.max())
        said = f"factors from {low:.6g} to {high:.6g}"
        text = "every column of B is A's times a factor of its own"
        if np.abs(np.abs(across) - 1.0).max() <= 4 * slack:
            columns = np.flatnonzero(across < 0).tolist()
            shown = join_first(columns, 6)
            text = "the sign of whole columns is turned, and nothing else differs"
            said = f"{len(columns)} of {len(across)} columns: {shown}"
        scaled = _apply_after(a.take, lambda values: values * across[None, :])
        made = case.guess("scale", (text, said), "A", scaled, slack, free=a.columns)
        yield replace(made, within=_margin(len(x) // 2))


def _margin(count: int) -> float:
    """Return how many roundings a value may be off under a factor that `count` values gave.

    The factor's own error is up to SURE standard errors of the mean of as many roundings.
    """
    return LEEWAY + SURE / math.sqrt(max(1, count))


def _leave_usual_errors(case: DifferingPair, axis: int) -> bool:
    """Return whether a factor for every row (axis 1) or column (axis 0) leaves only rounding.

    For a packed copy this is measured in the copy's own quantization steps, since the bound of
    its encoding as a whole is too wide. True where no side is a packed copy.
    """
    for copy in packed_copies(case):
        if copy.finite:
            factor = np.expand_dims(_least_squares_factors(copy.y, copy.x, axis), axis)
            after = fit_errors(copy.x, copy.y * factor, scale_lattice(copy.lattice, factor))
            if not copy.is_repaired(after):
                return False
    return True


def _least_squares_factors(x: "Array", y: "Array", axis: int) -> "Array":
    """Return the least-squares factor from x to y of every row (axis 1) or column (axis 0).

    It is 1 where x is zero.
    """
    square, product = (x * x).sum(axis=axis), (x * y).sum(axis=axis)
    return np.where(square > 0, product / np.where(square > 0, square, 1.0), 1.0)


def is_scaling(factors: "Array", slack: float) -> bool:
    """Return whether factors are a real scaling: some differ from 1, and none is near 0."""
    return bool(np.abs(factors - 1.0).max(initial=0.0) > 4 * slack) and bool(
        np.abs(factors).min() > 1e-9
    )


def fits_scaling(x: "Array", y: "Array", slack: float) -> bool:
    """Return whether each row of `y` is within the relative distance 2 * `slack` of that of `x`."""
    return bool((row_distances(x, y) <= 2 * slack).all())


def _factor_text(case: DifferingPair, factor: float, x: "Array", y: "Array") -> str:
    """Return a factor as text, with the number of the model that it equals, if one does.

    Numbers of the model are its multipliers, the square roots of its sizes, and 1 over these roots.
    One is equal if it is within SURE standard errors of the factor, which was measured from `x` to
    `y`.
    """
    rest, length = y - factor * x, abs(factor) * float(np.linalg.norm(x))
    known_to = SURE * float(np.linalg.norm(rest)) / length / x.size**0.5 if length else 0.0
    names: dict[str, float] = {}
    for size in ("hidden_size", "head_dim", "n_layers", "ffn_size"):
        for value in case.sizes(size):
            names[f"sqrt({size})"] = float(value) ** 0.5
            names[f"1/sqrt({size})"] = float(value) ** -0.5
    for hyper in case.context.hyper:
        for name, value in hyper.items():
            if isinstance(value, float) and ("multiplier" in name or "scale" in name):
                names[name] = value
                names[f"1/{name}"] = 1 / value if value else 0.0
    for name, known in names.items():
        if known and abs(factor / known - 1) < known_to + 1e-6:
            return f"{factor:.6g}, which is also {name}"
    return f"{factor:.6g}"


# --- rounding -------------------------------------------------------------------------------


def store_as(name: str) -> Take:
    """Return a function that encodes float values in encoding `name` and decodes them again."""

    def through(values: "Array") -> "Array":
        """Return float32 values encoded in the encoding `name` and decoded again."""
        values = np.asarray(values, np.float32)
        return decode(name, encode(name, values), values.shape)

    return through


def _cast_through(values: "Array", dtype: str) -> "Array":
    """Return values cast to a float type of ml_dtypes and back to float32."""
    import ml_dtypes

    with np.errstate(over="ignore", invalid="ignore"):
        narrow = np.asarray(values, np.float32).astype(getattr(ml_dtypes, dtype))
        return narrow.astype(np.float32)


def _truncate_significand(values: "Array", bits: int) -> "Array":
    """Return float32 values with the lowest `bits` bits set to zero (truncation)."""
    found = np.ascontiguousarray(values, np.float32).copy()
    found.view(np.uint32)[...] &= np.uint32(0xFFFFFFFF << bits & 0xFFFFFFFF)
    return found


def _truncate_to_f16(values: "Array") -> "Array":
    """Return float32 values truncated to F16 without rounding, as float32."""
    cut = _truncate_significand(values, 13)
    tiny = np.abs(cut) < 2.0**-14
    return np.where(tiny, np.trunc(cut * np.float32(2**24)) * np.float32(2**-24), cut)


def _flush_f16_subnormals(values: "Array") -> "Array":
    """Return values rounded to F16 with its subnormals set to zero."""
    found = store_as("F16")(values)
    return np.where(np.abs(found) < np.float32(2.0**-14), np.float32(0), found)


def _halve_f16_subnormals(values: "Array") -> "Array":
    """Return values rounded to F16 with its subnormals halved."""
    found = store_as("F16")(values)
    halved: Array = np.where(np.abs(found) < np.float32(2.0**-14), found * np.float32(0.5), found)
    return halved


# (what was done to the values, how)
ROUNDINGS: tuple[tuple[str, Take], ...] = (
    ("rounded to BF16", store_as("BF16")),
    ("rounded to F16", store_as("F16")),
    ("cut to BF16 instead of rounded", lambda x: _truncate_significand(x, 16)),
    ("cut to F16 instead of rounded", _truncate_to_f16),
    ("rounded to F16 with subnormals flushed to zero", _flush_f16_subnormals),
    ("rounded to F16 with subnormals read at half their size", _halve_f16_subnormals),
    ("rounded to F8_E4M3", lambda x: _cast_through(x, "float8_e4m3fn")),
    ("rounded to F8_E5M2", lambda x: _cast_through(x, "float8_e5m2")),
)


def _take_plus_one(side: RowReader) -> Take:
    """Return a function from row numbers to rows of the tensor `side` with 1 added, as float32."""
    return lambda rows: (to_float64(side.take(rows)) + 1).astype(np.float32)


def equal_with_one_added(case: DifferingPair) -> bool:
    """Return whether both sides are equal once 1 is added, as where one file stores w + 1.

    A small value loses bits when 1 is added in float32, and does not come back exactly when 1 is
    subtracted. False if neither file's layout says that 1 is added.
    """
    a, b = case.a, case.b
    if all(step.permutes for side in (a, b) for step in side.side.layout):
        return False
    mine, theirs = _take_plus_one(a), _take_plus_one(b)
    return all(bool((mine(rows) == theirs(rows)).all()) for rows in case.windows(None))


def guess_rounding(case: DifferingPair) -> Iterator[Guess | Finding]:
    """Yield guesses that one side was rounded or cut to fewer bits.

    If all values are within one unit in the last place, the finding of that comes last.
    """
    a, b = case.a, case.b
    if not (_is_float(a.encoding) and _is_float(b.encoding)):
        return
    if any(not step.permutes for side in (a, b) for step in side.side.layout):
        # 1 was added in float32 before it was stored, and taken away again when it was read
        yield Guess(
            "rounding",
            ("equal once 1 is added, as one of the files stores it: small values were rounded so",),
            _take_plus_one(a),
            _take_plus_one(b),
            slack=case.slack(moved=False),
        )
        # or the sum was rounded on the way to a type that holds more
        for told, fine, coarse in (("B's values are A's", a, b), ("A's values are B's", b, a)):
            for text, apply in ROUNDINGS:
                yield Guess(
                    "rounding",
                    (f"{told}, {text} with 1 added, as it is stored",),
                    _apply_after(_take_plus_one(fine), apply),
                    _take_plus_one(coarse),
                )
    for label, fine, told in (("A", a, "B's values are A's"), ("B", b, "A's values are B's")):
        for text, apply in ROUNDINGS if fine.encoding != "F64" else ():
            yield case.guess(
                "rounding", (f"{told}, {text}",), label, _apply_after(fine.take, apply), 0.0
            )
    yield from _guess_saturated_type(case)
    if all_within_last_place(case, largest=False):
        yield _last_place_explanation(case, "")


# Type -> its largest value, at which a cast that saturates holds larger ones.
LARGEST = {"F16": 65504.0, "F8_E4M3": 448.0, "F8_E5M2": 57344.0}
_STORED: Mapping[str, Take] = {
    "F16": store_as("F16"), "F8_E4M3": lambda x: _cast_through(x, "float8_e4m3fn"),
    "F8_E5M2": lambda x: _cast_through(x, "float8_e5m2"),
}  # fmt: skip


def _guess_saturated_type(case: DifferingPair) -> Iterator[Guess]:
    """Yield guesses that a side's values went through a float type that saturates at its top."""
    for label, fine in (("A", case.a), ("B", case.b)):
        for name, most in LARGEST.items() if fine.encoding != "F64" else ():

            def through(x: "Array", name: str = name, most: float = most) -> "Array":
                """Return values limited to `most`, the float type's largest, and rounded to it."""
                return _STORED[name](np.clip(to_float64(x), -most, most))

            other = "B" if label == "A" else "A"
            says = (
                f"{other}'s values are {label}'s, rounded to {name}: larger ones are held at its "
                f"largest, {most:g}"
            )
            yield case.guess("function_of", (says,), label, _apply_after(fine.take, through), 0.0)


def explain_sum_rounding(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that values are within one unit in the last place of their row's largest.

    A sum of larger values (a merged adapter, a mean of checkpoints) is rounded at the size of
    these, which is not known. The largest value of the row, or of all of a vector, stands for it:
    differences below one unit of it are no bug. A factor of every row or column may be rounded too,
    as that of a merged DoRA adapter.
    """
    floats = _is_float(case.a.encoding) and _is_float(case.b.encoding)
    # A sum in another order changes many values, damage a few.
    if not floats or case.before.changed <= FEW_SUMS:
        return
    of = " of its row's largest value"
    if all_within_last_place(case, largest=True):
        of += ": sums in another order, or by another library"
    elif (words := _rounded_factors(case)) is not None:
        of += f" once {words} are taken out: norms summed in another order"
    else:
        return
    found = _last_place_explanation(case, of)
    # That the summands were as large as that is a guess, so it bounds and does not prove.
    yield replace(found, proof=accused_proof(case.before.changed))


def _rounded_factors(case: DifferingPair) -> str | None:
    """Return in words which factors near 1 leave one unit of a row's largest value, or None.

    They are of the rows or of the columns. A factor further from 1 than a rounded norm makes it
    is no rounding.
    """
    a, b = case.a, case.b
    if case.before.nonfinite is not None or min(a.rows, a.columns) < NARROW:
        return None
    unit = 2 * max(UNIT[a.encoding], UNIT[b.encoding])

    def sides() -> Iterator[tuple["Array", "Array"]]:
        """Yield (rows of A, the same rows of B), each float64 [rows, columns], all in order."""
        for rows in case.windows(None):
            yield to_float64(a.take(rows)), to_float64(b.take(rows))

    for axis, count in ((1, a.columns), (0, a.rows)):
        words = "factors of rows" if axis else "factors of columns"
        across = None if axis else _column_factors(sides(), a.columns)
        most = 0.0
        for x, y in sides():
            factor = _least_squares_factors(x, y, 1) if across is None else across
            most = max(most, float(np.abs(factor - 1).max(initial=0.0)))
            made = x * np.expand_dims(factor, axis)
            if most > _norm_rounding(count) or not _all_equal_within(made, y, unit, largest=True):
                break
        else:
            return f"{words}, at most {most:.2g} from 1,"
    return None


def _norm_rounding(count: int) -> float:
    """Return how far from 1 a factor may be that a norm of `count` elements divides.

    The norm is a root of as many squares, summed in float32 in any order: it may be off by the
    root of their count, in units in the last place.
    """
    return math.sqrt(count) * 2 * UNIT["F32"]


def _column_factors(sides: Iterator[tuple["Array", "Array"]], columns: int) -> "Array":
    """Return the least-squares factor from A to B of every column, [columns]; 1 where A is zero.

    `sides` are (rows of A's tensor, the same rows of B's), float64 [rows, columns].
    """
    square, product = np.zeros(columns), np.zeros(columns)
    for x, y in sides:
        square, product = square + (x * x).sum(axis=0), product + (x * y).sum(axis=0)
    return np.where(square > 0, product / np.where(square > 0, square, 1.0), 1.0)


def all_within_last_place(case: DifferingPair, *, largest: bool) -> bool:
    """Return whether all values differ by at most one unit in the last place of the coarser type.

    `largest`: the unit is relative to the row's largest value, else to the value itself.
    """
    a, b = case.a, case.b
    unit = 2 * max(UNIT[a.encoding], UNIT[b.encoding])
    first, second = to_float64(case.sample_a), to_float64(case.sample_b)
    return _all_equal_within(first, second, unit, largest=largest) and all(
        _all_equal_within(to_float64(a.take(rows)), to_float64(b.take(rows)), unit, largest=largest)
        for rows in case.windows(None)
    )


def _last_place_explanation(case: DifferingPair, of: str) -> Finding:
    """Return the finding that no values are more than one unit in the last place apart.

    `of` ends the sentence, which says of what value the unit is.
    """
    coarser = max(case.a.encoding, case.b.encoding, key=lambda name: UNIT[name])
    values = case.a.take(case.sample)
    unit = 2 * max(UNIT[case.a.encoding], UNIT[case.b.encoding])
    return make_finding(
        "rounding",
        (case.key,),
        (
            f"no two values are further apart than one unit in the last place of {coarser}{of}",
            f"{case.before.changed} of {case.before.count} values differ, "
            f"by at most {case.before.largest:.3g}",
        ),
        case.before.relative,
        None,
        prove_values(values, case.before.count, 0, unit),
    )


def _all_equal_within(x: "Array", y: "Array", unit: float, *, largest: bool = False) -> bool:
    """Return whether all values are equal within `unit` times their magnitude.

    With `largest`, times the largest finite magnitude of each row, or of all of a vector.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    size = np.maximum(np.abs(x), np.abs(y))
    if largest:
        axis = 1 if x.ndim > 1 and x.shape[1] > 1 else None
        size = np.where(finite, size, 0.0).max(axis=axis, keepdims=True, initial=0.0)
    near = finite & (np.abs(x - y) <= unit * size)
    return bool((near | (x == y) | (np.isnan(x) & np.isnan(y))).all())


def _apply_after(take: Take, apply: Take) -> Take:
    """Return a function that gives apply(rows), rows being those that `take` gives."""
    return lambda rows: apply(take(rows))


def _is_float(encoding: str) -> bool:
    """Return whether an encoding is a plain float type."""
    return encoding in UNIT


# --- quantization ---------------------------------------------------------------------------


def guess_quantization(case: DifferingPair) -> Iterator[Guess | Finding]:
    """Yield guesses that one side is the other quantized, directly or through a coarser encoding.

    Last comes the finding that both are quantized from one source, where values are within one
    quantization step.
    """
    a, b = case.a, case.b
    if case.before.relative > 1.0:
        return
    step = max(1, a.rows * a.columns // REQUANTIZED)
    rows = np.arange(0, a.rows, step)
    # Encode the finer side again and compare with the other.
    for label, fine, coarse, told in (("A", a, b, "B's"), ("B", b, a, "A's")):
        for name in _detour_encodings(coarse.encoding):
            if a.columns % max(1, encoding_row(name).block_size) or not _has_encoder(name):
                continue
            if case.before.relative > 2 * storage_noise(name):
                continue
            passed = case.before.relative > storage_noise(name) / 4  # half of what it usually does
            if name != coarse.encoding and passed and _has_encoder(coarse.encoding):
                says = (
                    f"{told} values are {label}'s, quantized to {name}, then to {coarse.encoding}"
                )
                again = _encode_again(_encode_again(fine.take, name), coarse.encoding)
                checked = f"encoded {len(rows)} of {a.rows} rows twice: equal"
                made = case.guess("quantisation", (says, checked), label, again, 0.0, rows=rows)
                yield replace(made, sampled=True)
            through = "" if name == coarse.encoding else " and decoded again"
            slack = 0.0 if coarse.encoding in ("F32", name) else 2 * storage_noise(coarse.encoding)
            if 2 * slack > case.before.relative:
                continue  # the stored encoding hides earlier ones
            checked = f"encoded {len(rows)} of {a.rows} rows again: equal"
            says = f"{told} values are {label}'s, quantized to {name}{through}"
            again = _encode_again(fine.take, name)
            made = case.guess("quantisation", (says, checked), label, again, slack, rows=rows)
            beyond = None
            if name == coarse.encoding:
                beyond = partial(_explain_beyond_copy, case, fine, coarse, says, rows)
            yield replace(made, sampled=True, beyond=beyond)
    if len(case.changed_rows) < 2:
        return  # another quantizer leaves no tensor alone but for one row; damage does
    # Both may encode one source: then values are within a step of each other.
    off = steps_apart(case)
    if off is not None and off <= 1.0 and not _has_other_scales(a.take(rows), b.take(rows)):
        yield make_finding(
            "quantisation",
            (case.key,),
            (
                f"both are {a.encoding} of one source: no two values are further apart than one "
                "step of each (another quantizer, arithmetic or importance matrix, or a change, as "
                "of a merged adapter, that these steps hide)",
                f"at most {off:.3g} of both steps apart",
            ),
            case.before.relative,
            None,
            accused_proof(case.before.changed),  # the steps are those of both
        )


def _explain_beyond_copy(
    case: DifferingPair, fine: RowReader, coarse: RowReader, says: str, rows: "Array"
) -> Finding | None:
    """Return the finding that few runs of a copy are worse than its source encoded again.

    `fine` is the source's tensor, `coarse` the copy's, `rows` are those that were encoded again,
    `says` the sentence on it. Where nearly all blocks are reproduced, their encoder is known: its
    other arithmetic moves a value to the next code at most where both are as near, so that no run
    of values becomes much worse. None without such runs, and where many blocks differ.
    """
    name, block = coarse.encoding, encoding_row(coarse.encoding).block_size
    size = math.gcd(block, SHORT_RUN)
    found: list[tuple[int, int]] = []
    apart = total = 0
    for chosen in case.windows(rows):
        values = np.ascontiguousarray(fine.take(chosen), np.float32)
        again = decode(name, {"": encode_rows(name, values)}, values.shape)
        held = coarse.take(chosen)
        if values.shape[1] % block:
            return None
        total += values.size // block
        apart += int((held != again).reshape(-1, block).any(1).sum())
        mine, own = (
            np.square(to_float64(part) - to_float64(values)).reshape(-1, size).sum(1)
            for part in (held, again)
        )
        for run in np.flatnonzero(~(mine <= MUCH_WORSE * own)).tolist():
            row, column = divmod(run * size, values.shape[1])
            found.append((int(chosen[row]), column))
    if not found or apart > MOST_APART * total:
        return None
    text = (
        "all other values are those of the other side, encoded again, or as near: damage or an "
        f"edit; {len(found)} runs of {size} values are far from it, the first at {list(found[0])}"
    )
    before = case.before.relative
    return make_finding("bit_rot", (case.key,), (text, says), before, None, None, confirmed=False)


def _has_other_scales(x: "Array", y: "Array") -> bool:
    """Return whether some RUN values of a row have equal codes on both sides, by other scales.

    Rounding one source by two scales does not give the same codes, but floats hide a factor of two.
    RUN values with fewer than three magnitudes show nothing. `x` and `y` are [rows, columns].
    """
    wide = x.shape[1] // RUN * RUN
    x, y = (to_float64(part)[:, :wide].reshape(-1, RUN) for part in (x, y))
    sizes = np.sort(np.abs(x), axis=1)
    told = (np.diff(sizes, axis=1) > 0).sum(1) > 1
    x, y = x[told], y[told]
    factor = (x * y).sum(1) / (x * x).sum(1)
    same = (np.abs(y - factor[:, None] * x) <= EQUAL_CODES * np.abs(y)).all(1)
    return bool((same & (np.abs(np.log(np.abs(factor) + TINY)) > OTHER_SCALE)).any())


def _detour_encodings(stored: str) -> list[str]:
    """Return encodings that values stored as `stored` may have been quantized to before.

    They are the coarser ones of THROUGH, after the encoding itself if it is quantized.
    """
    own = [] if _is_float(stored) else [stored]
    bits = encoding_row(stored.split("+")[0]).bits_per_weight or 32.0
    return own + [name for name in THROUGH if encoding_row(name).bits_per_weight < bits]


def _has_encoder(name: str) -> bool:
    """Return whether a block encoding that is stored as one tensor can be encoded here."""
    try:
        found = codec(name)
    except AprfmtError:
        return False
    return found.parts == ("",) and encoding_row(name).block_size > 1 and found.has_encoder


def _encode_again(take: Take, name: str) -> Take:
    """Return a function from row numbers to rows encoded as `name` and decoded again."""

    def through(rows: "Array") -> "Array":
        """Return a tensor's rows (numbers `rows`) encoded in `name` and decoded again."""
        values = np.asarray(take(rows), np.float32)
        return decode(name, {"": encode_rows(name, values)}, values.shape)

    return through


def steps_apart(case: DifferingPair) -> float | None:
    """Return the largest |a-b| in quantization steps of the encoding that both sides have.

    None if encodings differ or have no blocks.
    """
    if case.a.encoding != case.b.encoding or encoding_row(case.a.encoding).block_size == 1:
        return None
    return largest_steps(case.a.side, case.b.side)


HYPOTHESES = (
    PairHypothesis(
        ("norm_offset",), guess_norm_offset, 110, "one constant, before a factor or a function"
    ),
    PairHypothesis(
        ("scale",),
        guess_scale,
        160,
        "a factor for each row fits more than what is above it",
        part=True,
    ),
    PairHypothesis(
        ("rounding",), guess_rounding, 170, "a bound, which a constant factor would miss"
    ),
    PairHypothesis(
        ("quantisation",),
        guess_quantization,
        260,
        "a bound and no equality, after all that is exact",
    ),
    PairHypothesis(
        ("rounding",), explain_sum_rounding, 280, "a bound that grows with what was summed"
    ),
)
