"""Fetches ahead the bytes of a remote file that are expected to be read next.

A *part* is bytes of the file that one request fetches ahead.

Expected is what a reader announces (`expect`: a tensor, and the next ones), or, where nothing is
announced, what follows sequential reads.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue

from aprfmt.base.memory import keep_freed

LARGE = 16 << 20  # reads of this size and more are fetched by two requests at a time
PART = 8 << 20  # of a range that is expected, counted from its start: as windows over it are read
AHEAD = 16  # parts of a file fetched before they are asked for: as many as are under way at a time,
# so that others begin while those that came wait to be read in order
EXPECTED = 64  # ranges that are remembered
STREAK = 16 << 20  # bytes read one after the other before anything is fetched ahead unasked
LITTLE = 256 << 10  # less than this is read along with what is expected before it
NEXT = 128 << 10  # a read that begins within this of the last one's end follows it
_THREADS = 16  # parts under way at a time, of all files

Fetch = Callable[[int, int], memoryview]


class _Pool:
    """Daemon threads that fetch, and end with the program even while one waits for a server."""

    def __init__(self, count: int) -> None:
        """Start `count` threads that wait for jobs."""
        self._jobs: SimpleQueue[tuple[Future[memoryview], Fetch, int, int]] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._run_jobs, name="aprfmt-fetching", daemon=True).start()

    def submit(self, fetch: Fetch, start: int, stop: int) -> Future[memoryview]:
        """Return a future of `fetch(start, stop)`, which a free thread will call."""
        future: Future[memoryview] = Future()
        self._jobs.put((future, fetch, start, stop))
        return future

    def _run_jobs(self) -> None:
        """Run the submitted jobs, one after another, forever; the loop of each thread."""
        while True:
            future, fetch, start, stop = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(fetch(start, stop))
            except BaseException as error:  # the reader's, who waits for the result
                future.set_exception(error)
            del future, fetch  # free them while waiting for the next job


@cache
def _shared_pool() -> _Pool:
    """Return the threads that fetch ahead for all files.

    Their number limits the bytes in flight.
    """
    keep_freed()
    return _Pool(_THREADS)


@dataclass
class _Expected:
    """Bytes [start, stop) that are expected to be read; those before `position` have been."""

    start: int
    stop: int
    position: int


def _is_short_rest(one: _Expected) -> bool:
    """Return whether a range has been read in part, with fewer than LITTLE bytes left.

    What is left is mostly a short range that `_join_expected` joined to the range before it.
    """
    return one.start < one.position and one.stop - one.position < LITTLE


class ReadAhead:
    """Serializes reads of a file by any thread, and fetches ahead what comes next.

    `fetch(start, stop)` returns bytes by one request; `size` is the file's.
    """

    def __init__(self, size: int, fetch: Fetch) -> None:
        """Start with nothing announced and nothing fetched."""
        self._size, self._fetch = size, fetch
        self._lock = threading.Lock()
        self._next, self._streak, self._reads = -1, 0, 0
        self._expected: deque[_Expected] = deque()
        self._announced = False  # whoever says what comes next says it always: nothing is guessed
        self._parts: dict[int, tuple[int, Future[memoryview]]] = {}

    def expect(self, start: int, stop: int, first: int | None = None) -> None:
        """Announce that bytes [start, stop) will be read after the ranges announced before.

        Fetching begins at `first` (None: at `start`), where the bytes before it are there already.
        """
        with self._lock:
            if not self._announced:
                self._expected.clear()
            self._announced = True
            announced = any(one.start <= start and stop <= one.stop for one in self._expected)
            if stop > start and not announced and not self._join_expected(start, stop):
                self._expected.append(_Expected(start, stop, start if first is None else first))
            while len(self._expected) > EXPECTED:
                self._expected.popleft()
            self._fetch_ahead()

    def awaits(self, start: int, stop: int) -> bool:
        """Return whether bytes [start, stop) are announced, and so come with a larger request."""
        with self._lock:
            return any(one.start <= start and stop <= one.stop for one in self._expected)

    def _join_expected(self, start: int, stop: int) -> bool:
        """Join a short range to the announced one just before it; return whether there is one.

        The two are then fetched as one range. The short range is [`start`, `stop`).
        """
        for one in self._expected:
            if stop - start < LITTLE and 0 <= start - one.stop < NEXT:
                one.stop = stop
                return True
        return False

    def get(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop), from parts fetched ahead or fetched now.

        Then the fetching of what is expected next begins.
        """
        with self._lock:
            self._drop_unexpected(start)
            pieces, at = [], start
            while at < stop:
                pieces.append(self._next_piece(at, stop))
                at += len(pieces[-1])
            self._record_read(start, stop)
            self._fetch_ahead()
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def _drop_unexpected(self, start: int) -> None:
        """Forget what is no longer expected, now that `start` is read.

        Announced ranges before it will not be read, except short rests of joined ranges, which are
        read in their turn. A read that nobody announced leaves the announced ranges as they are.
        """
        if not self._next <= start < self._next + NEXT:
            self._streak = self._reads = 0
            holding = [i for i, one in enumerate(self._expected) if one.start <= start < one.stop]
            guesses = 0 if self._announced else len(self._expected)
            passed = [self._expected.popleft() for _ in range([*holding, guesses][0])]
            self._expected.extendleft(one for one in reversed(passed) if _is_short_rest(one))
        for begin, (end, part) in list(self._parts.items()):
            expected = any(begin < one.stop and one.position < end for one in self._expected)
            if not expected and not begin <= start < end:
                part.cancel()
                del self._parts[begin]

    def _record_read(self, start: int, stop: int) -> None:
        """Record that [start, stop) was read; guess what comes next where nothing is announced."""
        self._next, self._streak = stop, self._streak + stop - start
        self._reads += 1
        for one in [one for one in self._expected if one.start < stop and start < one.stop]:
            one.position = max(one.position, stop)
            if one.position >= one.stop:
                self._expected.remove(one)
        if not self._announced and self._reads > 1 and self._streak >= STREAK:
            self._expected = deque([_Expected(stop, min(self._size, stop + AHEAD * PART), stop)])

    def _next_piece(self, at: int, stop: int) -> memoryview:
        """Return bytes from `at`: those to `stop`, or fewer where a fetched part ends or begins.

        Parts are what was fetched ahead. Bytes that are in none are fetched now.
        """
        for begin, (end, part) in self._parts.items():
            if begin <= at < end:
                piece = part.result()[at - begin : stop - begin]
                if end <= stop:
                    del self._parts[begin]
                return piece
        return self._fetch_now(at, min([stop, *(begin for begin in self._parts if begin > at)]))

    def _fetch_now(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop), fetched now; a large range by two requests at once."""
        if stop - start < LARGE:
            return self._fetch(start, stop)
        middle = (start + stop) // 2
        rest = _shared_pool().submit(self._fetch, middle, stop)
        return memoryview(b"".join([self._fetch(start, middle), rest.result()]))

    def _fetch_ahead(self) -> None:
        """Start to fetch expected bytes, until AHEAD parts are fetched or being fetched."""
        last = self._expected[-1] if self._expected else None
        for one in self._expected:
            begin = one.position
            while begin < min(one.stop, self._size) and len(self._parts) < AHEAD:
                covering = [e for b, (e, _) in self._parts.items() if b <= begin < e]
                if covering:
                    begin = covering[0]
                    continue
                later = [b for b in self._parts if b > begin]
                part_end = one.start + ((begin - one.start) // PART + 1) * PART
                if 0 < one.stop - part_end < PART // 2:
                    part_end = one.stop  # a short rest comes with the part before it
                end = min([part_end, one.stop, self._size, *later])
                if one is last and end == one.stop < part_end and 2 * len(self._parts) >= AHEAD:
                    return  # there is time: what is expected next may be a little that joins it
                self._parts[begin] = end, _shared_pool().submit(self._fetch, begin, end)
                begin = end

    def close(self) -> None:
        """Cancel what is being fetched ahead."""
        with self._lock:
            for _, part in self._parts.values():
                part.cancel()
            self._parts.clear()
            self._expected.clear()
