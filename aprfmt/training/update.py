"""What a step did to each weight, read in pieces: what moved, by how much, and by which rule.

A *piece* is some rows of a parameter, before the step and after it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.gradients.finite_weights import check_finite_before
from aprfmt.measure.encoding_noise import UNIT, float_spacing
from aprfmt.tensors.runs import first_difference
from aprfmt.tensors.view import View
from aprfmt.training.parameters import Parameter
from aprfmt.training.report import UpdateFacts

F64 = NDArray[np.float64]
CHUNK = 1 << 21  # elements of a piece; a dozen arrays of this size are held at once


@dataclass
class Sums:
    """Running sums over the pieces of one parameter.

    Integers count elements. `squares` is the sum of squares of the change, `largest` its largest
    absolute value, `weight` the sum of squares of the weight before the step.
    """

    elements: int = 0
    moved: int = 0
    one_step: int = 0
    nonfinite: int = 0
    squares: float = 0.0
    largest: float = 0.0
    weight: float = 0.0  # sum of squares before the step

    def add(self, before: F64, after: F64, encoding: str) -> None:
        """Add a piece of a parameter, before and after the step, to the sums; float64 of one shape.

        `encoding` is the type before the step, whose spacing says what one step of it is. Elements
        that are not finite are counted in `nonfinite`, and left out of the sums of the change.
        """
        self.elements += before.size
        self.weight += float(np.square(before).sum())
        finite = np.isfinite(after) & np.isfinite(before)
        if not finite.all():
            self.nonfinite += int((~finite).sum())
            before, after = before[finite], after[finite]
        change = after - before
        moved = change != 0
        count = int(np.count_nonzero(moved))
        if not count:
            return
        self.moved += count
        change, before = change[moved], before[moved]
        self.squares += float(np.square(change).sum())
        self.largest = max(self.largest, float(np.abs(change).max()))
        if encoding in UNIT:
            self.one_step += int(
                np.count_nonzero(np.abs(change) <= float_spacing(before, encoding))
            )

    def facts(self) -> UpdateFacts:
        """Return the sums as UpdateFacts, with the norm and the largest value of the change."""
        return UpdateFacts(
            self.elements,
            self.moved,
            self.one_step,
            float(np.sqrt(self.squares)),
            self.largest,
            self.nonfinite,
        )


def same_bytes(parameter: Parameter) -> bool:
    """Return whether a parameter's stored bytes are equal before and after the step.

    False also where bytes do not tell: the type is another one, or weights are made when read. The
    elements have to be compared then.
    """
    before, after = parameter.before, parameter.after
    if after is None or before.encoding != after.encoding or before.encoding not in UNIT:
        return False
    if before.runs is None or after.runs is None or before.restored or after.restored:
        return False
    return first_difference(before.runs, after.runs) is None


def pieces(view: View, other: View | None = None) -> Iterator[tuple[int, int, F64, F64 | None]]:
    """Yield (first row, end row, before, after) of a parameter in pieces, float64 [rows, columns].

    `after` is None where `other`, the weight after the step, is. Raises UsageError for a weight
    before the step that is NaN or infinite.
    """
    for start, stop, values in view.chunks(CHUNK):
        check_finite_before(view, values)
        after = None if other is None else other.rows(start, stop).astype(np.float64)
        yield start, stop, values.astype(np.float64), after
        view.drop()
        if other is not None:
            other.drop()
