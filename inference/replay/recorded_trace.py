"""Values that another run recorded, in the shapes and on the rows of a model's own pass."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.capture import POINTS, SLOTS, key_name
from aprfmt.measure import unit_lengths
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.log_softmax import NOTE, POINT, is_log_softmax, shift_logits_onto
from aprfmt.measure.trace_rows import positions_text
from aprfmt.measure.trace_view import TraceLike

Array = NDArray[Any]
NO_VALUES = "zero on both sides: nothing was measured"


def finite_rel_l2(mine: Any, theirs: Any) -> float:
    """Return the relative L2 distance over elements finite in both arrays; inf if sizes differ."""
    x, y = np.asarray(mine, np.float64).reshape(-1), np.asarray(theirs, np.float64).reshape(-1)
    if x.size != y.size:
        return math.inf
    finite = np.isfinite(x) & np.isfinite(y)
    return rel_l2(x[finite], y[finite])


@dataclass(frozen=True)
class RecordedValue:
    """A trace's values at a point, on rows that the model's pass has too.

    `rows` are row numbers of the model's value, None for all of them. `mask` is False at entries
    that were masked out (infinities, or numbers too low for a score), None where all count; these
    are not compared. `note` says how the values were brought into the model's shape. `normalized`
    are logits that were recorded as log-probabilities; they are compared up to a row's constant.
    `of_length_one` is an embedding that was recorded with length 1; its direction is compared.
    """

    values: Array
    rows: NDArray[np.int64] | None
    dtype: str
    note: str = ""
    mask: NDArray[np.bool_] | None = None  # of the entries that count
    normalized: bool = False
    of_length_one: bool = False

    def reference_rows(self, mine: Array, axis: int) -> Array:
        """Return the reference's value `mine` on the recorded rows.

        If `normalized`, its logits are shifted row by row onto the recorded ones. If
        `of_length_one`, it is divided by its length.
        """
        rows = mine if self.rows is None else np.take(mine, self.rows, axis=axis)
        if self.normalized and rows.shape == self.values.shape:
            return shift_logits_onto(rows, self.values)
        if self.of_length_one:
            return np.asarray(unit_lengths.divide_by_length(rows), rows.dtype)
        return rows

    def distance(self, mine: Array, axis: int) -> float:
        """Return the relative L2 of the model's value `mine`, on rows and entries that count.

        The recorded value is the reference, so that it does not change while changes of the model
        are tried. `axis` counts tokens.
        """
        cut = self.reference_rows(mine, axis)
        if self.mask is None or cut.shape != self.values.shape:
            return rel_l2(cut, self.values)
        return rel_l2(cut[self.mask], self.values[self.mask])

    def comparable_values(self, mine: Array, axis: int) -> tuple[Array, Array]:
        """Return (the reference's value, this trace's) on the same rows, masked entries zero.

        `mine` is the reference's value at this point on all rows; `axis` counts tokens.
        """
        cut = self.reference_rows(mine, axis)
        if self.mask is None or cut.shape != self.values.shape:
            return cut, self.values
        return np.where(self.mask, cut, 0), np.where(self.mask, self.values, 0)

    def fill_into(self, mine: Array, axis: int) -> Array:
        """Return the reference's value `mine` with this trace's rows and entries put in."""
        values = self.values.astype(mine.dtype, copy=False)
        if self.mask is not None:
            values = np.where(self.mask, values, self.reference_rows(mine, axis))
        if self.rows is None:
            return values
        out = np.array(mine)
        index: list[Any] = [slice(None)] * out.ndim
        index[axis] = self.rows
        out[tuple(index)] = values
        return out


# A lower score can only come from a mask (half of float16's lowest number). Our own backends record
# scores before the mask, so in their traces such a number counts like any other.
MASKED = -3e4


def may_be_masked(key: str, trace: TraceLike) -> bool:
    """Return whether a trace's values of a key may be scores with the mask already applied."""
    return key.rpartition(".")[2] == "scores" and not is_own_backend(trace)


