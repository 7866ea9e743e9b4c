"""From a buffer to the structure of one GGUF file: no path, no mapping, no tensor bytes.

Everything is checked by the C reader's rules. Where it refuses what can be read without doubt
(holes, another data order, long names), the file opens with a note that says so. Faults that leave
other tensors readable go to `ParsedGguf.faults`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from aprfmt.base.protocols import Note, Region, TensorInfo
from aprfmt.base.text_escape import shorten
from aprfmt.errors import CodecError, FormatError, TruncatedError, UnsupportedError
from aprfmt.formats.cursor import MAX_DIMS, Cursor
from aprfmt.formats.damage import Faults, Structure, report_overlap, tensor_label
from aprfmt.formats.gguf import layout
from aprfmt.formats.gguf.fork_types import (
    TableLine,
    TensorExtents,
    count_phrase,
    missing_row_header,
    resolve_fork_types,
    undecoded_notes,
)
from aprfmt.formats.gguf.layout import MAX_INT64, align_size, encoding_of
from aprfmt.formats.gguf.metadata import Drop, Metadata, read_metadata


@dataclass(slots=True)
class ParsedGguf(Structure):
    """The structure of one GGUF file.

    `order` is "<" or ">". `infos` are in the table's order with absolute offsets. The data section
    begins at `data_offset`, the tensor table takes the bytes `table`; `end` is where the last
    tensor's bytes end, before its padding. `counts` are those of tensors and keys in the header.
    `joined` says that another model file begins after it, "" where none does.
    """

    where: str
    size: int
    version: int
    order: str
    alignment: int
    metadata: Metadata
    faults: Faults
    data_offset: int
    end: int = 0
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    counts: tuple[int, int] = (0, 0)
    table: tuple[int, int] = (0, 0)
    joined: str = ""

    def regions(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of header, table and tensors; bytes outside them should be zeros."""
        yield 0, self.table[1]
        for info in self.infos.values():
            yield info.offset, info.offset + info.nbytes


def parse(
    buffer: Region,
    where: str,
    *,
    partial: bool = False,
    damaged: bool = False,
    drop: Drop | None = None,
) -> ParsedGguf:
    """Return the structure of the GGUF file in `buffer`; `where` begins every message.

    `partial` lists tensors that are beyond the end of a truncated file, with a warning; everything
    before the data must be whole. `damaged` collects faults that leave other tensors readable in
    `faults`; without it the first fault raises. `drop` is called with the ranges of large values
    that were skipped. Raises FormatError, TruncatedError or UnsupportedError.
    """
    cursor = Cursor(buffer, where)
    cursor.faults = Faults(where, damaged)
    try:
        return _parse_file(cursor, buffer, partial, drop)
    except FormatError as error:
        raise cursor.faults.first(error) from None


def _parse_file(cursor: Cursor, buffer: Region, partial: bool, drop: Drop | None) -> ParsedGguf:
    """Return the structure of the file at the cursor; tolerable faults go to the cursor's `faults`.

    `buffer` is all of the file.
    """
    version = _read_version(cursor)
    tensors = cursor.count(8, layout.SMALLEST_TENSOR, "the tensor count")
    keys = cursor.count(8, layout.SMALLEST_KEY, "the key count")
    metadata = read_metadata(cursor, keys, drop)
    misaligned: FormatError | None = None
    try:
        alignment = _read_alignment(metadata, cursor.where)
    except FormatError as error:
        cursor.faults.add(error)
        misaligned, alignment = error, 1
    begin = cursor.offset
    entries = _read_table(cursor, tensors, alignment)
    if misaligned is not None:  # nobody knows where the data begin
        cursor.faults.spoil(misaligned, [entry.name for entry in entries])
    parsed = ParsedGguf(
        cursor.where,
        cursor.size,
        version,
        cursor.order,
        alignment,
        metadata,
        cursor.faults,
        align_size(cursor.offset, alignment),
        cursor.offset,
        counts=(tensors, keys),
        table=(begin, cursor.offset),
    )
    starts = sorted({entry.offset for entry in entries})
    extents = TensorExtents(starts, cursor.size - parsed.data_offset, alignment)
    entries, fork_notes = resolve_fork_types(entries, extents, metadata)
    _add_infos(parsed, entries, extents, partial)
    _note_entries(parsed, entries, extents, fork_notes)
    _check_overlap(parsed)
    _check_end(parsed, buffer, partial)
    return parsed


