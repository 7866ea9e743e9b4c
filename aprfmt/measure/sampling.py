"""`diff --sample`: compares random byte ranges of two models.

A and B are the two models; a *side* is one of them.

Random ranges can show a difference, never that there is none.
"""

import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.protocols import ByteSource
from aprfmt.measure.alignment import TensorPair, align_models
from aprfmt.model import open_model
from aprfmt.model.ledger import NotCompared
from aprfmt.model.verdict import Compared, Pronounced, VerdictWords, pronounce
from aprfmt.tensors.runs import RunBytes, published_equal

if TYPE_CHECKING:
    from aprfmt.model import Model
    from aprfmt.tensors.view import View

RANGE = 64 << 10  # bytes of one range, aligned to itself within its tensor
BATCH = 256  # ranges read at a time: 16 MiB a side
SURE = 0.95
_WORDS = VerdictWords("equal", "different", "not shown to be equal")
_BY_DIGESTS = VerdictWords("equal", "different", "not decided")


@dataclass(frozen=True, slots=True)
class DifferingRange:
    """A sampled range that differs: bytes [start, stop) of a tensor, and its first difference."""

    tensor: str
    start: int
    stop: int
    byte: int


@dataclass(frozen=True, slots=True)
class Unsampled:
    """A tensor whose bytes cannot be compared, and why."""

    tensor: str
    why: str


@dataclass(frozen=True)
class SampleReport:
    """What was sampled of two models, and what was found.

    `ranges` of `of_ranges` byte ranges were drawn with `seed`; `bytes` of `of_bytes` of each model.
    `settled` counts the tensors that are equal by the published digests of their files. `unlike`
    are tensors that differ in shape or are in one model only, `unsampled` those whose bytes cannot
    be compared.
    """

    a: str
    b: str
    seed: int
    ranges: int
    of_ranges: int
    bytes: int
    of_bytes: int
    settled: int
    differing: tuple[DifferingRange, ...]
    unlike: tuple[Unsampled, ...]
    unsampled: tuple[Unsampled, ...]

    @property
    def share(self) -> float | None:
        """With 95 % confidence, less than this fraction of all ranges differs.

        None where nothing was drawn, or a difference was found.
        """
        if self.different or not self.ranges:
            return None
        return float(1 - (1 - SURE) ** (1 / self.ranges))

    @property
    def different(self) -> bool:
        """Whether the models differ for certain."""
        return bool(self.differing or self.unlike)

    @property
    def exit_code(self) -> int:
        """1 where the models differ, else 2: a sample cannot show that they are equal."""
        return self.pronounced.exit

    @property
    def pronounced(self) -> Pronounced:
        """The verdict: different if a difference was found, else undecided.

        A sample cannot show that all is equal.
        """
        tensors = [*dict.fromkeys(one.tensor for one in self.differing)]
        said = [f"{len(self.differing)} ranges of {len(tensors)} tensors"] if tensors else []
        said += [f"{len(self.unlike)} tensors that are no bytes of each other"] * bool(self.unlike)
        undrawn = self.of_ranges - self.ranges
        left = [
            NotCompared("range", f"not drawn: {undrawn} of {self.of_ranges}", "unreadable"),
            *(NotCompared("tensor", one.tensor, "unreadable", one.why) for one in self.unsampled),
            NotCompared("section", "of keys and texts", "unreadable", "ranges are of tensors"),
        ][not undrawn :]
        counts = {"ranges": (self.ranges, self.of_ranges), "tensors": (self.settled, self.settled)}
        words = _WORDS
        if self.all_settled:
            words, said = _BY_DIGESTS, ["equal by the digests of their files"]
        return pronounce(words, Compared(self.different, counts, tuple(left), "; ".join(said)))

    @property
    def all_settled(self) -> bool:
        """Whether the published digests prove every tensor equal, so that no range is drawn."""
        return bool(self.settled) and not (self.of_ranges or self.different or self.unsampled)

    def to_json(self) -> dict[str, object]:
        """Return plain data for `--json`."""
        return {
            "a": self.a,
            "b": self.b,
            **self.pronounced.to_json(),
            "sample": {
                "different": self.different,
                "seed": self.seed,
                "range_bytes": RANGE,
                "ranges": self.ranges,
                "of_ranges": self.of_ranges,
                "bytes": self.bytes,
                "of_bytes": self.of_bytes,
                "settled": self.settled,
                "share_below": self.share,
                "confidence": SURE,
                "differing": [asdict(each) for each in self.differing],
                "unlike": [asdict(each) for each in self.unlike],
                "unsampled": [asdict(each) for each in self.unsampled],
            },
        }


def sample_files(
    a: "Path | str",
    b: "Path | str",
    nbytes: int,
    *,
    seed: int | None = None,
    tensors: Sequence[str] = (),
    arch: str | None = None,
) -> SampleReport:
    """Return the report on two models, compared in random ranges of about `nbytes` in all.

    `tensors` are patterns of names in any spelling, as `diff` takes them; () for all. `seed` makes
    the choice repeatable.
    """
    with open_model(a, arch=arch) as first, open_model(b, arch=arch) as second:
        return sample_models(first, second, nbytes, seed=seed, tensors=tensors)


