"""Compares the values of two tensors whose bytes differ, within their encodings' bounds.

A *side* is the tensor of file A or of file B. A *step* is how far storing in an encoding may move a
value.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.budget import end_where_time_is_over
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.shapes import matrix_shape
from aprfmt.codecs import CODECS
from aprfmt.measure.bounds import BEYOND_SHARE, NMSE, NMSE_SLACK, Fit, fit_errors
from aprfmt.measure.bounds import quantization_steps as codec_steps
from aprfmt.measure.coarse_steps import WideSteps, WideStepsOfBlocks, wide_steps_of_lattice
from aprfmt.measure.copy_factor import find_copy_factor, may_have_factor
from aprfmt.measure.far_runs import FarBlocks, FarRuns
from aprfmt.measure.numbers import CHUNK, PairSums, steps_between, to_float64
from aprfmt.measure.records import TensorDiff, ulp_type
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.formats.mapped_file import Buffer
    from aprfmt.measure.numbers import Step


def judge_mislabelled(diff: TensorDiff, a: View, b: View) -> TensorDiff:
    """Return the verdict on a pair of equal bytes under two encodings, as a TensorDiff.

    Either their values are the same, or one label is wrong. `diff` is the comparison so far.
    """
    result = compare_values(diff, a, b, False)
    if result.verdict == "SAME_VALUES":
        return result
    return replace(result, verdict="DIFFERENT", cause="dtype_mislabel", steps_off=None)


def compare_values(diff: TensorDiff, a: View, b: View, imatrix: bool) -> TensorDiff:
    """Return `diff` with the verdict on a pair of tensors by their decoded values.

    It is SAME_VALUES, WITHIN the bounds of their encodings, or as before, with the numbers.
    `imatrix` says that either was quantized with an importance matrix.
    """
    found = _compare_within_bounds(diff, a, b, imatrix)
    copied = block_copy(a, b) if found.verdict == "WITHIN" else None
    if copied is None or found.stats is None or not may_have_factor(found.stats, copied is a):
        return found
    if find_copy_factor(b if copied is a else a, copied) is None:
        return found
    return replace(found, verdict=diff.verdict, cause=diff.cause)  # its steps hide its own scales


def _compare_within_bounds(diff: TensorDiff, a: View, b: View, imatrix: bool) -> TensorDiff:
    """Return `diff` with the verdict on each value, by its distance and the encodings' bounds."""
    for side in (a, b):
        if any(stored.parts for stored in side.stored):
            from aprfmt.measure.activation_scales import check_input_scales

            check_input_scales(side)
    accumulator = PairSums(a.shape, ulp_type(a.encoding, b.encoding))
    copied = block_copy(a, b)
    blocks = None if copied is None else WideStepsOfBlocks(copied.encoding, copied.shape[-1])
    runs = None if imatrix else far_runs(a, b)
    with np.errstate(all="ignore"):  # damaged scales make wild steps, and are judged by them
        for x, y, steps in value_chunks(a, b):
            before = accumulator.changed
            accumulator.add(x, y, steps)
            if blocks is None or copied is None:
                continue
            source, copy = (x, y) if copied is b else (y, x)
            if accumulator.changed == before:
                blocks.skip(x.size)  # values that a copy has exactly accuse no step
                if runs is not None:
                    runs.skip(x.size)
                continue
            wide = steps.of_blocks(int(copied is b))
            blocks.add(source, wide)
            if runs is not None:
                runs.add(source, copy, wide)
    off, beyond = accumulator.off if accumulator.known else None, accumulator.beyond
    stats = accumulator.stats()
    diff = replace(diff, stats=stats)
    if not stats.changed:
        if a.encoding == b.encoding and not diff.layout:
            return replace(diff, verdict="SAME_VALUES", layout=("other bytes, same values",))
        widened = () if a.encoding == b.encoding else (f"{a.encoding} and {b.encoding}",)
        return replace(diff, verdict="SAME_VALUES", layout=(*diff.layout, *widened))
    if a.encoding == b.encoding:
        return diff
    if stats.alone:  # no bound holds for what is no number
        return replace(diff, steps_off=None if off is None else math.inf)
    if blocks is not None and blocks.count:
        return replace(diff, steps_off=off)  # steps of the accused side are no bound
    if runs is not None and off is not None and off <= 1.0 and runs.found() is not None:
        return replace(diff, steps_off=off)  # nor is one step where the others are far closer
    found = _lattice_fit(a, b)
    if found is not None and found.how and lattice_wide_steps(a, b) is None:
        coarser = coarser_encoding(a.encoding, b.encoding)
        most = found.largest if off is None else off  # with what was clipped
        return replace(diff, steps_off=most, verdict="WITHIN", cause=f"{coarser}: {found.how}")
    if off is not None:
        diff = replace(diff, steps_off=off)
        if off <= 1.0 and found is None:
            coarser = coarser_encoding(a.encoding, b.encoding)
            return replace(diff, verdict="WITHIN", cause=f"one step of {coarser}")
    if imatrix or off is None:
        return _judge_by_noise(diff, stats.rel_l2, beyond / max(1, stats.count), imatrix)
    return diff


