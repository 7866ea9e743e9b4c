"""One pair, one verdict: bytes first, then elements, then the bound of the coarser encoding."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from aprfmt.base.encodings import encoding as encoding_row
from aprfmt.compare.align import Pair, Side, stored_names
from aprfmt.compare.bounds import BEYOND_SHARE, NMSE, NMSE_SLACK, steps
from aprfmt.compare.nonfinite import alike
from aprfmt.compare.raw import byte_runs, first_difference, stored_runs
from aprfmt.compare.records import TensorDiff
from aprfmt.compare.values import CHUNK, Accumulator, wide
from aprfmt.errors import AprfmtError, CodecError
from aprfmt.tensors.logical import LogicalTensor
from aprfmt.tensors.views import Tensor


def compare_pair(pair: Pair, imatrix: bool = False) -> TensorDiff:
    """Compare one pair; never raises for a tensor that cannot be read: that is UNREADABLE.

    `imatrix` says that either file was quantized with an importance matrix, which makes the
    one-step bound statistical.
    """
    a, b = pair.a, pair.b
    diff = TensorDiff(
        pair.key,
        "DIFFERENT",
        name_a=", ".join(stored_names(a)[:2]),
        name_b=", ".join(stored_names(b)[:2]),
        encoding_a=_encoding(a),
        encoding_b=_encoding(b),
        shape_a=None if a is None else a.shape,
        shape_b=None if b is None else b.shape,
        layout=pair.layout,
    )
    damage = next((side.damage for side in (a, b) if side is not None and side.damage), "")
    if damage:
        return replace(diff, verdict="UNREADABLE", cause=damage)
    if a is None or b is None:
        return replace(diff, verdict="ONLY_IN_B" if a is None else "ONLY_IN_A")
    if a.shape != b.shape:
        return replace(diff, verdict="SHAPE_DIFFERS")
    try:
        return _compare(diff, a, b, imatrix)
    except AprfmtError as error:
        return replace(diff, verdict="UNREADABLE", cause=str(error))


def _encoding(side: Side | None) -> str:
    return "" if side is None else side.encoding


def _layout(a: Side, b: Side) -> tuple[str, ...]:
    """Name the steps only one side has: what the formats did to the same values."""
    sides = [
        (label, side.steps if isinstance(side, LogicalTensor) else ())
        for label, side in (("A", a), ("B", b))
    ]
    (_, first), (_, second) = sides
    if first == second:
        return ()
    return tuple(
        f"{step} in {label}"
        for (label, mine), other in zip(sides, (second, first), strict=True)
        for step in mine
        if step not in other
    )


def _compare(diff: TensorDiff, a: Side, b: Side, imatrix: bool) -> TensorDiff:
    layout = (*diff.layout, *_layout(a, b))
    diff = replace(diff, layout=layout)
    if not layout and a.encoding == b.encoding and _same_stored(a, b):
        return replace(diff, verdict="SAME_BYTES")
    runs_a, runs_b = byte_runs(a), byte_runs(b)
    first: int | None = None
    comparable = (
        runs_a is not None
        and runs_b is not None
        and encoding_row(_one(a)).type_size * encoding_row(_one(b)).block_size
        == encoding_row(_one(b)).type_size * encoding_row(_one(a)).block_size
        and sum(r.nbytes for r in runs_a) == sum(r.nbytes for r in runs_b)
    )
    if comparable and runs_a is not None and runs_b is not None:
        first = first_difference(runs_a, runs_b)
        if first is None and a.encoding == b.encoding:
            return replace(diff, verdict="SAME_VALUES" if layout else "SAME_BYTES")
        if first is None:
            return _mislabelled(diff, a, b)
    return _by_values(replace(diff, first_byte=first), a, b, imatrix)


def _same_stored(a: Side, b: Side) -> bool:
    """Say whether both sides store the same bytes, all parts of packed weights included."""
    return first_difference(stored_runs(a), stored_runs(b)) is None


def _one(side: Side) -> str:
    return side.encodings[0] if isinstance(side, LogicalTensor) else side.encoding


def _mislabelled(diff: TensorDiff, a: Side, b: Side) -> TensorDiff:
    """Equal bytes under two encodings: the same values (all zero) or a wrong label."""
    result = _by_values(diff, a, b, False)
    if result.verdict == "SAME_VALUES":
        return result
    return replace(result, verdict="DIFFERENT", cause="dtype_mislabel", steps_off=None)


def _by_values(diff: TensorDiff, a: Side, b: Side, imatrix: bool) -> TensorDiff:
    import numpy as np

    accumulator = Accumulator(a.shape)
    off: float | None = 0.0
    beyond = 0
    with np.errstate(all="ignore"):  # damaged scales make wild steps, and are judged by them
        for x, y, step in chunks(a, b):
            accumulator.add(x, y)
            if step is None:
                off = None
                continue
            ratio = steps_between(x, y, step)
            if off is not None:
                off = max(off, float(ratio.max(initial=0.0)))
            beyond += int((ratio > 1.0).sum())
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
    if off is not None:
        diff = replace(diff, steps_off=off)
        if off <= 1.0:
            coarser = coarser_of(a.encoding, b.encoding)
            return replace(diff, verdict="WITHIN", cause=f"one step of {coarser}")
    if imatrix or off is None:
        return _statistical(diff, stats.rel_l2, beyond / max(1, stats.count), imatrix)
    return diff


def _statistical(diff: TensorDiff, rel_l2: float, share: float, imatrix: bool) -> TensorDiff:
    coarser = coarser_of(diff.encoding_a, diff.encoding_b)
    limit = NMSE.get(coarser)
    near = limit is not None and rel_l2**2 <= limit * NMSE_SLACK
    if not near or (imatrix and share > BEYOND_SHARE):
        return diff
    return replace(diff, verdict="WITHIN", cause=f"mean square error usual for {coarser}")


def coarser_of(a: str, b: str) -> str:
    """Return the encoding with fewer bits a weight."""
    return min((a, b), key=lambda name: encoding_row(name.split("+")[0]).bits_per_weight)


def in_steps(a: Side, b: Side) -> float | None:
    """Return the largest |a-b| of two tensors in steps of both encodings, None where unknown."""
    off = 0.0
    for x, y, step in chunks(a, b):
        if step is None:
            return None
        off = max(off, float(steps_between(x, y, step).max(initial=0.0)))
    return off


def steps_between(x: Any, y: Any, step: Any) -> Any:
    """Return |x - y| in steps; infinite where the step is zero, or one side alone is not finite.

    What is not finite and alike on both sides is no step apart.
    """
    import numpy as np

    x, y = wide(x).reshape(-1), wide(y).reshape(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        delta = np.abs(x - y)
        ratio = delta / step
    ratio[np.isnan(ratio) | ~np.isfinite(delta)] = np.inf
    ratio[alike(x, y)] = 0.0
    return ratio


def chunks(a: Side, b: Side) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (values of a, values of b, step of every element or None), in chunks of rows."""
    shape = a.shape
    columns = shape[-1] if shape else 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    whole = _whole(a) or _whole(b) or len(shape) < 2 or not columns
    if whole:
        yield (*_all(a, b), _steps(a, b, 0, rows, columns))
        return
    per_chunk = max(1, CHUNK // columns)
    for start in range(0, rows, per_chunk):
        stop = min(rows, start + per_chunk)
        yield _rows(a, start, stop), _rows(b, start, stop), _steps(a, b, start, stop, columns)
        a.drop()
        b.drop()


def _all(a: Side, b: Side) -> tuple[Any, Any]:
    return a.numpy(), b.numpy()


def _whole(side: Side) -> bool:
    """Say whether a side can only be decoded in one piece."""
    runs = byte_runs(side)
    if runs is None or (isinstance(side, LogicalTensor) and side.restored):
        return True
    return encoding_row(_one(side)).row_bytes(side.shape) is None


def _rows(side: Side, start: int, stop: int) -> Any:
    if isinstance(side, LogicalTensor):
        return side.decode_rows(start, stop)
    return _tensor_rows(side, start, stop)


def _tensor_rows(side: Tensor, start: int, stop: int) -> Any:
    from aprfmt.codecs import decode

    row_bytes = encoding_row(side.encoding).row_bytes(side.shape)
    assert row_bytes is not None
    raw = side.raw(start * row_bytes, stop * row_bytes)
    return decode(side.encoding, {"": raw}, (stop - start, side.shape[-1]))


def _steps(a: Side, b: Side, start: int, stop: int, columns: int) -> Any:
    """Return the tolerance of every element: the sum of both sides' steps, None where unknown.

    A plain float type's step is the spacing of its numbers at the other side's value.
    """
    total: Any = 0.0
    for side, other in ((a, b), (b, a)):
        row = encoding_row(_one(side))
        if row.numpy:
            total = total + _float_step(_one(side), other, start, stop, columns)
            continue
        runs = byte_runs(side)
        count = (stop - start) * columns
        if runs is None:
            if not isinstance(side, Tensor) and len(side.stored) != 1:
                return None
            lazy = side.lazy if isinstance(side, Tensor) else side.stored[0]
            parts: dict[str, Any] = {suffix: part.raw() for suffix, part in lazy.parts.items()}
            parts = parts or {"": lazy.raw()}
        else:
            from aprfmt.tensors.logical import gather

            row_bytes = row.row_bytes(side.shape)
            if row_bytes is None:
                parts = {"": gather(runs, 0, sum(run.nbytes for run in runs))}
            else:
                parts = {"": gather(runs, start * row_bytes, stop * row_bytes)}
        found = steps(_one(side), parts, count)
        if found is None:
            return None
        total = total + found
    return total


# Significand bits after the leading one, and the smallest normal exponent, of plain float types.
_FLOATS = {
    "F64": (52, -1022), "F32": (23, -126), "F16": (10, -14), "BF16": (7, -126),
    "F8_E4M3": (3, -6), "F8_E5M2": (2, -14), "F8_E4M3FNUZ": (3, -7), "F8_E5M2FNUZ": (2, -15),
}  # fmt: skip


def _float_step(name: str, other: Side, start: int, stop: int, columns: int) -> Any:
    """Half the spacing of a float type's numbers at the other side's values: round to nearest."""
    import numpy as np

    if name not in _FLOATS:
        raise CodecError(f"{name}: has no rounding step")
    bits, smallest = _FLOATS[name]
    if name in ("F64", "F32"):
        return 0.0
    whole = len(other.shape) < 2 or _whole(other)
    values = other.numpy().reshape(-1, columns)[start:stop] if whole else _rows(other, start, stop)
    _, exponent = np.frexp(np.abs(wide(values)).reshape(-1))
    return 0.5 * np.ldexp(1.0, np.maximum(exponent - 1, smallest) - bits)
