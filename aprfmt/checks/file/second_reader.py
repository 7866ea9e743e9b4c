"""Compares what aprfmt reads of a file with what the official library reads of it.

The libraries are `gguf` and `safetensors`. Names, types, shapes and the bytes of every tensor are
compared. A library runs in a child process with limits, reads the file by itself, and sends facts
and digests, a tensor at a time. Where the two disagree, a third reading of a few lines decides: one
entry of the header, as the format's text has it. What fits it is right, and the other is named as
outside the specification.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from aprfmt.base.budget import end_where_time_is_over
from aprfmt.base.child_process import end_child, import_path, start_library_child
from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import TensorInfo
from aprfmt.base.text_escape import shorten
from aprfmt.checks.context import CheckContext
from aprfmt.checks.records import LISTED, CheckFinding, NotRun, Result
from aprfmt.checks.table import SECOND_READER
from aprfmt.errors import FormatError
from aprfmt.formats.cursor import MAX_HEADER
from aprfmt.formats.mapped_file import MappedFile, Shard
from aprfmt.formats.safetensors.layout import FIELDS, PREFIX
from aprfmt.tensors.digest import sha256_of_pieces

if TYPE_CHECKING:
    import subprocess

LIBRARIES: Mapping[str, str] = {"gguf": "gguf", "safetensors": "safetensors"}  # by format

# Limits of the child. The libraries map the file, and `gguf` makes several objects of each element
# of an array of the metadata: 1.5 kB for each token and merge of a vocabulary.
_MEMORY = 4 << 30  # bytes of address space above twice the size of the file
_CPU_SECONDS = 120
_BYTES_A_SECOND = 32 << 20  # read and hashed in a second of CPU, at the least
_WALL = 5  # times the CPU time
_LINE = 8 << 20  # bytes of an answer: names may be long

_CHILD = Path(__file__).with_name("second_reader_child.py")
_COUNTS = {"no such tensor": 0, "it once": 1, "it twice": 2}
_UNDECIDED = "not decided"
_THE_FILE = "the file"
_OURS = "aprfmt"
_ENDED = "its process ended: it crashed, or needs more memory or time than it may have"


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One fact that aprfmt and the official library read differently.

    `tensor` is "" where it is of the file as a whole. `what` is "opens", "present", "type",
    "shape", "place" (the offset) or "bytes"; `ours` and `theirs` are what aprfmt and the library
    say. `outside` names who is outside the specification ("the file", "aprfmt", the library, or
    "not decided") and `because` says how that was found.
    """

    file: str
    tensor: str
    what: str
    ours: str
    theirs: str
    outside: str
    because: str


@dataclass(frozen=True, slots=True)
class NotRead:
    """Tensors that the library did not read, and why.

    `tensor` is one tensor's name, or the number of tensors in the file.
    """

    file: str
    tensor: str
    reason: str


@dataclass(slots=True)
class SecondReading:
    """What the official library read of a model: how many tensors, and which disagree."""

    library: str
    tensors: int = 0
    agreed: int = 0
    disagreements: list[Disagreement] = field(default_factory=list)
    not_read: list[NotRead] = field(default_factory=list)


def check_second_reader(ctx: CheckContext) -> Result:
    """Return a Result with a finding for each thing the official library reads differently.

    A disagreement fails, but where the library alone is outside the specification it is a warning.
    Raises NotRun where the library did not read every tensor.
    """
    reading = read_again(ctx)
    findings = [_disagreement_finding(one, reading.library) for one in reading.disagreements]
    count = f"{reading.agreed} of {reading.tensors} tensors"
    agreed = f"{reading.library} has the names, types, shapes and bytes of {count}"
    if reading.not_read:
        reasons = list(dict.fromkeys(one.reason for one in reading.not_read))
        raise NotRun(f"{agreed}; not read: {'; '.join(reasons[:LISTED])}", findings)
    return Result(agreed, findings)


def _disagreement_finding(one: Disagreement, library: str) -> CheckFinding:
    """Return a disagreement as a CheckFinding that names who is outside the specification.

    It is a warning where that is `library`.
    """
    place = f"{one.file}: {one.tensor}" if one.tensor else one.file
    said = f"{one.what}: aprfmt has {one.ours}, {library} {one.theirs}"
    return CheckFinding(
        place,
        f"{said}; outside the specification: {one.outside} ({one.because})",
        "both readers to say the same",
        "report it with the file" if one.outside != _THE_FILE else "get or write the file again",
        level="warning" if one.outside == library else "fail",
    )


