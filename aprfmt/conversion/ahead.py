"""Several workers encode what is written next; one writes, in order, so the bytes are the same.

Kernels and numpy let go of the interpreter, so the workers are threads. They run ahead over pieces
of tensors and over tensors, as far as BUDGET allows.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from aprfmt.base.crc import crc32
from aprfmt.conversion.choosing import importance_of
from aprfmt.conversion.counts import Counts
from aprfmt.conversion.options import Options
from aprfmt.conversion.outputs import Output
from aprfmt.conversion.run import (
    CHUNK,
    Written,
    check_overflow,
    encode_piece,
    narrowed,
    pieces,
    together,
)
from aprfmt.formats.sequential import combine

if TYPE_CHECKING:
    from aprfmt.codecs.lattice import PackedWeight

BUDGET = 640 << 20  # bytes of values and results that workers hold; one piece may be larger
HELD = 16  # bytes an element takes: read, decoded, encoded, read back
PIECE = CHUNK // 4  # elements of a piece


@dataclass(frozen=True)
class EncodedPiece:
    """One piece, encoded; or how many codes of one do not come back, None where it has none."""

    data: bytes = b""
    counts: Counts | None = None
    crc: int = 0
    lost_codes: int | None = None


class Ahead:
    """The chunks of a plan's outputs, made by `options.jobs` workers; a context manager."""

    def __init__(self, outputs: Sequence[Output], options: Options) -> None:
        self._options = options
        self._pool = ThreadPoolExecutor(options.jobs, "aprfmt-jobs")
        self._tasks = self._every(outputs)
        self._waiting: deque[tuple[str, int, Future[EncodedPiece]]] = deque()
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def chunks(self, output: Output, written: Written) -> Iterator[memoryview]:
        """Yield the stored bytes of the next output that is encoded; fills in `written`."""
        lost: list[int | None] = []
        while True:
            self._fill()
            if not self._waiting or self._waiting[0][0] != output.info.name:
                break
            _, cost, future = self._waiting.popleft()
            made = future.result()
            if made.counts is None:
                lost.append(made.lost_codes)
            else:
                written.counts.join(made.counts)
                check_overflow(output, self._options, written.counts)
                written.crc = combine(written.crc, made.crc, len(made.data))
                yield memoryview(made.data)
            self._held -= cost
        written.lost_codes = together(lost)
        for tensor in output.sources:
            tensor.drop()

    def _fill(self) -> None:
        """Hand out tasks while the budget lasts; one in any case."""
        while not self._waiting or self._held < BUDGET:
            task = next(self._tasks, None)
            if task is None:
                return
            name, cost, work = task
            self._waiting.append((name, cost, self._pool.submit(work)))
            self._held += cost

    def _every(
        self, outputs: Sequence[Output]
    ) -> Iterator[tuple[str, int, Callable[[], EncodedPiece]]]:
        """Yield each output's tasks in order: its name, bytes that one holds, and the work."""
        for output in outputs:
            if not encodes(output):
                continue
            shape = output.info.shape
            whole = math.prod(shape)
            parts = list(pieces(output, PIECE))
            cost = HELD * (whole if len(parts) == 1 else min(whole, PIECE + shape[-1]))
            for first, values in parts:
                yield output.info.name, cost, self._work(output, first, values, len(parts))
            for band in narrowed(output, PIECE):
                cost = HELD * math.prod(band.shape)
                yield output.info.name, cost, partial(_lost, band, output.info.encoding)

    def _work(
        self, output: Output, first: int, values: Callable[[], Any], parts: int
    ) -> Callable[[], EncodedPiece]:
        """Return the work on a piece: one thread's, or every worker's on a tensor that is one."""
        options = replace(self._options, threads=1 if parts > 1 else self._options.jobs)

        def work() -> EncodedPiece:
            importance = importance_of(output, options)
            data, counts = encode_piece(output, options, importance, first, values())
            return EncodedPiece(data, counts, crc32(data))

        return work


def _lost(band: "PackedWeight", stored: str) -> EncodedPiece:
    from aprfmt.codecs.way_back import lost_codes

    return EncodedPiece(lost_codes=lost_codes(band, stored))


def encodes(output: Output) -> bool:
    """Say whether an output is decoded and encoded, not copied or packed in several tensors."""
    return output.part is None and not (output.copies and output.runs is not None)
