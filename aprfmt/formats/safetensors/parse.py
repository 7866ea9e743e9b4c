"""From bytes to the structure of one safetensors file, under all rules of the format.

The parser is strict: a file that breaks a rule of the format's text is refused, also where the
reference accepts it (a space before `{`, unknown fields of an entry). Faults that leave other
tensors readable go to `ParsedSafe.faults`, which raises them unless it collects.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aprfmt.base.encodings import BY_SAFETENSORS, UNNAMED, Encoding
from aprfmt.base.protocols import SURPLUS, Note, Region, TensorInfo, has_aprfmt_keys
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, TruncatedError
from aprfmt.formats import bounded_json
from aprfmt.formats.cursor import MAX_COUNT, MAX_HEADER, read_prefix
from aprfmt.formats.damage import Faults, Structure, report_overlap, tensor_label
from aprfmt.formats.safetensors.layout import (
    FIELDS,
    INDEX_SUFFIX,
    METADATA,
    PREFIX,
    U64,
    element_bits,
)

WINDOW = 1 << 20  # bytes of a header that are copied at a time to look for zeros

_BLANKS = (b" ", b"\t", b"\n", b"\r")  # JSON allows them before the brace, the format does not


@dataclass(slots=True)
class ParsedSafe(Structure):
    """The structure of one safetensors file.

    `infos` are in the header's own order, offsets absolute. `header_size` counts the JSON with its
    padding, `end` is where the last tensor ends. Tensors of encodings without a safetensors dtype
    are stored as bytes: then `stored` are the tensors as the header lists them, and `carried` maps
    a tensor's name to that of its bytes. Both are empty otherwise.
    """

    where: str
    buffer: Region
    size: int
    header_size: int
    metadata: dict[str, str]
    faults: Faults
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    end: int = 0
    carried: Mapping[str, str] = field(default_factory=dict)  # name -> that of its bytes
    stored: Mapping[str, TensorInfo] = field(default_factory=dict)

    @property
    def data_offset(self) -> int:
        """The offset of the first tensor byte."""
        return PREFIX + self.header_size

    @property
    def header_raw(self) -> memoryview:
        """The bytes of the length, the JSON and its padding."""
        return self.buffer[: self.data_offset]


def parse(
    buffer: Region, where: str, *, partial: bool = False, damaged: bool = False
) -> ParsedSafe:
    """Return the structure of the safetensors file in `buffer`; `where` begins every message.

    `partial` lists a file whose data is cut, with a warning. `damaged` collects faults that leave
    other tensors readable in `faults`; without it the first fault raises. Raises FormatError or
    TruncatedError.
    """
    faults = Faults(where, damaged)
    try:
        return _parse_file(buffer, partial, faults)
    except FormatError as error:
        raise faults.first(error) from None


def _parse_file(buffer: Region, partial: bool, faults: Faults) -> ParsedSafe:
    """Return the structure of a file; adds tolerable faults to `faults`, raises the others.

    Those are FormatError for a header of impossible length or of zeros, and TruncatedError where
    the file ends inside the header.
    """
    where, size = faults.where, len(buffer)
    if size < PREFIX:
        raise TruncatedError(f"{where}: has {size} bytes, the header's length alone takes {PREFIX}")
    length = int.from_bytes(buffer[:PREFIX], "little")
    if not length:
        zeros = _leading_zeros(buffer)
        if zeros > PREFIX:
            raise FormatError(
                f"{where}: its first {zeros} bytes are zero, header included: an interrupted "
                "download, or a save that was cut short; get this file again"
            )
    # A header that is too long may be intact: that is said differently from damage.
    if MAX_HEADER < length <= size - PREFIX and bytes(buffer[PREFIX : PREFIX + 1]) == b"{":
        raise FormatError(
            f"{where}: its header has {length} bytes, the format allows {MAX_HEADER}. This is a "
            "limit of the format and no damage: store the tensors in several files, with an "
            f"index ({INDEX_SUFFIX[1:]})"
        )
    if length > MAX_HEADER:
        from aprfmt.formats.foreign_formats import HEAD, download_left

        left = download_left(bytes(buffer[:HEAD]))
        if left:
            raise FormatError(f"{where}: is {left}")
        raise FormatError(
            f"{where}: header length at offset 0 is {length}, the format allows {MAX_HEADER}; "
            "the file is damaged or not a safetensors file"
        )
    if length > size - PREFIX:
        raise TruncatedError(
            f"{where}: header length at offset 0 is {length}, {size - PREFIX} bytes follow; "
            "the file is cut or damaged"
        )
    # Nearly all headers have the compact form, which is read without JSON objects.
    raw = read_prefix(buffer, PREFIX + length)[PREFIX : PREFIX + length]
    _refuse_zeros(raw, f"{where}: header at offset {PREFIX}")
    parsed = _parse_compact_header(raw, ParsedSafe(where, buffer, size, length, {}, faults))
    if parsed is None:
        parsed = _parse_json_header(raw, ParsedSafe(where, buffer, size, length, {}, faults))
    # If the tensors follow each other in order, neither overlap nor gap is possible.
    metadata, end = parsed.metadata, _contiguous_end(parsed)
    if end is None:
        report_overlap(parsed.undamaged_infos(), faults)
        parsed.end = max(
            [parsed.data_offset, *(i.offset + i.nbytes for i in parsed.undamaged_infos())]
        )
    else:
        parsed.end = end
    _check_end(parsed, partial)
    if end is None:
        _check_gaps(parsed)
    if has_aprfmt_keys(metadata):
        _restore_unsupported_encodings(parsed)
    return parsed


def _parse_json_header(raw: memoryview, parsed: ParsedSafe) -> ParsedSafe:
    """Return `parsed` with metadata and tensors of a header parsed as JSON, whatever it holds.

    Raises FormatError for more than MAX_COUNT tensors.
    """
    where, faults = parsed.where, parsed.faults
    header = _read_header(raw, f"{where}: header at offset {PREFIX}", faults)
    twice = header.keys_twice if isinstance(header, bounded_json.DuplicateKeys) else frozenset()
    parsed.metadata.update(_read_metadata(header.pop(METADATA, {}), faults))
    if len(header) > MAX_COUNT:
        raise FormatError(f"{where}: {len(header)} tensors, the limit is {MAX_COUNT}")
    read = _Entries(parsed.data_offset)
    for name, entry in header.items():
        made = read.read_entry(name, entry)
        if made is None and _is_placeholder(entry):
            error = FormatError(
                f"{where}: {tensor_label(name)} has neither dtype nor bytes: an entry for a tensor "
                "that was not stored, such as a tied head; loaders refuse the file until it is "
                "taken out of the header (aprfmt repair FILE --partial -o OUT)"
            )
            faults.add(error, kind=SURPLUS)
            continue
        parsed.infos[name] = made or _read_any_entry(name, entry, parsed)
        if name in twice:
            faults.add(
                FormatError(f"{where}: {tensor_label(name)} stands twice in the header"), name
            )
    return parsed


_NUMBER = "(?:0|[1-9][0-9]{0,18})"  # below 2**64
# An entry as the format's own library writes it, with the comma after it.
_ENTRY = re.compile(
    rf'"([^"\\\x00-\x1f]*)":{{"dtype":"([A-Z0-9_]{{1,16}})","shape":\[((?:{_NUMBER}(?:,{_NUMBER})*)?)\],'
    rf'"data_offsets":\[({_NUMBER}),({_NUMBER})\]}},'
)
_FRAME = len('"":{"dtype":"","shape":[],"data_offsets":[,]},')
_BETWEEN = b'},"'  # an entry's end and the next one's name


def _parse_compact_header(raw: memoryview, parsed: ParsedSafe) -> ParsedSafe | None:
    """Return `parsed` with metadata and tensors of a header without fault or space, else None.

    Nearly all files have such a header, and it may have a million entries: one expression reads
    them window by window, without the objects that JSON would make of all of them at once.
    """
    first = bytes(raw[:WINDOW])
    at = 1
    if first.startswith(b'{"' + METADATA.encode() + b'":'):
        found = _compact_metadata(first, f"{parsed.where}: header at offset {PREFIX}")
        if found is None:
            return None
        metadata, at = found
        parsed.metadata.update(metadata)
    read, count = _Entries(parsed.data_offset), 0
    for text in _entry_windows(raw, at):
        rows = [] if text is None else _ENTRY.findall(text)
        count += len(rows)
        # Matches do not overlap: where their lengths make up the window, nothing is between them.
        if (
            text is None
            or not rows
            or count > MAX_COUNT
            or len(text)
            != _FRAME * len(rows) + sum(sum(map(len, column)) for column in zip(*rows, strict=True))
        ):
            return None
        if not read.read_compact_entries(rows, parsed.infos):
            return None
    once = len(parsed.infos) == count and METADATA not in parsed.infos
    return parsed if once and count else None


def _compact_metadata(first: bytes, where: str) -> tuple[dict[str, str], int] | None:
    """Return (metadata at a header's beginning, offset of the next entry).

    None where it is odd in any way, or longer than a window.
    """
    try:
        text = first.decode("utf-8", "ignore")
        start = len(METADATA) + 4  # after the brace, the key and its colon
        _, end = json.JSONDecoder().raw_decode(text, start)
        size = len(text[:end].encode())
        value = bounded_json.loads(first[start:size], where, max_bytes=WINDOW)
    except (FormatError, ValueError, RecursionError):
        return None
    sound = isinstance(value, dict) and all(type(item) is str for item in value.values())
    return (value, size + 1) if sound and first[size : size + 1] == b"," else None


def _entry_windows(raw: memoryview, at: int) -> Iterator[str | None]:
    """Yield texts of whole entries from offset `at` on, each entry with its comma.

    None for text that is not UTF-8 or not closed by a brace.
    """
    end = _end_of_text(raw)
    if end <= at or raw[0] != ord("{") or raw[end - 1] != ord("}"):
        yield None
        return
    # Each window is cut after its last whole entry; the last one gets a comma, too.
    while at < end - 1:
        piece = bytes(raw[at : min(at + WINDOW, end - 1)])
        if at + len(piece) == end - 1:
            piece += b","
        else:
            piece = piece[: piece.rfind(_BETWEEN) + 2]
        try:
            yield piece.decode("utf-8")
        except UnicodeDecodeError:
            yield None
        at += len(piece)


def _end_of_text(raw: memoryview) -> int:
    """Return the offset after the last byte of a header that is no space; 0 for spaces only."""
    end = len(raw)
    while end:
        piece = bytes(raw[max(0, end - WINDOW) : end])
        kept = len(piece.rstrip(b" "))
        end -= len(piece) - kept
        if kept:
            break
    return end


def _restore_unsupported_encodings(parsed: ParsedSafe) -> None:
    """Give tensors that were stored as bytes their own names, encodings and shapes.

    Changes `parsed`. A table that cannot be read is a warning, and the tensors stay bytes.
    """
    from aprfmt.formats.unsupported_encodings import KEY, restore_encodings

    if KEY not in parsed.metadata:
        return
    where, stored = parsed.where, parsed.infos
    text = parsed.metadata.pop(KEY)
    try:
        table: Any = bounded_json.loads(text.encode(), f"{where}: {KEY}", max_bytes=MAX_HEADER)
    except (FormatError, UnicodeEncodeError) as error:
        parsed.warn(
            "carried_tensors",
            f"{KEY} cannot be read, its tensors stay bytes: {shorten(str(error), 200)}",
        )
        return
    _, parsed.infos, notes = restore_encodings({KEY: table}, stored, where)
    parsed.notes += notes
    names = dict(zip(stored, parsed.infos, strict=True))
    parsed.stored = stored
    parsed.carried = {name: at for at, name in names.items() if name != at}
    parsed.faults.rename(names)


def _leading_zeros(buffer: Region) -> int:
    """Return how many zero bytes the file begins with."""
    found, size = 0, len(buffer)
    while found < size:
        piece = bytes(buffer[found : found + WINDOW])
        rest = piece.lstrip(b"\0")
        found += len(piece) - len(rest)
        if rest:
            break
    return found


def _refuse_zeros(raw: memoryview, where: str) -> None:
    """Raise FormatError for a large header with a zero byte, before all of it is copied.

    JSON has none: a file whose pages were never written has nothing else. A small header costs
    little to parse, and the parser says more.
    """
    if len(raw) <= WINDOW:
        return
    for start in range(0, len(raw), WINDOW):
        at = bytes(raw[start : start + WINDOW]).find(0)
        if at >= 0:
            raise FormatError(
                f"{where}: byte 0x00 at byte {start + at}; the format wants JSON, which has no "
                "zero bytes: this part of the file was never written or is damaged"
            )


class _Entries:
    """Reader of the entries without a fault, which nearly all are: a header may have a million."""

    def __init__(self, data_offset: int) -> None:
        """Start without known dtypes; `data_offset` is where the tensors begin in the file."""
        self._base = data_offset
        # dtype and shape -> encoding, shape, bytes, bytes of a row
        self._known: dict[Any, tuple[str, tuple[int, ...], int, int | None]] = {}

    def read_entry(self, name: str, entry: Any) -> TensorInfo | None:
        """Return the tensor of an entry, None if it has any fault: `_read_any_entry` reports it."""
        if type(entry) is not dict or tuple(entry) != FIELDS:
            return None
        dtype, shape, offsets = entry.values()
        if type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
            return None
        start, stop = offsets
        if type(dtype) is not str or type(start) is not int or type(stop) is not int:
            return None
        for size in shape:  # as a key, 2.0 and true would be what 2 and 1 are
            if type(size) is not int:
                return None
        key = dtype, *shape
        found = self._known.get(key) or self._learn_dtype_shape(key, entry)
        if found is None or stop - start != found[2] or not 0 <= start <= stop < U64:
            return None
        encoding, sizes, nbytes, row_bytes = found
        return TensorInfo(name, sizes, encoding, self._base + start, nbytes, row_bytes)

    def read_compact_entries(
        self, rows: list[tuple[str, ...]], infos: dict[str, TensorInfo]
    ) -> bool:
        """Add the tensors of entries given as texts to `infos`; return False if any has a fault.

        A row is (name, dtype, sizes, begin, end).
        """
        known, base, make = self._known, self._base, TensorInfo
        for name, dtype, sizes, begin, end in rows:
            start, found = int(begin), known.get((dtype, sizes))
            if found is None:
                shape = list(map(int, sizes.split(","))) if sizes else []
                entry = {"dtype": dtype, "shape": shape, "data_offsets": [start, int(end)]}
                found = self._learn_dtype_shape((dtype, sizes), entry)
            if found is None or int(end) - start != found[2]:
                return False
            infos[name] = make(name, found[1], found[0], base + start, found[2], found[3])
        return True

    def _learn_dtype_shape(
        self, key: Any, entry: Any
    ) -> tuple[str, tuple[int, ...], int, int | None] | None:
        """Return (encoding, shape, bytes, row bytes) of a new dtype and shape; remembers it.

        None if the entry has a fault.
        """
        row, shape, (start, stop), wrong = _examine_entry(entry)
        if wrong or row is None:
            return None
        self._known[key] = row.name, shape, stop - start, row.row_bytes(shape)
        return self._known[key]


def _contiguous_end(parsed: ParsedSafe) -> int | None:
    """Return the end of the last tensor if all follow each other in header order, else None.

    None for any gap, overlap or broken tensor.
    """
    at = parsed.data_offset
    for info in parsed.infos.values():
        if info.offset != at:
            return None
        at += info.nbytes
    return None if parsed.faults.broken else at


def _read_header(raw: memoryview, where: str, faults: Faults) -> dict[str, Any]:
    """Return the header's JSON object; adds faults of its first and last byte.

    When faults are collected, names that occur twice are marked instead of refused.
    """
    first = bytes(raw[:1])
    if first != b"{":
        found = f"0x{first.hex()}" if first else "nothing"
        error = FormatError(f"{where}: begins with {found}; the format wants '{{'")
        if first not in _BLANKS or not bytes(raw).strip().startswith(b"{"):
            raise error
        faults.add(error)
    last = raw[_end_of_text(raw) - 1]
    if last != ord("}"):
        error = FormatError(
            f"{where}: ends with 0x{last:02x} before its padding; the format wants '}}' and "
            "then spaces only"
        )
        faults.add(error)
    if not faults.collect:
        header = bounded_json.loads(raw, where, max_bytes=MAX_HEADER)
    else:
        header = bounded_json.loads(raw, where, max_bytes=MAX_HEADER, duplicates="mark")
    assert isinstance(header, dict)  # it begins with a brace
    return header


def _read_metadata(value: Any, faults: Faults) -> dict[str, str]:
    """Return the metadata; of damaged metadata the entries that are text.

    {} and a fault where it is not an object.
    """
    what = f"{faults.where}: {METADATA}"
    if not isinstance(value, dict):
        found = type(value).__name__
        faults.add(FormatError(f"{what} is {found}; the format wants an object of strings"))
        return {}
    for key, text in value.items():
        if not isinstance(text, str):
            error = (
                f"{what} key {shorten(key, 80)!r} is {type(text).__name__}; "
                "the format allows strings only"
            )
            faults.add(FormatError(error))
    return {key: text for key, text in value.items() if isinstance(text, str)}


def _is_placeholder(entry: Any) -> bool:
    """Return whether an entry has no dtype and no bytes, so that it describes no tensor."""
    if not isinstance(entry, dict) or entry.get("dtype", "") not in ("", None):
        return False
    offsets = entry.get("data_offsets")
    return isinstance(offsets, list) and len(offsets) == 2 and offsets[0] == offsets[1]


def _read_any_entry(name: str, entry: Any, parsed: ParsedSafe) -> TensorInfo:
    """Return the tensor of an entry as far as it can be read; its fault is added, if any."""
    row, shape, extent, wrong = _examine_entry(entry)
    if wrong:
        error = FormatError(f"{parsed.where}: {tensor_label(name)}{wrong}")
        parsed.faults.add(error, name)
    start, stop = extent
    row_bytes = None if row is None or wrong else row.row_bytes(shape)
    encoding = UNNAMED if row is None else row.name
    nbytes = max(0, stop - start)
    return TensorInfo(name, shape, encoding, parsed.data_offset + start, nbytes, row_bytes)


def _examine_entry(entry: Any) -> tuple[Encoding | None, tuple[int, ...], tuple[int, int], str]:
    """Return (encoding or None, shape, data_offsets, fault in words or "") of an entry."""
    # Unknown fields are a fault that leaves the rest readable; missing ones do not.
    if not isinstance(entry, dict) or entry.keys() != set(FIELDS):
        found = ", ".join(shorten(key, 40) for key in entry) if isinstance(entry, dict) else entry
        wrong = f" has {shorten(str(found), 200)}; expected {', '.join(FIELDS)}"
        if not isinstance(entry, dict) or not entry.keys() >= set(FIELDS):
            return None, (), (0, 0), wrong
    else:
        wrong = ""
    dtype, shape, offsets = (entry[key] for key in FIELDS)
    row = BY_SAFETENSORS.get(dtype) if isinstance(dtype, str) else None
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        said = (
            f": shape {shorten(str(shape), 100)} and data_offsets {shorten(str(offsets), 100)}; "
            "expected arrays of non-negative integers, the second of two"
        )
        return row, tuple(shape) if _is_sizes(shape) else (), (0, 0), wrong or said
    extent = offsets[0], offsets[1]
    if row is None:
        known = ", ".join(BY_SAFETENSORS)
        said = f": dtype {shorten(str(dtype), 40)!r} is not one of {known}"
        return None, tuple(shape), extent, wrong or said
    if isinstance(entry, bounded_json.DuplicateKeys):
        wrong = wrong or f": {shorten(min(entry.keys_twice), 40)!r} stands twice in its entry"
    return row, tuple(shape), extent, wrong or _size_error(row, shape, extent)


def _size_error(row: Encoding, shape: Sequence[int], extent: tuple[int, int]) -> str:
    """Return what is wrong with shape and offsets of an entry; "" if they fit each other."""
    begin, end = extent
    shown = shorten(str(shape), 200)
    count = 1
    for dim in shape:
        count *= dim
        if count >= U64:
            return f": shape {shown} has more elements than 64 bits count"
    total = count * element_bits(row)
    what = f": {count} elements of {row.safetensors}"
    if total >= U64:
        return f"{what} have more bits than 64 bits count"
    if total % 8:
        return f"{what} take {total} bits, which is not a whole number of bytes"
    if end - begin != total // 8:
        return (
            f": data_offsets {begin}..{end} hold {end - begin} bytes, shape {shown} of "
            f"{row.safetensors} takes {total // 8}"
        )
    return ""


def _is_sizes(value: Any) -> bool:
    """Return whether a value is a list of non-negative integers below 2**64."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < U64 for item in value)


def _check_gaps(parsed: ParsedSafe) -> None:
    """Add faults for bytes that belong to no tensor, and for empty tensors inside others."""
    faults = parsed.faults
    if any(one.tensors for one in faults.damage):
        return  # bytes of damaged ones would look like gaps
    at, before = parsed.data_offset, "the header"
    for info in sorted(parsed.infos.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != at:
            inside = info.offset < at  # an empty tensor: others would have been reported
            kind = "overlaps" if inside else f"leaves {info.offset - at} bytes unused after"
            error = FormatError(
                f"{parsed.where}: {tensor_label(info.name)} begins at byte {info.offset} and "
                f"{kind} {before}, which ends at {at}; the format wants no gap and no overlap"
            )
            faults.add(error, *([info.name] if inside else []), kind="" if inside else SURPLUS)
        at, before = max(at, info.offset + info.nbytes), tensor_label(info.name)


def _check_end(parsed: ParsedSafe, partial: bool) -> None:
    """Add a fault for bytes after the last tensor, or for tensors that the file's end cuts.

    With `partial` a cut file is only a warning.
    """
    faults = parsed.faults
    missing = parsed.end - parsed.size
    if missing < 0 and not faults.broken:
        from aprfmt.formats.foreign_formats import joined_file_text

        error = FormatError(
            f"{parsed.where}: {-missing} bytes follow the last tensor, which ends at "
            f"{parsed.end}; the format wants the file to end there"
            f"{joined_file_text(parsed.buffer, parsed.end, parsed.end)}"
        )
        faults.add(error, kind=SURPLUS)
    if missing > 0:
        beyond = (i for i in parsed.undamaged_infos() if i.offset + i.nbytes > parsed.size)
        cut = [info.name for info in beyond if info.nbytes]
        text = (
            f"has {parsed.size} bytes, its tensors end at {parsed.end}: {missing} bytes are "
            f"missing, {len(cut)} of {len(parsed.infos)} tensors are cut"
        )
        if partial and not faults.collect:
            parsed.warn("truncated", text)
            return
        todo = "" if faults.collect else "; get the file again, or list it with --partial"
        faults.cut(TruncatedError(f"{parsed.where}: {text}{todo}"), cut)


def merge_metadata(shards: Mapping[str, Mapping[str, str]]) -> tuple[dict[str, str], list[Note]]:
    """Return (metadata of all shards together, warnings for values that differ).

    The first shard's value wins.
    """
    merged: dict[str, str] = {}
    notes: list[Note] = []
    for where, metadata in shards.items():
        for key, value in metadata.items():
            if merged.setdefault(key, value) != value:
                text = f"metadata {shorten(key, 80)!r} differs from that of an earlier shard"
                notes.append(Note("warning", where, text, "shard_metadata"))
    return merged, notes
