"""Large reads of one opening of a remote file: what is expected to be read next is fetched ahead.

Expected is what a reader says (`expect`: a tensor, and the next ones), or, where nobody says, what
follows reads that followed one another.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue

from aprfmt.base.memory import keep_freed

LARGE = 16 << 20  # reads from here on are fetched by two requests at a time
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
    """Threads that end with the program, even while one waits for a server that does not answer."""

    def __init__(self, count: int) -> None:
        self._jobs: SimpleQueue[tuple[Future[memoryview], Fetch, int, int]] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, name="aprfmt-fetching", daemon=True).start()

    def submit(self, fetch: Fetch, start: int, stop: int) -> Future[memoryview]:
        """Have `fetch(start, stop)` called when a thread is free."""
        future: Future[memoryview] = Future()
        self._jobs.put((future, fetch, start, stop))
        return future

    def _work(self) -> None:
        while True:
            future, fetch, start, stop = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(fetch(start, stop))
            except BaseException as error:  # the reader's, who waits for the result
                future.set_exception(error)
            del future, fetch  # nothing is kept while it waits for the next


@cache
def _pool() -> _Pool:
    """Return the threads that fetch parts: with PART, what bounds the bytes in flight."""
    keep_freed()
    return _Pool(_THREADS)


@dataclass
class _Expected:
    """Bytes [start, stop) that will be read, of which those before `at` have been."""

    start: int
    stop: int
    at: int


def _little(one: _Expected) -> bool:
    """Say whether most has been read, and what is left is a little that joined it."""
    return one.start < one.at and one.stop - one.at < LITTLE


class ReadAhead:
    """Reads of any thread, one at a time; `fetch(start, stop)` makes one request."""

    def __init__(self, size: int, fetch: Fetch) -> None:
        self._size, self._fetch = size, fetch
        self._lock = threading.Lock()
        self._next, self._streak, self._reads = -1, 0, 0
        self._expected: deque[_Expected] = deque()
        self._told = False  # whoever says what comes next says it always: nothing is guessed
        self._parts: dict[int, tuple[int, Future[memoryview]]] = {}

    def expect(self, start: int, stop: int, at: int | None = None) -> None:
        """Say that bytes [start, stop) will be read, from `at`, after what was expected before."""
        with self._lock:
            if not self._told:
                self._expected.clear()
            self._told = True
            said = any(one.start <= start and stop <= one.stop for one in self._expected)
            if stop > start and not said and not self._joined(start, stop):
                self._expected.append(_Expected(start, stop, start if at is None else at))
            while len(self._expected) > EXPECTED:
                self._expected.popleft()
            self._fill()

    def awaits(self, start: int, stop: int) -> bool:
        """Say whether bytes [start, stop) are expected: then they come with what is around them."""
        with self._lock:
            return any(one.start <= start and stop <= one.stop for one in self._expected)

    def _joined(self, start: int, stop: int) -> bool:
        """Join a little that follows what is expected to it: it needs no request of its own."""
        for one in self._expected:
            if stop - start < LITTLE and 0 <= start - one.stop < NEXT:
                one.stop = stop
                return True
        return False

    def get(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop)."""
        with self._lock:
            self._turn_to(start)
            pieces, at = [], start
            while at < stop:
                pieces.append(self._piece(at, stop))
                at += len(pieces[-1])
            self._read_to(start, stop)
            self._fill()
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def _turn_to(self, start: int) -> None:
        """Forget what is not expected any more, now that `start` is read.

        What was announced before it will not be read, but for a little that joined what has been:
        its turn comes by itself. A read that nobody announced says nothing about those that were.
        """
        if not self._next <= start < self._next + NEXT:
            self._streak = self._reads = 0
            none = 0 if self._told else len(self._expected)
            at = [i for i, one in enumerate(self._expected) if one.start <= start < one.stop]
            passed = [self._expected.popleft() for _ in range(at[0] if at else none)]
            self._expected.extendleft(one for one in reversed(passed) if _little(one))
        for begin, (end, part) in list(self._parts.items()):
            expected = any(begin < one.stop and one.at < end for one in self._expected)
            if not expected and not begin <= start < end:
                part.cancel()
                del self._parts[begin]

    def _read_to(self, start: int, stop: int) -> None:
        """Note that [start, stop) was read; guess what comes next where nobody says."""
        self._next, self._streak = stop, self._streak + stop - start
        self._reads += 1
        for one in [one for one in self._expected if one.start < stop and start < one.stop]:
            one.at = max(one.at, stop)
            if one.at >= one.stop:
                self._expected.remove(one)
        if not self._told and self._reads > 1 and self._streak >= STREAK:
            self._expected = deque([_Expected(stop, min(self._size, stop + AHEAD * PART), stop)])

    def _piece(self, at: int, stop: int) -> memoryview:
        """Return bytes from `at` on, up to `stop`: of a part, or all before the next part."""
        for begin, (end, part) in self._parts.items():
            if begin <= at < end:
                piece = part.result()[at - begin : stop - begin]
                if end <= stop:
                    del self._parts[begin]
                return piece
        return self._direct(at, min([stop, *(begin for begin in self._parts if begin > at)]))

    def _direct(self, start: int, stop: int) -> memoryview:
        """Fetch bytes now; many of them by two requests at a time."""
        if stop - start < LARGE:
            return self._fetch(start, stop)
        middle = (start + stop) // 2
        rest = _pool().submit(self._fetch, middle, stop)
        return memoryview(b"".join([self._fetch(start, middle), rest.result()]))

    def _fill(self) -> None:
        """Have the next parts of what is expected fetched, up to AHEAD of them."""
        last = self._expected[-1] if self._expected else None
        for one in self._expected:
            begin = one.at
            while begin < min(one.stop, self._size) and len(self._parts) < AHEAD:
                there = [e for b, (e, _) in self._parts.items() if b <= begin < e]
                if there:
                    begin = there[0]
                    continue
                after = [b for b in self._parts if b > begin]
                whole = one.start + ((begin - one.start) // PART + 1) * PART
                if 0 < one.stop - whole < PART // 2:
                    whole = one.stop  # a short rest comes with the part before it
                end = min([whole, one.stop, self._size, *after])
                if one is last and end == one.stop < whole and 2 * len(self._parts) >= AHEAD:
                    return  # there is time: what is expected next may be a little that joins it
                self._parts[begin] = end, _pool().submit(self._fetch, begin, end)
                begin = end

    def close(self) -> None:
        """Stop what is fetched ahead."""
        with self._lock:
            for _, part in self._parts.values():
                part.cancel()
            self._parts.clear()
            self._expected.clear()