def is_own_backend(trace: TraceLike) -> bool:
    """Return whether one of our own backends made a trace."""
    facts = trace.run.get("backend")
    return isinstance(facts, Mapping) and facts.get("backend") in BACKENDS


class RecordedTrace:
    """A trace's values at the reference's points: rows by position, joined stages split."""

    def __init__(
        self,
        trace: TraceLike,
        ids: Sequence[int],
        shapes: Mapping[str, tuple[int, ...]],
        without: Collection[str] = (),
        bounds: Mapping[str, float] | None = None,
    ) -> None:
        """Take a trace, the ids of the model's pass and the shapes of its points.

        `without` are keys to ignore, `bounds` tolerances of points after much rounding, by key.
        """
        self.trace = trace
        self.ids = tuple(ids)
        self.shapes = dict(shapes)
        self.without = frozenset(without)  # keys to ignore
        self.bounds = bounds or {}  # tolerances of points that much rounding comes before
        self.foreign = not is_own_backend(trace)
        self._cut: dict[str, RecordedValue | None] = {}

    def ignoring(self, without: Collection[str]) -> "RecordedTrace":
        """Return the same trace with these keys ignored, and no others."""
        return RecordedTrace(self.trace, self.ids, self.shapes, without, self.bounds)

    def with_trace(self, trace: TraceLike) -> "RecordedTrace":
        """Return another trace with the ids, shapes and settings of this one."""
        return RecordedTrace(trace, self.ids, self.shapes, self.without, self.bounds)

    def with_bounds(self, bounds: Mapping[str, float]) -> "RecordedTrace":
        """Return the same trace with other tolerances at some points, by key."""
        return RecordedTrace(self.trace, self.ids, self.shapes, self.without, bounds)

    def has_record(self, key: str) -> bool:
        """Return whether the trace recorded the key itself, not only a point equal to it."""
        return key in self.trace.records

    def value_of(self, key: str) -> RecordedValue | None:
        """Return the values of a key; None if there are none, or their shape cannot be adapted.

        They get the reference's shape, which is known after its first pass.
        """
        if key in self.without or key not in self.shapes:
            return None
        if key not in self._cut:
            self._cut[key] = self._read(key, self.shapes[key])
        return self._cut[key]

    def forget(self, key: str) -> None:
        """Drop the cached values of a key; they are read again when needed."""
        self._cut.pop(key, None)

    def _read(self, key: str, shape: tuple[int, ...]) -> RecordedValue | None:
        """Return the values of a key in `shape`; None if there are none or they do not fit."""
        # What a foreign trace says of equal points is the model's own statement about itself.
        held = not self.foreign or key in self.trace.records
        record = self.trace.find_record(key) if held else None
        if record is None:
            return self._read_slot_part(key, shape)
        values = self.trace.recorded_values(key)
        if values is None:
            return None
        positions = record.positions
        if positions is None:
            positions = positions_before_padding(values.size, shape, token_axis(key), self.ids)
        found = fit_values(
            np.asarray(values),
            positions,
            record.dtype,
            shape,
            token_axis(key),
            len(self.ids),
            masked=may_be_masked(key, self.trace),
        )
        if found is not None and record.point == unit_lengths.POINT and self.foreign:
            if not unit_lengths.has_length_one(found.values):
                return found
            note = "; ".join(text for text in (found.note, unit_lengths.NOTE) if text)
            return replace(found, note=note, of_length_one=True)
        if found is None or record.point != POINT or not is_log_softmax(found.values):
            return found
        note = "; ".join(text for text in (found.note, NOTE) if text)
        return replace(found, note=note, normalized=True)

    def _read_slot_part(self, key: str, shape: tuple[int, ...]) -> RecordedValue | None:
        """Return the values of point `key`, cut from a recorded stage that joins several points.

        An APRT folder has such stages (`L0.qkv`). None if no such stage was recorded, or widths are
        not known.
        """
        layer, _, point = key.rpartition(".")
        for slot, parts in SLOTS.items():
            joined = f"{layer}.{slot}"
            if len(parts) == 1 or point not in parts or joined not in self.trace.records:
                continue
            record, values = self.trace.find_record(joined), self.trace.recorded_values(joined)
            widths = [
                math.prod(self.shapes[f"{layer}.{part}"][1:])
                for part in parts
                if f"{layer}.{part}" in self.shapes
            ]
            if record is None or values is None or len(widths) != len(parts):
                return None
            rows = np.asarray(values).reshape(-1)
            if rows.size % sum(widths):
                return None
            at = parts.index(point)
            start = sum(widths[:at])
            cut = rows.reshape(-1, sum(widths))[:, start : start + widths[at]]
            return fit_values(cut, record.positions, record.dtype, shape, 0, len(self.ids))
        return None


