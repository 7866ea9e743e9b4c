"""Writes model files from start to end by a program: literal bytes, tensor slots, a checksum.

A *slot* is the range of a file that is reserved for one tensor. A format for which the plan fixes
all bytes except the tensors' returns such a program; `SequentialSink` does the writing, the checks
and the publishing.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from aprfmt.base.crc import crc32
from aprfmt.base.protocols import TensorInfo, TypedValue, Value
from aprfmt.base.text_escape import shorten
from aprfmt.errors import ConversionError, UsageError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.crc_combine import ChecksumPiece, RunningChecksum
from aprfmt.formats.output_file import OutputFile, ReservedRange

_WIDTH = 4  # bytes of a checksum
FILES = 192  # files that are open at a time, about; systems allow 256 and more


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The range of a file that is reserved for one tensor's bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Checksum:
    """Where a file has a checksum: the little-endian CRC-32 (zlib's) of all bytes before it.

    `settle` gets the four computed bytes and returns the four to write.
    """

    settle: Callable[[bytes], bytes] = bytes


Segment = bytes | memoryview | TensorSlot | Checksum


@dataclass(frozen=True, slots=True)
class FileProgram:
    """The planned content of one file: its first bytes `head`, then the segments of `body`.

    `head` may be amended until the end; it ends before the first tensor.
    """

    path: Path
    head: bytes
    body: Sequence[Segment] = field(default=())


@dataclass(frozen=True, slots=True)
class DeferredSlot:
    """The range of a file that other threads fill with a tensor's bytes.

    `crc` says that `SequentialSink.record_filled` needs the checksum of its bytes.
    """

    place: ReservedRange
    summed: ChecksumPiece | None = None

    @property
    def crc(self) -> bool:
        """Whether the CRC-32 of the tensor's bytes is needed."""
        return self.summed is not None


@dataclass(frozen=True, slots=True)
class _Check:
    """A checksum that is written later: its offset, its settings, and what it is computed from."""

    start: int
    segment: Checksum
    total: RunningChecksum
    summed: ChecksumPiece


@dataclass(frozen=True, slots=True)
class _Ended:
    """A file written to its end, except for slots that other threads fill, and its checksums."""

    file: OutputFile
    number: int
    checks: Sequence[_Check]


class SequentialSink:
    """A model being written; see `aprfmt.base.protocols.Sink`. Formats implement `_lay_out`.

    With `files` the sink writes into that set, and the set's owner publishes it. Raises
    ConversionError for tensors that are missing, out of order or of another size than planned, and
    OutputError for errors of the system.
    """

    def __init__(self, path: Path, *, force: bool = False, files: FileSet | None = None) -> None:
        """Prepare to write `path`; nothing is opened before `plan`."""
        self._path = Path(path)
        self._own = files is None
        self._files = FileSet(force=force) if files is None else files
        self._programs: Sequence[FileProgram] | None = None
        self._steps: Iterator[TensorSlot] = iter(())
        self._next: TensorSlot | None = None
        self._out: OutputFile | None = None
        self._first: OutputFile | None = None
        self._last: tuple[OutputFile, int] | None = None  # where the last tensor begins
        self._sum: RunningChecksum | None = None
        self._footers: list[tuple[OutputFile, int, RunningChecksum]] = []  # of the first file
        self._left: dict[OutputFile, int] = {}  # rooms of each file that others fill
        self._ended: list[_Ended] = []  # files, and checksums, that wait for these

    def _lay_out(
        self, metadata: Mapping[str, Value | TypedValue], infos: Sequence[TensorInfo]
    ) -> Sequence[FileProgram]:
        """Return what each file to write holds, first the one that `amend` changes.

        A FileProgram has the file's bytes and the slots of its tensors, in order. Subclasses
        implement it: this one raises NotImplementedError.
        """
        raise NotImplementedError

    def plan(self, metadata: Mapping[str, Value | TypedValue], infos: Sequence[TensorInfo]) -> None:
        """Fix everything but the tensors' bytes, and write up to the first tensor.

        `metadata` and `infos` are the file's keys and tensors, in order. Raises ConversionError for
        a second call and for a name that appears twice.
        """
        if self._programs is not None:
            raise ConversionError(f"{self._path}: is planned already; a sink is planned once")
        check_unique(infos, str(self._path))
        self._programs = self._lay_out(metadata, infos)
        self._steps = self._write_programs(self._programs)
        self._next = next(self._steps, None)

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Write the next planned tensor from `chunks`, and the program's bytes after it.

        Raises ConversionError for another name or another number of bytes than planned.
        """
        slot = self._next_slot(name)
        if self._out is not None:
            self._last = self._out, self._out.tell()
        written = 0
        for chunk in chunks:
            view = memoryview(chunk)
            written += view.nbytes
            if written > slot.nbytes:
                break
            self._emit(view)
        if written != slot.nbytes:
            more = " or more" if written > slot.nbytes else ""
            raise ConversionError(
                f"{self._path}: tensor {name!r}: {written} bytes{more} were given, "
                f"{slot.nbytes} were planned"
            )
        self._next = next(self._steps, None)

    def defer_tensor(self, name: str) -> DeferredSlot:
        """Return the slot of the next planned tensor, for other threads to fill.

        The sink moves past it. `record_filled` has to be called when its bytes are written.
        """
        slot, out = self._next_slot(name), self._out
        assert out is not None
        summed = None if self._sum is None else self._sum.reserve(slot.nbytes)
        deferred = DeferredSlot(out.reserve(slot.nbytes), summed)
        self._left[out] = self._left.get(out, 0) + 1
        self._next = next(self._steps, None)
        return deferred

    def record_filled(self, slot: DeferredSlot, crc: int) -> None:
        """Record that all bytes of a deferred slot are written, and that they have this CRC-32.

        Writes the checksums that waited for it.
        """
        if slot.summed is not None:
            slot.summed.crc = crc
        self._left[slot.place.file] -= 1
        self._write_checksums()

    def location(self) -> tuple[OutputFile, int]:
        """Return (file, offset) of the tensor that was written last, flushed so it can be read.

        Raises ConversionError before the first tensor was written.
        """
        if self._last is None:
            raise ConversionError(f"{self._path}: no tensor was written yet")
        self._last[0].flush()
        return self._last

    def keep(self, name: str, crc: int) -> bool:
        """Move past the next planned tensor if its bytes are in a resumed file; return whether.

        They are there if they have the CRC-32 `crc`. If not, the tensor has to be written.
        """
        slot, out = self._next_slot(name), self._out
        if out is None or not out.skip_finished(slot.nbytes, crc):
            return False
        if self._sum is not None:
            self._sum.join(crc, slot.nbytes)
        self._next = next(self._steps, None)
        return True

    def _next_slot(self, name: str) -> TensorSlot:
        """Return the slot of the next tensor; ConversionError if that is not `name`."""
        slot = self._next
        if slot is None or slot.name != name:
            expected = repr(slot.name) if slot is not None else "no tensor"
            raise ConversionError(f"{self._path}: tensor {name!r} was given, {expected} is next")
        return slot

    def amend(self, old: str, new: str) -> None:
        """Overwrite the metadata text `old` with `new`, of equal length, in the first file.

        ConversionError unless `old` occurs exactly once.
        """
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
        self._programs = (FileProgram(programs[0].path, head, programs[0].body), *programs[1:])
        for out, place, total in self._footers:
            out.patch(place, total.digest(head))

    @property
    def programs(self) -> Sequence[FileProgram]:
        """The planned content of each file, in order; empty before `plan`."""
        return self._programs or ()

    @property
    def layout(self) -> str:
        """SHA-256 of the plan, in hex: every name and size, and all bytes outside the tensors."""
        digest = hashlib.sha256()
        for program in self._programs or ():
            digest.update(f"{program.path.name!r} {len(program.head)}\n".encode())
            digest.update(program.head)
            for part in program.body:
                if isinstance(part, TensorSlot):
                    digest.update(f"{part.name!r} {part.nbytes}\n".encode())
                else:
                    digest.update(b"checksum\n" if isinstance(part, Checksum) else part)
        return digest.hexdigest()

    @property
    def files(self) -> Sequence[Path]:
        """The paths of the files being written, in shard order, an index last."""
        return [program.path for program in self._programs or ()]

    @property
    def sizes(self) -> Mapping[Path, int]:
        """{path: bytes} of every file, known as soon as it is planned."""
        return {program.path: program_size(program) for program in self._programs or ()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Check that all is written; publish or discard the files if the sink owns them."""
        try:
            if not any(exc):
                self._finish()
        finally:
            if self._own:
                self._files.discard()

    def _finish(self) -> None:
        """Publish the files if the sink owns them; ConversionError unless everything is written."""
        if any(self._left.values()):
            raise ConversionError(f"{self._path}: a tensor that others write is not whole")
        if self._programs is None or self._next is not None:
            missing = repr(self._next.name) if self._next is not None else "the plan"
            raise ConversionError(
                f"{self._path}: not everything was written, {missing} is the first that is "
                "missing; nothing is published"
            )
        if self._own:
            self._files.publish()

    def _write_programs(self, programs: Sequence[FileProgram]) -> Iterator[TensorSlot]:
        """Write each file's bytes up to a tensor's slot and yield that slot, to the end.

        The caller writes the tensor before it asks for the next slot.
        """
        for number, program in enumerate(programs):
            out = self._out = self._files.create(program.path)
            if number == 0:
                self._first = out
            sums = any(isinstance(segment, Checksum) for segment in program.body)
            self._sum = None
            out.write(program.head)
            self._sum = total = RunningChecksum(program.head) if sums else None
            checks: list[_Check] = []
            for segment in program.body:
                if isinstance(segment, TensorSlot):
                    yield segment
                elif isinstance(segment, Checksum):
                    assert total is not None
                    if number == 0:
                        self._footers.append((out, out.tell(), total.copy()))
                    if self._left.get(out):  # it is written when all bytes before it are
                        before, at = total.copy(), out.skip(_WIDTH)
                        checks.append(_Check(at, segment, before, total.reserve(_WIDTH)))
                    else:
                        self._emit(segment.settle(total.digest(self._amended_head(number))))
                else:
                    self._emit(segment)
            self._ended.append(_Ended(out, number, checks))
            self._write_checksums()

    def _amended_head(self, number: int) -> bytes:
        """Return the first bytes of a file, with the changes that `amend` made."""
        return self.programs[number].head

    def _write_checksums(self) -> None:
        """Write the checksums of files that are complete now, and close these files.

        The first file stays open, as `amend` may change it.
        """
        for ended in self._ended[:]:
            if self._left.get(ended.file):
                continue
            self._ended.remove(ended)
            for check in ended.checks:
                found = check.segment.settle(check.total.digest(self._amended_head(ended.number)))
                ended.file.patch(check.start, found)
                check.summed.crc = crc32(found)
            if ended.number:
                ended.file.close()  # the first stays open, to be amended

    def _emit(self, data: bytes | memoryview) -> None:
        """Write bytes to the current file, and add them to its checksum if it has one."""
        assert self._out is not None
        if self._sum is None:
            self._out.write(data)
        else:
            self._sum.add(data, self._out.write)


def program_size(program: FileProgram) -> int:
    """Return the number of bytes of a planned file."""
    size = len(program.head)
    for segment in program.body:
        if isinstance(segment, TensorSlot):
            size += segment.nbytes
        else:
            size += 4 if isinstance(segment, Checksum) else memoryview(segment).nbytes
    return size


def check_unique(infos: Sequence[TensorInfo], where: str) -> None:
    """Raise ConversionError if `infos` plan a tensor name twice; `where` begins the message."""
    seen: set[str] = set()
    for info in infos:
        if info.name in seen:
            raise ConversionError(
                f"{where}: tensor {info.name!r} is planned twice; names must be unique"
            )
        seen.add(info.name)


def distribute_tensors(
    infos: Sequence[TensorInfo], limit: int | None, where: str
) -> list[Sequence[TensorInfo]]:
    """Return the tensors of each shard, at most `limit` tensor bytes in one, in order.

    A larger tensor gets its own shard. One shard without a limit, or if everything fits. Raises
    UsageError for a limit of 0 or less; `where` begins the message.
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