def _lattice_fit(a: View, b: View) -> Fit | None:
    """Return the errors of a packed weight from the other side, in its steps.

    None unless exactly one side is a packed weight.
    """
    copied = _packed_copy(a, b)
    if copied is None or copied.lattice is None:
        return None
    return fit_errors((b if copied is a else a).numpy(), copied.numpy(), copied.lattice)


def _packed_copy(a: View, b: View) -> View | None:
    """Return the side that is a packed weight; None unless exactly one is."""
    packed = [side for side in (a, b) if side.lattice is not None]
    return packed[0] if len(packed) == 1 else None


def lattice_wide_steps(a: View, b: View) -> WideSteps | None:
    """Return the groups of a packed weight with steps too wide for the other side's values.

    None without any, or unless exactly one side is a packed weight.
    """
    copied = _packed_copy(a, b)
    if copied is None or copied.lattice is None:
        return None
    return wide_steps_of_lattice((b if copied is a else a).numpy(), copied.lattice)


def block_copy(a: View, b: View) -> View | None:
    """Return the side that may be a copy of the other in blocks with one step each, or None.

    It is the one in the coarser encoding. None for equal encodings, vectors and packed weights.
    """
    if a.encoding == b.encoding or len(a.shape) < 2:
        return None
    copied = a if coarser_encoding(a.encoding, b.encoding) == a.encoding else b
    if copied.lattice is not None or not WideStepsOfBlocks.is_for(copied.encoding, a.shape[-1]):
        return None
    return copied


def far_runs(a: View, b: View) -> FarRuns | None:
    """Return what looks for runs that are far off in a copy in blocks; None if neither is one."""
    copied = block_copy(a, b)
    if copied is None or not FarRuns.is_for(copied.encoding, copied.shape[-1]):
        return None
    return FarRuns(copied.encoding, copied.shape[-1])


def far_blocks(a: View, b: View) -> FarBlocks | None:
    """Return the blocks of a copy in blocks with a run that is far off; None without any."""
    runs, copied = far_runs(a, b), block_copy(a, b)
    if runs is None:
        return None
    for x, y, steps in value_chunks(a, b):
        source, copy = (x, y) if copied is b else (y, x)
        runs.add(source, copy, steps.of_blocks(int(copied is b)))
    return runs.found()


def block_wide_steps(a: View, b: View, copied: View) -> WideSteps | None:
    """Return the blocks of `copied` (`a` or `b`) with steps too wide for the other's values.

    None without any, or where its encoding has no blocks with one step each.
    """
    if not WideStepsOfBlocks.is_for(copied.encoding, copied.shape[-1]):
        return None
    blocks = WideStepsOfBlocks(copied.encoding, copied.shape[-1])
    for x, y, steps in value_chunks(a, b):
        source, copy = (x, y) if copied is b else (y, x)
        number = int(copied is b)
        wide, each = steps.of_blocks(number), steps.of_side(number)
        if each is not None:
            blocks.add(source, wide, copy, each)
    return blocks.found()