def token_axis(key: str) -> int:
    """Return the axis of a point's value that counts tokens: 1 for scores, else 0."""
    row = POINTS.get(key.rpartition(".")[2])
    return 1 if row is not None and row.rows == "scores" else 0


def positions_before_padding(
    size: int, shape: tuple[int, ...], axis: int, ids: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the positions of rows that were recorded without the padding after them.

    `size` counts the recorded values of a point of `shape`, whose `axis` counts the tokens `ids`.
    Padding is a run of one id at the end that is at least as long as the rows that are missing,
    which are several. None where the rows may be others.
    """
    width = math.prod(shape) // max(shape[axis], 1)
    if shape[axis] != len(ids) or not width or size % width:
        return None
    count = size // width
    padding = ids[count:]
    return tuple(range(count)) if count and len(padding) > 1 and len({*padding}) == 1 else None


def fit_values(
    values: Array,
    positions: Sequence[int] | None,
    dtype: str,
    shape: tuple[int, ...],
    axis: int,
    tokens: int,
    masked: bool = True,
) -> RecordedValue | None:
    """Return recorded values in the reference's `shape`; None if that is not possible.

    If all tokens were recorded, rows are those of the reference. Otherwise rows are matched by
    position, and have the reference's width; without positions they count as the last ones. `axis`
    counts tokens, of which the pass has `tokens`. `masked` leaves out entries that only a mask can
    produce; a NaN is never left out.
    """
    note = ""
    rows: NDArray[np.int64] | None = None
    width = math.prod(shape) // max(shape[axis], 1)
    if values.size == math.prod(shape):
        values = values.reshape(shape)
    elif width and values.size and values.size % width == 0 and values.size < math.prod(shape):
        count = values.size // width
        if positions is not None:
            if len(positions) != count:
                return None  # its rows have another width
            chosen = [p for p in positions if p < tokens]
            note = f"rows of positions {positions_text(chosen)}"
        else:
            chosen = list(range(shape[axis] - count, shape[axis]))
            note = f"{count} of {shape[axis]} rows, taken as the last ones"
        if len(chosen) != count:
            return None
        rows = np.asarray(chosen, np.int64)
        values = values.reshape(*shape[:axis], count, *shape[axis + 1 :])
    elif axis == 1 and values.ndim == 3 and values.shape[:2] == shape[:2]:
        if values.shape[2] < shape[2]:
            return None
        values, note = values[:, :, : shape[2]], f"padded to {values.shape[2]} keys"
    else:
        return None
    mask = None
    if masked and axis == 1 and values.dtype.kind == "f":
        counts = ~(values <= MASKED)
        if not counts.all():
            mask, note = counts, (note + "; " if note else "") + "masked entries left out"
    return RecordedValue(values, rows, dtype, note, mask)


def layer_keys(layer: int) -> list[str]:
    """Return the keys of a layer's points in execution order; -1: of the points of no layer."""
    return [key_name(name, layer) for name, row in POINTS.items() if row.layered == (layer >= 0)]
