"""Two defects in one tensor: the rest after the first one, and bytes read as another type."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.causes.tensor.differing_pair import Unequal
from aprfmt.causes.tensor.guess import Guess, Take
from aprfmt.causes.tensor.stored_bytes import SIXTEEN, swapped
from aprfmt.measure.numbers import wide
from aprfmt.measure.row_reader import Computed, Reader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

SANE = 4.0  # how far two root mean squares may be apart for a reading to be worth a try


class Transformed(Computed):
    """A transformed tensor; it has values but no stored bytes."""

    def __init__(self, like: Reader, take: Take) -> None:
        super().__init__(like.side)
        self.rows, self.columns, self.shape = like.rows, like.columns, like.shape
        self._take = take

    def take(self, index: "Array | list[int]") -> "Array":
        """Return the transformed rows with these numbers."""
        return self._take(np.asarray(index))


def remainder(case: Unequal, guess: Guess) -> Unequal | None:
    """Return the pair after applying a guess; None if the guess concerns only some rows."""
    if guess.rows is not None or case.a.shape != case.b.shape:
        return None
    a, b = Transformed(case.a, guess.left), Transformed(case.b, guess.right)
    rest = Unequal(case.key, a, b, case.context)
    rest.numbers, rest.known = case.numbers, False
    return rest


def rereadings(case: Unequal) -> Iterator[tuple[str, str, Unequal]]:
    """Yield (cause, sentence, case) of one side's bytes read as another type or byte order.

    Only if the values then have about the other side's size, and did not before.
    """
    for label, side, other in (("B", case.b, case.a), ("A", case.a, case.b)):
        row = encoding_row(side.encoding.split("+")[0])
        if side.row_bytes is None or not row.numpy or row.type_size == 1:
            continue
        size = _size(other.take(case.sample))
        readings: list[tuple[str, str, Take]] = [
            (
                "endianness",
                f"{label} has every {row.type_size}-byte value in the other byte order",
                swapped(side, True),
            )
        ]
        if side.encoding in SIXTEEN:
            name = SIXTEEN[1 - SIXTEEN.index(side.encoding)]
            readings.append(
                (
                    "dtype_mislabel",
                    f"{label} is {name} under the label {side.encoding}",
                    _labelled(side, name),
                )
            )
        for cause, text, take in readings:
            now = _size(take(case.sample))
            if not 1 / SANE < now / max(size, 1e-300) < SANE:
                continue
            made = Transformed(side, take)
            a, b = (other, made) if label == "B" else (made, other)
            reread = Unequal(case.key, a, b, case.context)
            reread.known = False
            yield cause, text, reread


def _labelled(side: Reader, name: str) -> Take:
    return lambda rows: side.decoded(side.raw(rows), name)


def _size(values: "Array") -> float:
    """Return the root mean square; 0 if a value is not finite."""
    values = wide(values)
    if not np.isfinite(values).all() or not values.size:
        return 0.0
    with np.errstate(over="ignore"):
        found = float(np.sqrt(np.mean(values * values)))
    return found if np.isfinite(found) else 0.0