def _judge_by_noise(diff: TensorDiff, rel_l2: float, share: float, imatrix: bool) -> TensorDiff:
    """Return `diff` as WITHIN if its distance is usual for the coarser encoding, else unchanged.

    `rel_l2` is the distance, `share` the fraction of elements beyond one step, which counts with an
    importance matrix.
    """
    coarser = coarser_encoding(diff.encoding_a, diff.encoding_b)
    limit = NMSE.get(coarser)
    near = limit is not None and rel_l2**2 <= limit * NMSE_SLACK
    if not near or (imatrix and share > BEYOND_SHARE):
        return diff
    return replace(diff, verdict="WITHIN", cause=f"mean square error usual for {coarser}")


def coarser_encoding(a: str, b: str) -> str:
    """Return the encoding with fewer bits per weight; one of unknown size counts as the coarser."""
    return min((a, b), key=lambda name: encoding_row(name.split("+")[0]).bits_per_weight)


def largest_steps(a: View, b: View) -> float | None:
    """Return the largest |a - b| over the sum of both encodings' steps there; None if unknown."""
    off = 0.0
    for x, y, steps in value_chunks(a, b):
        step = steps()
        if step is None:
            return None
        off = max(off, float(steps_between(x, y, step).max(initial=0.0)))
    return off


