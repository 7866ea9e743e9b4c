"""Plain values that are the other side's codes with wrongly read scales.

A *side* is the tensor of file A or of file B. The *packed side* is stored as codes and scales, the
*plain side* as floats.

A scale that is stored as a byte is an exponent or a small float. A reader that takes the byte for a
whole number, for another float or for an exponent of another bias, or that divides by the scales,
has another factor for each group. Every such reading is executed on the packed side: its factors
follow from the stored bytes, and no number is free.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.encodings import find_encoding
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.misread_codes import FAR, ROUNDED, CodedSide, nearly_equal
from aprfmt.causes.tensor.packed_copies import is_plain_float
from aprfmt.causes.tensor.proof import either_side_text, make_finding, prove_values
from aprfmt.causes.tensor.scale_bytes import (
    BIAS,
    TWO,
    byte_readings,
    bytes_of_factors,
    misread_factors,
    tells_bytes_apart,
)
from aprfmt.codecs import CODECS, f4, fp8
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.codecs.minifloat import MinifloatCodec

KINDS = (fp8.E8M0, fp8.E4M3)  # what a byte that scales a group is
FIELDS = {"MXFP4": ("e", fp8.E8M0), "NVFP4": ("d", fp8.E4M3)}  # GGUF blocks: where these bytes are
SURE = 2.0**-9  # relative: how well one factor on all values is known
FUSED = (  # roles that engines join to one weight
    ("ffn_gate.weight", "ffn_up.weight"),
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
)
WHOLE = "the scale of the whole tensor"
EXPONENT_OF = 32  # values that share an exponent

# Factors of values, float64 [n, columns], for the numbers of n rows.
Factors = Callable[["Array"], "Array"]


class ScaleReading(NamedTuple):
    """A wrong way to read scales: in words, and the factor on each value by row numbers.

    `either`: either side may be the one that reads them wrongly.
    """

    says: str
    factors: Factors
    either: bool = False


def explain_misread_scales(case: DifferingPair) -> Iterator[Finding]:
    """Yield at most one finding: a side's values are the other's codes with misread scales."""
    if case.numbers is not None or case.a.shape != case.b.shape or case.a.columns < 2:
        return
    for plain, coded, one, other in ((case.b, case.a, "B", "A"), (case.a, case.b, "A", "B")):
        if not is_plain_float(plain) or is_plain_float(coded):
            continue
        # Only the scale of a fused weight may be near the right one.
        near = case.before.relative < FAR
        side = CodedSide(coded)
        for reading in _near_readings(case, side) if near else _readings(case, coded, side):
            if not _gives_values(case, plain, coded, reading.factors):
                continue
            says = f"{one}'s values are the codes of {other} with {reading.says}"
            if reading.either:
                says += either_side_text(f"{one}'s", "scales are")
            x = to_float64(plain.take(case.sample))
            proof = prove_values(x, plain.size, 0, ROUNDED * UNIT[plain.encoding])
            before = case.before.relative
            found = make_finding("quant_scale", (case.key,), (says,), before, 0.0, proof)
            yield replace(
                found, side="" if reading.either else one, leaves_side_open=reading.either
            )
            return


def explain_misread_exponents(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that a side's floats are the other's codes with misread exponents.

    Both sides are plain floats. The ratio of the sides' values in a group identifies the byte of
    its scale; the right side's values over that power of two must then be numbers of a code.
    """
    if case.numbers is not None or case.a.shape != case.b.shape or case.before.relative < FAR:
        return
    if not (is_plain_float(case.a) and is_plain_float(case.b)) or case.a.columns % EXPONENT_OF:
        return
    slack = ROUNDED * max(UNIT[case.a.encoding], UNIT[case.b.encoding])
    for right, wrong, one, other in ((case.a, case.b, "B", "A"), (case.b, case.a, "A", "B")):
        for says, numbers, either in byte_readings(fp8.E8M0):
            if either or not tells_bytes_apart(numbers):
                continue
            seen: set[int] = set()
            for rows in (case.sample, *case.windows(np.arange(right.rows))):
                x, y = (to_float64(side.take(rows)) for side in (right, wrong))
                held = _exponents_of(x, y, numbers, slack)
                if held is None:
                    break
                seen.update(np.unique(held).tolist())
            else:
                if len(seen) < TWO:
                    continue
                said = f"{one}'s values are the codes of {other} with {says}"
                proof = prove_values(
                    to_float64(wrong.take(case.sample)),
                    wrong.size,
                    wrong.size // EXPONENT_OF,
                    ROUNDED * UNIT[wrong.encoding],
                )
                before = case.before.relative
                found = make_finding("quant_scale", (case.key,), (said,), before, 0.0, proof)
                yield replace(found, side=one)
                return


