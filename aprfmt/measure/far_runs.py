"""Runs of a quantized copy whose errors are far larger than its encoding makes them.

A *block* is the elements that are encoded together, a *run* is RUN neighbours in a block. A *copy*
is the quantized tensor, its *source* the tensor of the other file.

A wrong scale of a part of a block, or a few wrong codes, may leave every value within one step of
its block. The source encoded again shows what the encoding makes of it: no quantizer's worst run of
a block is WORSE times as bad as the encoder's. The largest of such ratios have to be APART from
those of all other blocks, as another quantizer is worse in many.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.base.encodings import find_encoding
from aprfmt.codecs import CODECS, decode, encode
from aprfmt.measure.numbers import to_float64

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

RUN = 16
WORSE = 40.0  # times the sum of squared errors: strong importance matrices were seen to make 30
APART = 2.0  # times the ratio of any other block
KEPT = 16  # blocks that are encoded again, for each of two rankings
TINY = 1e-30


class _Block(NamedTuple):
    """A block that may be far off: its number in the tensor, the source's values, the copy's."""

    number: int
    source: "Array"
    copy: "Array"


@dataclass(frozen=True, slots=True)
class FarBlocks:
    """Blocks with a run far off: (row, first column) of each run, and how many times worse."""

    places: tuple[tuple[int, int], ...]
    times: float
    total: int

    def text(self) -> str:
        """Return how many blocks they are, where the first run is, and how much worse, as text."""
        row, column = self.places[0]
        many = len(self.places)
        first = "" if many == 1 else "the first "
        return (
            f"in {many} of {self.total} blocks, {first}at [{row}, {column}], errors are "
            f"{self.times:.2g} times those of the other side encoded again"
        )


class FarRuns:
    """Finds the blocks of a copy in a block encoding with a run far off, chunk by chunk."""

    def __init__(self, encoding: str, columns: int) -> None:
        """Start without rows; `encoding` is the copy's, `columns` the length of its rows."""
        self.size = find_encoding(encoding).block_size
        self.encoding, self.columns = encoding, columns
        self.total = 0
        self._kept: tuple[list[tuple[float, _Block]], ...] = ([], [])

    @staticmethod
    def is_for(encoding: str, columns: int) -> bool:
        """Return whether an encoding can be encoded in blocks of whole runs, in such rows."""
        if encoding not in CODECS or not CODECS[encoding].has_encoder:
            return False
        size = find_encoding(encoding).block_size
        whole = size >= RUN and size % RUN == 0 and columns % size == 0
        return whole and CODECS[encoding].parts == ("",)

    def add(self, source: "Array", copied: "Array", wide: "Array | None") -> None:
        """Add the next rows: the source's values and the copy's, and the step of each block.

        `wide` [blocks] are the largest steps of the copy's blocks, None where they are unknown.
        """
        x, y = (part.reshape(-1, self.size) for part in (source, copied))
        errors = _run_sums(y - x).max(axis=1)
        peaks = _run_sums(x).max(axis=1)
        rankings = [errors / (peaks + TINY)]
        if wide is not None:
            rankings.append(errors / (np.square(wide) + TINY))
        for kept, scores in zip(self._kept, rankings, strict=False):
            scores = np.where(np.isfinite(scores), scores, 0.0)
            few = min(KEPT, len(scores))
            for at in np.argpartition(scores, -few)[-few:].tolist():
                block = _Block(self.total + at, x[at].copy(), y[at].copy())
                kept.append((float(scores[at]), block))
            kept.sort(key=lambda row: -row[0])
            del kept[KEPT:]
        self.total += len(x)

    def skip(self, count: int) -> None:
        """Count the blocks of the next `count` elements, which are equal on both sides."""
        self.total += count // self.size

    def found(self) -> FarBlocks | None:
        """Return the blocks with a run far off; None if there are none."""
        blocks = {block.number: block for kept in self._kept for _, block in kept}
        blocks = {number: one for number, one in blocks.items() if np.isfinite(one.source).all()}
        if not blocks:
            return None
        x = np.ascontiguousarray([one.source for one in blocks.values()], np.float32)
        again = decode(self.encoding, encode(self.encoding, x), x.shape)
        own = _run_sums(again - x).max(axis=1)
        mine = _run_sums(np.asarray([one.copy for one in blocks.values()]) - x)
        ratios = np.where(own > 0, mine.max(axis=1) / np.maximum(own, TINY), 0.0)
        far = ratios > WORSE
        if not far.any() or far.all():
            return None
        if ratios[far].min() < APART * max(1.0, float(ratios[~far].max())):
            return None
        numbers = np.asarray(list(blocks))[far]
        runs = mine[far].argmax(axis=1) * RUN
        starts = sorted((numbers * self.size + runs).tolist())
        places = tuple(divmod(start, self.columns) for start in starts)
        return FarBlocks(places, float(np.median(ratios[far])) ** 0.5, self.total)


def _run_sums(values: "Array") -> "Array":
    """Return the sum of squares [blocks, runs] of each run of values [blocks, elements]."""
    runs = to_float64(values).reshape(len(values), -1, RUN)
    return np.asarray(np.einsum("brn,brn->br", runs, runs))
