"""Compares stored bytes of tensor pairs on threads, before the verdicts need the result.

A *pair* is the tensors that files A and B have of one role. A *span* is a range of their bytes, a
*run* a range that a file stores in one piece. A *side* is one of the two.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from aprfmt.base.budget import end_where_time_is_over
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.errors import AprfmtError
from aprfmt.formats.mapped_file import in_mapped_file
from aprfmt.measure.alignment import TensorPair
from aprfmt.tensors.runs import ByteRun, RunBytes, difference_offset, first_difference
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from collections.abc import Callable

    First = Callable[[Sequence[ByteRun], Sequence[ByteRun]], int | None]

LARGE = 1 << 20  # smaller tensors are compared when they are asked for: handing over costs as much
SPAN = 32 << 20  # bytes of each side that a thread compares at a time, and has resident
MOST = 4  # threads: memory gives no more


@dataclass(slots=True)
class _PairProgress:
    """The bytes of one pair: `left` spans still to compare, `at` the first difference so far."""

    a: RunBytes
    b: RunBytes
    left: int
    at: int | None = None
    error: BaseException | None = None


class BytePrefetch:
    """A context manager that compares the bytes of `pairs` in order, on threads.

    On exit what was not compared yet is dropped.
    """

    def __init__(self, pairs: Sequence[TensorPair], threads: int) -> None:
        """Create up to MOST threads; they start when the context is entered."""
        self._pairs = pairs
        self._progress: dict[int, _PairProgress | None] = {}
        self._spans = self._spans_of_pairs()
        self._exhausted = False  # no span is left
        self._turn = threading.Lock()
        self._done = threading.Condition(threading.RLock())
        self._threads = [
            threading.Thread(target=self._compare_until_done, name="aprfmt-compare", daemon=True)
            for _ in range(min(threads, MOST))
        ]

    def __enter__(self) -> Self:
        """Start the threads."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Drop the spans that are not compared yet and wait for the threads."""
        with self._turn:
            self._spans = iter(())
        for thread in self._threads:
            thread.join()

    def comparer(self, number: int) -> "First":
        """Return a function that returns the first differing byte of pair `number`, None if equal.

        It waits for the threads' result or compares now. It may be called once, with the runs of
        bytes that `compare_pair` compares first.
        """

        def first(a: Sequence[ByteRun], b: Sequence[ByteRun]) -> int | None:
            """Return the offset of the first byte in which the pair's runs differ; None if equal.

            It waits for the threads' result, or compares the runs `a` and `b` now.
            """
            while not self._is_final(number) and self._compare_next_span():
                end_where_time_is_over()
            with self._done:
                self._done.wait_for(lambda: self._is_final(number))
                found = self._progress.get(number)
            if found is None:
                return first_difference(a, b)
            if found.error is not None:
                raise found.error
            return found.at

        return first

    def _is_final(self, number: int) -> bool:
        """Return whether no thread is going to change the result of a pair.

        Either all its bytes are compared, or none are going to be.
        """
        with self._done:
            if number not in self._progress:
                return self._exhausted
            found = self._progress[number]
            return found is None or not found.left

    def _compare_until_done(self) -> None:
        """Compare spans until none is left; the body of a thread."""
        while self._compare_next_span():
            pass

    def _compare_next_span(self) -> bool:
        """Compare the next span and store the result; return False where none is left."""
        with self._turn:
            span = next(self._spans, None)
            if span is None:
                self._exhausted = True
                return False
        pair, start, stop = span
        at, error = None, None
        try:
            if pair.at is None or pair.at > start:
                at = _first_difference(pair, start, stop)
        except BaseException as raised:  # raised again for the caller of `comparer`
            error = raised
        with self._done:
            if at is not None and (pair.at is None or at < pair.at):
                pair.at = at
            pair.error = pair.error or error
            pair.left -= 1
            self._done.notify_all()
        return True

    def _spans_of_pairs(self) -> Iterator[tuple[_PairProgress, int, int]]:
        """Yield (pair, start, stop) of every byte span to compare; one thread at a time may ask."""
        for number, pair in enumerate(self._pairs):
            sides = _plain_bytes_of_pair(pair)
            if sides is None:
                self._progress[number] = None
                continue
            size = len(sides[0])
            found = self._progress[number] = _PairProgress(*sides, -(-size // SPAN))
            for start in range(0, size, SPAN):
                yield found, start, min(start + SPAN, size)


def _plain_bytes_of_pair(pair: TensorPair) -> tuple[RunBytes, RunBytes] | None:
    """Return (A's bytes, B's bytes) that `compare_pair` compares first.

    None for small tensors, remote files, and pairs that need more than bytes.
    """
    a, b = pair.a, pair.b
    if a is None or b is None or a.shape != b.shape or a.damage or b.damage:
        return None
    if not all(in_mapped_file(part) for side in (a, b) for part in side.stored):
        return None
    runs: tuple[Sequence[ByteRun], Sequence[ByteRun]]
    try:
        if not pair.layout and a.steps == b.steps and same_meaning(a, b):
            runs = a.stored_runs(), b.stored_runs()
        elif a.runs is not None and b.runs is not None and same_length(a, b):
            runs = a.runs, b.runs
        else:
            return None
    except AprfmtError:  # said when the pair's turn comes
        return None
    sides = RunBytes(runs[0]), RunBytes(runs[1])
    return sides if LARGE <= len(sides[0]) == len(sides[1]) else None


def _first_difference(pair: _PairProgress, start: int, stop: int) -> int | None:
    """Return the offset of the first differing byte in [start, stop); None if equal."""
    at = difference_offset(pair.a.window(start, stop), pair.b.window(start, stop))
    for side in (pair.a, pair.b):
        side.drop(start, stop)
    return None if at is None else start + at


def same_meaning(a: View, b: View) -> bool:
    """Return whether equal bytes mean equal values: same encoding and same packing."""
    return a.encoding == b.encoding and _same_packing(a, b)


def same_length(a: View, b: View) -> bool:
    """Return whether both sides have equally many bytes, by their encodings and as stored."""
    x, y = encoding_row(a.encodings[0]), encoding_row(b.encodings[0])
    blocks = x.type_size * y.block_size == y.type_size * x.block_size
    return blocks and a.data is not None and b.data is not None and len(a.data) == len(b.data)


def _same_packing(a: View, b: View) -> bool:
    """Return whether two packed weights have the same kinds of stored tensors and configuration.

    True if neither is packed.
    """
    if not (a.parts or b.parts):
        return True
    for x, y in zip(a.stored, b.stored, strict=False):
        mine = [(s, p.info.encoding, p.info.shape) for s, p in x.parts.items()]
        if mine != [(s, p.info.encoding, p.info.shape) for s, p in y.parts.items()]:
            return False
        if x.packed is not None and y.packed is not None:
            if x.packed().config != y.packed().config:
                return False
    return True