def _exponents_of(x: "Array", y: "Array", numbers: "Array", slack: float) -> "Array | None":
    """Return the exponent byte of each group if `y` is a misreading of `x`; else None.

    `x` and `y` are values [n, columns], `numbers` what bytes were read as [256]; values may be
    off by `slack`, relative. Groups of zeros are left out.
    """
    x, y = (v.reshape(-1, EXPONENT_OF) for v in (x, y))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    at = np.abs(x).argmax(axis=1)[:, None]
    top, made = (np.take_along_axis(v, at, axis=1)[:, 0] for v in (x, y))
    held, near = bytes_of_factors(top, made, numbers, slack)
    full = x.any(axis=1)
    if y[~full].any() or not near[full].all():
        return None
    made = x * np.where(full, misread_factors(numbers)[held], 1.0)[:, None]
    if not nearly_equal(made, y, slack):
        return None
    codes = np.unique(np.abs(x[full] * 2.0 ** (BIAS - held[full, None].astype(np.float64))))
    books = (fp8.E4M3, fp8.E5M2, f4.CODEC)
    return held[full] if any(np.isin(codes, book.values).all() for book in books) else None


def _gives_values(
    case: DifferingPair, plain: RowReader, coded: RowReader, factors: Factors
) -> bool:
    """Return whether the decoded values times `factors` are the plain side's values.

    Each must be within the rounding of the plain type, and all together without a common factor.
    """
    slack = ROUNDED * UNIT[plain.encoding]
    product = square = 0.0
    for rows in (case.sample, *case.windows(np.arange(plain.rows))):
        made, x = to_float64(coded.take(rows)) * factors(rows), to_float64(plain.take(rows))
        if not nearly_equal(made, x, slack):
            return False
        finite = np.isfinite(made) & np.isfinite(x)
        top = np.abs(x[finite]).max(initial=0.0) or 1.0
        product += float((made[finite] / top * (x[finite] / top)).sum())
        square += float(((made[finite] / top) ** 2).sum())
    return square > 0 and abs(product / square - 1) <= SURE


def _readings(case: DifferingPair, coded: RowReader, side: CodedSide) -> Iterator[ScaleReading]:
    """Yield the wrong ways to read the scales of a packed tensor, `coded`; `side` are its codes."""
    found = _scale_bytes(coded, side)
    if found is not None:
        held, kind = found
        for says, numbers, either in byte_readings(kind):
            with np.errstate(all="ignore"):
                table = np.where(kind.values > 0, numbers / kind.values.astype(np.float64), 0.0)
            yield ScaleReading(says, _looked_up(table, held), either)
    yield from _misread_tensor_scales(case, side)
    scale = side.scale if side.table is not None and side.zero is side.offset is None else None
    if scale is not None:

        def inverse(rows: "Array") -> "Array":
            """Return each value's factor that turns its product with a scale into a quotient by it.

            `rows` are row numbers; the factors, one over the scale's square, are 1 for a scale of
            0.
            """
            wide = np.asarray(scale[rows], np.float64)
            made: Array = 1 / np.where(wide > 0, wide, 1.0) ** 2
            return made

        yield ScaleReading("their scales inverted: values are divided by them", inverse, True)


def _looked_up(table: "Array", held: "Callable[[Array], Array]") -> Factors:
    """Return a function from row numbers to factors, looked up in `table` [256] by scale byte.

    `held` gives each value's scale byte by row numbers.
    """
    return lambda rows: np.asarray(table[held(rows)])


def _misread_tensor_scales(case: DifferingPair, side: CodedSide) -> Iterator[ScaleReading]:
    """Yield wrong ways to read the one scale of a tensor that multiplies its FP8 group scales.

    It is left out, inverted, or that of a weight which engines fuse with this one.
    """
    wholes = _tensor_scales(side)
    every = _whole_of_each_value(side, wholes)
    if every is None:
        return
    yield ScaleReading(f"{WHOLE} left out", lambda rows: 1 / np.asarray(every[rows], np.float64))
    yield ScaleReading(
        f"{WHOLE} inverted", lambda rows: 1 / np.asarray(every[rows], np.float64) ** 2, True
    )
    yield from _scales_of_fused(case, side, wholes, every)


def _near_readings(case: DifferingPair, side: CodedSide) -> Iterator[ScaleReading]:
    """Yield the wrong readings that may be nearly right: the tensor scales of a fused weight."""
    wholes = _tensor_scales(side)
    yield from _scales_of_fused(case, side, wholes, _whole_of_each_value(side, wholes))


