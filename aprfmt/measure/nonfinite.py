"""Counts and locates NaN and infinities of two arrays.

Where only one array is not finite no bound holds and no hypothesis can be confirmed: that is a bug.
Where both have the same NaN or infinity at an index they do not differ there, and it is reported. A
*side* is one of the two arrays, *alone* an element that is not finite in one and differs in the
other.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The NaN and infinities in two arrays of one shape.

    `alone` counts the elements where one side is not finite and the other holds something else,
    `at` is the index of the first and `values` what the sides hold there, as text. `both` counts
    the indices with the same NaN or infinity in both arrays, `both_at` is the first. `a` and `b`
    are each side's count, `count` the number of elements.
    """

    count: int
    a: int
    b: int
    alone: int
    at: tuple[int, ...] | None
    values: tuple[str, str]
    both: int
    both_at: tuple[int, ...] | None

    @property
    def side(self) -> str:
        """The side that is not finite at the first difference: "A", "B" or "A and B"; else ""."""
        odd = [
            label for label, text in zip("AB", self.values, strict=True) if _is_nonfinite_text(text)
        ]
        return odd[0] if len(odd) == 1 else "A and B" if odd else ""

    @property
    def with_sides_exchanged(self) -> "NonFinite":
        """The same counts with A and B exchanged."""
        return replace(self, a=self.b, b=self.a, values=self.values[::-1])

    def text(self, a: str = "A", b: str = "B") -> str:
        """Return a sentence with the counts and first indices; `a` and `b` name the two arrays."""
        said = []
        if self.alone:
            many = f"{self.alone} of {self.count} values"
            at = f"the first at {list(self.at or ())}: {a} {self.values[0]}, {b} {self.values[1]}"
            said.append(
                f"NaN or infinity on one side at {many} ({a} has {self.a}, {b} {self.b}), {at}"
            )
        if self.both:
            said.append(
                f"NaN or infinity on both sides alike at {self.both} of {self.count} "
                f"values, the first at {list(self.both_at or ())}"
            )
        return "; ".join(said)


class HasNonFinite:
    """What measured a difference may know of NaN and infinity in it: `nonfinite`, else None."""

    __slots__ = ()

    nonfinite: NonFinite | None

    @property
    def alone(self) -> bool:
        """Whether an element is not finite in one array and differs in the other."""
        return self.nonfinite is not None and self.nonfinite.alone > 0


def _is_nonfinite_text(text: str) -> bool:
    """Return whether a text is a NaN or an infinity."""
    return text in ("nan", "inf", "-inf")


class Census:
    """Counts NaN and infinities of two arrays that come some elements at a time, in order."""

    def __init__(self) -> None:
        """Start with no elements counted."""
        self.count = self.a = self.b = self.alone = self.both = 0
        self._at: int | None = None
        self._both_at: int | None = None
        self._values = ("", "")

    def add(self, x: "Array", y: "Array") -> None:
        """Count two flat float arrays of one size; they continue those of the call before."""
        import numpy as np

        base, self.count = self.count, self.count + x.size
        bad_x, bad_y = ~np.isfinite(x), ~np.isfinite(y)
        bad = bad_x | bad_y
        if not bad.any():
            return
        self.a, self.b = self.a + int(bad_x.sum()), self.b + int(bad_y.sum())
        same = bad & equal_or_both_nan(x, y)
        alone = np.flatnonzero(bad & ~same)
        both = np.flatnonzero(same)
        self.alone, self.both = self.alone + alone.size, self.both + both.size
        if alone.size and self._at is None:
            at = int(alone[0])
            self._at, self._values = base + at, (f"{float(x[at]):.6g}", f"{float(y[at]):.6g}")
        if both.size and self._both_at is None:
            self._both_at = base + int(both[0])

    def add_counts(
        self,
        x: "Array",
        y: "Array",
        odd: tuple[int, int],
        alone: tuple[int, int | None],
        both: tuple[int, int | None],
    ) -> None:
        """Count two arrays as `add` does, from the counts that a kernel has taken of them.

        `odd` are the numbers of values of `x` and of `y` that are not finite. `alone` and `both`
        are (number of elements, index of the first or None): of elements where a value that is not
        finite differs from the other array's, and where both have the same one.
        """
        base, self.count = self.count, self.count + x.size
        self.a, self.b = self.a + odd[0], self.b + odd[1]
        self.alone, self.both = self.alone + alone[0], self.both + both[0]
        if alone[1] is not None and self._at is None:
            at = alone[1]
            self._at, self._values = base + at, (f"{float(x[at]):.6g}", f"{float(y[at]):.6g}")
        if both[1] is not None and self._both_at is None:
            self._both_at = base + both[1]

    def result(self, shape: tuple[int, ...]) -> NonFinite | None:
        """Return the counts of NaN and infinities; None where every value is finite.

        `shape` is that of the whole arrays, for the indices.
        """
        if not self.alone and not self.both:
            return None
        return NonFinite(
            self.count,
            self.a,
            self.b,
            self.alone,
            _unravel_index(self._at, shape),
            self._values,
            self.both,
            _unravel_index(self._both_at, shape),
        )


def equal_or_both_nan(x: "Array", y: "Array") -> "Array":
    """Return a bool array: True where both hold equal numbers, or NaN."""
    import numpy as np

    same: Array = (x == y) | (np.isnan(x) & np.isnan(y))
    return same


def count_nonfinite(x: "Array", y: "Array") -> NonFinite | None:
    """Return the counts of two arrays of one size; None where every value is finite.

    Indices are in the first one's shape.
    """
    import numpy as np

    x, y = np.asarray(x), np.asarray(y)
    if x.dtype.kind not in "fc" and y.dtype.kind not in "fc":
        return None
    found = Census()
    found.add(x.astype(np.float64).reshape(-1), y.astype(np.float64).reshape(-1))
    return found.result(x.shape)


def _unravel_index(at: int | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the multi-index of a flat index; None for None."""
    import numpy as np

    if at is None:
        return None
    return tuple(int(i) for i in np.unravel_index(at, shape or (1,)))
