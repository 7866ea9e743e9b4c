"""From bytes to the structure of one APR v2 file; no file is opened and no tensor read here.

Order of checks as in the reference: length, magic, header checksum, version and layout flag,
metadata, index; then what the reference leaves out: sizes, overlap, the file's end.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from aprfmt.dtypes import ENCODINGS
from aprfmt.errors import FormatError, TruncatedError, UnsupportedError
from aprfmt.formats import jsonio
from aprfmt.formats.apr import carried, layout
from aprfmt.formats.apr.layout import BITS, CODES, COMPRESSED, HEADER_SIZE, Header, align
from aprfmt.formats.apr.metadata import misfits
from aprfmt.formats.cursor import MAX_COUNT, MAX_DIMS, MAX_METADATA, Cursor
from aprfmt.tensor import Note, TensorInfo, Value
from aprfmt.text import shorten

FooterState = Literal["present", "missing", "trailing"]

_ENTRY_TAIL = struct.Struct("<QQ")
_JSON_INDEX = b"[{"  # one loader's dump writes its index as JSON


@dataclass(frozen=True, slots=True)
class Entry:
    """One index entry: the stored tensor (absolute offset) and its code as it stands there."""

    info: TensorInfo
    code: int


@dataclass(slots=True)
class Parsed:
    """The structure of one file.

    `buffer` holds the plain file: the one given, or the expanded one. `infos` are the logical
    tensors in index order, `entries` the stored ones. `end` is where the padded data ends and the
    footer begins; `size` is the plain file's length.
    """

    where: str
    buffer: memoryview
    size: int
    header: Header
    metadata: dict[str, Value] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    index_end: int = 0
    end: int = 0
    expanded: bool = False

    @property
    def metadata_raw(self) -> memoryview:
        """The metadata's bytes as they stand in the file."""
        start = self.header.metadata_offset
        return self.buffer[start : start + self.header.metadata_size]

    @property
    def footer(self) -> FooterState:
        """Whether the file ends with its checksum, before it, or behind it."""
        if self.size == self.end + 4:
            return "present"
        return "missing" if self.size <= self.end else "trailing"

    def regions(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of everything that has a meaning; the rest should be zeros."""
        header = self.header
        yield 0, HEADER_SIZE
        yield header.metadata_offset, header.metadata_offset + header.metadata_size
        yield header.index_offset, self.index_end
        for entry in self.entries:
            yield entry.info.offset, entry.info.offset + entry.info.nbytes

    def warn(self, text: str, where: str = "") -> None:
        """Add a warning; `where` defaults to the file."""
        self.notes.append(Note("warning", where or self.where, text))

    def remark(self, text: str) -> None:
        """Add a note: unusual, but harmless."""
        self.notes.append(Note("note", self.where, text))


def parse(buffer: memoryview, where: str, *, partial: bool = False) -> Parsed:
    """Return the structure of the APR v2 file in `buffer`; `where` begins every message.

    `partial` lists tensors that lie beyond the end of a truncated file, with a warning each.
    Raises FormatError, TruncatedError or UnsupportedError.
    """
    header, legacy = _read_header(buffer, where)
    if not header.flags & COMPRESSED:
        return _parse_plain(buffer, where, header, legacy, partial)
    # The reference writer sets the bits over plain data, so the plain reading comes first.
    try:
        return _parse_plain(buffer, where, header, legacy, partial)
    except FormatError as plain_error:
        from aprfmt.formats.apr.compressed import expand

        try:
            whole = memoryview(expand(buffer, header.flags, where)).toreadonly()
        except FormatError as error:
            looks_plain = bytes(buffer[HEADER_SIZE : HEADER_SIZE + 2]) == b'{"'
            raise plain_error if looks_plain else error from None
        parsed = _parse_plain(whole, where, header, legacy, partial)
        parsed.expanded = True
        parsed.warn("everything after the header is compressed, which no known writer does")
        return parsed


def _read_header(buffer: memoryview, where: str) -> tuple[Header, bool]:
    """Return the checked header and whether it stands under a legacy magic."""
    if len(buffer) < HEADER_SIZE:
        raise TruncatedError(
            f"{where}: has {len(buffer)} bytes, an APR header has {HEADER_SIZE}; the file is cut"
        )
    header = Header.unpack(buffer[:HEADER_SIZE])
    intact = header.checksum == header.computed_checksum
    if header.magic != layout.MAGIC:
        legacy = header.magic in layout.LEGACY_MAGICS
        if legacy and intact and (header.major, header.minor) == layout.VERSION:
            return _check_flags(header, where), True
        if header.magic in layout.REFUSED_MAGICS:
            raise UnsupportedError(f"{where}: is {layout.REFUSED_MAGICS[header.magic]}")
        raise FormatError(f"{where}: starts with {header.magic.hex(' ')}, not with an APR magic")
    if not intact:
        hint = (
            "0 is what one loader's dumps leave there; write the file again with `apr`"
            if header.checksum == 0
            else "the header is damaged; get the file again"
        )
        raise FormatError(
            f"{where}: header checksum at offset {layout.CRC_AT} is 0x{header.checksum:08x}, "
            f"its bytes give 0x{header.computed_checksum:08x}; {hint}"
        )
    if header.major != layout.VERSION[0]:
        raise UnsupportedError(
            f"{where}: version {header.major}.{header.minor} at offset 4; this reader knows 2.0"
        )
    return _check_flags(header, where), False


def _check_flags(header: Header, where: str) -> Header:
    if header.flags & BITS["LAYOUT_COLUMN_MAJOR"]:
        raise UnsupportedError(
            f"{where}: flag LAYOUT_COLUMN_MAJOR is set; APR v2 tensors are row-major (LAYOUT-002), "
            "so convert the model again from its source"
        )
    return header


def _parse_plain(
    buffer: memoryview, where: str, header: Header, legacy: bool, partial: bool
) -> Parsed:
    parsed = Parsed(where, buffer, len(buffer), header)
    _note_header(parsed, legacy)
    metadata = _read_metadata(parsed)
    _read_index(parsed)
    stored = {entry.info.name: entry.info for entry in parsed.entries}
    parsed.metadata, parsed.infos, notes = carried.join(metadata, stored, where)
    parsed.notes += notes
    _check_regions(parsed)
    _check_end(parsed, partial)
    return parsed


def _note_header(parsed: Parsed, legacy: bool) -> None:
    header = parsed.header
    if legacy:
        parsed.warn(f"legacy magic {header.magic.decode()!r}; today's readers want 'APR\\0'")
    if header.minor != layout.VERSION[1]:
        parsed.warn(f"version {header.major}.{header.minor}; this reader knows 2.0")
    if header.flags & BITS["ENCRYPTED"]:
        parsed.warn("flag ENCRYPTED is set, but APR v2 has no encryption: read as plain data")
    if unknown := [name for name in header.flag_names if name.startswith("0x")]:
        parsed.remark(f"undefined flag bits {', '.join(unknown)}")
    if any(header.reserved):
        parsed.remark("reserved header bytes 44..63 are not zero")


def _read_metadata(parsed: Parsed) -> dict[str, Value]:
    header, where = parsed.header, parsed.where
    cursor = Cursor(parsed.buffer, where)
    if header.metadata_offset < HEADER_SIZE:
        raise FormatError(
            f"{where}: metadata_offset {header.metadata_offset} lies inside the header"
        )
    cursor.skip(header.metadata_offset, "metadata_offset")
    raw = cursor.take(header.metadata_size, "metadata")
    place = f"{where}: metadata at offset {header.metadata_offset}"
    if not raw:
        raise FormatError(f"{place}: is empty; APR v2 needs a JSON object")
    try:
        metadata = jsonio.loads(raw, place, max_bytes=MAX_METADATA, surrogates=True)
    except FormatError as error:
        # Some training checkpoints hold a key twice; the reference keeps the last.
        metadata = jsonio.loads(
            raw, place, max_bytes=MAX_METADATA, surrogates=True, duplicates="last"
        )
        parsed.warn(f"{error}; the last is kept, as the reference does".removeprefix(f"{where}: "))
    if not isinstance(metadata, dict):
        raise FormatError(f"{place}: is {type(metadata).__name__}; APR v2 needs a JSON object")
    for sentence in misfits(metadata):
        parsed.warn(f"{sentence}; the reference refuses the file for it")
    return metadata


def _read_index(parsed: Parsed) -> None:
    header, where, buffer = parsed.header, parsed.where, parsed.buffer
    start = header.index_offset
    metadata_end = header.metadata_offset + header.metadata_size
    for first, end, what in (
        (0, HEADER_SIZE, "header"),
        (header.metadata_offset, metadata_end, "metadata"),
    ):
        if first <= start < end:
            raise FormatError(
                f"{where}: tensor_index_offset {start} overlaps the {what}, which ends at {end}"
            )
    if header.tensor_count > MAX_COUNT:
        raise FormatError(
            f"{where}: tensor_count at offset 8 is {header.tensor_count}, the limit is {MAX_COUNT}"
        )
    cursor = Cursor(buffer, where)
    cursor.skip(start, "tensor_index_offset")
    cursor.need(header.tensor_count * layout.ENTRY_SIZE, f"{header.tensor_count} index entries")
    if header.tensor_count and bytes(buffer[start : start + 2]) == _JSON_INDEX:
        raise UnsupportedError(
            f"{where}: tensor index at offset {start} is JSON, as one loader's dump writes it; "
            "APR v2 needs binary entries: convert the model again from its source"
        )
    seen: set[bytes] = set()
    last, unsorted = b"", ""
    legacy: dict[str, list[str]] = {}
    for number in range(header.tensor_count):
        raw_name, entry = _read_entry(cursor, number, header.data_offset, parsed)
        if raw_name in seen:
            raise FormatError(
                f"{where}: {_tensor(entry.info.name)} stands twice in the index; "
                "names must be unique"
            )
        seen.add(raw_name)
        if raw_name < last:
            unsorted = unsorted or entry.info.name
        last = raw_name
        parsed.entries.append(entry)
        if ENCODINGS[entry.info.encoding].apr != entry.code:
            meaning = f"code {entry.code} read as {entry.info.encoding} by its size"
            legacy.setdefault(meaning, []).append(entry.info.name)
    parsed.index_end = cursor.offset
    if unsorted:
        tensor = _tensor(unsorted)
        parsed.warn(f"the index is not sorted by name from {tensor} on; aprender refuses that")
    for meaning, names in legacy.items():
        parsed.warn(f"{len(names)} tensors have legacy {meaning}, the first is {_tensor(names[0])}")


def _tensor(name: str) -> str:
    return f"tensor {shorten(name, 100)!r}"


def _read_entry(
    cursor: Cursor, number: int, data_offset: int, parsed: Parsed
) -> tuple[bytes, Entry]:
    """Read one entry; returns the name's bytes, which order and uniqueness go by."""
    where = cursor.where
    what = f"index entry {number}"
    at = cursor.offset
    raw_name = bytes(cursor.take(cursor.uint(2, what), f"name of {what}"))
    name = _decode_name(raw_name, at, what, parsed)
    tensor = _tensor(name)
    code, ndim = cursor.take(2, f"{what} ({tensor})")
    if ndim > MAX_DIMS:
        raise FormatError(
            f"{where}: {tensor} at offset {at} has {ndim} dimensions, "
            f"the limit is {MAX_DIMS}; the index is damaged"
        )
    shape = struct.unpack(f"<{ndim}Q", cursor.take(8 * ndim, f"shape of {tensor}"))
    offset, nbytes = _ENTRY_TAIL.unpack(cursor.take(_ENTRY_TAIL.size, f"extent of {tensor}"))
    if code not in CODES:
        raise UnsupportedError(
            f"{where}: {tensor} at offset {at} has dtype code {code}; "
            f"known codes are {', '.join(map(str, CODES))}"
        )
    found = layout.resolve(code, shape, nbytes)
    if found is None:
        sizes = shorten(str(layout.expected_sizes(code, shape)), 200)
        raise FormatError(
            f"{where}: {tensor} has {nbytes} bytes; shape {shorten(str(list(shape)), 200)} "
            f"under dtype code {code} takes {sizes}"
        )
    encoding, fit = found
    info = TensorInfo(name, shape, encoding, data_offset + offset, nbytes, fit.row_bytes)
    return raw_name, Entry(info, code)


def _decode_name(raw: bytes, at: int, what: str, parsed: Parsed) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        # The reference writer cuts names at byte 256, which can split the last character.
        if len(raw) == layout.MAX_NAME_BYTES and error.start >= len(raw) - 3:
            name = raw.decode("utf-8", "backslashreplace")
            parsed.warn(
                f"the name of {what} was cut at {layout.MAX_NAME_BYTES} bytes: {_tensor(name)}"
            )
            return name
        raise FormatError(
            f"{parsed.where}: the name of {what} at offset {at} is not UTF-8 "
            f"(byte {error.start} is 0x{raw[error.start]:02x}); the index is damaged"
        ) from None


def _check_regions(parsed: Parsed) -> None:
    """Refuse overlap; remark on holes and on unaligned tensors."""
    header = parsed.header
    infos = _infos(parsed.entries)
    regions: list[tuple[int, int, str]] = [
        (0, HEADER_SIZE, "the header"),
        (header.metadata_offset, header.metadata_offset + header.metadata_size, "the metadata"),
        (header.index_offset, parsed.index_end, "the tensor index"),
        *((i.offset, i.offset + i.nbytes, _tensor(i.name)) for i in infos if i.nbytes),
    ]
    regions = sorted(region for region in regions if region[0] < region[1])
    holes = 0
    for (_, end, before), (start, stop, name) in pairwise(regions):
        if start < end:
            raise FormatError(
                f"{parsed.where}: {name} ({start}..{stop}) overlaps {before}, which ends at {end}"
            )
        if start > align(end):
            holes += 1
            if holes == 1:
                parsed.warn(f"{start - end} unused bytes between {before} and {name}")
    if holes > 1:
        parsed.warn(f"{holes} holes between the parts of the file")
    unaligned = [i.name for i in infos if i.nbytes and i.offset % layout.ALIGNMENT]
    if unaligned:
        name = _tensor(unaligned[0])
        parsed.remark(f"{len(unaligned)} tensors are not 64-byte aligned, first {name}")
    # Relative to data_offset, as the writer pads; an empty tensor counts with its offset.
    start = header.data_offset
    parsed.end = start + max((align(i.offset + i.nbytes - start) for i in infos), default=0)


def _check_end(parsed: Parsed, partial: bool) -> None:
    missing = parsed.end - parsed.size
    if missing > 0:
        beyond = [
            info for info in _infos(parsed.entries) if info.offset + info.nbytes > parsed.size
        ]
        first = f"; {_tensor(beyond[0].name)} is the first beyond the end" if beyond else ""
        text = (
            f"has {parsed.size} bytes, its tensors end at {parsed.end}: "
            f"{missing} bytes are missing{first}"
        )
        if not partial:
            raise TruncatedError(
                f"{parsed.where}: {text}; get the file again, or list it with --partial"
            )
        parsed.warn(text)
        for info in beyond:
            parsed.warn(
                f"lies beyond the end ({info.offset}..{info.offset + info.nbytes})", info.name
            )
    elif parsed.footer == "missing":
        parsed.warn("no footer checksum, so damage to the data cannot be noticed")
    elif parsed.footer == "trailing":
        parsed.warn(
            f"{parsed.size - parsed.end} bytes follow the data, where a 4-byte footer is expected"
        )


def _infos(entries: Sequence[Entry]) -> list[TensorInfo]:
    return [entry.info for entry in entries]
