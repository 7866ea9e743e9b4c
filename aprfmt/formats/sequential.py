"""Files written from start to end by a program: literal bytes, room for tensors, a checksum.

A format for which the plan fixes all bytes except the tensors' returns such a program;
`SequentialSink` does the writing, the checks and the publishing.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Self

from aprfmt.base.crc import crc32
from aprfmt.base.protocols import TensorInfo, Typed, Value
from aprfmt.base.text import shorten
from aprfmt.errors import ConversionError, UsageError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.output import OutputFile

_ASIDE = 1 << 20  # from this size on, the checksum is computed in parallel with the write


@dataclass(frozen=True, slots=True)
class Room:
    """Where the bytes of one tensor go."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Checksum:
    """Four bytes: the little-endian CRC-32 (zlib's) of everything before them in the file.

    `settle` gets the four computed bytes and returns the four to write.
    """

    settle: Callable[[bytes], bytes] = bytes


Segment = bytes | memoryview | Room | Checksum


@dataclass(frozen=True, slots=True)
class Program:
    """One file. `head` may be amended until the end; it ends before the first tensor."""

    path: Path
    head: bytes
    body: Sequence[Segment] = field(default=())


class SequentialSink:
    """A model being written; see `aprfmt.base.protocols.Sink`. Formats give `_lay_out`.

    With `files` the sink writes into that set, and the set's owner publishes it. Raises
    ConversionError for tensors that are missing, out of order or of another size than planned, and
    OutputError for errors of the system.
    """

    def __init__(self, path: Path, *, force: bool = False, files: FileSet | None = None) -> None:
        self._path = Path(path)
        self._own = files is None
        self._files = FileSet(force=force) if files is None else files
        self._programs: Sequence[Program] | None = None
        self._steps: Iterator[Room] = iter(())
        self._next: Room | None = None
        self._out: OutputFile | None = None
        self._first: OutputFile | None = None
        self._last: tuple[OutputFile, int] | None = None  # where the last tensor begins
        self._sum: _Sum | None = None
        self._footers: list[tuple[OutputFile, int, _Sum]] = []  # of the first file

    def _lay_out(
        self, metadata: Mapping[str, Value | Typed], infos: Sequence[TensorInfo]
    ) -> Sequence[Program]:
        """Return the files to write, the one whose metadata `amend` changes first."""
        raise NotImplementedError

    def plan(self, metadata: Mapping[str, Value | Typed], infos: Sequence[TensorInfo]) -> None:
        """Fix everything but the tensors' bytes."""
        if self._programs is not None:
            raise ConversionError(f"{self._path}: is planned already; a sink is planned once")
        check_unique(infos, str(self._path))
        self._programs = self._lay_out(metadata, infos)
        self._steps = self._run(self._programs)
        self._next = next(self._steps, None)

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Write the bytes of the next planned tensor, and the program's bytes after it."""
        room = self._awaited(name)
        if self._out is not None:
            self._last = self._out, self._out.tell()
        written = 0
        for chunk in chunks:
            view = memoryview(chunk)
            written += view.nbytes
            if written > room.nbytes:
                break
            self._emit(view)
        if written != room.nbytes:
            more = " or more" if written > room.nbytes else ""
            raise ConversionError(
                f"{self._path}: tensor {name!r}: {written} bytes{more} were given, "
                f"{room.nbytes} were planned"
            )
        self._next = next(self._steps, None)

    def lies(self) -> tuple[OutputFile, int]:
        """Return the file of the tensor that was written last, and where; it can be read there."""
        if self._last is None:
            raise ConversionError(f"{self._path}: no tensor was written yet")
        self._last[0].flush()
        return self._last

    def keep(self, name: str, crc: int) -> bool:
        """Leave the next planned tensor as it lies in a continued file, if it has that CRC-32.

        Says whether it does; where it does not, the tensor has to be written.
        """
        room, out = self._awaited(name), self._out
        if out is None or not out.passes(room.nbytes, crc):
            return False
        if self._sum is not None:
            self._sum.join(crc, room.nbytes)
        self._next = next(self._steps, None)
        return True

    def _awaited(self, name: str) -> Room:
        """Return the room of the next tensor; ConversionError if that is not `name`."""
        room = self._next
        if room is None or room.name != name:
            expected = repr(room.name) if room is not None else "no tensor"
            raise ConversionError(f"{self._path}: tensor {name!r} was given, {expected} is next")
        return room

    def amend(self, old: str, new: str) -> None:
        """Write `new` over the metadata text `old`; ConversionError unless it occurs once."""
        before, after = old.encode("ascii"), new.encode("ascii")
        programs = self._programs or ()
        head = programs[0].head if programs else b""
        count = head.count(before)
        if len(before) != len(after) or count != 1 or self._first is None:
            raise ConversionError(
                f"{self._path}: {shorten(old, 80)!r} stands {count} times in the metadata and has "
                f"{len(before)} bytes; expected once, and {len(after)} bytes"
            )
        at = head.index(before)
        self._first.patch(at, after)
        head = head[:at] + after + head[at + len(before) :]
        self._programs = (Program(programs[0].path, head, programs[0].body), *programs[1:])
        for out, place, total in self._footers:
            out.patch(place, total.digest(head))

    @property
    def programs(self) -> Sequence[Program]:
        """Every file as it is planned."""
        return self._programs or ()

    @property
    def layout(self) -> str:
        """A digest of the plan: every name and size, and all bytes outside the tensors."""
        digest = hashlib.sha256()
        for program in self._programs or ():
            digest.update(f"{program.path.name!r} {len(program.head)}\n".encode())
            digest.update(program.head)
            for part in program.body:
                if isinstance(part, Room):
                    digest.update(f"{part.name!r} {part.nbytes}\n".encode())
                else:
                    digest.update(b"checksum\n" if isinstance(part, Checksum) else part)
        return digest.hexdigest()

    @property
    def files(self) -> Sequence[Path]:
        """The files being written, in shard order, an index last."""
        return [program.path for program in self._programs or ()]

    @property
    def sizes(self) -> Mapping[Path, int]:
        """Bytes of every file, known as soon as it is planned."""
        return {program.path: program_size(program) for program in self._programs or ()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if not any(exc):
                self._finish()
        finally:
            if self._own:
                self._files.discard()

    def _finish(self) -> None:
        if self._programs is None or self._next is not None:
            missing = repr(self._next.name) if self._next is not None else "the plan"
            raise ConversionError(
                f"{self._path}: not everything was written, {missing} is the first that is "
                "missing; nothing is published"
            )
        if self._own:
            self._files.publish()

    def _run(self, programs: Sequence[Program]) -> Iterator[Room]:
        """Write the literal bytes; yield each Room, for the caller to write its tensor."""
        for number, program in enumerate(programs):
            out = self._out = self._files.create(program.path)
            if number == 0:
                self._first = out
            sums = any(isinstance(segment, Checksum) for segment in program.body)
            self._sum = None
            out.write(program.head)
            self._sum = total = _Sum(program.head) if sums else None
            for segment in program.body:
                if isinstance(segment, Room):
                    yield segment
                elif isinstance(segment, Checksum):
                    assert total is not None
                    # The checksum uses the amended head.
                    head = (self._programs or programs)[number].head
                    if number == 0:
                        self._footers.append((out, out.tell(), total.copy()))
                    self._emit(segment.settle(total.digest(head)))
                else:
                    self._emit(segment)
            if number:
                out.close()  # the first stays open, to be amended

    def _emit(self, data: bytes | memoryview) -> None:
        assert self._out is not None
        if self._sum is None:
            self._out.write(data)
        else:
            self._sum.add(data, self._out.write)


def program_size(program: Program) -> int:
    """Return the bytes of the file a program writes."""
    size = len(program.head)
    for segment in program.body:
        if isinstance(segment, Room):
            size += segment.nbytes
        else:
            size += 4 if isinstance(segment, Checksum) else memoryview(segment).nbytes
    return size


class _Sum:
    """CRC-32 of a head that may still change, and of a body already written."""

    def __init__(self, head: bytes) -> None:
        self._head_bytes = len(head)
        self._body = 0
        self._body_bytes = 0

    def add(self, data: bytes | memoryview, write: Callable[[bytes | memoryview], None]) -> None:
        """Write `data` and count it; large pieces are summed by another thread meanwhile."""
        size = memoryview(data).nbytes
        if size < _ASIDE:
            write(data)
            self._body = crc32(data, self._body)
        else:

            def summing() -> None:
                self._body = crc32(data, self._body)

            worker = threading.Thread(target=summing)
            worker.start()
            try:
                write(data)
            finally:
                worker.join()  # the caller may reuse the buffer
        self._body_bytes += size

    def join(self, crc: int, nbytes: int) -> None:
        """Count bytes that lie there already, by their checksum."""
        self._body = combine(self._body, crc, nbytes)
        self._body_bytes += nbytes

    def copy(self) -> "_Sum":
        """Return the state as it is now."""
        twin = _Sum(b"")
        twin._head_bytes = self._head_bytes
        twin._body, twin._body_bytes = self._body, self._body_bytes
        return twin

    def digest(self, head: bytes) -> bytes:
        """Return the checksum of `head` and the body, four bytes little-endian."""
        assert len(head) == self._head_bytes
        value = combine(crc32(head), self._body, self._body_bytes)
        return value.to_bytes(4, "little")


def combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of A + B from the CRCs of A and of B and the bytes of B.

    Appending zeros is linear over GF(2): A's CRC goes through the operators for 2^n zero bytes, for
    every bit n of `length`. The method is that of zlib's crc32_combine.
    """
    for power in range(length.bit_length()):
        if length >> power & 1:
            first = _times(_zero_bytes(power), first)
    return first ^ second


@cache
def _zero_bytes(power: int) -> Sequence[int]:
    """Return the operator that appends 2^`power` zero bytes: the one of half of them, twice."""
    if power:
        operator = _zero_bytes(power - 1)
        return [_times(operator, row) for row in operator]
    operator = [0xEDB88320, *(1 << bit for bit in range(31))]  # one zero bit
    for _ in range(3):
        operator = [_times(operator, row) for row in operator]
    return operator


def _times(operator: Sequence[int], vector: int) -> int:
    result = 0
    for row in operator:
        if vector & 1:
            result ^= row
        vector >>= 1
    return result


def check_unique(infos: Sequence[TensorInfo], where: str) -> None:
    """Raise ConversionError for a name that is planned twice."""
    seen: set[str] = set()
    for info in infos:
        if info.name in seen:
            raise ConversionError(
                f"{where}: tensor {info.name!r} is planned twice; names must be unique"
            )
        seen.add(info.name)


def deal(infos: Sequence[TensorInfo], limit: int | None, where: str) -> list[Sequence[TensorInfo]]:
    """Distribute tensors over shards of at most `limit` tensor bytes, in order.

    A larger tensor gets its own shard. One shard without a limit, or if everything fits.
    """
    if limit is None:
        return [infos]
    if limit <= 0:
        raise UsageError(f"{where}: a shard size of {limit} bytes; give a size > 0")
    shards: list[list[TensorInfo]] = [[]]
    held = 0
    for info in infos:
        if shards[-1] and held + info.nbytes > limit:
            shards.append([])
            held = 0
        shards[-1].append(info)
        held += info.nbytes
    return list(shards)
