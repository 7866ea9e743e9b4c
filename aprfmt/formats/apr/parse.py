"""From bytes to the structure of one APR v2 file; no file is opened and no tensor read here.

Order of checks as in the reference: length, magic, header checksum, version, layout flag, metadata,
index; then our own: sizes, overlap, end. Faults that leave other tensors readable go to
`ParsedApr.faults`.
"""

import struct
from collections.abc import Iterator

from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import Region, TensorInfo, Value
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, TruncatedError, UnsupportedError
from aprfmt.formats import bounded_json, unsupported_encodings
from aprfmt.formats.apr import layout
from aprfmt.formats.apr.layout import BITS, CODES, COMPRESSED, HEADER_SIZE, Header
from aprfmt.formats.apr.metadata import type_mismatches
from aprfmt.formats.apr.regions import check_end, check_regions
from aprfmt.formats.apr.structure import IndexEntry, ParsedApr
from aprfmt.formats.cursor import MAX_COUNT, MAX_DIMS, MAX_METADATA, Cursor
from aprfmt.formats.damage import Faults, tensor_label

_ENTRY_TAIL = struct.Struct("<QQ")
_JSON_INDEX = b"[{"  # one loader's dump writes its index as JSON


def parse(buffer: Region, where: str, *, partial: bool = False, damaged: bool = False) -> ParsedApr:
    """Return the structure of the APR v2 file in `buffer`; `where` begins every message.

    `partial` lists tensors that are beyond the end of a truncated file, with a warning. `damaged`
    collects faults that leave other tensors readable in `faults`; without it the first fault
    raises. Raises FormatError, TruncatedError or UnsupportedError.
    """
    faults = Faults(where, damaged)
    try:
        header, legacy = _read_header(buffer, where, faults)
        if header.flags & COMPRESSED:
            return _parse_compressed(buffer, header, legacy, partial, faults)
        return _parse_plain(buffer, header, legacy, partial, faults)
    except FormatError as error:
        raise faults.first(error) from None


def _parse_compressed(
    buffer: Region, header: Header, legacy: bool, partial: bool, faults: Faults
) -> ParsedApr:
    """Return the structure of a file whose flags say that it is compressed.

    The reference writer sets these flags on uncompressed files too, so the file is read as
    uncompressed first, and expanded only if that fails.
    """
    where = faults.where
    try:
        parsed = _parse_plain(buffer, header, legacy, partial, Faults(where, False))
    except FormatError as plain_error:
        from aprfmt.formats.apr.compression import expand_file

        try:
            whole = memoryview(expand_file(buffer[:], header.flags, where)).toreadonly()
        except FormatError as error:
            looks_plain = bytes(buffer[HEADER_SIZE : HEADER_SIZE + 2]) == b'{"'
            if looks_plain and faults.collect:
                return _parse_plain(buffer, header, legacy, partial, faults)
            raise plain_error if looks_plain else error from None
        parsed = _parse_plain(whole, header, legacy, partial, faults)
        parsed.expanded = True
        parsed.warn(
            "odd_flags", "everything after the header is compressed, which no known writer does"
        )
    parsed.faults = faults
    return parsed


def _read_header(buffer: Region, where: str, faults: Faults) -> tuple[Header, bool]:
    """Return (the checked header, whether its magic is a legacy one).

    Adds a fault for a wrong checksum. Raises TruncatedError for a file shorter than a header,
    FormatError for another magic, UnsupportedError for other versions and formats.
    """
    if len(buffer) < HEADER_SIZE:
        raise TruncatedError(
            f"{where}: has {len(buffer)} bytes, an APR header has {HEADER_SIZE}; the file is cut"
        )
    header = Header.unpack(buffer[:HEADER_SIZE])
    intact = header.checksum == header.computed_checksum
    # Other formats share the legacy magics: only a valid checksum makes it APR.
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
        faults.add(
            FormatError(
                f"{where}: header checksum at offset {layout.CRC_AT} is 0x{header.checksum:08x}, "
                f"its bytes give 0x{header.computed_checksum:08x}; {hint}"
            )
        )
    if header.major != layout.VERSION[0]:
        raise UnsupportedError(
            f"{where}: version {header.major}.{header.minor} at offset 4; this reader knows 2.0"
        )
    return _check_flags(header, where), False


def _check_flags(header: Header, where: str) -> Header:
    """Return the header; UnsupportedError if its flags say that tensors are column-major."""
    if header.flags & BITS["LAYOUT_COLUMN_MAJOR"]:
        raise UnsupportedError(
            f"{where}: flag LAYOUT_COLUMN_MAJOR is set; APR v2 tensors are row-major (LAYOUT-002), "
            "so convert the model again from its source"
        )
    return header


def _parse_plain(
    buffer: Region, header: Header, legacy: bool, partial: bool, faults: Faults
) -> ParsedApr:
    """Return the structure of an uncompressed file with this header.

    `legacy`: its magic is an old one. `partial` allows a truncated file, whose missing tensors get
    a warning.
    """
    parsed = ParsedApr(faults.where, buffer, len(buffer), header, faults)
    _note_header(parsed, legacy)
    metadata = _read_metadata(parsed)
    _read_index(parsed)
    stored = {entry.info.name: entry.info for entry in parsed.entries}
    parsed.metadata, parsed.infos, notes = unsupported_encodings.restore_encodings(
        metadata, stored, parsed.where
    )
    parsed.notes += notes
    check_regions(parsed)
    check_end(parsed, partial)
    faults.rename(dict(zip(stored, parsed.infos, strict=True)))
    return parsed


def _note_header(parsed: ParsedApr, legacy: bool) -> None:
    """Add the notes about the header: old magic, version, odd flags, reserved bytes."""
    header = parsed.header
    if legacy:
        parsed.warn(
            "legacy_format",
            f"legacy magic {header.magic.decode()!r}; today's readers want 'APR\\0'",
        )
    if header.minor != layout.VERSION[1]:
        parsed.warn(
            "unknown_version", f"version {header.major}.{header.minor}; this reader knows 2.0"
        )
    if header.flags & BITS["ENCRYPTED"]:
        parsed.warn(
            "odd_flags", "flag ENCRYPTED is set, but APR v2 has no encryption: read as plain data"
        )
    if unknown := [name for name in header.flag_names if name.startswith("0x")]:
        parsed.remark(f"undefined flag bits {', '.join(unknown)}")
    if any(header.reserved):
        parsed.remark("reserved header bytes 44..63 are not zero")


def _read_metadata(parsed: ParsedApr) -> dict[str, Value]:
    """Return the metadata; {} if they cannot be read and faults are collected.

    Sets `parsed.metadata_end`.
    """
    header = parsed.header
    try:
        metadata = _parse_metadata(parsed)
    except FormatError as error:
        parsed.faults.add(error)
        return {}
    parsed.metadata_end = header.metadata_offset + header.metadata_size
    return metadata


def _parse_metadata(parsed: ParsedApr) -> dict[str, Value]:
    """Return the metadata's JSON object; FormatError if it is none.

    Keys that occur twice and typed keys of another type are warnings.
    """
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
        metadata = bounded_json.loads(raw, place, max_bytes=MAX_METADATA, surrogates=True)
    except FormatError as error:
        # Some training checkpoints hold a key twice; the reference keeps the last.
        metadata = bounded_json.loads(
            raw, place, max_bytes=MAX_METADATA, surrogates=True, duplicates="last"
        )
        parsed.warn(
            "duplicate_keys",
            f"{error}; the last is kept, as the reference does".removeprefix(f"{where}: "),
        )
    if not isinstance(metadata, dict):
        raise FormatError(f"{place}: is {type(metadata).__name__}; APR v2 needs a JSON object")
    for sentence in type_mismatches(metadata):
        parsed.warn("metadata_type", f"{sentence}; the reference refuses the file for it")
    return metadata


def _read_index(parsed: ParsedApr) -> None:
    """Read all index entries into `parsed`, with faults and warnings about names and codes."""
    cursor = _find_index(parsed)
    seen: set[bytes] = set()
    last, unsorted = b"", ""
    legacy: dict[str, list[str]] = {}
    for raw_name, entry in _read_entries(cursor, parsed):
        name = entry.info.name
        # Names must be unique and sorted by their bytes.
        if raw_name in seen:
            what = f"{parsed.where}: {tensor_label(name)} stands twice in the index"
            parsed.faults.add(FormatError(f"{what}; names must be unique"), name)
        seen.add(raw_name)
        if raw_name < last:
            unsorted = unsorted or name
        last = raw_name
        parsed.entries.append(entry)
        if name not in parsed.faults.broken and ENCODINGS[entry.info.encoding].apr != entry.code:
            meaning = f"code {entry.code} read as {entry.info.encoding} by its size"
            legacy.setdefault(meaning, []).append(name)
    parsed.index_end = cursor.offset
    if unsorted:
        tensor = tensor_label(unsorted)
        parsed.warn(
            "unsorted_index",
            f"the index is not sorted by name from {tensor} on; aprender refuses that",
        )
    for meaning, names in legacy.items():
        parsed.warn(
            "legacy_format",
            f"{len(names)} tensors have legacy {meaning}, the first is {tensor_label(names[0])}",
        )


def _find_index(parsed: ParsedApr) -> Cursor:
    """Return a cursor at the index; FormatError if the header's offset or count is impossible.

    UnsupportedError for an index of JSON.
    """
    header, where = parsed.header, parsed.where
    start = header.index_offset
    metadata_end = parsed.metadata_end
    overlaps = f"{where}: tensor_index_offset {start} overlaps the"
    if start < HEADER_SIZE:
        raise FormatError(f"{overlaps} header, which ends at {HEADER_SIZE}")
    if header.metadata_offset <= start < metadata_end:
        parsed.faults.add(FormatError(f"{overlaps} metadata, which ends at {metadata_end}"))
    if header.tensor_count > MAX_COUNT:
        raise FormatError(
            f"{where}: tensor_count at offset 8 is {header.tensor_count}, the limit is {MAX_COUNT}"
        )
    cursor = Cursor(parsed.buffer, where)
    cursor.skip(start, "tensor_index_offset")
    cursor.need(header.tensor_count * layout.ENTRY_SIZE, f"{header.tensor_count} index entries")
    if header.tensor_count and bytes(parsed.buffer[start : start + 2]) == _JSON_INDEX:
        raise UnsupportedError(
            f"{where}: tensor index at offset {start} is JSON, as one loader's dump writes it; "
            "APR v2 needs binary entries: convert the model again from its source"
        )
    return cursor


def _read_entries(cursor: Cursor, parsed: ParsedApr) -> Iterator[tuple[bytes, IndexEntry]]:
    """Yield (bytes of the name, entry) of every index entry.

    An entry that cannot be read ends the list: entries have no fixed length, so the offset of the
    next one is not known.
    """
    count, data = parsed.header.tensor_count, parsed.header.data_offset
    for number in range(count):
        at = cursor.offset
        if parsed.faults.collect and parsed.header.index_offset < data <= at:
            error = FormatError(
                f"{parsed.where}: the index has {count} entries by the header, {number} stand "
                f"before the data at offset {data}"
            )
            parsed.faults.add(error)
            return
        try:
            yield _read_entry(cursor, number, data, parsed)
        except FormatError as error:
            parsed.faults.add(error)
            cursor.offset = at
            return


def _read_entry(
    cursor: Cursor, number: int, data_offset: int, parsed: ParsedApr
) -> tuple[bytes, IndexEntry]:
    """Return (bytes of the name, index entry number `number`); its faults are reported.

    Entries are sorted by the name's bytes, which must be unique. Raises FormatError for too many
    dimensions, TruncatedError where the file ends before.
    """
    where = cursor.where
    what, at = f"index entry {number}", cursor.offset
    raw_name = bytes(cursor.take(cursor.uint(2, what), f"name of {what}"))
    name = _decode_name(raw_name, at, what, parsed)
    tensor = tensor_label(name)
    code, ndim = cursor.take(2, f"{what} ({tensor})")
    if ndim > MAX_DIMS:
        raise FormatError(
            f"{where}: {tensor} at offset {at} has {ndim} dimensions, "
            f"the limit is {MAX_DIMS}; the index is damaged"
        )
    # The code alone is ambiguous: shape and size decide which encoding it means.
    shape = struct.unpack(f"<{ndim}Q", cursor.take(8 * ndim, f"shape of {tensor}"))
    offset, nbytes = _ENTRY_TAIL.unpack(cursor.take(_ENTRY_TAIL.size, f"extent of {tensor}"))
    encoding, row_bytes = f"type#{code}", None
    found = layout.resolve_encoding(code, shape, nbytes)
    if code not in CODES:
        known = ", ".join(map(str, CODES))
        error: FormatError = UnsupportedError(
            f"{where}: {tensor} at offset {at} has dtype code {code}; known codes are {known}"
        )
        parsed.faults.add(error, name)
    elif found is None:
        encoding = CODES[code][0]
        sizes = shorten(str(layout.expected_sizes(code, shape)), 200)
        error = FormatError(
            f"{where}: {tensor} has {nbytes} bytes; shape {shorten(str(list(shape)), 200)} "
            f"under dtype code {code} takes {sizes}"
        )
        parsed.faults.add(error, name)
    else:
        encoding, row_bytes = found[0], found[1].row_bytes
    info = TensorInfo(name, shape, encoding, data_offset + offset, nbytes, row_bytes)
    return raw_name, IndexEntry(info, code)


def _decode_name(raw: bytes, at: int, what: str, parsed: ParsedApr) -> str:
    """Return a tensor's name; one that is not UTF-8 is escaped and reported as a fault.

    A name that the reference writer cut inside a character is only a warning.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        # The reference writer cuts names at byte 256, which can split the last character.
        name = raw.decode("utf-8", "backslashreplace")
        if len(raw) == layout.MAX_NAME_BYTES and error.start >= len(raw) - 3:
            parsed.warn(
                "cut_name",
                f"the name of {what} is cut at {layout.MAX_NAME_BYTES} bytes: {tensor_label(name)}",
            )
            return name
        wrong = FormatError(
            f"{parsed.where}: the name of {what} at offset {at} is not UTF-8 "
            f"(byte {error.start} is 0x{raw[error.start]:02x}); the index is damaged"
        )
    parsed.faults.add(wrong, name)
    return name