def sample_models(
    a: "Model", b: "Model", nbytes: int, *, seed: int | None = None, tensors: Sequence[str] = ()
) -> SampleReport:
    """Return the report on two open models, compared in random ranges of about `nbytes` in all.

    `tensors` are patterns of names, () for all; `seed` makes the choice repeatable.
    """
    from aprfmt.model.patterns import matching_indices

    # The pairs to sample from, by the patterns.
    pairs = list(align_models(a, b).pairs)
    if tensors:
        names = [pair.spellings for pair in pairs]
        pairs = [pairs[i] for i in matching_indices(names, tensors, f"{a.path} and {b.path}")]
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    # Sort out pairs that differ in form, cannot be compared, or have equal digests.
    sides: list[tuple[str, RunBytes, RunBytes]] = []
    unlike: list[Unsampled] = []
    unsampled: list[Unsampled] = []
    settled = 0
    for pair in pairs:
        why, differs = _reason_not_compared(pair)
        if why:
            (unlike if differs else unsampled).append(Unsampled(pair.key, why))
            continue
        assert pair.a is not None and pair.b is not None
        if published_equal(pair.a.stored_runs(), pair.b.stored_runs()):
            settled += 1
            continue
        left, right = _stored_bytes(pair.a), _stored_bytes(pair.b)
        assert left is not None and right is not None
        sides.append((pair.key, left, right))
    # Draw ranges without repetition over all tensors, and compare them.
    counts = [-(-len(left) // RANGE) for _, left, _ in sides]
    ends = list(accumulate(counts))
    total = ends[-1] if ends else 0
    drawn = sorted(random.Random(seed).sample(range(total), min(total, max(1, nbytes // RANGE))))
    places = list(_drawn_places(drawn, ends, counts, sides))
    found = tuple(_differing_ranges(places, sides))
    return SampleReport(
        str(a.path),
        str(b.path),
        seed,
        len(drawn),
        total,
        sum(stop - start for _, start, stop in places),
        sum(len(left) for _, left, _ in sides),
        settled,
        found,
        tuple(unlike),
        tuple(unsampled),
    )


def _reason_not_compared(pair: TensorPair) -> tuple[str, bool]:
    """Return (why a pair's bytes cannot be compared, whether that already is a difference).

    ("", False) if they can be compared.
    """
    if pair.a is None or pair.b is None:
        return f"only in {'B' if pair.a is None else 'A'}", True
    if pair.a.shape != pair.b.shape:
        return f"shape {list(pair.a.shape)} in A, {list(pair.b.shape)} in B", True
    if pair.a.encoding != pair.b.encoding:
        return f"{pair.a.encoding} in A, {pair.b.encoding} in B: values must be compared", False
    left, right = _stored_bytes(pair.a), _stored_bytes(pair.b)
    if left is None or right is None or len(left) != len(right):
        return "the layouts have no bytes in common: values must be compared", False
    return "", False


def _stored_bytes(view: "View") -> RunBytes | None:
    """Return a tensor's stored bytes in logical order; None where there are none."""
    if view.data is not None or view.layout:
        return view.data
    return RunBytes(view.stored_runs())


def _drawn_places(
    drawn: Sequence[int],
    ends: Sequence[int],
    counts: Sequence[int],
    sides: Sequence[tuple[str, RunBytes, RunBytes]],
) -> Iterator[tuple[int, int, int]]:
    """Yield (index into `sides`, start byte, stop byte) of every range that was drawn.

    `sides` are the tensors. `drawn` are indices among the ranges of all tensors together, `counts`
    the number of ranges of each tensor, `ends` their running sums.
    """
    for number in drawn:
        at = bisect_right(ends, number)
        start = (number - ends[at] + counts[at]) * RANGE
        yield at, start, min(start + RANGE, len(sides[at][1]))


def _differing_ranges(
    places: Sequence[tuple[int, int, int]], sides: Sequence[tuple[str, RunBytes, RunBytes]]
) -> Iterator[DifferingRange]:
    """Yield the drawn ranges that differ.

    `places` are (index into `sides`, start, stop), `sides` (key, bytes of A, bytes of B).
    """
    for first in range(0, len(places), BATCH):
        batch = places[first : first + BATCH]
        left = _read_ranges([(sides[at][1], start, stop) for at, start, stop in batch])
        right = _read_ranges([(sides[at][2], start, stop) for at, start, stop in batch])
        for (at, start, stop), one, other in zip(batch, left, right, strict=True):
            if one != other:
                byte = next(i for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y)
                yield DifferingRange(sides[at][0], start, stop, start + byte)


def _read_ranges(wanted: Sequence[tuple[RunBytes, int, int]]) -> list[bytes]:
    """Return the bytes of each range (data, start, stop); ranges of one file are read together."""
    files: dict[int, tuple[ByteSource, list[tuple[int, int]]]] = {}
    parts: list[list[bytes | tuple[int, int]]] = []
    for data, start, stop in wanted:
        row: list[bytes | tuple[int, int]] = []
        for run in data.runs(start, stop):
            place = run.tensor.location(run.start)
            if place is None:  # made in memory
                row.append(bytes(run.tensor.raw(run.start, run.start + run.nbytes)))
                continue
            file, offset = place
            asked = files.setdefault(id(file), (file, []))[1]
            row.append((id(file), len(asked)))
            asked.append((offset, offset + run.nbytes))
        parts.append(row)
    read: Mapping[int, list[memoryview]] = {
        key: file.read(asked) for key, (file, asked) in files.items()
    }
    return [
        b"".join(each if isinstance(each, bytes) else read[each[0]][each[1]] for each in row)
        for row in parts
    ]
