"""A remote file as a ByteSource: its beginning is cached, other bytes fetched when read.

The beginning grows as a parser needs it. A *piece* is bytes that one request fetches for small
reads. Small reads that nobody announced fetch a piece around them, and a larger piece if it reaches
as far as the last read: rows that a conversion moves come in megabytes, norms that lie apart and
one look at a block in 64 KiB. Large reads, and announced ones, go through `ReadAhead`.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.text_escape import shorten
from aprfmt.errors import RemoteError
from aprfmt.remote.disk_cache import CACHE
from aprfmt.remote.paths import RemotePath
from aprfmt.remote.read_ahead import LITTLE, PART, ReadAhead
from aprfmt.remote.site import changed_error
from aprfmt.remote.temporary_cache import TemporaryRanges
from aprfmt.remote.traffic import TRAFFIC

if TYPE_CHECKING:
    from aprfmt.remote.site import Site

MAX_HELD = 700 << 20  # bytes before the tensors; above every limit of the parsers
GAP = 128 << 10  # ranges nearer to each other are fetched as one
PIECES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
AT_A_TIME = 16  # requests for ranges that are asked for together
KEPT = 32 << 20  # bytes of pieces
AGAIN = 16  # answers of which the beginning is read again, where nothing proves their version
WINDOW = 64 << 10  # bytes of that beginning


class RemoteObject:
    """One remote file for all its openings: its facts and cached bytes; safe for any thread."""

    def __init__(self, path: RemotePath) -> None:
        """Request the first bytes of a file, and hold them; RemoteError where it does not exist."""
        self.where = str(path)
        self._site, self._inner = path.site, path.inner
        self.facts, head = self._site.first(self._inner)
        self._held = memoryview(head)
        self._lock = threading.Lock()
        self._pieces: OrderedDict[int, memoryview] = OrderedDict()
        self._level, self._last = 0, -PIECES[-1] - 1
        self.observer: Callable[[int, memoryview], None] | None = None  # of all bytes that come
        self._remembered: TemporaryRanges | None = None
        self._remembering = 0  # how many ask for that
        self._cache_lock = threading.Lock()  # of the pieces, which are looked up while others come
        # Of the first answers, where nothing proves their version: where they begin, and that.
        self._early: list[tuple[int, bytes]] = []
        self._unsure = False  # more than one answer came since these were read again
        self.mixed = False  # more than one answer came, and nothing proves that they fit
        self._note(0, self._held)

    def _note(self, start: int, data: memoryview) -> None:
        """Store the first bytes of an answer, to be read again later, where no version is proven.

        `start` is the offset of its bytes `data` in the file. Only the first few answers are
        stored.
        """
        if self.facts.proven or not len(data):
            return
        with self._cache_lock:
            if self._early:
                self._unsure = self.mixed = True
            if len(self._early) < AGAIN:
                self._early.append((start, bytes(data[:WINDOW])))

    def refuse_changed(self) -> None:
        """Raise RemoteError if the file's size, date or the first answers' bytes have changed.

        The beginnings of these answers are read again, unless a strong ETag or digest proves that
        all answers are of one version.
        """
        with self._cache_lock:
            early, unsure, self._unsure = list(self._early), self._unsure, False
        if not unsure:
            return
        now = self._site.facts(self._inner)
        if now is None or now.size != self.facts.size:
            raise changed_error(self.where, "its size", now and now.size, self.facts.size)
        if now.tag and now.tag != self.facts.tag:  # a list has none
            raise changed_error(
                self.where, "its date", shorten(now.tag, 80), shorten(self.facts.tag, 80)
            )

        def check_again(row: tuple[int, bytes]) -> None:
            """Raise RemoteError if the bytes of an early answer have changed.

            `row` is (offset, first bytes) of that answer.
            """
            start, data = row
            stop = start + len(data)
            found = self._site.fetch(self._inner, self.facts, start, stop)
            if found != data:
                hashes = [hashlib.sha256(each).hexdigest()[:16] for each in (found, data)]
                raise changed_error(self.where, f"the SHA-256 of bytes {start}..{stop}", *hashes)

        with ThreadPoolExecutor(AT_A_TIME) as pool:
            list(pool.map(check_again, early))

    def one_pass(self) -> str:
        """Return the SHA-256 of the file, read whole by one request."""
        found = self._site.one_pass(self._inner, self.facts)
        self._unsure = self.mixed = False
        return found

    def head(self, stop: int, wish: int) -> memoryview:
        """Return the beginning of the file, at least `stop` bytes.

        If some of it is not held yet, up to `wish` bytes are fetched.

        Raises RemoteError where more than MAX_HELD bytes are before the tensors.
        """
        with self._lock:
            if stop > MAX_HELD:
                raise RemoteError(
                    f"{self.where}: what stands before its tensors reaches to byte {stop}, the "
                    f"limit for a file read from elsewhere is {MAX_HELD}; download it"
                )
            if stop > len(self._held):
                more = self.fetch(len(self._held), min(max(stop, wish), self.facts.size))
                self._held = memoryview(b"".join([self._held, more]))
            return self._held

    def small(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop), cached or fetched in one request with bytes after them.

        The piece is cached. Pieces get larger while reads are near each other.
        """
        with self._lock:
            if len(kept := self._cached_bytes(start, stop)) == stop - start:
                return kept
            more = min(self._level + 1, len(PIECES) - 1)
            self._level = more if abs(start - self._last) <= PIECES[more] else 0
            self._last = min(self.facts.size, max(stop, start + PIECES[self._level]))
            piece = self.fetch(start, self._last)
            self._cache_piece(start, piece)
            return piece[: stop - start]

    def _cache_piece(self, start: int, piece: memoryview) -> None:
        """Cache a piece that begins at `start`; the least recently used ones are dropped."""
        with self._cache_lock:
            self._pieces.pop(start, None)
            self._pieces[start] = piece
            while sum(map(len, self._pieces.values())) > KEPT:
                self._pieces.popitem(last=False)

    def bring(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch and cache the (start, stop) ranges that are not cached yet, several at once."""
        missing = [
            (a, b) for a, b in ranges if b > len(self._held) and not len(self._cached_bytes(a, b))
        ]
        with ThreadPoolExecutor(min(AT_A_TIME, max(1, len(missing)))) as pool:
            for (start, _), piece in zip(
                missing, pool.map(lambda row: self.fetch(*row), missing), strict=True
            ):
                self._cache_piece(start, piece)

    def _cached_bytes(self, start: int, stop: int) -> memoryview:
        """Return the cached bytes from `start`, at most to `stop`; empty where there are none."""
        with self._cache_lock:
            for begin, piece in self._pieces.items():
                if begin <= start < begin + len(piece):
                    self._pieces.move_to_end(begin)
                    return piece[start - begin : stop - begin]
        return memoryview(b"")

    def gather(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop), taken from memory where they are cached, else fetched."""
        with self._cache_lock:
            known = [(0, self._held), *self._pieces.items()]
        found, at = [], start
        while at < stop:
            piece = max(
                (p[at - b : stop - b] for b, p in known if b <= at < b + len(p)),
                key=len,
                default=memoryview(b""),
            )
            if not len(piece):
                after = min((b for b, p in known if at < b < stop and len(p)), default=stop)
                piece = self.fetch(at, after)
            found.append(piece)
            at += len(piece)
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def fetch(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) from the temporary file, the disk cache, or by one request.

        The callback `observer`, if set, is called with `start` and the bytes.
        """
        remembered = self._remembered
        data = (
            remembered.get(start, stop, self._fetch_through_cache)
            if remembered is not None
            else self._fetch_through_cache(start, stop)
        )
        if self.observer is not None:
            self.observer(start, data)
        return data

    def _fetch_through_cache(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) from the disk cache, or by one request."""
        data = CACHE.get(self.facts.identity, start, stop)
        if data is not None:
            TRAFFIC.count(cached=stop - start)
        else:
            data = self._site.fetch(self._inner, self.facts, start, stop)
            self._note(start, data)
            CACHE.put(self.facts.identity, start, data)
        return data

    def drop(self, start: int, stop: int) -> None:
        """Release the memory pages of [start, stop) in the temporary file."""
        if (remembered := self._remembered) is not None:
            remembered.drop(start, stop)

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Context in which all fetched bytes are stored in a temporary file.

        The file is deleted when the last of these contexts ends.
        """
        with self._lock:
            self._remembering += 1
            self._remembered = self._remembered or TemporaryRanges(self.facts.size)
        try:
            yield
        finally:
            with self._lock:
                self._remembering -= 1
                if not self._remembering and self._remembered is not None:
                    self._remembered.close()
                    self._remembered = None


class RemoteFile:
    """One opening of a remote file; cached bytes are shared by all openings.

    It is its own `view`: slices fetch what they ask for.
    """

    def __init__(self, path: RemotePath) -> None:
        """Open the file; the first opening in a process requests its first bytes."""
        self.path: Path = path
        self._found = open_object(path)
        self.size = self._found.facts.size
        self.identity = self._found.facts.identity
        self.sha256 = self._found.facts.sha256  # as the site publishes it
        self._stream = ReadAhead(self.size, self._found.gather)

    def observe(self, observer: Callable[[int, memoryview], None] | None) -> None:
        """Have `observer(start, data)` called with all bytes fetched from here on; None ends it."""
        self._found.observer = observer

    @property
    def view(self) -> "RemoteFile":
        """The file itself, which is sliced like bytes."""
        return self

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, where: slice) -> memoryview:
        """Return the bytes of a slice with step 1, from memory or by fetching."""
        start, stop, _ = where.indices(self.size)
        held = self._found.head(0, 0)
        if stop <= len(held) or start >= stop:
            return held[start : max(start, stop)]
        if self._stream.awaits(start, stop):
            return self._stream.get(start, stop)
        if stop - start < LITTLE:
            return self._found.small(start, stop)
        return self._stream.get(start, stop)

    def head(self, stop: int, wish: int = 0) -> memoryview:
        """Return the beginning of the file, at least `stop` bytes.

        If some of it is not in memory yet, up to `wish` bytes are fetched. Raises RemoteError where
        more than MAX_HELD bytes are before the tensors.
        """
        return self._found.head(stop, wish)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of every range, in order.

        Ranges that lie close are fetched by one request, and several requests run at a time.
        """
        joined = coalesce_ranges(ranges)
        small = [(start, stop) for start, stop in joined if stop - start <= PART]
        pieces = [(start, self[start:stop]) for start, stop in joined if stop - start > PART]
        with ThreadPoolExecutor(min(AT_A_TIME, max(1, len(small)))) as pool:
            read = list(pool.map(self._fetch_range, small))
        pieces += [(where[0], piece) for where, piece in zip(small, read, strict=True)]
        found = []
        for start, stop in ranges:
            at, piece = next(
                (at, piece) for at, piece in pieces if at <= start and stop <= at + len(piece)
            )
            found.append(piece[start - at : stop - at])
        return found

    def _fetch_range(self, where: tuple[int, int]) -> memoryview:
        """Return the bytes of a (start, stop) range, from memory or by fetching."""
        start, stop = where
        held = self._found.head(0, 0)
        return held[start:stop] if stop <= len(held) else self._found.fetch(start, stop)

    def windows(self, start: int, stop: int, size: int = PART) -> Iterator[memoryview]:
        """Yield the bytes of [start, stop), as far as the file goes, in windows of `size` bytes."""
        stop = min(stop, self.size)
        held = self._found.head(0, 0)
        with closing(ReadAhead(stop, self._found.gather)) as stream:
            stream.expect(start, stop, max(start, len(held)))
            for first in range(start, stop, size):
                last = min(first + size, stop)
                if last <= len(held):
                    yield held[first:last]
                elif first < len(held):
                    yield memoryview(b"".join([held[first:], stream.get(len(held), last)]))
                else:
                    yield stream.get(first, last)

    def expect(self, start: int, stop: int) -> None:
        """Announce that bytes [start, stop) will be read, so that they are fetched ahead."""
        if stop > len(self._found.head(0, 0)):
            self._stream.expect(start, stop)

    @property
    def proven(self) -> bool:
        """Whether a strong ETag or a digest of the site shows that answers are of one version."""
        return self._found.facts.proven

    def bring(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch small ranges that will be read soon, in any order, and cache them."""
        self._found.bring(coalesce_ranges(ranges))

    def refuse_changed(self) -> None:
        """Raise RemoteError if the file has changed since it was opened.

        Only a file whose version no strong ETag or digest proves is asked for again.
        """
        self._found.refuse_changed()

    def one_pass(self) -> str:
        """Return the SHA-256 of the file, read whole by one request."""
        return self._found.one_pass()

    def drop(self, start: int, stop: int) -> None:
        """Release memory pages of [start, stop) in the temporary file; cached pieces stay."""
        self._found.drop(start, stop)

    def close(self) -> None:
        """Cancel what is being fetched ahead."""
        self._stream.close()


_objects: "dict[tuple[Site, str], RemoteObject]" = {}
_opening = threading.Lock()


def open_object(path: RemotePath) -> RemoteObject:
    """Return the shared object of a remote file; its first bytes are requested once a process."""
    place = path.site, path.inner
    with _opening:
        known = _objects.get(place)
    if known is None:
        known = RemoteObject(path)
        with _opening:
            known = _objects.setdefault(place, known)
    return known


def refuse_changed(files: Iterable[Path] | None = None) -> None:
    """Raise RemoteError if one of `files` (None: all that were read) has changed since.

    Only remote ones whose version nothing proves are asked for again.
    """
    with _opening:
        known = list(_objects.values())
    if files is not None:
        known = [open_object(path) for path in files if isinstance(path, RemotePath)]
    for each in known:
        each.refuse_changed()


def unproven_sites() -> list[str]:
    """Return a sentence for every site that cannot prove its answers to be of one file version."""
    with _opening:
        known = list(_objects.values())
    sites = dict.fromkeys("/".join(each.where.split("/")[:3]) for each in known if each.mixed)
    return [
        f"{site}/: gives no strong ETag: that what came of a file is of one version of it cannot "
        "be proven; the first ranges were read twice and are the same"
        for site in sites
    ]


def keep_fetched(files: Iterable[Path]) -> ExitStack:
    """Return a context that stores fetched bytes of the remote ones of `files` until it is closed.

    No byte is fetched twice meanwhile. Several contexts may be open for a file.
    """
    stack = ExitStack()
    for path in files:
        if isinstance(path, RemotePath):
            stack.enter_context(open_object(path).remembering())
    return stack


def coalesce_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges that cover all of `ranges`, joined where at most GAP lies between them."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] <= GAP:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined
