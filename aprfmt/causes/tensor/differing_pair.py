"""One pair of differing tensors as the hypotheses read it: samples, distances, sizes.

A and B are the two files that are compared, and a *side* is the tensor of one of them. A *guess* is
a change of one side that should give the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.budget import end_where_time_is_over
from aprfmt.causes.tensor.guess import Guess, Take
from aprfmt.measure.encoding_noise import UNIT, float_spacing, pair_noise
from aprfmt.measure.nonfinite import Census, NonFinite
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader
from aprfmt.measure.verdicts import Certainty

if TYPE_CHECKING:
    from aprfmt.causes.tensor.context import PairContext
    from aprfmt.codecs.base import Array

SAMPLE_ROWS = 24  # rows that every guess is tried on first
WIDE = 1 / 3  # a bound beyond which values may be others as well: then no factor may be left
FACTOR = 0.15  # ... beyond 1 plus this
STRAY = 4.0  # a row further apart than this many slacks is not equal
STRAY_COLUMNS = 16  # with fewer columns, single values decide
WINDOW = 1 << 20  # elements compared at a time
FURTHER = 1.5  # times the largest distance in a sample's blocks: one change makes no larger one
BLOCKS = (256, 32)  # values in a block, of which the first is taken that divides the row


@dataclass(frozen=True, slots=True)
class Distance:
    """||l-r|| / max(||l||, ||r||), how many values differ and of how many, the largest |l-r|.

    `stray` counts rows far beyond the slack, so that a few large rows do not hide them. `norms` are
    ||l|| and ||r||. All numbers are over values finite on both sides; but if a value is not finite
    on one side only, `relative` and `largest` are infinite, `rest` is the distance of the other
    values, and `nonfinite` has the indices of such values.
    """

    relative: float
    changed: int
    count: int
    largest: float
    norms: tuple[float, float] = (0.0, 0.0)
    stray: int = 0
    rest: float = 0.0
    nonfinite: NonFinite | None = None
    constant: bool = False

    def leaves_factor(self, slack: float) -> bool:
        """Return whether l and r are within `slack` although r is l times a factor other than 1.

        A wide bound, of an encoding with few levels, hides such a factor. Rounding alone leaves
        large errors, but no common factor.
        """
        left, right = self.norms
        if slack <= WIDE or not (left and right and np.isfinite(self.rest)):
            return False
        product = (left**2 + right**2 - (self.rest * max(left, right)) ** 2) / 2
        factor = product / right**2
        return not 1 / (1 + FACTOR) <= factor <= 1 + FACTOR

    def equal(self, slack: float) -> bool:
        """Return whether the two arrays are equal up to the relative distance `slack`.

        Their distance as a whole must be within `slack`, and no row may be stray, which is far
        beyond it. With a slack of 0 no value may differ.
        """
        return not self.changed or (slack > 0 and self.relative <= slack and not self.stray)


class Extent:
    """The smallest and the largest of values that are added piece by piece."""

    def __init__(self) -> None:
        """Start without values."""
        self.low, self.high = np.inf, -np.inf

    def add(self, values: "Array") -> None:
        """Extend the range by an array of finite values."""
        self.low = min(self.low, float(values.min(initial=np.inf)))
        self.high = max(self.high, float(values.max(initial=-np.inf)))

    @property
    def constant(self) -> bool:
        """True if all values are equal, or there were none."""
        return self.low >= self.high


class DifferingPair:
    """Two tensors of one role and shape that differ, read by rows, with their context."""

    a: RowReader
    b: RowReader

    def __init__(
        self,
        key: str,
        a: RowReader,
        b: RowReader,
        context: "PairContext",
        shape: tuple[int, ...] = (),
    ) -> None:
        """Store both tensors without reading them; `shape` is A's shape if it is not given."""
        self.key, self.a, self.b, self.context = key, a, b, context
        self.shape = shape or a.shape
        self.known = True  # the comparison's numbers are those of these two
        self.copies: list[Any] = []  # B and then A as copies on a lattice, once looked for
        self.numbers: Array | None = None  # the rows' own numbers, where only some are looked at
        self.role = split_key(key)[1]

    @cached_property
    def sample(self) -> "Array":
        """Numbers of the sample's rows, int64: evenly spaced, each with an irregular neighbour."""
        rows = self.a.rows
        if self.a.columns == 1:
            return np.arange(min(rows, 4096))
        even = np.linspace(0, rows - 1, SAMPLE_ROWS // 2).astype(np.int64)
        other = (even * 7 + 3) % max(rows, 1)
        return np.unique(np.concatenate([even, other]))

    @cached_property
    def sample_a(self) -> "Array":
        """A's values of the sample's rows, [rows, columns]."""
        return self.a.take(self.sample)

    @cached_property
    def sample_b(self) -> "Array":
        """B's values of the sample's rows, [rows, columns]."""
        return self.b.take(self.sample)

    @cached_property
    def differing_sample(self) -> "Array":
        """Numbers of the sample's rows; of differing rows where no row of the sample differs."""
        if self.a.rows != self.b.rows or self.a.columns != self.b.columns:
            return self.sample
        near = row_distances(self.sample_a, self.sample_b) <= self.slack()
        if not near.all() or not len(self.changed_rows):
            return self.sample
        few = np.linspace(0, len(self.changed_rows) - 1, SAMPLE_ROWS).astype(np.int64)
        return np.unique(self.changed_rows[few])

    @cached_property
    def before(self) -> Distance:
        """Distance of A and B over all values as stored; taken from the comparison if it has it."""
        # The comparison has measured this pair already.
        known = self.context.results.get(self.key)
        if known is not None and known.stats is not None and self.known:
            stats = known.stats
            norms = stats.norm_a, stats.norm_b
            away = rest = stats.rel_l2 * stats.norm_a / max(norms) if max(norms) else 0.0
            if stats.max_abs_diff == float("inf"):
                away = stats.max_abs_diff
            return Distance(
                away,
                stats.changed,
                stats.count,
                stats.max_abs_diff,
                norms,
                0,
                rest,
                stats.nonfinite,
            )
        return self.distance(self.a.take, self.b.take, None)

    @cached_property
    def changed_rows(self) -> "Array":
        """Numbers of the rows in which A and B differ by more than rounding, int64, ascending."""
        found = []
        for index in self.windows(None):
            x, y = self.a.take(index), self.b.take(index)
            found.append(index[row_distances(x, y) > self.slack()])
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def slack(self, *, moved: bool = True) -> float:
        """Return the relative L2 distance up to which A's and B's values count as equal.

        It follows from the rounding of both encodings. `moved`: elements may also have been
        moved, which changes the blocks they are in.
        """
        return pair_noise(self.a.encoding, self.b.encoding, moved=moved)

    def windows(self, rows: "Array | None") -> "Iterator[Array]":
        """Yield arrays of row numbers, each of at most WINDOW elements of the tensor or one row.

        `rows` are the row numbers to split; None for all of the tensor. Mapped pages are released
        after each.
        """
        step = max(1, WINDOW // max(1, self.a.columns))
        total = self.a.rows if rows is None else len(rows)
        for start in range(0, total, step):
            end_where_time_is_over()
            stop = min(total, start + step)
            try:
                yield np.arange(start, stop) if rows is None else rows[start:stop]
            finally:  # also where the pass is given up
                self.a.side.drop()
                self.b.side.drop()

    def distance(
        self, left: Take, right: Take, rows: "Array | None", slack: float = 0.0
    ) -> Distance:
        """Return the distance between the rows that two functions give for `rows` (None: all).

        `left` and `right` take row numbers. `slack` is the relative distance beyond which a row
        counts as stray (0: not counted). A value that is finite on one side only makes the
        distance infinite.
        """
        dd = ll = rr = 0.0
        changed = count = stray = 0
        largest = 0.0
        broken = False
        odd = Census()
        extent = Extent(), Extent()
        # Sum squares over finite values; count those that differ.
        for index in self.windows(rows):
            x, y = to_float64(left(index)), to_float64(right(index))
            odd.add(x.reshape(-1), y.reshape(-1))
            differs = (x != y) & ~(np.isnan(x) & np.isnan(y))
            finite = np.isfinite(x) & np.isfinite(y)
            broken = broken or bool((differs & ~finite).any())
            x, y = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
            extent[0].add(x)
            extent[1].add(y)
            with np.errstate(over="ignore"):
                delta = x - y
                dd, ll, rr = (
                    total + float(np.einsum("ij,ij->", part, part))
                    for total, part in ((dd, delta), (ll, x), (rr, y))
                )
            if slack and delta.shape[1] >= STRAY_COLUMNS:
                stray += _count_stray_rows(delta, x, y, slack)
            changed, count = changed + int(differs.sum()), count + differs.size
            largest = max(largest, float(np.abs(delta).max(initial=0.0)))
        # A value that is finite on one side only makes the distance infinite.
        norm = max(ll, rr)
        relative = rest = (dd / norm) ** 0.5 if dd else 0.0
        if broken or not np.isfinite(relative):
            relative = largest = float(np.inf)
        shape = self.shape if rows is None and prod(self.shape) == count else (count,)
        return Distance(
            relative,
            changed,
            count,
            largest,
            (ll**0.5, rr**0.5),
            stray,
            rest,
            odd.result(shape),
            any(side.constant for side in extent),
        )

    def guess(
        self,
        cause: str,
        says: tuple[str, ...],
        label: str,
        take: Take,
        slack: float | None = None,
        *,
        rows: "Array | None" = None,
        where: tuple[str, ...] = (),
        constant: bool = False,
        free: int = 0,
        most: Certainty = "confirmed",
    ) -> Guess:
        """Return the guess that `take`, in place of the side `label`, equals the other side.

        `take` gives rows by their numbers. `cause` is the cause's name, `says` its evidence,
        `where` the keys (none: the pair's), `rows` the only rows compared (None: all), `slack`
        the relative distance of equal rows (None: the pair's). `constant`: the guess is that one
        value is everywhere. `free` is how many numbers were read from the values, `most` the
        highest certainty.
        """
        left, right = (take, self.b.take) if label == "A" else (self.a.take, take)
        near = self.slack() if slack is None else slack
        return Guess(cause, says, left, right, where, rows, near, constant, free, most=most)

    def holds_on_sample(self, guess: Guess) -> bool:
        """Return whether the sampled rows of A and B are equal once the guess is applied."""
        rows = self.differing_sample
        if guess.rows is not None:
            both = np.intersect1d(rows, guess.rows)
            rows = both if both.size else guess.rows[: len(rows)]
        found = self.distance(guess.left, guess.right, rows)
        if not guess.slack:
            return not found.changed
        return found.relative <= 1.5 * guess.slack and not found.leaves_factor(guess.slack)

    def count_beyond_rounding(self, guess: Guess) -> int:
        """Return how many values still differ by more than rounding after a guess is applied.

        A value may be off by `guess.within` times half a unit in the last place of B's encoding and
        as much of A's. 0 where a side is no plain float, or the guess does not limit single values.
        """
        one, other = self.a.encoding, self.b.encoding
        if not guess.within or one not in UNIT or other not in UNIT:
            return 0
        beyond = 0
        for rows in self.windows(guess.rows):
            left, right = to_float64(guess.left(rows)), to_float64(guess.right(rows))
            limit = float_spacing(right, other) / 2 + UNIT[one] * np.abs(left)
            beyond += int((np.abs(left - right) > guess.within * limit).sum())
        return beyond

    def row_name(self, row: int) -> str:
        """Return, as text, the number in the whole tensor of a row of this pair."""
        return str(row if self.numbers is None else int(self.numbers[row]))

    # --- names of sizes ----------------------------------------------------------------------

    def sizes(self, *names: str) -> list[int]:
        """Return the distinct positive integers among these hyperparameters of both models."""
        found: dict[int, None] = {}
        for hyper in self.context.hyper:
            for name in names:
                value = hyper.get(name)
                for one in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(one, int) and not isinstance(one, bool) and one > 0:
                        found[one] = None
        return list(found)


def _count_stray_rows(delta: "Array", x: "Array", y: "Array", slack: float) -> int:
    """Return how many rows of x - y, `delta`, are longer than STRAY * `slack` times the row's norm.

    The norm is the larger of both sides', and at least 1/100 of the median.
    """
    away = np.einsum("ij,ij->i", delta, delta)
    own = np.maximum(np.einsum("ij,ij->i", x, x), np.einsum("ij,ij->i", y, y))
    least = 1e-4 * float(np.median(own)) if own.size else 0.0
    return int((away > (STRAY * slack) ** 2 * np.maximum(own, least)).sum())


def row_distances(x: "Array", y: "Array") -> "Array":
    """Return ||x-y|| / max(||x||, ||y||) for every row, float64 [rows]; infinite if not finite."""
    x, y = to_float64(x), to_float64(y)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore", over="ignore"):
        delta = np.where(same, 0.0, x - y)
        dd = np.einsum("ij,ij->i", delta, delta)
        norm = np.maximum(np.einsum("ij,ij->i", x, x), np.einsum("ij,ij->i", y, y))
        found = np.sqrt(dd / np.where(norm > 0, norm, 1.0))
    found = np.where(dd == 0, 0.0, found)
    return np.where(np.isnan(found), np.inf, found)


def count_stray_rows(case: DifferingPair, sample: "Array | None") -> int:
    """Return how many rows outside a sample differ more than the sample's rows allow.

    `sample` are the numbers of its rows; 0 where it is None, all rows. The bound is the largest
    difference in a block of the sample, relative to the block's largest value, with half of it
    more: one transformation makes no larger ones.
    """
    if sample is None:
        return 0
    bound = max(
        (float(_block_distances(case, rows).max()) for rows in case.windows(sample)), default=0.0
    )
    rest = np.setdiff1d(case.changed_rows, sample)
    return sum(
        int((_block_distances(case, rows) > FURTHER * bound).sum()) for rows in case.windows(rest)
    )


def _block_distances(case: DifferingPair, rows: "Array") -> "Array":
    """Return, for each row, the largest |a-b| in a block over that block's largest value, float64.

    A *block* is a fixed number of columns. Infinite where a block has differing values that are not
    finite, or zeros in one of the tensors.
    """
    x, y = to_float64(case.a.take(rows)), to_float64(case.b.take(rows))
    size = next((n for n in BLOCKS if x.shape[1] % n == 0), x.shape[1])
    x, y = (values.reshape(len(rows), -1, size) for values in (x, y))
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        apart = np.where(same, 0.0, np.abs(x - y)).max(axis=2)
        largest = np.minimum(np.abs(x).max(axis=2), np.abs(y).max(axis=2))
        found = np.where(apart == 0, 0.0, apart / largest)
    worst: Array = np.where(np.isnan(found), np.inf, found).max(axis=1)
    return worst