def read_again(ctx: CheckContext) -> SecondReading:
    """Return what the format's official library reads of the model; it runs once per context.

    Raises NotRun where the format has no such library, or the file is not on this machine.
    """
    if SECOND_READER not in ctx.shared:
        ctx.shared[SECOND_READER] = _read_files(ctx)
    found: SecondReading = ctx.shared[SECOND_READER]
    return found


def _read_files(ctx: CheckContext) -> SecondReading:
    """Return the library's reading of every file, compared with aprfmt's.

    Raises NotRun where the format has no such library, or a file is not on this machine.
    """
    kind = ctx.model.format
    if kind not in LIBRARIES:
        raise NotRun(f"there is no official library of the format {kind} to ask")
    source: Any = ctx.model.source
    reading = SecondReading(LIBRARIES[kind])
    shards: Sequence[Shard[Any]] = source.shards
    if not all(isinstance(shard.file, MappedFile) for shard in shards):
        raise NotRun(f"{LIBRARIES[kind]} reads files of this machine only")
    every = sum(shard.file.size for shard in shards)
    done = 0
    for shard in shards:
        reading.tensors += len(shard.parsed.infos)
        for nbytes in _Comparison(kind, shard, reading).run():
            end_where_time_is_over()
            done += nbytes
            if ctx.progress is not None:
                ctx.progress(min(done, every), every)
    return reading


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor's entry in a header: `encoding` is the format's own code, `offset` absolute.

    `nbytes` is None where the format leaves it to the encoding's block.
    """

    encoding: str | int | None
    shape: tuple[int, ...]
    offset: int
    nbytes: int | None = None


class _Comparison:
    """Compares the library's rows of one file with aprfmt's tensors, and records the results."""

    def __init__(self, kind: str, shard: Shard[Any], reading: SecondReading) -> None:
        """Prepare aprfmt's tensors of one file, by the names that the file stores.

        `kind` is the format, `reading` what results are added to.
        """
        self._kind, self._shard, self._reading = kind, shard, reading
        self._file = str(shard.file.path)
        parsed = shard.parsed
        carried: Mapping[str, str] = getattr(parsed, "carried", {})
        infos: Mapping[str, TensorInfo] = getattr(parsed, "stored", None) or parsed.infos
        self._ours = {info.name: info for info in infos.values()}
        self._left = dict.fromkeys(self._ours)
        self._broken = {
            carried.get(name, name): str(why) for name, why in parsed.faults.broken.items()
        }

    def run(self) -> Iterator[int]:
        """Compare every tensor of the file; yield the number of bytes of each one compared."""
        said, raised, ended = _ENDED, False, False
        for row in _rows_of_child(self._kind, self._shard.file):
            if "library" in row:
                self._reading.library = str(row["library"])
            elif "stopped" in row:
                said, raised = f"stops: {row['stopped']}", bool(row["raised"])
            elif "end" in row:
                ended = True
            else:
                yield self._compare_tensor(row)
        # What the library has not named is missing for it; what aprfmt calls damage, it accepts.
        if ended:
            for name in self._left:
                self._record_difference(name, "present", "it once", "no such tensor")
            for damage in self._shard.parsed.faults.damage:
                self._reading.disagreements.append(
                    Disagreement(
                        self._file,
                        "",
                        "opens",
                        shorten(damage.text, 300),
                        "opens it without a complaint",
                        _THE_FILE,
                        "it breaks that rule",
                    )
                )
        else:
            self._report_stopped(said, raised)

    def _report_stopped(self, reason: str, raised: bool) -> None:
        """Record that the library did not read the file to its end, for `reason`.

        `raised` says that it raised an error. A library that needed more memory or time than it is
        given has decided nothing about a file that aprfmt finds sound.
        """
        self._reading.not_read.append(NotRead(self._file, f"{len(self._left)} tensors", reason))
        parsed = self._shard.parsed
        own = [one.text for one in parsed.faults.damage]
        own += [one.text for one in parsed.notes if one.level == "warning"]
        if own or raised:
            outside, because = _UNDECIDED, "aprfmt finds nothing wrong with it"
            if own:
                outside, because = _THE_FILE, f"aprfmt says: {shorten(own[0], 200)}"
            self._reading.disagreements.append(
                Disagreement(
                    self._file, "", "opens", f"{len(self._ours)} tensors", reason, outside, because
                )
            )

    def _compare_tensor(self, row: Mapping[str, Any]) -> int:
        """Compare a row of the library with aprfmt's tensor; return the tensor's size in bytes."""
        name = str(row["name"])
        # Names first: one that is unknown, or comes twice, has no facts to compare.
        if name not in self._ours:
            self._record_difference(name, "present", "no such tensor", "it once")
            return 0
        if name not in self._left:
            self._record_difference(name, "present", "it once", "it twice")
            return 0
        del self._left[name]
        info = self._ours[name]
        mine = self._expected_entry(info)
        same = True
        for what, ours, theirs in (
            ("type", mine.encoding, row["encoding"]),
            ("shape", list(mine.shape), row.get("shape", list(mine.shape))),
            ("place", mine.offset, mine.offset if row.get("offset") is None else row["offset"]),
        ):
            if ours != theirs:
                self._record_difference(name, what, _short_text(ours), _short_text(theirs))
                same = False
        # Bytes are compared only where the library can read them and the header facts agree.
        if "lacks" in row:
            self._reading.not_read.append(
                NotRead(self._file, name, f"{self._reading.library} has no {row['lacks']}")
            )
            return info.nbytes
        if same and name not in self._broken:
            same = self._same_bytes(info, row)
        self._reading.agreed += same
        return info.nbytes

    def _same_bytes(self, info: TensorInfo, row: Mapping[str, Any]) -> bool:
        """Return whether the library's digest and size are those of the stored bytes.

        A difference is recorded. `info` is aprfmt's tensor, `row` the library's. Raises FormatError
        where the file has changed meanwhile.
        """
        file, stop = self._shard.file, info.offset + info.nbytes
        found = sha256_of_pieces(file.windows(info.offset, stop))
        if found == row["sha256"] and row["nbytes"] == info.nbytes:
            return True
        if isinstance(file, MappedFile):
            file.refuse_changed()
        self._record_difference(
            info.name,
            "bytes",
            f"{info.nbytes} with SHA-256 {found}",
            f"{row['nbytes']} with SHA-256 {row['sha256']}",
        )
        return False

    def _expected_entry(self, info: TensorInfo) -> _Stored:
        """Return the header entry that aprfmt's tensor has: the format's code, shape and offset."""
        row = find_encoding(info.encoding)
        return _Stored(
            row.ggml if self._kind == "gguf" else row.safetensors, tuple(info.shape), info.offset
        )

    def _record_difference(self, name: str, what: str, ours: str, theirs: str) -> None:
        """Record a Disagreement of the two readers, with which of them the header contradicts.

        The arguments are those of `Disagreement`; an empty name is the file as a whole.
        """
        outside, because = self._find_outsider(name, what, ours, theirs)
        shown = shorten(name, 200)
        self._reading.disagreements.append(
            Disagreement(self._file, shown, what, ours, theirs, outside, because)
        )

    def _find_outsider(self, name: str, what: str, ours: str, theirs: str) -> tuple[str, str]:
        """Return (who is outside the specification, how that was found), by the header's entry.

        The first is the file, aprfmt, the library, or "not decided". `name` is the tensor, `what`
        the property that differs, `ours` and `theirs` what each reader says.
        """
        if name in self._broken:
            return _THE_FILE, f"aprfmt says: {shorten(self._broken[name], 200)}"
        try:
            entry = header_entries(self._kind, self._shard).get(name)
        except (FormatError, ValueError, struct.error, KeyError, TypeError):
            return _UNDECIDED, "the header cannot be read without either"
        if what == "present":
            count = entry[1] if entry else 0
            return self._blame_reader(count == _COUNTS[ours], f"the header has {count} of it")
        if entry is None:
            return _UNDECIDED, "the header has no such entry"
        stored = entry[0]
        said: Mapping[str, Any] = {
            "type": stored.encoding, "shape": list(stored.shape), "place": stored.offset,
        }  # fmt: skip
        if what not in said:
            mine = self._ours[name]
            fits = mine.offset == stored.offset and stored.nbytes in (None, mine.nbytes)
            return self._blame_reader(fits, f"the header has its bytes at {stored.offset}")
        truth = _short_text(said[what])
        if truth not in (ours, theirs):
            return _UNDECIDED, f"the header has {truth}"
        return self._blame_reader(truth == ours, f"the header has {truth}")

    def _blame_reader(self, ours_fit: bool, because: str) -> tuple[str, str]:
        """Return (the reader that does not fit the header, `because`).

        It is the library where `ours_fit` says that aprfmt's reading fits, else aprfmt.
        """
        return (self._reading.library if ours_fit else _OURS), because


def _short_text(value: object) -> str:
    """Return a value as text of at most 200 characters."""
    return shorten(str(value), 200)


def header_entries(kind: str, shard: Shard[Any]) -> dict[str, tuple[_Stored, int]]:
    """Return {tensor name: (its header entry, how often the header has it)}.

    It is read by the format's text alone. Layout sources: the format section of safetensors'
    README; `gguf_tensor_info_t` of ggml's page on GGUF. `kind` is the format, gguf or safetensors.
    """
    found: dict[str, tuple[_Stored, int]] = {}
    for name, stored in (_gguf_entries if kind == "gguf" else _safetensors_entries)(shard):
        found[name] = stored, found[name][1] + 1 if name in found else 1
    return found


def _gguf_entries(shard: Shard[Any]) -> Iterator[tuple[str, _Stored]]:
    """Yield (name, entry) of each tensor info of a GGUF header; shapes are outermost first."""
    parsed = shard.parsed
    start, stop = parsed.table
    table, order, at = bytes(shard.file.view[start:stop]), parsed.order, 0
    for _ in range(parsed.counts[0]):
        (length,) = struct.unpack_from(f"{order}Q", table, at)
        name = table[at + 8 : at + 8 + length].decode()
        at += 8 + length
        (ndim,) = struct.unpack_from(f"{order}I", table, at)
        *sizes, kind, offset = struct.unpack_from(f"{order}{ndim}QIQ", table, at + 4)
        at += 4 + 8 * ndim + 12
        yield name, _Stored(kind, tuple(sizes[::-1]), parsed.data_offset + offset)


def _safetensors_entries(shard: Shard[Any]) -> Iterator[tuple[str, _Stored]]:
    """Yield (name, entry) of each tensor of a safetensors header, duplicates included."""
    raw = bytes(shard.file.view[: PREFIX + min(MAX_HEADER, shard.parsed.header_size)])
    (length,) = struct.unpack_from("<Q", raw)
    pairs: list[tuple[str, Any]] = json.loads(raw[PREFIX : PREFIX + length], object_pairs_hook=list)
    for name, entry in pairs:
        if name != "__metadata__":
            dtype, shape, offsets = (dict(entry)[key] for key in FIELDS)
            at = PREFIX + length + offsets[0]
            yield name, _Stored(dtype, tuple(shape), at, offsets[1] - offsets[0])


# --- the child --------------------------------------------------------------------------------


def _rows_of_child(kind: str, file: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rows that the library's process sends about a file.

    The process is killed when the generator ends, or after its time. `kind` is the format. Raises
    NotRun where it cannot start.
    """
    seconds = _CPU_SECONDS + file.size // _BYTES_A_SECOND
    request = {
        "path": import_path(), "format": kind, "file": str(file.path.absolute()),
        "cpu_seconds": seconds, "memory": _MEMORY + 2 * file.size,
    }  # fmt: skip
    try:
        child = start_library_child(_CHILD)
    except OSError as error:
        raise NotRun(f"a process for {LIBRARIES[kind]} could not start: {error}") from None
    timer = Timer(_WALL * seconds, child.kill)
    timer.start()
    try:
        yield from _exchange_lines(child, json.dumps(request).encode("ascii") + b"\n")
    finally:
        timer.cancel()
        end_child(child)


def _exchange_lines(
    child: "subprocess.Popen[bytes]", request: bytes
) -> Iterator[Mapping[str, Any]]:
    """Send the request to a child process, and yield its answers, a JSON object a line."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(request)
        child.stdin.flush()
    except BrokenPipeError:
        return
    while (raw := child.stdout.readline(_LINE)).endswith(b"\n"):
        yield json.loads(raw)