def value_chunks(a: View, b: View) -> "Iterator[tuple[Array, Array, ChunkSteps]]":
    """Yield (values of a, values of b, ChunkSteps) in chunks of rows.

    A chunk's ChunkSteps has to be called before the next chunk is read.
    """
    rows, columns = matrix_shape(a.shape)
    if len(a.shape) == 1 and all(_decodes_rows(side) and _is_plain_array(side) for side in (a, b)):
        for start in range(0, columns, CHUNK):  # a vector of gigabytes is not decoded whole
            end_where_time_is_over()
            x, y = a[start : start + CHUNK], b[start : start + CHUNK]
            yield x, y, ChunkSteps(a, b, x, y, (0, rows))
            a.drop()
            b.drop()
        return
    if not (_decodes_rows(a) and _decodes_rows(b)) or len(a.shape) < 2 or not columns:
        x, y = a.numpy(), b.numpy()
        yield x, y, ChunkSteps(a, b, x, y, (0, rows))
        return
    per_chunk = max(1, CHUNK // columns)
    for start in range(0, rows, per_chunk):
        end_where_time_is_over()
        stop = min(rows, start + per_chunk)
        x, y = a.rows(start, stop), b.rows(start, stop)
        yield x, y, ChunkSteps(a, b, x, y, (start, stop))
        a.drop()
        b.drop()


def _decodes_rows(side: View) -> bool:
    """Return whether single rows of a tensor can be decoded from the stored bytes."""
    return side.row_bytes is not None and not side.restored


def _is_plain_array(side: View) -> bool:
    """Return whether a tensor is stored as plain numbers, not in blocks or as a packed weight."""
    return bool(encoding_row(side.encodings[0]).numpy) and side.lattice is None


class ChunkSteps:
    """Computes how far apart a chunk's elements may be: the sum of both sides' steps.

    A side's step is what storing in its encoding may change. `x` and `y` are the values of these
    rows. A plain float type's step is half the spacing of its numbers at the other side's value.
    """

    def __init__(self, a: View, b: View, x: "Array", y: "Array", rows: tuple[int, int]) -> None:
        """Store each side's view with the other side's decoded values of one chunk.

        `x` are the values of `a`, `y` those of `b`; `rows` is (first, end) of the chunk. A step
        depends on the other side's value, which the copy should be nearest to.
        """
        self._sides = (a, y.reshape(-1)), (b, x.reshape(-1))
        self._rows = rows

    def __call__(self, part: slice = slice(None)) -> "Step | None":
        """Return each element's rounding step, in the unit of its values: the sum of both sides'.

        `part` chooses elements of the flat chunk. It is a single number where all elements have
        the same, and None where a side's step is unknown.
        """
        total: Step | None = None
        for number in range(len(self._sides)):
            found = self.of_side(number, part)
            if found is None:
                return None
            total = found if total is None else _add_steps(total, found)
        return total

    def of_side(self, number: int, part: slice = slice(None)) -> "Step | None":
        """Return the steps of side 0 (A) or 1 (B) for the elements `part`; None if unknown."""
        (side, other), raw = self._sides[number], self._stored_blocks[number]
        name = side.encodings[0]
        if encoding_row(name).numpy:
            return _float_half_spacing(name, other[part])
        if side.lattice is not None:
            found: Array = side.lattice.bound.reshape(-1)[part]
            return found
        if raw is None:
            return None
        columns = side.shape[-1] if side.shape else 1
        return codec_steps(
            name, raw, other.size, part, columns=columns, row_bytes=side.stored_row_bytes
        )

    def of_blocks(self, number: int) -> "Array | None":
        """Return the step of each block [blocks] of side 0 (A) or 1 (B); None if unknown.

        That side's encoding is one that WideStepsOfBlocks takes.
        """
        (side, other), raw = self._sides[number], self._stored_blocks[number]
        if raw is None:
            return None
        codec = CODECS[side.encodings[0]].of_rows(side.shape[-1])
        return codec.largest_steps(raw, other.size)

    @cached_property
    def _stored_blocks(self) -> "tuple[Mapping[str, Buffer] | None, ...]":
        """Return (A's, B's) stored bytes of the chunk's rows, each by suffix of the stored tensor.

        A member is None if that tensor is a plain array or a packed weight.
        """
        return tuple(
            None
            if encoding_row(side.encodings[0]).numpy or side.lattice is not None
            else side.raw_rows(*self._rows)
            for side, _ in self._sides
        )


def _add_steps(one: "Step", other: "Step") -> "Step":
    """Return the sum of two steps; a step of 0.0, of exact storage, adds nothing."""
    if isinstance(one, float) and one == 0.0:
        return other
    return one if isinstance(other, float) and other == 0.0 else one + other


# Significand bits after the leading one, and the smallest normal exponent, of plain float types.
_FLOATS = {
    "F64": (52, -1022), "F32": (23, -126), "F16": (10, -14), "BF16": (7, -126),
    "F8_E4M3": (3, -6), "F8_E5M2": (2, -14), "F8_E4M3FNUZ": (3, -7), "F8_E5M2FNUZ": (2, -15),
}  # fmt: skip


def _float_half_spacing(name: str, other: "Array") -> "Step":
    """Return half the spacing of a float type's numbers at each value of the other side.

    `name` is the encoding. It is 0.0 for F32, F64, integers and booleans.
    """
    if name not in _FLOATS:
        return 0.0
    bits, smallest = _FLOATS[name]
    if name in ("F64", "F32"):
        return 0.0
    if other.dtype.kind == "f" and other.dtype.itemsize <= 4:
        exponents = np.ascontiguousarray(other, np.float32).view(np.uint32) >> 23 & 0xFF
        near: Array = _half_spacings(bits, smallest)[exponents.reshape(-1)]
        return near
    size = np.abs(to_float64(other)).reshape(-1)
    _, exponent = np.frexp(size)
    exponent[size == 0] = smallest  # frexp gives 0, the exponent of a number below 1
    half: Array = 0.5 * np.ldexp(1.0, np.maximum(exponent - 1, smallest) - bits)
    return half


@cache
def _half_spacings(bits: int, smallest: int) -> "Array":
    """Return half the spacing (float64 [256]) of a float type, by a float32's 8-bit exponent.

    `bits` and `smallest` describe the type: bits of its fraction, and its smallest exponent.
    """
    exponent = np.arange(256) - 127
    half: Array = 0.5 * np.ldexp(1.0, np.maximum(exponent, smallest) - bits)
    return half
