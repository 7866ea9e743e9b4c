"""The type `Writer`: one way of storing a quantized weight in the several tensors of a dialect.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes. A *group* is the elements that share one scale.

A writer rounds values to the nearest on the scales that its library would choose without
calibration, or takes codes and scales from a weight that is repacked; either way the same rows lay
them out. The table is in `writers.py`. Parts are made one at a time, so that a large weight is
never in memory twice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from aprfmt.codecs import decode, encode
from aprfmt.codecs.base import F32, U8, Array
from aprfmt.codecs.dialect import StoredPart
from aprfmt.codecs.grids import GridWeight, Groups
from aprfmt.codecs.repacks import GroupCounts
from aprfmt.errors import CodecError

_ROWS = 1 << 20  # elements looked at in one step


class Settings(NamedTuple):
    """How a weight is written: `size` inputs share a scale, `scales` is the encoding of scales.

    `version` is that of the layout. With `activations` every weight also has scales of its inputs.
    `most` is the largest magnitude of all weights that share one factor of the whole tensor.
    """

    size: int
    scales: str
    version: int = 1
    activations: bool = False
    most: float = 0.0


@dataclass(frozen=True)
class OutTensor:
    """One tensor to write for a weight: `shape(outputs, inputs, groups)` gives its shape.

    `make(source, settings)` gives its values. `encoding` is "" where it is that of the scales.
    """

    encoding: str
    shape: Callable[[int, int, int], tuple[int, ...]]
    make: Callable[[GridWeight, Settings], Array]


@dataclass(frozen=True)
class Writer:
    """One way of storing a weight [out, in], or with `stacked` one of experts, [experts, out, in].

    `encoding` is the dialect's row of the encoding table. `choose(values, settings)` returns the
    scales of groups as they are stored, `codes(values, groups)` the codes under them, in the form
    of GridWeight.codes. `hold(groups, settings)` returns the scales of a weight that is repacked as
    they can be stored here, or raises CodecError. `tensors` are by suffix, the main part first.
    `section(settings, left_out)` returns the keys of config.json, and `files` further JSON files.
    `shares`: weights that engines join have one factor of the whole (`Settings.most`).
    """

    encoding: str
    choose: Callable[[F32, Settings], Groups]
    codes: Callable[[F32, Groups], U8]
    hold: Callable[[Groups, Settings], Groups]
    tensors: Mapping[str, OutTensor]
    section: Callable[[Settings, Sequence[str]], Mapping[str, Any]]
    files: Callable[[Settings, Sequence[str]], Mapping[str, Any]] = lambda settings, left_out: {}
    scales: str = ""  # their encoding where it is not the weight's own
    stacked: bool = False
    shares: bool = False

    @property
    def main(self) -> str:
        """Suffix of the tensor that holds the codes."""
        return next(iter(self.tensors))

    def stored(self, shape: Sequence[int], settings: Settings) -> Mapping[str, StoredPart]:
        """Return {suffix: stored part without bytes} for a weight of this shape."""
        *stack, outputs, inputs = shape
        return {
            suffix: StoredPart(
                b"",
                row.encoding or settings.scales,
                (*stack, *row.shape(outputs, inputs, inputs // settings.size)),
            )
            for suffix, row in self.tensors.items()
        }

    def part(self, source: GridWeight, suffix: str, settings: Settings) -> bytes:
        """Return the bytes of the stored tensor `suffix` of a weight, given as codes and scales."""
        row = self.tensors[suffix]
        made = np.ascontiguousarray(row.make(source, settings))
        if made.dtype == np.float32 and (row.encoding or settings.scales) != "F32":
            return encode(row.encoding or settings.scales, made)[""]
        return made.tobytes()

    def quantize(self, values: F32, settings: Settings) -> GridWeight:
        """Return values [out, in] quantized: scales chosen for each group, and the nearest codes.

        Raises CodecError for a NaN, an infinity, or rows that are not whole groups.
        """
        outputs, inputs = values.shape
        if inputs % settings.size:
            raise CodecError(f"rows of {inputs} are no whole number of groups of {settings.size}")
        wrong = ~np.isfinite(values)
        if wrong.any():
            index = [int(i) for i in np.argwhere(wrong)[0]]
            raise CodecError(f"holds {values[tuple(index)]} at {index}, expected finite numbers")
        with np.errstate(all="ignore"):
            groups = self.choose(values, settings)

        def round_rows(start: int, stop: int) -> U8:
            """Return the nearest codes of rows [start, stop), made some rows at a time."""
            step, made = max(1, _ROWS // max(inputs, 1)), []
            with np.errstate(all="ignore"):
                for at in range(start, stop, step):
                    end = min(at + step, stop)
                    made.append(self.codes(values[at:end], groups.rows(at, end)))
            return made[0] if len(made) == 1 else np.concatenate(made)

        return GridWeight((outputs, inputs), groups, round_rows)

    def repack(self, source: GridWeight, settings: Settings) -> tuple[GridWeight, GroupCounts]:
        """Return (`source` with its scales as this layout stores them, counts of changed values).

        `source` is a weight to be repacked [out, in]: its codes are used unchanged. Raises
        CodecError with the reason where this layout cannot hold it.
        """
        if len(source.shape) != 2:
            raise CodecError(f"its shape is {list(source.shape)}, expected [out, in]")
        if source.groups.size != settings.size:
            raise CodecError(
                f"its groups are of {source.groups.size} inputs, expected {settings.size}"
            )
        held = replace(source, groups=self.hold(source.groups, settings))
        scale = source.groups.scale
        if scale.dtype == np.float32 and scale.any() and not held.groups.scale.any():
            raise CodecError(
                f"its scales, up to {np.abs(scale).max():.3g}, would all be 0 in "
                f"{self.scales or settings.scales}: nothing of it would be left"
            )
        return held, count_changes(source, held)


def count_changes(before: GridWeight, after: GridWeight) -> GroupCounts:
    """Return how many groups of values there are, in how many one changes, and the largest change.

    `before` and `after` are the same weight as codes and scales in two layouts. Values are only
    decoded where the scales or offsets differ.
    """
    count = before.groups.scale.size
    if before.groups.same(after.groups):
        return GroupCounts(count, 0, 0.0)
    rows, changed, largest = before.groups.scale.shape[0], 0, 0.0
    step = max(1, _ROWS // max(before.shape[-1], 1))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values = [one.values(start, stop).astype(np.float64) for one in (before, after)]
        off = np.abs(values[0] - values[1]).reshape(-1, before.groups.size)
        changed += int(off.any(axis=1).sum())
        largest = max(largest, float(off.max(initial=0.0)))
    return GroupCounts(count, changed, largest)


def round_numbers(what: str, numbers: F32, encoding: str) -> F32:
    """Return numbers rounded to an encoding, as float32; CodecError where one is beyond its range.

    `what` names the numbers in the error.
    """
    found: F32 = decode(
        encoding, encode(encoding, np.ascontiguousarray(numbers, np.float32))[""], numbers.shape
    )
    wrong = ~np.isfinite(found)
    if wrong.any():
        index = [int(i) for i in np.argwhere(wrong)[0]]
        raise CodecError(f"{what} {numbers[tuple(index)]} at {index} is beyond {encoding}")
    return found