def _read_version(cursor: Cursor) -> int:
    """Return the version after the magic, and set the cursor's byte order.

    A version is small, so that the half of its bytes that is zero shows the order. Raises
    FormatError for another magic, UnsupportedError for a version that this reader does not know.
    """
    magic = bytes(cursor.take(4, "the magic"))
    if magic != layout.MAGIC:
        raise FormatError(
            f"{cursor.where}: starts with {magic.hex(' ')}, expected {layout.MAGIC.hex(' ')} (GGUF)"
        )
    raw = cursor.take(4, "the version")
    version = int.from_bytes(raw, "little")
    spelled = "version"
    if version and not version & 0xFFFF:
        cursor.order = ">"
        version = int.from_bytes(raw, "big")
        spelled = "big-endian version"
    if version not in layout.VERSIONS:
        todo = "convert it with an older llama.cpp" if version == 1 else "is it a damaged file?"
        raise UnsupportedError(
            f"{cursor.where}: {spelled} {version} at offset 4; this reader knows "
            f"{' and '.join(map(str, layout.VERSIONS))}; {todo}"
        )
    return version


def _read_alignment(metadata: Metadata, where: str) -> int:
    """Return the alignment that the metadata gives; FormatError if it is no power of two."""
    key = layout.ALIGNMENT_KEY
    if key not in metadata:
        return layout.DEFAULT_ALIGNMENT
    kind, value = metadata.fields[key].type, metadata.fields[key].value
    if kind != "uint32":
        raise FormatError(f"{where}: {key} has type {kind}; GGUF wants uint32")
    if not 0 < value <= layout.MAX_ALIGNMENT or value & (value - 1):
        raise FormatError(
            f"{where}: {key} is {value}; it must be a power of two up to {layout.MAX_ALIGNMENT}"
        )
    return int(value)


def _read_table(cursor: Cursor, count: int, alignment: int) -> list[TableLine]:
    """Return the lines of the tensor table, whose names must be unique.

    Raises FormatError for a name of impossible length.
    """
    entries: list[TableLine] = []
    seen: set[str] = set()
    for number in range(count):
        at = cursor.offset
        length = cursor.uint(8, f"the name length of tensor {number}")
        if length > layout.MAX_KEY_BYTES:
            raise FormatError(
                f"{cursor.where}: the name of tensor {number} at offset {at} has {length} bytes, "
                f"the limit is {layout.MAX_KEY_BYTES}; the file is damaged"
            )
        name, wrong = cursor.name(length, f"the name of tensor {number}")
        if wrong is not None:
            cursor.faults.spoil(wrong, [name])
        if name in seen:
            error = FormatError(
                f"{cursor.where}: {tensor_label(name)} at offset {at} stands twice in the table; "
                "names must be unique"
            )
            cursor.faults.add(error, name)
        seen.add(name)
        entries.append(_read_entry(cursor, name, at, alignment))
    return entries


def _read_entry(cursor: Cursor, name: str, at: int, alignment: int) -> TableLine:
    """Return the line of the table that begins at offset `at`; its name is read already.

    Raises FormatError for more than MAX_DIMS dimensions; other faults are added to the cursor's.
    """
    tensor = tensor_label(name)
    ndim = cursor.uint(4, tensor)
    if ndim > MAX_DIMS:
        raise FormatError(f"{cursor.where}: {tensor} at offset {at} {_too_many_dims_text(ndim)}")
    line = cast("tuple[int, ...]", cursor.unpack(f"{ndim}QIQ", tensor))
    dims, ggml_id, offset = line[:-2], line[-2], line[-1]
    if what := _line_fault(dims, ggml_id, offset, alignment):
        error = FormatError(f"{cursor.where}: {tensor} at offset {at} {what}")
        cursor.faults.add(error, name)
    return TableLine(name, dims[::-1], encoding_of(ggml_id), offset)


def _too_many_dims_text(ndim: int) -> str:
    """Return the words for a tensor of too many dimensions."""
    return f"has {ndim} dimensions, GGUF has at most {layout.MAX_DIMS}"


def _line_fault(dims: Sequence[int], ggml_id: int, offset: int, alignment: int) -> str:
    """Return what is wrong with a line of the table, "" where nothing is."""
    if len(dims) > layout.MAX_DIMS:
        return _too_many_dims_text(len(dims))
    if not _is_countable(dims):
        return (
            f"has dimensions {list(dims)}, fastest first; sizes and their product must be below "
            "2^63 (negative numbers look like this); the table is damaged"
        )
    if ggml_id >= 1 << 31:
        return f"has ggml type {ggml_id - (1 << 32)}; types are not negative; the table is damaged"
    if offset % alignment:
        return f"has data offset {offset}, which is no multiple of the alignment {alignment}"
    return ""


def _is_countable(dims: Sequence[int]) -> bool:
    """Return whether the sizes and their product are below 2^63."""
    return max(dims, default=0) <= MAX_INT64 and math.prod(dims) < MAX_INT64


def _add_infos(
    parsed: ParsedGguf, entries: Sequence[TableLine], extents: TensorExtents, partial: bool
) -> None:
    """Add the TensorInfo of every line to `parsed.infos`, with offset and size in bytes.

    A tensor of an encoding that is not known gets all bytes up to the next tensor.
    """
    for entry in entries:
        if entry.name in parsed.infos:
            continue  # listed twice
        if not _is_countable(entry.shape):
            nbytes = 0
        elif entry.row.known:
            nbytes = _known_size(parsed, entry)
            if short := missing_row_header(entry, nbytes, extents):
                error = FormatError(f"{parsed.where}: {tensor_label(entry.name)} {short}")
                parsed.faults.add(error, entry.name)
        else:
            empty = not math.prod(entry.shape)
            nbytes = 0 if empty else _bytes_to_next(parsed, entry, extents, partial)
        offset = parsed.data_offset + entry.offset
        if offset + nbytes > MAX_INT64 and entry.name not in parsed.faults.broken:
            error = FormatError(
                f"{parsed.where}: {tensor_label(entry.name)} has data offset {entry.offset} and "
                f"{nbytes} bytes, which ends beyond 2^63; the table is damaged"
            )
            parsed.faults.add(error, entry.name)
        parsed.infos[entry.name] = TensorInfo(
            entry.name,
            entry.shape,
            entry.row.name,
            offset,
            nbytes,
            entry.row.row_bytes(entry.shape),
        )


def _bytes_to_next(
    parsed: ParsedGguf, entry: TableLine, extents: TensorExtents, partial: bool
) -> int:
    """Return the bytes between a tensor's start and the next one's, or the end of the file.

    0, with a fault, for a last tensor that begins beyond the end. With `partial` that is no fault.
    """
    found, _ = extents.bytes_to_next(entry)
    if found <= 0 and (parsed.faults.collect or not partial):
        error = TruncatedError(
            f"{parsed.where}: {tensor_label(entry.name)} of {entry.row.name} begins at offset "
            f"{parsed.data_offset + entry.offset}, where the file of {parsed.size} bytes has none "
            "left for it; get the file again"
        )
        parsed.faults.add(error, entry.name)
    return max(0, found)


def _known_size(parsed: ParsedGguf, entry: TableLine) -> int:
    """Return a tensor's size in bytes; 0, with a fault, if its shape does not fit the encoding."""
    try:
        return entry.row.nbytes(entry.shape)
    except CodecError as error:
        wrong = FormatError(f"{parsed.where}: {tensor_label(entry.name)}: {error}")
    parsed.faults.add(wrong, entry.name)
    return 0


def _note_entries(
    parsed: ParsedGguf,
    entries: Sequence[TableLine],
    extents: TensorExtents,
    fork_notes: Mapping[int, str],
) -> None:
    """Add the notes about the table: byte order, long names, encodings, order of the data.

    `fork_notes` are texts about encodings that forks number differently, by ggml id.
    """
    if parsed.order == ">":
        parsed.remark("big-endian; tensor bytes are given in little-endian order")
    names = [e.name for e in entries if len(e.name.encode()) > layout.MAX_NAME_BYTES]
    if names:
        parsed.warn(
            "long_name",
            f"{count_phrase(names, 'tensor name')} longer than {layout.MAX_NAME_BYTES} bytes, "
            f"which llama.cpp refuses; the first is {shorten(names[0], 100)!r}",
        )
    doubtful = [
        e for e in entries if e.row.ggml not in fork_notes and e.name not in parsed.faults.broken
    ]
    for text in undecoded_notes(doubtful, extents):
        parsed.warn("unknown_type", text)
    for text in fork_notes.values():
        parsed.warn("contested_type", text)
    offsets = [entry.offset for entry in entries]
    if offsets != sorted(offsets) and not parsed.faults.damage:
        parsed.warn(
            "tensor_order",
            "tensors lie in another order than the table has; llama.cpp refuses such files",
        )


def _check_overlap(parsed: ParsedGguf) -> None:
    """Report tensors that share bytes, warn about bytes of no tensor, and set `parsed.end`."""
    infos = [info for info in parsed.undamaged_infos() if info.nbytes]
    report_overlap(infos, parsed.faults)
    if not parsed.faults.damage:
        _note_holes(parsed, sorted(infos, key=lambda i: (i.offset, i.nbytes)))
    ends = (info.offset + info.nbytes for info in parsed.undamaged_infos() if info.nbytes)
    parsed.end = max(ends, default=parsed.data_offset)


def _note_holes(parsed: ParsedGguf, infos: Iterable[TensorInfo]) -> None:
    """Warn about unused bytes between tensors, which are given in the order of their offsets."""
    holes: list[tuple[int, str]] = []
    end = parsed.data_offset
    for info in infos:
        hole = (
            info.offset
            - align_size(end - parsed.data_offset, parsed.alignment)
            - parsed.data_offset
        )
        if hole > 0:
            holes.append((hole, info.name))
        end = info.offset + info.nbytes
    if holes:
        parsed.warn(
            "holes",
            f"{sum(size for size, _ in holes)} unused bytes in {len(holes)} holes, the first "
            f"before {tensor_label(holes[0][1])}; llama.cpp refuses such files",
        )


def _is_beyond(info: TensorInfo, parsed: ParsedGguf) -> bool:
    """Return whether a tensor ends beyond the file's end; an empty one, whether it starts there."""
    if info.nbytes:
        return info.offset + info.nbytes > parsed.size
    return info.offset > max(align_size(parsed.end, parsed.alignment), parsed.size)


def _check_end(parsed: ParsedGguf, buffer: Region, partial: bool) -> None:
    """Report tensors that the file's end cuts, and note bytes after the data or missing padding.

    With `partial` cut tensors are only a warning.
    """
    beyond = [info for info in parsed.undamaged_infos() if _is_beyond(info, parsed)]
    if beyond:
        first = beyond[0]
        stop = first.offset + first.nbytes
        text = (
            f"{tensor_label(first.name)} needs bytes {first.offset}..{stop}, the file has "
            f"{parsed.size}, {stop - parsed.size} too few; {len(beyond)} of {len(parsed.infos)} "
            "tensors are cut"
        )
        if partial and not parsed.faults.collect:
            parsed.warn("truncated", f"truncated: {text}")
            return
        todo = "" if parsed.faults.collect else "; get the file again, or list it with --partial"
        error = TruncatedError(f"{parsed.where}: {text}{todo}")
        parsed.faults.cut(error, [info.name for info in beyond if info.nbytes])
    if parsed.faults.damage:
        return  # offsets or sizes are wrong: where the data should end is not known
    padded = align_size(parsed.end, parsed.alignment)
    if parsed.size > padded:
        from aprfmt.formats.foreign_formats import joined_file_text

        parsed.joined = joined_file_text(buffer, parsed.end, padded)
        text = f"{parsed.size - padded} bytes follow the data{parsed.joined}"
        parsed.warn("trailing_bytes", text)
    elif parsed.size < padded and parsed.end > parsed.data_offset:
        parsed.remark(f"{padded - parsed.size} bytes of padding are missing after the last tensor")