def _scales_of_fused(
    case: DifferingPair, side: CodedSide, wholes: "list[Array]", every: "Array | None"
) -> Iterator[ScaleReading]:
    """Yield readings with the tensor scale of another weight that engines fuse with this one.

    Each of several experts has that of the same expert. `wholes` are the weight's own tensor
    scales, and `every` that of each value; nothing without them.
    """
    if every is None:
        return
    label = "a" if side.reader is case.a else "b"
    role = split_key(case.key)[1]
    for partner in next((names for names in FUSED if role in names), ()):
        key = case.key.removesuffix(role) + partner
        reader = None if partner == role else case.context.reader(label, key)
        theirs = [] if reader is None else _tensor_scales(CodedSide(reader))
        if [one.shape for one in theirs] != [one.shape for one in wholes]:
            continue
        others = _whole_of_each_value(side, theirs)
        if others is not None:
            taken = np.asarray(others, np.float64) / np.asarray(every, np.float64)
            says = f"{WHOLE} of {partner}, which it is fused with"
            yield ScaleReading(says, taken.__getitem__)


def _whole_of_each_value(side: CodedSide, wholes: "list[Array]") -> "Array | None":
    """Return the tensor scale of each value, by rows; None without `wholes`.

    `wholes` are [matrices, 1], one array for each weight of the side.
    """
    return (
        side.read_scale_bytes([np.repeat(one, 256, axis=1) for one in wholes]) if wholes else None
    )


def _tensor_scales(side: CodedSide) -> "list[Array]":
    """Return the scale above the block scales of each weight; [] unless every weight has one.

    A weight's block scales are E4M3 values times that scale, [matrices, 1].
    """
    tables = [one.scale.table for one in side.weights if one.scale is not None]
    wholes = [one for table in tables if (one := _multiple_of(table, fp8.E4M3)) is not None]
    return wholes if len(wholes) == len(side.weights) else []


def _scale_bytes(
    coded: RowReader, side: CodedSide
) -> "tuple[Callable[[Array], Array], MinifloatCodec] | None":
    """Return (function from row numbers to each value's scale byte, the bytes' type), or None.

    None where scales are no bytes.
    """
    if coded.encoding in FIELDS:
        field, kind = FIELDS[coded.encoding]
        size = find_encoding(coded.encoding).block_size

        def held(rows: "Array") -> "Array":
            """Return the scale byte of the block that each value is in, uint8 [n, columns].

            `rows` are the numbers of the n rows.
            """
            layout = CODECS[coded.encoding].layout
            assert layout is not None
            blocks = np.ascontiguousarray(coded.raw(rows)).reshape(-1).view(layout)
            each = np.ascontiguousarray(blocks[field]).view(np.uint8).reshape(len(blocks), -1)
            found: Array = np.repeat(each, size // each.shape[1], axis=1)
            return found.reshape(len(rows), -1)[:, : coded.columns]

        return (held, kind) if coded.decodes_rows else None
    tables = [None if one.scale is None else one.scale.table for one in side.weights]
    for kind in KINDS:
        if all(_multiple_of(table, kind) is not None for table in tables) and tables:
            every = side.read_scale_bytes([np.arange(256)[None]] * len(side.weights))
            whole = None if every is None else every.astype(np.uint8)
            return None if whole is None else (whole.__getitem__, kind)
    return None


def _multiple_of(table: "Array | None", kind: "MinifloatCodec") -> "Array | None":
    """Return the factors [matrices, 1] over which the scales in `table` are numbers of type `kind`.

    `table` is float32 [matrices, 256]; a factor is the scale of a whole tensor, or 1. None where
    there are no such factors.
    """
    if table is None:
        return None
    known = np.isfinite(kind.values) & (kind.values > 2.0**-100) & (kind.values < 2.0**100)
    ratio = table[:, known].astype(np.float64) / kind.values[known]
    middle: Array = np.median(ratio, axis=1, keepdims=True)
    fits = (middle > 0).all() and (np.abs(ratio / middle - 1) < SURE).all()
    return middle if fits else None


HYPOTHESES = (
    PairHypothesis(
        ("quant_scale",),
        explain_misread_scales,
        87,
        "stored bytes give every factor, before a factor is fitted to each group",
        facts=("two encodings",),
    ),
    PairHypothesis(
        ("quant_scale",),
        explain_misread_exponents,
        84,
        "bytes that each group's factor tells, before a factor is fitted to each group",
    ),
)
